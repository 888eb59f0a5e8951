"""Modules that moved: an import by the old path gives the new module, with a DeprecationWarning, for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from kvaudit.core.removed import removed_import

# old path -> new path, both below kvaudit
MOVED = {
    "reports.drift.answers": "reports.verdict.reference_answers",
    "reports.drift.canary": "reports.verdict.canary",
    "reports.drift.comparison": "reports.verdict.comparison",
    "reports.drift.drift": "reports.verdict.drift",
    "reports.drift.results": "reports.verdict.contrast",
    "reports.drift.selectivity": "reports.verdict.selectivity",
    "reports.labels.blind": "reports.verdict.human_labels",
    "reports.labels.pairs": "reports.verdict.label_pairs",
    "reports.labels.relabelled": "reports.verdict.human_labels",
    "reports.labels.sheet": "reports.verdict.label_sheet",
    "reports.gate.decided": "reports.verdict.verdict",
    **{
        f"reports.gate.{name}": f"reports.verdict.{name}"
        for name in (
            *("cell", "chance", "controls", "decide", "error_rates", "family", "pin", "ratios", "rules", "sizes"),
            *("verdict", "waivers"),
        )
    },
    "reports.gate.enough": "reports.verdict.item_counts",
    "reports.layout.rows": "reports.verdict.row",
    **{
        f"reports.layout.{name}": f"reports.sections.shared.{name}"
        for name in ("canvas", "events", "facts", "tables", "words")
    },
    "reports.layout.contrasts": "reports.sections.base",
    "reports.layout.json_text": "reports.sections.shared.facts",
    "reports.analysis.sides": "reports.sections.shared.both_sides",
    "reports.analysis.mechanism": "reports.sections.shared.lost_spans",
    **{f"reports.analysis.{name}": f"reports.sections.shared.{name}" for name in ("cache_use", "floor", "safe")},
    "reports.analysis.examples": "reports.sections.examples",
    "reports.analysis.slopes": "reports.stats.slope",
    **{f"reports.compare.{name}": f"reports.page.compare_{name}" for name in ("direction", "files", "page", "pairing")},
}
_FORMER_PACKAGES = frozenset(name.rpartition(".")[0] for name in MOVED)


class MovedModules(MetaPathFinder):
    """Find moved modules by their old path, and refuse removed ones with what to do instead."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the contract of importlib
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return how to load a former path of kvaudit, None for any other.

        Raises ModuleNotFoundError for a removed module, saying what to do instead.
        """
        top, _, name = fullname.partition(".")
        if top != "kvaudit":
            return None
        if name in MOVED:
            return ModuleSpec(fullname, _Alias(f"kvaudit.{MOVED[name]}"))
        if (refusal := removed_import(fullname)) is not None:
            raise ModuleNotFoundError(refusal, name=fullname)
        return ModuleSpec(fullname, _Alias(""), is_package=True) if name in _FORMER_PACKAGES else None


class _Alias(Loader):
    """Put the module of the new path under the old one; without a path, leave an empty package."""

    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        if self._path:
            warnings.warn(f"{module.__name__} is now {self._path}", DeprecationWarning, stacklevel=2)
            sys.modules[module.__name__] = import_module(self._path)


def install() -> None:
    """Let imports by former paths succeed; asked last, so that nothing else becomes slower."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
