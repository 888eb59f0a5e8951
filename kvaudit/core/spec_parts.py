"""The parts of which spec sections are built: bounded numbers, the base class, and checks of plug-in names.

Every number is bounded, so that no spec can ask for more than a machine has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kvaudit.core.errors import SpecError
from kvaudit.core.policy_names import policy_text

TEMPERATURES = "0, or 0.001 to 100"  # 0 is greedy
LEAST_MARGIN = 0.01  # percentage points: no sample can show less
LEAST_RATIO, MOST_RATIO = 1.01, 100  # how many times as often
PUBLISHED = "published"  # the length of a row that is asked as published; stored as 0

Text = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # of one context
ContextLength = Annotated[
    int, BeforeValidator(lambda value: 0 if value == PUBLISHED else value), Field(strict=True, ge=0, le=10_000_000)
]
BatchTokens = Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)]
Group = Annotated[int, Field(strict=True, ge=1, le=1024)]  # rows of one prompt
Rank = Annotated[int, Field(strict=True, ge=1, le=4096)]  # of an adapter
PromptCount = Annotated[int, Field(strict=True, ge=1, le=65_536)]
Steps = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number")
    return value


def is_temperature(value: float) -> bool:
    """Return whether a temperature is one of ``TEMPERATURES``."""
    return value == 0 or 1e-3 <= value <= 100


def _require_number(is_valid: Callable[[float], bool], expected: str) -> AfterValidator:
    def check(value: float) -> float:
        if not is_valid(value):
            raise PydanticCustomError("number", expected)
        return value

    return AfterValidator(check)


Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=1e-12, le=1)]
Norm = Annotated[Number, Field(ge=1e-6, le=1e9)]
Factor = Annotated[Number, Field(ge=0, le=1000)]
Temperature = Annotated[Number, Field(ge=1e-3, le=100)]  # above 0
TemperatureOrGreedy = Annotated[Number, _require_number(is_temperature, TEMPERATURES)]
Share = Annotated[Number, Field(gt=0, le=1)]
ShareOrZero = Annotated[Number, Field(ge=0, le=1)]
Alpha = Annotated[Number, Field(gt=0, lt=0.5)]
Points = Annotated[  # percentage points
    Number,
    Field(gt=0, lt=100),
    _require_number(lambda value: value >= LEAST_MARGIN, f"at least {LEAST_MARGIN} (percentage points)"),
]
Ratio = Annotated[Number, Field(ge=LEAST_RATIO, le=MOST_RATIO)]


@dataclass(frozen=True)
class PluginNames:
    """The functions that check a spec against the plug-ins; each raises SpecError or UnknownName for a wrong name.

    They are passed as pydantic's validation context. Without them a spec can be read without loading plug-ins.
    """

    policy: Callable[[Any], str]  # text or mapping of a policy or an engine's condition -> canonical text
    # condition, its reference in the spec or None -> canonical reference; None for a policy of ours
    reference: Callable[[Any, Any], str | None]
    kind: Callable[[str], Literal["safety", "capability"]]  # of a suite
    default_gate: Callable[[str], tuple[str, ...]]  # the facets of a suite gated by default; (): its score
    placements: Callable[[str], tuple[str, ...]]  # of a suite
    lengths: Callable[[str], Literal["given", "none", "any"]]  # whether a suite's items are made to a length
    bare: Callable[[str], str]  # SUITE@CONTEXT -> SUITE
    check_training: Callable[[Any], None]  # checks arms, loss, suites and policy of a ``TrainSpec``
    loss_defaults: Callable[[str], Mapping[str, Any]]  # options of training whose default a loss changes
    check_judge: Callable[[str], object]  # checks a judge and its options


_T = TypeVar("_T")
_OMIT = "omit default"
# a field that is written only if it differs from its default: it was added later, and older specs keep their hash
OmitDefault = Annotated[_T, _OMIT]


class SpecSection(BaseModel):
    """The base of spec sections, which are frozen and refuse unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def written(self) -> dict[str, Any]:
        """Return the section as plain values for YAML, without ``OmitDefault`` fields that have their default."""
        row = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if _OMIT not in field.metadata or value != field.get_default(call_default_factory=True):
                row[name] = _plain(value)
        return row


def _plain(value: Any) -> Any:
    if isinstance(value, SpecSection):
        return value.written()
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def canonical_policy(value: Any, names: PluginNames | None) -> Any:
    """Return a policy's canonical text, which ``names`` asks the plug-ins for.

    Without ``names``, a mapping is only converted to text, and any other value is returned unchanged. Pydantic later
    refuses values that are no text.
    """
    if names is not None:
        return names.policy(value)
    return policy_text(value) if isinstance(value, Mapping) else value


def canonical_policies(value: Any, names: PluginNames | None) -> Any:
    """Return ``canonical_policy`` of each policy in a list; return any other value unchanged (pydantic refuses it)."""
    return [canonical_policy(policy, names) for policy in value] if isinstance(value, list) else value


Policy = Annotated[str, BeforeValidator(lambda value, info: canonical_policy(value, info.context))]
Policies = Annotated[tuple[str, ...], BeforeValidator(lambda value, info: canonical_policies(value, info.context))]


def is_scalar(value: Any) -> bool:
    """Return whether a value is text, a finite number or a bool."""
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def check_unique(key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of an option unchanged; raises SpecError for duplicates."""
    duplicates = sorted({str(value) for value in values if values.count(value) > 1})
    if duplicates:
        raise SpecError(f"{key} names {', '.join(duplicates)} twice; give each once")
    return values
