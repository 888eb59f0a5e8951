"""The flips of a run (items whose answers differ between two sides) as static pages, with both answers side by side."""
