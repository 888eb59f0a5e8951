"""The kinds of numbers that a spec holds: every one is bounded, so that no file can ask for more than a machine has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

HEATS = "0, or 0.001 to 100"  # temperatures, 0 is greedy
LEAST_MARGIN = 0.01  # percentage points: no sample shows less

Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # of one context
BatchTokens = Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)]
Group = Annotated[int, Field(strict=True, ge=1, le=1024)]  # rows of one prompt
Rank = Annotated[int, Field(strict=True, ge=1, le=4096)]  # of an adapter
PromptCount = Annotated[int, Field(strict=True, ge=1, le=65_536)]
Steps = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


def _no_truth(value: Any) -> Any:
    """A truth value is no number, although it could be counted as one."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number")
    return value


def is_heat(value: float) -> bool:
    """Whether a temperature can be sampled at: ``HEATS``."""
    return value == 0 or 1e-3 <= value <= 100


def _usable_temperature(value: float) -> float:
    if not is_heat(value):
        raise PydanticCustomError("temperature", HEATS)
    return value


def _usable_margin(value: float) -> float:
    if value < LEAST_MARGIN:
        raise PydanticCustomError("margin", f"at least {LEAST_MARGIN} (percentage points)")
    return value


Number = Annotated[float, BeforeValidator(_no_truth), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=1e-12, le=1)]
Norm = Annotated[Number, Field(ge=1e-6, le=1e9)]
Factor = Annotated[Number, Field(ge=0, le=1000)]
Heat = Annotated[Number, Field(ge=1e-3, le=100)]  # a temperature to sample at
HeatOrGreedy = Annotated[Number, AfterValidator(_usable_temperature)]
Share = Annotated[Number, Field(gt=0, le=1)]
ShareOrZero = Annotated[Number, Field(ge=0, le=1)]
Alpha = Annotated[Number, Field(gt=0, lt=0.5)]
Points = Annotated[Number, Field(gt=0, lt=100), AfterValidator(_usable_margin)]  # percentage points
