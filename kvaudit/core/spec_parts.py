"""What the sections of a spec share: bounded numbers, a mapping that knows its keys, what names mean to plug-ins.

Every number is bounded, so that no file can ask for more than a machine has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kvaudit.core.errors import SpecError
from kvaudit.core.policy_names import policy_text

TEMPERATURES = "0, or 0.001 to 100"  # temperatures, 0 is greedy
LEAST_MARGIN = 0.01  # percentage points: no sample shows less

Text = Annotated[str, Field(min_length=1, max_length=1000)]

Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # of one context
PUBLISHED = "published"  # what a spec calls the length of a row that is asked as it is, which is noted as 0


ContextLength = Annotated[
    int, BeforeValidator(lambda value: 0 if value == PUBLISHED else value), Field(strict=True, ge=0, le=10_000_000)
]
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


def is_temperature(value: float) -> bool:
    """Whether a temperature can be sampled at: ``TEMPERATURES``."""
    return value == 0 or 1e-3 <= value <= 100


def _usable(holds: Callable[[float], bool], wanted: str) -> AfterValidator:
    def check(value: float) -> float:
        if not holds(value):
            raise PydanticCustomError("number", wanted)
        return value

    return AfterValidator(check)


Number = Annotated[float, BeforeValidator(_no_truth), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=1e-12, le=1)]
Norm = Annotated[Number, Field(ge=1e-6, le=1e9)]
Factor = Annotated[Number, Field(ge=0, le=1000)]
Temperature = Annotated[Number, Field(ge=1e-3, le=100)]  # a temperature to sample at
TemperatureOrGreedy = Annotated[Number, _usable(is_temperature, TEMPERATURES)]
Share = Annotated[Number, Field(gt=0, le=1)]
ShareOrZero = Annotated[Number, Field(ge=0, le=1)]
Alpha = Annotated[Number, Field(gt=0, lt=0.5)]
Points = Annotated[  # percentage points
    Number,
    Field(gt=0, lt=100),
    _usable(lambda value: value >= LEAST_MARGIN, f"at least {LEAST_MARGIN} (percentage points)"),
]
LEAST_RATIO, MOST_RATIO = 1.01, 100  # how many times as often
Ratio = Annotated[Number, Field(ge=LEAST_RATIO, le=MOST_RATIO)]


@dataclass(frozen=True)
class PluginNames:
    """What plug-ins answer to, for a spec that is to run. Each raises SpecError, or UnknownName with a suggestion.

    ``policy`` gives the canonical text of a policy, or of an engine with its settings, written as text or as a mapping,
    and ``reference`` that of what an engine's is compared with (None for a policy of ours), which may have been written
    beside it; ``kind`` is a suite's kind and ``placements`` where its items may put what matters, and ``lengths``
    whether they are made to a length (given, none, any); ``bare`` is the suite whose rows a suite in a context asks;
    ``check_training`` knows the arms, the loss, the suites and whether the policy can be replayed; ``loss_defaults``
    are values that a loss would rather have; ``check_judge`` knows a judge and its options.
    """

    policy: Callable[[Any], str]
    reference: Callable[[Any, Any], str | None]
    kind: Callable[[str], Literal["safety", "capability"]]
    placements: Callable[[str], tuple[str, ...]]
    lengths: Callable[[str], Literal["given", "none", "any"]]
    bare: Callable[[str], str]
    check_training: Callable[[Any], None]  # of a ``TrainSpec``, which is made of these parts
    loss_defaults: Callable[[str], Mapping[str, Any]]
    check_judge: Callable[[str], object]


class SpecSection(BaseModel):
    """A mapping of the spec: frozen, and any key it does not know is an error.

    ``later`` are fields that came after the first specs: they are written only where they are not as by default, so
    that specs from before keep their hash.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    later: ClassVar[Collection[str]] = ()

    def written(self) -> dict[str, Any]:
        """The section as plain values, every default spelled out but those of ``later``."""
        every = {name: (getattr(self, name), about) for name, about in type(self).model_fields.items()}
        return {
            name: _plain(value)
            for name, (value, about) in every.items()
            if name not in self.later or value != about.get_default(call_default_factory=True)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, SpecSection):
        return value.written()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def canonical_policy(value: Any, names: PluginNames | None) -> Any:
    """The canonical text of a policy; without names its text as it stands, and what is none is left to the model."""
    if names is not None:
        return names.policy(value)
    return policy_text(value) if isinstance(value, Mapping) else value


def canonical_policies(value: Any, names: PluginNames | None) -> Any:
    """``canonical_policy`` of each; what is no list is left to the model."""
    return [canonical_policy(policy, names) for policy in value] if isinstance(value, list) else value


Policy = Annotated[str, BeforeValidator(lambda value, info: canonical_policy(value, info.context))]
Policies = Annotated[tuple[str, ...], BeforeValidator(lambda value, info: canonical_policies(value, info.context))]


def is_scalar(value: Any) -> bool:
    """Whether a value is text, a finite number or a truth value."""
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def check_unique(key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise SpecError(f"{key} names {', '.join(twice)} twice; give each once")
    return values
