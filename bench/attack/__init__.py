"""Attacks on what is near the outside: engines, keys, the server, folders, rows, foreign tasks; one file a section."""
