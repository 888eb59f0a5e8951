"""Code that runs in a worker process, in the Python of an engine; it must not import kvaudit outside this folder."""
