"""The checks of the calibration, one file each: the cases to simulate, and figures with their requirements."""
