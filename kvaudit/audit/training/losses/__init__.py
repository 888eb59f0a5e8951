"""Losses, found by walking this package (``base.LOSSES``)."""
