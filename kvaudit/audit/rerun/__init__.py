"""Serve recorded items again and measure the result: one loop (``measure``), one file per measure.

``measure`` also reopens a finished run: its checkpoints, records and items.
"""
