"""The paired trainer: GRPO over rollouts under compression, with arms that differ in one respect only."""
