"""The paired trainer: GRPO over rollouts under compression, with arms that differ in nothing else."""
