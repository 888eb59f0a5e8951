"""What runs in an engine's own environment: it knows the engine and Python's library, and nothing of kvaudit."""
