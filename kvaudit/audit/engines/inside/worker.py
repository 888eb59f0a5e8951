"""The worker process of an engine: reads one line of JSON per request and writes one line of JSON per answer.

    {"start": {...}}                                  -> {"about": {...}, "to": 1}
    {"ask": [{"ids": [...], "max_tokens": 40, ...}]}  -> {"replies": [{"ids": [...], "finish": "stop", ...}], "to": 2}
                                                      -> {"error": "the engine's message", "to": 2}

``to`` is the number of the request's line, so that no other output is taken for its answer.

    python worker.py FILE      run by its path

FILE defines ``start(setup) -> (description, answer)``. The environment may lack kvaudit, so FILE can import only the
modules of this folder. Everything that the engine prints goes to stderr.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def answer_lines(path: str) -> None:
    """Answer the requests on stdin, one per line, until it is closed; ``path`` is the engine's FILE."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the engine's own prints would be taken for answers
    for number, line in enumerate(sys.stdin, start=1):
        try:
            row = json.loads(line)
            if "start" in row:
                description, answer = _load(path).start(row["start"])
                result: dict[str, Any] = {"about": description}
            else:
                result = {"replies": answer(row["ask"])}
        except Exception as error:  # any error of the engine
            result = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps({**result, "to": number}) + "\n")
        out.flush()


def _load(path: str) -> Any:
    _add_packages()
    # OpenVINO reports its import over the network; without this module it does not
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location("engine_inside", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_packages() -> None:
    """Make the modules of this folder importable by their full names, without the rest of kvaudit."""
    names = ("kvaudit", "kvaudit.audit", "kvaudit.audit.engines", "kvaudit.audit.engines.inside")
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[names[-1]].__path__ = [os.path.dirname(os.path.abspath(__file__))]


def arrays_sha256(arrays: Mapping[str, Any]) -> str:
    """Return the sha256 of named numpy arrays; learner and engine compare it to see that their weights are equal."""
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(name.encode() + arrays[name].tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    answer_lines(sys.argv[1])
