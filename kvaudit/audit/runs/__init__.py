"""Run folders: the stages of a run, its units of work, the locks on them (claims), and resuming."""
