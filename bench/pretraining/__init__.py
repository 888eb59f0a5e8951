"""The training of the embedded model, from procedural text alone: ``python -m bench.pretraining``."""
