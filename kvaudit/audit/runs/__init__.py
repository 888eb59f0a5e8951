"""Run folders: claims on work units, resuming, the evaluation grid and the pipeline of stages."""
