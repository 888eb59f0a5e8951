"""An engine's own formats, of checkpoints and of what its cache holds: loaded with torch, only where one is needed."""
