"""What may stand between a model and its users: one guard a file, each blind to arm, policy and the other passages."""
