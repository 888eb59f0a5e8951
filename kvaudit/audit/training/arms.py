"""The table of arms: how rollouts are sampled, what the learner sees, and which correction treats the mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvaudit.core.errors import UnknownName
from kvaudit.core.spec_train import DENSE_ARM


@dataclass(frozen=True, slots=True)
class Arm:
    """The design of one arm; everything else (items, seeds, optimiser, updates) is equal between arms."""

    name: str
    rollout: Literal["dense", "compressed"]  # the sampler's cache
    learner: Literal["dense", "shadow"]  # the attention of the pass with gradient
    correction: str  # a name in ``corrections.CORRECTIONS``
    distill: bool  # whether the dense view learns from the shadow view
    summary: str  # one line for people

    def __post_init__(self) -> None:
        assert self.learner == "dense" or self.rollout == "compressed", "dense rollouts leave no ledger to replay"
        assert not self.distill or self.learner == "shadow", "distillation needs the shadow view as its teacher"
        assert (self.rollout == "dense") == (self.name == DENSE_ARM), "a sweep of policies trains one arm once"


_ALL = (
    Arm(DENSE_ARM, "dense", "dense", "none", False, "uncompressed rollouts: the reference"),
    Arm("naive", "compressed", "dense", "none", False, "compressed rollouts taken for the learner's own: silent bias"),
    Arm("naive-ratio", "compressed", "dense", "naive-ratio", False, "the sampler's log-probs inside the clipped ratio"),
    Arm("tis", "compressed", "dense", "tis", False, "truncated importance weights, min(ratio, 2)"),
    Arm("mis", "compressed", "dense", "mis", False, "masked importance weights, ratios outside [.5, 5] dropped"),
    Arm("tis-sequence", "compressed", "dense", "tis-sequence", False, "one truncated weight for a whole rollout"),
    Arm("mis-sequence", "compressed", "dense", "mis-sequence", False, "one weight for a rollout, none outside [.5, 5]"),
    Arm("sparse-rl", "compressed", "dense", "sparse-rl", False, "clipped weights, token mask and sequence veto"),
    Arm("sparse-rl-text", "compressed", "dense", "sparse-rl-text", False, "sequence veto and clipped weights alone"),
    Arm("smd", "compressed", "shadow", "none", False, "the learner replays the ledger: the ratio is 1"),
    Arm("smd-distill", "compressed", "shadow", "none", True, "smd, and the dense view learns from the shadow view"),
)
ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _ALL})


def get_arm(name: str) -> Arm:
    """Return the arm called ``name``; raises UnknownName with a suggestion."""
    if name not in ARMS:
        raise UnknownName("arm", name, ARMS)
    return ARMS[name]
