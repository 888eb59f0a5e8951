"""From records to a verdict: what is compared, how much it moved, and what the declared rules conclude.

Read in this order: ``comparison``, ``drift``, ``rules``, ``family``, ``cell``, ``decide``, ``verdict``.
"""
