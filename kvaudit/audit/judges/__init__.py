"""Judges that decide whether an answer refuses, one file each; none sees arm or policy.

Each has a card of its errors.
"""
