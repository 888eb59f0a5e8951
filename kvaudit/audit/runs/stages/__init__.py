"""The stages of a run: training, the pilot, the grid or its rounds, and the A/A floor of engines."""
