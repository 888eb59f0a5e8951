"""Run: python -m bench.attack [SECTION ...]. Prints what each section tried, what held and what broke (exit code 1).

Everything happens on the loopback and in temporary folders, in bounded time and number.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.attack.trial import attacked
from kvaudit.core.errors import UnknownName

SECTIONS = {
    "engines": "the life of engines",
    "secrets": "keys and passwords",
    "server": "kvaudit serve",
    "folders": "folders and specs",
    "disks": "disks, clocks and places",
    "rows": "rows and words",
    "tasks": "foreign tasks",
}


def main(names: list[str]) -> int:
    """Attack these sections, by default all; how many of their trials broke."""
    broken = 0
    print("| section | tried | held | broken | seconds |\n|---|---|---|---|---|")
    for name in names or SECTIONS:
        if name not in SECTIONS:
            raise UnknownName("section", name, SECTIONS)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvaudit-attack-", ignore_cleanup_errors=True) as folder:
            found = attacked(importlib.import_module(f"bench.attack.{name}").trials(Path(folder)))
        row = (SECTIONS[name], found.tried, found.held, len(found.broken), f"{time.monotonic() - began:.0f}")
        print(f"| {' | '.join(map(str, row))} |", *(f"  broken: {line}" for line in found.broken), sep="\n", flush=True)
        broken += len(found.broken)
    return broken


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell ignores behind &, every child would ignore
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(bool(code))  # threads of trials that hang are left behind
