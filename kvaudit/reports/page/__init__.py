"""What is said: banner, tables, figures and formats. Nothing here decides."""
