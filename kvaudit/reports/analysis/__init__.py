"""What several sections or pages compute from: both sides of a cell, floors, curves, fixed sequences."""
