"""What pages are made of: tables, words for numbers, names of cells, the look of figures."""
