"""The policies that combine others, and the parser of all policies from text or YAML.

A composition is an evictor with a quantiser; a mixture draws one policy per request. ``snapkv:budget=96,window=8`` is
one policy. ``snapkv:budget=96+kivi:bits=4`` evicts some entries and quantises the rest. In ``snapkv:budget=96@3|none``
every request draws one of the two policies, the first three times as often. The YAML forms are
``{name: snapkv, budget: 96}``, ``{compose: [...]}`` and ``{mixture: [...], weights: [...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import gcd
from typing import Any, get_type_hints

from kvaudit.audit.policies.base import LARGEST_NUMBER, POLICIES, Policy
from kvaudit.audit.policies.blind import Dense
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.policies.evictor import Evictor
from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.audit.policies.selector import Selector
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.plugins import split_named

_KINDS = (Evictor, Quantiser, Selector)
_PLAIN = (str, int, float, bool)


@dataclass(frozen=True)
class Composed(Policy):
    """A policy that joins an evictor and a quantiser, in either order; the quantiser stores what the evictor keeps."""

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
    """A mixture of policies; each request is served under one of them, drawn by the request's random key.

    ``weights`` are whole numbers, in lowest terms: how often each policy is drawn, relative to the others. If none are
    given, all policies are drawn equally often.
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
        """Always False: the rollouts of a group share one prompt and its ledger, which differs between policies."""
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
    """Return the part of a policy that evicts; ``Dense``, which keeps everything, if none does."""
    evictors = (part for part in policy.members if isinstance(part, Evictor))
    return next(evictors, None) or Dense(chunk=policy.chunk)


def quantiser_of(policy: Policy) -> Quantiser | None:
    """Return the part of a policy that quantises; None for full precision."""
    return next((part for part in policy.members if isinstance(part, Quantiser)), None)


def selector_of(policy: Policy) -> Selector | None:
    """Return the part of a policy that selects what queries attend to; None if they attend to every entry."""
    return next((part for part in policy.members if isinstance(part, Selector)), None)


def quantiser_on_write(policy: Policy) -> Quantiser | None:
    """Return a policy's quantiser if it quantises entries before their own queries attend, else None.

    No other part of a policy acts before the first chunk of a prompt has attended.
    """
    codec = quantiser_of(policy)
    return codec if codec is not None and codec.on_write else None


def parse_policy(source: str | Mapping[str, Any]) -> Policy:
    """Parse a policy from text or a mapping; raises UnknownName or SpecError, which list the known names."""
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if not isinstance(source, str):
        raise SpecError(f"policy {source!r} is not text; write none, or 'snapkv:budget=96,window=8'")
    requests = [_parse_weighted(part) for part in source.split("|")]
    if len(requests) > 1:
        parts, weights = zip(*requests, strict=True)
        return Mixture(parts=parts, weights=weights)
    if "@" in source:
        raise SpecError(f"policy {source!r}: a weight is a share of a mixture, such as snapkv:budget=96@3|none")
    return requests[0][0]


def _parse_weighted(text: str) -> tuple[Policy, int]:
    """Return one part of a mixture and its weight, from POLICY@WEIGHT or POLICY (weight 1)."""
    request, sign, weight = text.strip().partition("@")
    if sign and not (weight.isascii() and weight.isdigit() and len(weight) <= len(str(LARGEST_NUMBER))):
        raise SpecError(f"policy {text!r}: weight {weight!r}, wanted a whole number at the end, such as {request}@3")
    parts = tuple(_simple(part) for part in request.split("+"))
    return parts[0] if len(parts) == 1 else Composed(parts=parts), int(weight or 1)


def _simple(text: str) -> Policy:
    name, fields = split_named(text)
    values: dict[str, Any] = {}
    for field in fields:
        if field.value is None:
            raise SpecError(f"policy {text!r}: {field.text!r} is not field=value")
        if field.name in values:
            raise SpecError(f"policy {text!r}: field {field.name} is given twice")
        values[field.name] = field.value  # converted by the class's types in _build
    return _build(name, values, text)


def _from_mapping(source: Mapping[str, Any]) -> Policy:
    kinds = [key for key in ("name", "compose", "mixture") if key in source]
    allowed = {"compose": {"compose"}, "mixture": {"mixture", "weights"}}
    if len(kinds) != 1 or not set(source) <= allowed.get(kinds[0], set(source)):
        raise SpecError(
            f"policy {dict(source)!r}: write name: snapkv, budget: 96, or compose: [...] alone, or mixture: [...] "
            "alone or with weights: [...]"
        )
    if kinds[0] == "name":
        values = {str(key): value for key, value in source.items() if key != "name"}
        return _build(str(source["name"]), values, str(dict(source)))
    entries = source[kinds[0]]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) < 2:
        raise SpecError(f"policy {dict(source)!r}: {kinds[0]} wants a list of two or more policies")
    parts = tuple(parse_policy(entry) for entry in entries)
    if kinds[0] == "compose":
        return Composed(parts=parts)
    weights = source.get("weights", ())
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise SpecError(f"policy {dict(source)!r}: weights={weights!r}, wanted a whole number for each policy")
    return Mixture(parts=parts, weights=tuple(weights))


def _build(name: str, values: Mapping[str, Any], text: str) -> Policy:
    cls = POLICIES.get(name)
    if not issubclass(cls, _KINDS):
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise SpecError(f"policy {name} of {cls.__module__} subclasses Policy directly; subclass one of {kinds}")
    names, types = cls.field_names(), _types(cls)  # type: ignore[arg-type] # a class is hashable
    for field in values:
        if field not in names:
            raise UnknownName(f"field of policy {name}", field, names)
    return cls(**{field: _value(text, field, value, types[field]) for field, value in values.items()})


@cache  # this is the slowest part of parsing a policy
def _types(cls: type[Policy]) -> dict[str, Any]:
    return get_type_hints(cls)  # annotations may be strings


def _value(text: str, field: str, value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, list) and all(type(entry) in (str, int) for entry in value):
        return "/".join(map(str, value))  # YAML: pin: [system, tool], skip_layers: [0, 1]
    if not isinstance(value, _PLAIN):
        raise SpecError(f"policy {text!r}: {field}={value!r}, wanted {kind.__name__}")
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise SpecError(f"policy {text!r}: {field}={value!r}, wanted true or false")
        return str(value).lower() == "true"
    if kind is str:
        return str(value)
    try:
        return kind(str(value))  # of text, since int(3.7) would be 3
    except ValueError:
        raise SpecError(f"policy {text!r}: {field}={value!r}, wanted {kind.__name__}") from None
