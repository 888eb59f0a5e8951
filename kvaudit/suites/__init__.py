"""Suites: test sets of items with graders, one file each. No torch."""
