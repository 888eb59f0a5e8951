"""A checkpoint in an engine's own format: loaded with torch, and only where one is written."""
