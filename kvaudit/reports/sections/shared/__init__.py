"""What several sections and pages share: tables, words for numbers, figures, and computations that both use."""
