"""Attacks on what is near the outside: engines, keys, the server, folders, disks, rows, foreign tasks; one a file."""
