"""The flips of a run as static pages with both answers side by side."""
