"""Losses, found by walking this package; ``LOSSES.get(name)()`` (``base``) is called on ``LossInputs``."""
