"""Models for lm-evaluation-harness and Inspect that use our sampler, and our records as Inspect logs."""
