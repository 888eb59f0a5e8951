"""Entries kept as packed codes: the codes, their layout, attention on them, and hints where rounding decides."""
