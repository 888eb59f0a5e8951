"""What people said of answers that the judge told apart, and the drift that follows from it."""
