"""Model classes for lm-evaluation-harness and Inspect that use kvaudit's sampler; export of records as Inspect logs."""
