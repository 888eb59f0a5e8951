"""Tables, texts, figures and computations that several sections and pages share."""
