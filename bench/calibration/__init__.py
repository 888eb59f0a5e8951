"""Simulations of how often the statistics and the gate are wrong: ``python -m bench.calibration``."""
