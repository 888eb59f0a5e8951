"""Recorded items served again, and what is measured of them: one loop (``measure``), one file per measure.

``finished`` opens a run that is over: its weights, records and items as they were. ``trajectories`` and ``forced``
lead a model along recorded answers, ``distances`` says how far its distributions are from the reference's.
"""
