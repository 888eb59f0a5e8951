"""What is compared with what, and by how much it moved: effects and intervals. Knows no verdict."""
