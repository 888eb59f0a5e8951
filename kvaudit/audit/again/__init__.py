"""Recorded items served again, and what is measured of them: one loop (``measure``), one file per measure.

``finished`` opens a run that is over: its weights, records and items as they were. ``answers`` serves its answers
again; ``trajectories`` and ``along`` lead a model along them, and say how far its distributions have moved.
"""
