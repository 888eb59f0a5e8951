"""Which exact versions are the project's dependencies tested with? Rewrite constraints.txt from what is installed.

    python -m bench.pins FROZEN CONSTRAINTS    # FROZEN: the output of pip freeze; ``make pins`` runs it

Takes a second; it has no page. Builds for one kind of machine (torch 2.13.0+cpu) are pinned by their release. Pins of
packages that are not installed, such as an extra that developers do not need, stay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HEAD = (
    "# Exact versions that the project is tested with, of what it depends on and of what that depends on. "
    "Renewed by: make pins"
)


def pins(text: str) -> dict[str, str]:
    """Return normalised name -> line NAME==VERSION, without the build."""
    lines = [line.partition("+")[0] for line in text.splitlines() if re.match(r"[A-Za-z0-9._-]+==", line)]
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(): line for line in lines}


def main(frozen: Path, constraints: Path) -> None:
    """Write the lines of both files, sorted by name; those of ``frozen`` win."""
    pinned = pins(constraints.read_text(encoding="utf-8")) | pins(frozen.read_text(encoding="utf-8"))
    pinned.pop("kvaudit", None)
    constraints.write_text("\n".join([HEAD, *(pinned[name] for name in sorted(pinned))]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
