"""Plug-ins found by walking a package: one file, one plug-in, no list to keep."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from kvaudit.core.errors import DataError, SpecError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes in ``package`` that subclass ``base`` and declare their own ``name``; found on first use.

    A class is a plug-in when it is defined in the walked module and has a non-empty ``name`` of its own.
    """

    def __init__(self, kind: str, package: str, base: type[T]) -> None:
        self.kind, self._package, self._base = kind, package, base
        self._found: dict[str, type[T]] | None = None
        self._walk = threading.RLock()  # a server's first requests come at once, and none may see half of them

    def all(self) -> dict[str, type[T]]:
        """Every plug-in by name, sorted."""
        with self._walk:
            if self._found is None:
                root = importlib.import_module(self._package)
                entries = pkgutil.iter_modules(root.__path__, root.__name__ + ".")
                modules = [importlib.import_module(entry.name) for entry in entries]
                self._found = {}  # only now: a module that cannot be imported must not leave half of them behind
                for module in modules:
                    self._collect(module)
            return dict(sorted(self._found.items()))

    def get(self, name: str) -> type[T]:
        """The plug-in called ``name``; raises UnknownName with a suggestion."""
        found = self.all()
        if name not in found:
            raise UnknownName(self.kind, name, found)
        return found[name]

    def load_file(self, path: Path) -> list[str]:
        """Add the plug-ins of an outside Python file; returns the names it brought."""
        before = set(self.all())
        spec = importlib.util.spec_from_file_location(f"kvaudit_plugin_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise DataError(f"plug-in file {str(path)!r} cannot be read; give the path of a .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there for annotations that are text
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
        self._collect(module)
        return sorted(set(self.all()) - before)

    def _collect(self, module: ModuleType) -> None:
        assert self._found is not None
        for value in vars(module).values():
            if self._is_plugin(value, module):
                taken = self._found.setdefault(value.name, value)
                if taken is not value:
                    raise SpecError(f"two {self.kind} plug-ins are called {value.name!r}; rename one")

    def _is_plugin(self, value: Any, module: ModuleType) -> bool:
        return (
            isinstance(value, type)
            and issubclass(value, self._base)
            and value.__module__ == module.__name__
            and bool(vars(value).get("name"))
        )
