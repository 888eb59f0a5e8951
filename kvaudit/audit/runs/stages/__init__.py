"""The stages of a run: training, the pilot, the grid or its rounds, and the repeats that measure engines' own noise."""
