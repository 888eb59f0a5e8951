"""Serve items of a finished run, or recorded rollouts, again, and compare the result with the record.

``measure`` has the loop that serves them and reopens a run's checkpoints, records and items. Every other file computes
one quantity (a measure) from what was served again.
"""
