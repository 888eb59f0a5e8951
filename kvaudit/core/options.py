"""Plug-ins with options as one text: ``NAME`` or ``NAME:field=value,field=value``, of a frozen dataclass's fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.plugins import split_named
from kvaudit.core.plugins import Registry
from kvaudit.core.text import short_repr

T = TypeVar("T")
IDENTITY_DIGITS = 12  # hex digits of an identity in names and records
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def parse_named(registry: Registry[T], text: str) -> T:
    """The plug-in of a registry that a text names, with its options; raises SpecError for what it does not know."""
    name, options_given = split_named(text)
    plugin, what = registry.get(name), f"{registry.kind} {name}"
    given: dict[str, Any] = {}
    for option in options_given:
        kind = _kind_of(plugin, what, option.name)
        if option.value is None or option.name in given:
            raise SpecError(f"{what}: option {option.text!r}, wanted {option.name}=VALUE, once")
        try:
            given[option.name] = kind(option.value)
        except ValueError:
            raise SpecError(f"{what}: {option.name} is {option.value!r}, wanted a number") from None
    if missing := _missing(plugin, given):
        raise SpecError(f"{what} needs {missing[0]}: give {name}:{','.join(f'{key}=...' for key in missing)}")
    return plugin(**given)


def made_of(plugin: type[T], what: str, given: Mapping[str, Any]) -> T:
    """The plug-in ``what`` with the options of a mapping in YAML; raises SpecError for what it does not know."""
    for key, value in given.items():
        wanted = _kind_of(plugin, what, key)
        # a whole number is a number too; true and false are none
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SpecError(f"{what}: {key} is {short_repr(value)}, wanted {_KINDS[wanted]}")
    if missing := _missing(plugin, given):
        raise SpecError(f"{what} needs {missing[0]}; give {', '.join(f'{key}: ...' for key in missing)}")
    return plugin(**given)


def options(plugin: Any) -> list[str]:
    """The options of a plug-in's class, each with its default, if it has one."""
    return [f.name if f.default is MISSING else f"{f.name}={f.default}" for f in fields(plugin)]


def sha256_of(*parts: Any) -> str:
    """sha256 of plain values, of which an identity is made."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _kind_of(plugin: Any, what: str, key: str) -> Any:
    """The type of an option; raises UnknownName for one that the plug-in has not."""
    if key not in (known := [option.name for option in fields(plugin)]):
        raise UnknownName(f"option of {what}", key, known)
    return get_type_hints(plugin)[key]


def _missing(plugin: Any, given: Mapping[str, Any]) -> list[str]:
    return [option.name for option in fields(plugin) if option.default is MISSING and option.name not in given]
