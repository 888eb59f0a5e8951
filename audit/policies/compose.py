"""Policies made of policies: an evictor with a quantiser, and a draw per request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from audit.draws import derive_seed
from audit.errors import SpecError
from audit.policies.base import Policy

if TYPE_CHECKING:
    from audit.policies.quantiser import Quantiser


@dataclass(frozen=True)
class Composed(Policy):
    """What one policy keeps, another stores in fewer bits: exactly one evictor and one quantiser, in any order."""

    parts: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        plain = [part for part in self.parts if part.name]
        evictors = [part for part in plain if part.evicts]
        quantisers = [part.quantiser for part in plain if part.quantiser is not None]
        if len(self.parts) != 2 or len(evictors) != 1 or len(quantisers) != 1:
            names = " + ".join(part.name or type(part).__name__.lower() for part in self.parts)
            raise SpecError(
                f"policy {names}: a composition is one evicting policy and one quantising policy, such as "
                "snapkv:budget=512+kivi:bits=4"
            )
        if evictors[0].repositions:
            raise SpecError(f"policy {evictors[0].name}: reposition=true turns exact keys and takes no quantiser")
        # one form: the evictor first, and its chunk for both
        object.__setattr__(self, "parts", (evictors[0], replace(quantisers[0], chunk=evictors[0].chunk)))
        object.__setattr__(self, "chunk", evictors[0].chunk)

    @property
    def replayable(self) -> bool:
        return all(part.replayable for part in self.parts)

    @property
    def evictor(self) -> Policy:
        return self.parts[0]

    @property
    def quantiser(self) -> Quantiser | None:
        return self.parts[1].quantiser

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return self.evictor.pinned_roles

    def for_layer(self, layer: int, layers: int) -> Composed:
        return Composed(parts=(self.evictor.for_layer(layer, layers), self.parts[1]))

    @property
    def canonical(self) -> str:
        return "+".join(part.canonical for part in self.parts)

    def as_row(self) -> dict[str, Any]:
        return {"compose": [part.as_row() for part in self.parts]}


@dataclass(frozen=True)
class Mixture(Policy):
    """Every request draws one of the parts, equally likely, from its own key: serving whose policy is not constant."""

    parts: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        if any(isinstance(part, Mixture) for part in self.parts):
            raise SpecError("a mixture inside a mixture; list every policy once, side by side")
        if len(set(self.parts)) < 2:
            raise SpecError(f"a mixture of {self.canonical!r} alone; name two policies that differ")

    @property
    def replayable(self) -> bool:
        """Each rollout is, but a group's prompt has one ledger only where its members share a policy."""
        return False

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for part in self.parts for role in part.pinned_roles))

    def drawn(self, key: int) -> Policy:
        return self.parts[derive_seed("mixture", key) % len(self.parts)]

    @property
    def canonical(self) -> str:
        return "|".join(part.canonical for part in self.parts)

    def as_row(self) -> dict[str, Any]:
        return {"mixture": [part.as_row() for part in self.parts]}
