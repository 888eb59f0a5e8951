"""The policy losses of training, found by walking this package (``base.LOSSES``)."""
