"""Suites: test sets with items and graders, one file each. No torch."""
