"""The statistics: pure functions of arrays, one idea per file.

Each statistic is tested against results that do not come from its own code (its oracle), such as those of another
library or of a small example.
"""
