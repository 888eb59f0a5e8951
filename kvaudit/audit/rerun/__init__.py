"""Serving items of a finished run, or recorded rollouts, again, to compare the result with the record.

``measure`` has the loop that serves them and reopens a run's checkpoints, records and items; each other file has one
measure, what is computed from the result.
"""
