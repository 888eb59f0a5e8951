"""The sections of the report. A section is defined in one file, from what it computes to what it shows."""
