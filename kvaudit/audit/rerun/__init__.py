"""Serve recorded items again and measure the result: one loop (``measure``), one file per measure.

``finished`` opens a finished run: its checkpoints, records and items, and its answers served again.
"""
