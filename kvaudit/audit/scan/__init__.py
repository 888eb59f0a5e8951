"""Rules that read rollout and serving configurations as data, and the questions that ask a vendor for the same."""
