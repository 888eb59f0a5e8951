"""A run folder or foreign logs, read into one table of scores. Nothing that is read is trusted."""
