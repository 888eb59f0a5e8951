"""How the embedded model was made, from procedural text alone: ``python -m bench.pretraining``."""
