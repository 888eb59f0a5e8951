"""What breaks if engines, requests, folders, disks, rows or foreign tasks are hostile?

    python -m bench.attack [SECTION ...]    # engines secrets server folders disks rows tasks

Takes about an hour, a section at most half; results: docs/results/attack.md. Prints for each section how many trials
were run, held and broke; exits with 1 if one broke. Everything stays on this machine and in temporary folders.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.attack.trial import run_trials
from kvaudit.core.errors import UnknownName

SECTIONS = {
    "engines": "engines that misbehave",
    "secrets": "keys and passwords",
    "server": "kvaudit serve",
    "folders": "folders and specs",
    "disks": "disks, clocks and folder names",
    "rows": "hostile rows and mirrors",
    "tasks": "foreign tasks",
}


def main(names: list[str]) -> int:
    """Run these sections, by default all; returns the number of broken trials."""
    broken = 0
    print("| section | tried | held | broken | seconds |\n|---|---|---|---|---|")
    for name in names or SECTIONS:
        if name not in SECTIONS:
            raise UnknownName("section", name, SECTIONS)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvaudit-attack-", ignore_cleanup_errors=True) as folder:
            result = run_trials(importlib.import_module(f"bench.attack.{name}").trials(Path(folder)))
        row = (SECTIONS[name], result.tried, result.held, len(result.broken), f"{time.monotonic() - began:.0f}")
        print(
            f"| {' | '.join(map(str, row))} |", *(f"  broken: {line}" for line in result.broken), sep="\n", flush=True
        )
        broken += len(result.broken)
    return broken


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores SIGINT of jobs behind &, and every child would inherit that
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(bool(code))  # do not wait for threads of trials that hang
