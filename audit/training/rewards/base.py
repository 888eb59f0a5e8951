"""The contract of a reward: one number per rollout, from what was played alone."""

from __future__ import annotations

from typing import ClassVar

from audit.core.registry import Registry
from audit.sampling.conversations import Played


class Reward:
    """What a rollout earns. Subclass in a file of its own, with a ``name``; the registry finds it."""

    name: ClassVar[str] = ""

    def __call__(self, played: Played) -> float | None:
        """A finite number, higher for what is wanted; None where nobody can tell, and no gradient is taken."""
        raise NotImplementedError


REWARDS: Registry[Reward] = Registry("reward", "audit.training.rewards", Reward)
