"""From records to a verdict: what is compared, by how much it moved, and what the rules make of it.

Read in this order: ``comparison``, ``drift``, ``rules``, ``family``, ``cell``, ``decide``, ``verdict``.
"""
