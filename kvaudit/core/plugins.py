"""Plug-ins: a registry that finds them by walking a package, and their options, written ``NAME:field=value,...``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import pkgutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from kvaudit.core.errors import DataError, SpecError, UnknownName
from kvaudit.core.text import short_repr

T = TypeVar("T")
IDENTITY_DIGITS = 12  # hex digits of an identity in names and records
_BOOLS = {"true": True, "false": False}
_KIND_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Registry(Generic[T]):
    """The plug-ins in ``package``: subclasses of ``base`` with a non-empty ``name``, loaded on first use.

    ``kind`` is what errors call such a plug-in. A user's file can add more (``load_file``).
    """

    def __init__(self, kind: str, package: str, base: type[T]) -> None:
        self.kind, self._package, self._base = kind, package, base
        self._classes: dict[str, type[T]] | None = None
        self._lock = threading.RLock()  # a server's first requests arrive together; none may see half of the classes

    def all(self) -> dict[str, type[T]]:
        """Return every plug-in class by its name, sorted."""
        with self._lock:
            if self._classes is None:
                root = importlib.import_module(self._package)
                entries = pkgutil.iter_modules(root.__path__, root.__name__ + ".")
                modules = [importlib.import_module(entry.name) for entry in entries]
                self._classes = {}  # only now: if a module cannot be imported, the next call must try all of them again
                for module in modules:
                    self._collect(module)
            return dict(sorted(self._classes.items()))

    def get(self, name: str) -> type[T]:
        """Return the plug-in class called ``name``; raise UnknownName with a suggestion."""
        classes = self.all()
        if name not in classes:
            raise UnknownName(self.kind, name, classes)
        return classes[name]

    def load_file(self, path: Path) -> list[str]:
        """Add the plug-ins in a user's Python file; return their names."""
        before = set(self.all())
        spec = importlib.util.spec_from_file_location(f"kvaudit_plugin_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise DataError(f"plug-in file {str(path)!r} cannot be read; give the path of a .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses resolve annotations there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
        self._collect(module)
        return sorted(set(self.all()) - before)

    def _collect(self, module: ModuleType) -> None:
        assert self._classes is not None
        for value in vars(module).values():
            if self._is_plugin(value, module) and self._classes.setdefault(value.name, value) is not value:
                raise SpecError(f"two {self.kind} plug-ins are called {value.name!r}; rename one")

    def _is_plugin(self, value: Any, module: ModuleType) -> bool:
        return (
            isinstance(value, type)
            and issubclass(value, self._base)
            and value.__module__ == module.__name__
            and bool(vars(value).get("name"))
        )


class Field(NamedTuple):
    """One field of ``NAME:field=value,...``; ``text`` is the whole field, ``value`` is None without an equals sign."""

    text: str
    name: str
    value: str | None


def split_named(text: str) -> tuple[str, list[Field]]:
    """Split ``NAME:field=value,...`` into name and fields, without surrounding spaces and empty fields."""
    name, _, rest = text.partition(":")
    return name.strip(), [_field(entry.strip()) for entry in rest.split(",") if entry.strip()]


def _field(text: str) -> Field:
    name, equals, value = text.partition("=")
    return Field(text, name.strip(), value.strip() if equals else None)


def parse_plugin(registry: Registry[T], text: str) -> T:
    """Build a plug-in from ``NAME:field=value,...``; raises UnknownName or SpecError for a wrong name or option."""
    name, options = split_named(text)
    plugin, label = registry.get(name), f"{registry.kind} {name}"
    values: dict[str, Any] = {}
    for option in options:
        kind = _option_type(plugin, label, option.name)
        if option.value is None or option.name in values:
            raise SpecError(f"{label}: option {option.text!r}, wanted {option.name}=VALUE, once")
        try:
            values[option.name] = _BOOLS[option.value] if kind is bool else kind(option.value)
        except (ValueError, KeyError):
            raise SpecError(f"{label}: {option.name} is {option.value!r}, wanted {_KIND_NAMES[kind]}") from None
    if missing := _missing_options(plugin, values):
        raise SpecError(f"{label} needs {missing[0]}: give {name}:{','.join(f'{key}=...' for key in missing)}")
    return plugin(**values)


def plugin_from_mapping(plugin: type[T], label: str, values: Mapping[str, Any]) -> T:
    """Build a plug-in from its options in a YAML mapping; raise UnknownName or SpecError for a wrong option.

    ``label`` is what the error calls the plug-in.
    """
    for key, value in values.items():
        kind = _option_type(plugin, label, key)
        # a whole number is valid for a float, a bool is not
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise SpecError(f"{label}: {key} is {short_repr(value)}, wanted {_KIND_NAMES[kind]}")
    if missing := _missing_options(plugin, values):
        raise SpecError(f"{label} needs {missing[0]}; give {', '.join(f'{key}: ...' for key in missing)}")
    return plugin(**values)


def option_texts(plugin: Any) -> list[str]:
    """Return the options of a plug-in class as texts: ``name``, or ``name=default``."""
    texts = {f.name: str(f.default).lower() if isinstance(f.default, bool) else f.default for f in fields(plugin)}
    return [name if default is MISSING else f"{name}={default}" for name, default in texts.items()]


def sha256_of(*values: Any) -> str:
    """Return the sha256 of plain values written as JSON, by which a plug-in with its options, or a recipe, is known."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _option_type(plugin: Any, label: str, key: str) -> Any:
    names = [option.name for option in fields(plugin)]
    if key not in names:
        raise UnknownName(f"option of {label}", key, names)
    return get_type_hints(plugin)[key]


def _missing_options(plugin: Any, values: Mapping[str, Any]) -> list[str]:
    return [option.name for option in fields(plugin) if option.default is MISSING and option.name not in values]
