"""The recipes of the embedded model and its larger relative, by size. Used by ``python -m bench.pretraining``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.pretraining.lessons import Mix
from kvaudit.audit.sampling.model import EMBEDDED, locate

EMBEDDED_FOLDER = locate(EMBEDDED)
# the first model that shipped, three layers, in bfloat16, with its tokens
PARENT = Path(__file__).with_name("parent.safetensors")
SHIPPED = EMBEDDED_FOLDER / "model.safetensors"


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum: conversations of ``shortest`` to ``longest`` context tokens.

    The learning rate changes linearly from the first to the second of ``rates``.
    """

    steps: int
    shortest: int
    longest: int
    mix: Mix
    rows: int = 8
    rates: tuple[float, float] = (1.5e-3, 1.5e-3)


# New words and whose order counts in short contexts; then all of it, as long as it will be asked.
STAGES = (
    Stage(
        500, 88, 128, Mix({"refusal": 0.8, "agent": 2.0, "math": 0.8}, {"refusal": 6, "agent": 3, "math": 4}, quizzes=6)
    ),
    Stage(
        500,
        112,
        224,
        Mix(
            {"refusal": 0.8, "agent": 1.6, "math": 1.4},
            {"refusal": 4, "agent": 2, "math": 3},
            quizzes=1,
            kinds=(4, 7, 2, 1, 1),
        ),
        rates=(1.5e-3, 5e-5),
    ),
    Stage(
        300,
        112,
        224,
        Mix(
            {"refusal": 0.6, "agent": 2.4, "math": 1.2},
            {"refusal": 4, "agent": 2, "math": 3},
            quizzes=1,
            kinds=(5, 8, 1, 1, 1),
        ),
        rates=(1e-3, 5e-5),
    ),
)

# A long context is read once and asked about often: questions cost little beside it.
_LONG = Mix(
    {"refusal": 0.7, "agent": 2.0, "math": 1.2}, {"refusal": 8, "agent": 4, "math": 5}, quizzes=2, kinds=(5, 6, 2, 2, 1)
)
LONG_STAGES = (
    Stage(150, 160, 640, _LONG, rows=4, rates=(1e-3, 1e-3)),
    Stage(200, 160, 1088, _LONG, rows=3, rates=(1e-3, 5e-5)),
)


@dataclass(frozen=True)
class PretrainingRecipe:
    """Everything that determines the weights, except the parent's.
    ``head_size`` None is ``width`` / ``heads``; ``theta`` is the base of the rotary positions. ``precision`` None
    trains and stores float32; "bfloat16" multiplies and stores bfloat16, with float32 weights during training.
    """

    seed: int = 0
    layers: int = 4
    width: int = 128
    mlp: int = 256
    heads: int = 4
    kv_heads: int = 2
    stages: tuple[Stage, ...] = STAGES
    warmup_steps: int = 30
    copying_every: int = 20  # one step in so many is a copying exercise
    head_size: int | None = None
    theta: float | None = None
    precision: str | None = None

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def written(self) -> dict[str, Any]:
        """Return the recipe as plain values, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Size:
    """A recipe and the weights from which it starts."""

    recipe: PretrainingRecipe
    parent: Path


# The shipped model's heads keep their size, since attention is what costs at length. Five times the rotary base lets it
# answer at 512 tokens before a single step of training (docs/decisions.md).
_MID = PretrainingRecipe(
    layers=5, width=256, mlp=768, stages=LONG_STAGES, head_size=32, theta=5e4, precision="bfloat16"
)
SIZES: Mapping[str, Size] = MappingProxyType(
    {"embedded": Size(PretrainingRecipe(), PARENT), "mid": Size(_MID, SHIPPED)}
)
