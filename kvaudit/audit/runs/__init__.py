"""One run folder and all who work on it: claims, resume, the grid, the pipeline."""
