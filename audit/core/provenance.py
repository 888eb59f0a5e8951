"""What the known keys of a run's provenance.json may hold, checked whenever it is read, by a run and by its reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.core.files import read_json
from audit.core.inputs import TABLE, WORKED_WITH
from audit.core.text import is_text

PROVENANCE = "provenance.json"
ORIGIN = "origin.json"  # in a judged run: the provenance of a checkpoint that lies with the run it was judged from
CHECKPOINTS = "checkpoints"  # "arm/seed" -> sha256 of the weights
JUDGED = "judged"  # what a run was judged from, where its answers were graded again elsewhere
ENDPOINT = "endpoint"  # of a probe: its address, and the model as it names it itself
ASKED = "asked"  # of an endpoint: items of a suite at a length -> sha256, and decoding
REWARD_JUDGES = "reward_judges"  # who graded each suite that was trained on: itself (programmatic), or phrases
STOPPED = "stopped"  # seed -> in words, at which step all its arms ended before their last, and whose alarm that was
MOST_THREADS = 1024  # of one process
_TEXTS = ("name", "spec_sha256", "spec_file_sha256", "started", "finished", "base_sha256", "device", "dtype")
_TABLES = (
    *("versions", "host", "policies", "suite_kinds", "suite_versions", "checkpoints", "reference_sha256"),
    *(REWARD_JUDGES, ASKED, ENDPOINT, STOPPED),
)


def table_of(story: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table of a provenance, empty where it has none: files of strangers may hold anything."""
    value = story.get(key)
    return value if isinstance(value, Mapping) else {}


def read_provenance(run: Path) -> dict[str, Any]:
    """What is known of the run in a folder; raises DataError where that is of another kind than a run writes."""
    return check_provenance(read_json(run / PROVENANCE), run / PROVENANCE)


def check_provenance(story: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same object; raises DataError naming the first key whose value is of another kind. Any key may be absent."""
    wrong = next((f"{key} holds {_kind(story[key])}, wanted {wanted}" for key, wanted in _wrong(story)), None)
    if wrong is None and not _writable(story):
        wrong = "it holds text or a number that JSON in UTF-8 cannot spell"
    if wrong is not None:
        raise DataError(f"{str(path)!r}: {wrong}; put it back as it was, or start another run with --out")
    return story


def _wrong(story: dict[str, Any]) -> list[tuple[str, str]]:
    """Keys and what they should hold."""
    wanted = [(key, "text", story.get(key) is None or isinstance(story[key], str)) for key in _TEXTS]
    wanted += [(key, "names and texts", _texts(story.get(key, {}))) for key in (*_TABLES, WORKED_WITH)]
    inputs = story.get(TABLE, {})
    wanted += [(TABLE, "names and sha256 by kind", isinstance(inputs, dict) and all(map(_texts, inputs.values())))]
    wanted += [("threads", f"a whole number from 1 to {MOST_THREADS}", _usable(story.get("threads")))]
    return [(key, kind) for key, kind, right in wanted if not right]


def _texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


def _usable(threads: Any) -> bool:
    return threads is None or (type(threads) is int and 1 <= threads <= MOST_THREADS)


def _writable(story: dict[str, Any]) -> bool:
    """Whether the next note can be written back beside what is there."""
    try:
        return is_text(json.dumps(story, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return False


def _kind(value: Any) -> str:
    return (
        json.dumps(value)[:40]
        if isinstance(value, str | int | float)
        else f"a {type(value).__name__} that does not fit"
    )
