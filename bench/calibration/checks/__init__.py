"""One file per kind of check: the cases to simulate, and the figures that must hold over them."""
