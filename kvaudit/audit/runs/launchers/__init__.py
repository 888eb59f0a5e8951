"""Who works on a run: one file per launcher. Units are claimed in the run folder, so any process may join."""
