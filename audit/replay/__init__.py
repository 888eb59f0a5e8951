"""What the sampler saw, seen again: the learner's shadow pass, rollouts from elsewhere, policies held to records."""
