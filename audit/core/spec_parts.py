"""What the sections of a spec share: a mapping that knows its keys, and what the names in it mean to plug-ins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from audit.core.errors import SpecError
from audit.core.policy_names import policy_text

Text = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Names:
    """What plug-ins answer to, for a spec that is to run. Each raises SpecError, or UnknownName with a suggestion.

    ``policy`` gives the canonical text of a policy written as text or as a mapping, ``kind`` a suite's kind and
    ``placements`` where its items may put what matters; ``check_training`` knows the arms, the loss, the suites and
    whether the policy can be replayed; ``loss_defaults`` are values of the section that a loss would rather have;
    ``check_guard`` and ``check_judge`` know a guard and a judge, and their options; ``remedy`` gives the text of a
    remedy, and ``check_remedies`` knows whether remedies have a hold on gated policies.
    """

    policy: Callable[[Any], str]
    kind: Callable[[str], Literal["safety", "capability"]]
    placements: Callable[[str], tuple[str, ...]]
    check_training: Callable[[Any], None]  # of a ``TrainSpec``, which is made of these parts
    loss_defaults: Callable[[str], Mapping[str, Any]]
    check_guard: Callable[[str], None]
    check_judge: Callable[[str], None]
    remedy: Callable[[Any], str]
    check_remedies: Callable[[Sequence[str], Sequence[str]], None]


class Part(BaseModel):
    """A mapping of the spec: frozen, and any key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def canonical_policy(value: Any, names: Names | None) -> Any:
    """The canonical text of a policy; without names its text as it stands, and what is none is left to the model."""
    if names is not None:
        return names.policy(value)
    return policy_text(value) if isinstance(value, Mapping) else value


def canonical_policies(value: Any, names: Names | None) -> Any:
    """``canonical_policy`` of each; what is no list is left to the model."""
    return [canonical_policy(policy, names) for policy in value] if isinstance(value, list) else value


def is_plain(value: Any) -> bool:
    """Whether a value is text, a finite number or a truth value."""
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def unique(key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise SpecError(f"{key} names {', '.join(twice)} twice; give each once")
    return values
