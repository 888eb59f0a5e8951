"""Policies that combine others: an evictor with a quantiser, and a mixture that draws one policy per request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import gcd
from typing import Any

from kvaudit.audit.policies.base import LARGEST_NUMBER, Policy
from kvaudit.audit.policies.blind import Dense
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.policies.evictor import Evictor
from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.audit.policies.selector import Selector
from kvaudit.core.errors import SpecError


@dataclass(frozen=True)
class Composed(Policy):
    """A policy of an evictor and a quantiser, named in any order; the quantiser stores what the evictor keeps."""

    parts: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        evictors = [part for part in self.parts if isinstance(part, Evictor) and part.evicts]
        quantisers = [part for part in self.parts if isinstance(part, Quantiser)]
        if len(self.parts) != 2 or len(evictors) != 1 or len(quantisers) != 1:
            names = " + ".join(part.name or type(part).__name__.lower() for part in self.parts)
            raise SpecError(
                f"policy {names}: a composition is one evicting policy and one quantising policy, such as "
                "snapkv:budget=512+kivi:bits=4"
            )
        # repositioning rotates the exact keys of the sink, which a quantised cache no longer holds
        if evictors[0].repositions:
            raise SpecError(
                f"policy {evictors[0].name}: reposition=true rotates exact keys and cannot be combined with a quantiser"
            )
        if quantisers[0].skip_layers:
            raise SpecError(f"policy {quantisers[0].name}: skip_layers cannot be combined with an evicting policy")
        # one spelling: the evictor first, and its chunk for both
        object.__setattr__(self, "parts", (evictors[0], replace(quantisers[0], chunk=evictors[0].chunk)))

    @property
    def chunk(self) -> int:
        return self.parts[0].chunk

    @property
    def members(self) -> tuple[Policy, ...]:
        return self.parts

    @property
    def replayable(self) -> bool:
        return all(part.replayable for part in self.parts)

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return self.parts[0].pinned_roles

    def for_layer(self, layer: int, layers: int) -> Composed:
        return Composed(parts=(self.parts[0].for_layer(layer, layers), self.parts[1]))

    @property
    def canonical(self) -> str:
        return "+".join(part.canonical for part in self.parts)

    def as_row(self) -> dict[str, Any]:
        return {"compose": [part.as_row() for part in self.parts]}


@dataclass(frozen=True)
class Mixture(Policy):
    """A mixture of policies; each request is served under one of them, drawn by the request's key.

    ``weights`` are the relative shares of requests, integers in lowest terms; empty: all equal.
    """

    parts: tuple[Policy, ...] = ()
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        weights = self.weights or (1,) * len(self.parts)
        if len(weights) != len(self.parts) or not all(type(w) is int and 1 <= w <= LARGEST_NUMBER for w in weights):
            raise SpecError(
                f"a mixture of {len(self.parts)} policies with weights {', '.join(map(str, weights))}; wanted a whole "
                f"number from 1 to {LARGEST_NUMBER} for each"
            )
        # 2:4 is 1:2, so that equal mixtures have one text and one hash
        object.__setattr__(self, "weights", tuple(weight // gcd(*weights) for weight in weights))
        if any(isinstance(part, Mixture) for part in self.parts):
            raise SpecError("a mixture inside a mixture; list every policy once, side by side")
        if len(set(self.parts)) < 2:
            raise SpecError(f"a mixture of {self.canonical!r} alone; name two policies that differ")

    @property
    def members(self) -> tuple[Policy, ...]:
        raise SpecError(f"policy {self.canonical!r} is a mixture; draw one per request with policy.drawn(key)")

    @property
    def draws(self) -> tuple[Policy, ...]:
        return self.parts

    @property
    def replayable(self) -> bool:
        """False, because the rollouts of a group share one prompt and its ledger, which differs between policies."""
        return False

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for part in self.parts for role in part.pinned_roles))

    def drawn(self, key: int) -> Policy:
        ends = list(accumulate(self.weights))
        ticket = derive_seed("mixture", key) % ends[-1]
        return next(part for part, end in zip(self.parts, ends, strict=True) if ticket < end)

    @property
    def canonical(self) -> str:
        shares = ["" if weight == 1 else f"@{weight}" for weight in self.weights]
        return "|".join(part.canonical + share for part, share in zip(self.parts, shares, strict=True))

    def as_row(self) -> dict[str, Any]:
        parts = {"mixture": [part.as_row() for part in self.parts]}
        return parts if set(self.weights) == {1} else {**parts, "weights": list(self.weights)}


@cache
def evictor_of(policy: Policy) -> Evictor:
    """Return the evictor of a policy; the dense one if no part evicts."""
    evictors = (part for part in policy.members if isinstance(part, Evictor))
    return next(evictors, None) or Dense(chunk=policy.chunk)


def quantiser_of(policy: Policy) -> Quantiser | None:
    """Return the quantiser of a policy; None for full precision."""
    return next((part for part in policy.members if isinstance(part, Quantiser)), None)


def selector_of(policy: Policy) -> Selector | None:
    """Return the selector of a policy; None if queries attend to every entry."""
    return next((part for part in policy.members if isinstance(part, Selector)), None)


def quantiser_on_write(policy: Policy) -> Quantiser | None:
    """Return the quantiser if it quantises entries before their own queries attend, else None.

    It is the only part of a policy that acts before the first chunk of a prompt has attended.
    """
    codec = quantiser_of(policy)
    return codec if codec is not None and codec.on_write else None
