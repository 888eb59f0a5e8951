"""Plug-ins with options as one text: ``NAME`` or ``NAME:field=value,field=value``, of a frozen dataclass's fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.registry import Registry
from kvaudit.core.text import shown

T = TypeVar("T")
IDENTITY_DIGITS = 12  # hex digits of an identity in names and records
_KIND_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def parse_named(registry: Registry[T], text: str) -> T:
    """The plug-in of a registry that a text names, with its options; raises SpecError for what it does not know."""
    name, _, rest = text.partition(":")
    plugin: Any = registry.get(name)
    what = f"{registry.kind} {name}"
    known, kinds = {option.name: option for option in fields(plugin)}, get_type_hints(plugin)
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in known:
            raise UnknownName(f"option of {what}", key, known)
        if not equals or key in given:
            raise SpecError(f"{what}: option {part!r}, wanted {key}=VALUE, once")
        given[key] = _read(f"{what}: {key}", kinds[key], value)
    if missing := list(_missing(known, given)):
        raise SpecError(f"{what} needs {missing[0]}: give {name}:{','.join(f'{key}=...' for key in missing)}")
    made: T = plugin(**given)
    return made


def made_of(plugin: type[T], what: str, given: Mapping[str, Any]) -> T:
    """The plug-in ``what`` with the options of a mapping in YAML; raises SpecError for what it does not know."""
    kind: Any = plugin
    known, kinds = {option.name: option for option in fields(kind)}, get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            raise UnknownName(f"option of {what}", key, known)
        wanted = kinds[key]
        # a whole number is a number too; true and false are none
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SpecError(f"{what}: {key} is {shown(value)}, wanted {_KIND_WORDS[wanted]}")
    if missing := list(_missing(known, dict(given))):
        raise SpecError(f"{what} needs {missing[0]}; give {', '.join(f'{key}: ...' for key in missing)}")
    made: T = kind(**given)
    return made


def options(plugin: Any) -> list[str]:
    """The options of a plug-in's class, each with its default, if it has one."""
    return [f.name if f.default is MISSING else f"{f.name}={f.default}" for f in fields(plugin)]


def sha256_of(*parts: Any) -> str:
    """sha256 of plain values, of which an identity is made."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(what: str, kind: Callable[[str], Any], value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise SpecError(f"{what} is {value!r}, wanted a number") from None


def _missing(known: dict[str, Field[Any]], given: dict[str, Any]) -> Iterator[str]:
    return (key for key, option in known.items() if option.default is MISSING and key not in given)
