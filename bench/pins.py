"""Renew constraints.txt by what is installed: ``python -m bench.pins FROZEN CONSTRAINTS``, which ``make pins`` calls.

Builds of one release for one kind of machine (torch 2.13.0+cpu) are pinned by the release. What is pinned and not
installed here, such as an extra that developers do not have, keeps its line.
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
    """Normalised name -> line NAME==VERSION, without the build."""
    lines = [line.partition("+")[0] for line in text.splitlines() if re.match(r"[A-Za-z0-9._-]+==", line)]
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(): line for line in lines}


def main(frozen: Path, constraints: Path) -> None:
    """Write the lines of both, those of ``frozen`` where both have one, in the order of their names."""
    found = pins(constraints.read_text(encoding="utf-8")) | pins(frozen.read_text(encoding="utf-8"))
    found.pop("kvaudit", None)
    constraints.write_text("\n".join([HEAD, *(found[name] for name in sorted(found))]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
