"""The sections of the report: one file per section, from what it computes to what it shows."""
