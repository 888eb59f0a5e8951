"""lm-evaluation-harness and Inspect ask our sampler, and take our suites as tasks and our records as logs."""
