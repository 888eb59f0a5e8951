"""Code that runs in a worker, in the environment of an engine; it must not import kvaudit outside this folder."""
