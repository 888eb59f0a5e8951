"""Models for lm-evaluation-harness and Inspect that use kvaudit's sampler, and records as Inspect logs."""
