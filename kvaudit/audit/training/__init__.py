"""The paired trainer: GRPO on rollouts from a compressed cache, with arms (variants) that differ in one respect."""
