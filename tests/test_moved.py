"""Former import paths answer for one release."""

from __future__ import annotations

import importlib
import sys

import pytest

from kvaudit.core.moved import MOVED


def test_a_former_path_gives_the_module_of_today() -> None:
    for old, now in MOVED.items():
        sys.modules.pop(f"kvaudit.{old}", None)
        with pytest.warns(DeprecationWarning, match=f"kvaudit.{old} is now kvaudit.{now}"):
            module = importlib.import_module(f"kvaudit.{old}")
        assert module is importlib.import_module(f"kvaudit.{now}"), old


def test_another_path_is_not_found() -> None:
    for name in ("kvaudit.reports.verdict.nothing", "kvaudit.nothing", "kvaudit.reports.analysis.remedies"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
