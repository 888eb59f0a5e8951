"""The statistics: one idea per file, each held to an oracle. Pure functions of arrays."""
