"""Formats of engines for checkpoints and cache contents. These modules load torch, so import them only when needed."""
