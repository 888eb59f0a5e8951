"""How much memory there is, and how much is free: of the machine, of its container, of a GPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

GROUPS = Path("/sys/fs/cgroup")
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # and what is used of it
_FILES = ("inactive_file", "active_file")


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses and this process may have, in bytes; of a system that does not say so, all it has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])  # free, total
    found = _table(Path("/proc/meminfo"))
    # that file counts in units of 1024 bytes
    free = found["MemAvailable:"] * 1024 if "MemAvailable:" in found else _installed()
    return int(min([free, *map(_left, _groups())]))


def total_bytes() -> int:
    """Memory of the machine, or of the container that this process is in, whoever uses it: the same at any time."""
    limits = [_limit(group, name) for group in _groups() for name in _LIMITS]
    return min([_installed(), *(most for most in limits if most is not None)])


def _installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> list[Path]:
    """The control groups that this process is in, each with those around it: a container's limit is that of one."""
    table, found = Path("/proc/self/cgroup"), list[Path]()
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else []:
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds, version 1 a folder for each
        if not kinds or "memory" in kinds.split(","):
            base = GROUPS / kinds
            own = base / path.lstrip("/")
            found += [own, *(around for around in own.parents if around.is_relative_to(base))]
    return found


def _left(group: Path) -> float:
    """What a control group may still take, in bytes; files in memory give way. No limit is infinity."""
    for limit, used in _LIMITS.items():
        if (most := _limit(group, limit)) is not None:
            held = _table(group / "memory.stat")
            # version 1 counts groups within apart, under the names with total
            # the page cache, which the kernel gives back before it refuses
            files = max(sum(held.get(kind + name, 0) for name in _FILES) for kind in ("", "total_"))
            return max(most - int((group / used).read_text(encoding="ascii")) + files, 0)
    return math.inf


def _limit(group: Path, name: str) -> int | None:
    """The bytes that a group's file allows; None where it is not there or allows everything."""
    text = (group / name).read_text(encoding="ascii").strip() if (group / name).is_file() else ""
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    return {name: int(value) for name, value, *_ in map(str.split, lines) if value.isdigit()}
