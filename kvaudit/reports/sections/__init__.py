"""The sections of the report, each whole in one file, from what it computes to what it shows."""
