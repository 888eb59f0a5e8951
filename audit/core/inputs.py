"""What a run reads, by sha256: noted when it starts, held by every process that goes on with it and by the gate.

    provenance.json    inputs: {"rows": {"gsm8k/test.jsonl": sha256}, "model files": {...}, "plug-ins": {...}}
    <unit>.done.json   inputs: sha256 of that table, as it was when the unit was evaluated

Weights and spec have hashes of their own. What a plug-in opens by itself is not known here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from audit.core.errors import DataError, RunError

TABLE = "inputs"
WORKED_WITH = "worked_with"  # versions, in one line -> when a process first worked with them; other ones are a remark
ROWS, MODEL, PLUGINS, REWARD = "rows", "model files", "plug-ins", "reward"  # kinds: name -> sha256
_NAMED = 3  # changes that a refusal spells out

Digests = Mapping[str, str]


def inputs_sha256(table: Any) -> str:
    """What stands for a whole table, kind by kind, in the seals of units."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def check_same(kind: str, then: Any, now: Digests) -> None:
    """Raise RunError, naming what changed, where a run would go on with other inputs than it was started with.

    ``then`` is what provenance.json holds of the kind; DataError where that is no table.
    """
    if not isinstance(then, dict):
        raise DataError(f"provenance.json: {TABLE}.{kind} holds a {type(then).__name__}, wanted names and sha256")
    changes = list(_changes(then, now))
    if changes:
        more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        raise RunError(
            f"the run was started with other {kind}: {'; '.join(changes[:_NAMED])}{more}; put back what it was started "
            "with, or start another run"
        )


def _changes(then: Mapping[str, Any], now: Digests) -> Iterator[str]:
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            yield f"{name} had sha256 {_short(then.get(name))}, now {_short(now.get(name))}"


def _short(digest: Any) -> str:
    return "none (it was not read)" if digest is None else str(digest)[:12]
