"""Checkpoints and cache contents in the formats of engines; these modules load torch."""
