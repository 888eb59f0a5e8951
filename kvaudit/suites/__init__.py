"""What is asked: one file per suite. No torch."""
