"""A process that holds an engine of the same machine: a line of JSON in, a line of JSON out.

    {"start": {...}}                            -> {"about": {...}, "to": 1}
    {"ask": [{"ids": [...], "most": 40, ...}]}  -> {"replies": [{"ids": [...], "finish": "stop", "logprob": -1}], ...}
                                                -> {"error": "what the engine said", "to": 2}

``to`` is the number of the line that is answered, so that nothing said out of turn is taken for an answer.

    python worker.py FILE

FILE has ``start(setup) -> (description, answer)``. This is run by its path in an environment that need not hold
kvaudit, so of all its modules those beside this one are there, and none but them. Whatever an engine prints goes to
stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any


def answer_lines(path: str) -> None:
    """Answer until nobody asks any more."""
    # our own way out, kept before the engine's prints are turned away from it
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an engine's own prints would be taken for answers
    for number, line in enumerate(sys.stdin, start=1):
        try:
            row = json.loads(line)
            if "start" in row:
                description, answer = _loaded(path).start(row["start"])
                said: dict[str, Any] = {"about": description}
            else:
                said = {"replies": answer(row["ask"])}
        except Exception as error:  # in the engine's own words, whatever they are
            said = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps({**said, "to": number}) + "\n")
        out.flush()


def _loaded(path: str) -> Any:
    _show_files_beside()
    # OpenVINO has a stub for where this is not installed; with it, to be imported is to send a line home
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location("engine_inside", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _show_files_beside() -> None:
    """Have the files of this folder found by their full names, as packages in which there is nothing else."""
    names = ("kvaudit", "kvaudit.audit", "kvaudit.audit.engines", "kvaudit.audit.engines.inside")
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[names[-1]].__path__ = [os.path.dirname(os.path.abspath(__file__))]


if __name__ == "__main__":
    answer_lines(sys.argv[1])
