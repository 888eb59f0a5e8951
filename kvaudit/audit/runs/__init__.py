"""Run folders: locks on units of work (claims), resuming, the evaluation grid and the pipeline of stages."""
