"""Policies parsed from text or YAML into the same frozen object.

``snapkv:budget=96,window=8`` is one policy, ``snapkv:budget=96+kivi:bits=4`` evicts and quantises the rest, and in
``snapkv:budget=96@3|none`` every request draws one of the two, the first three times as often. The YAML forms are
``{name: snapkv, budget: 96}``, ``{compose: [...]}`` and ``{mixture: [...], weights: [...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from kvaudit.audit.policies.base import LARGEST_NUMBER, POLICIES, Policy
from kvaudit.audit.policies.compose import Composed, Mixture
from kvaudit.audit.policies.evictor import Evictor
from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.audit.policies.selector import Selector
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.plugins import split_named

_KINDS = (Evictor, Quantiser, Selector)
_PLAIN = (str, int, float, bool)


def parse_policy(source: str | Mapping[str, Any]) -> Policy:
    """Parse a policy from text or a mapping; raises UnknownName or SpecError with the known fields."""
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
