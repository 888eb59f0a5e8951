"""The memory of the machine, of its container or of a GPU, and how much of it is free."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

GROUPS = Path("/sys/fs/cgroup")
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # limit file: usage file
_FILES = ("inactive_file", "active_file")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate; all memory if the system does not report what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])  # free, total
    table = _read_table(Path("/proc/meminfo"))
    # meminfo counts in units of 1024 bytes
    free = table["MemAvailable:"] * 1024 if "MemAvailable:" in table else _installed()
    return int(min([free, *map(_free_in_group, _groups())]))


def total_bytes() -> int:
    """Return the bytes of memory of the machine, or of the container that this process is in, used or not."""
    limits = [_limit(group, name) for group in _groups() for name in _LIMITS]
    return min([_installed(), *(limit for limit in limits if limit is not None)])


def _installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> list[Path]:
    """Return the folders of this process's control groups (cgroups) and of their parents.

    Any of these may hold the memory limit of a container.
    """
    table, groups = Path("/proc/self/cgroup"), list[Path]()
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else []:
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds, version 1 a folder for each
        if not kinds or "memory" in kinds.split(","):
            base = GROUPS / kinds
            group = base / path.lstrip("/")
            groups += [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
    return groups


def _free_in_group(group: Path) -> float:
    """Return the bytes that a control group may still allocate; infinity if it has no limit."""
    for limit_file, usage_file in _LIMITS.items():
        if (limit := _limit(group, limit_file)) is not None:
            stat = _read_table(group / "memory.stat")
            # the page cache counts as free, since the kernel frees it first; version 1 counts inner groups as total_
            files = max(sum(stat.get(prefix + name, 0) for name in _FILES) for prefix in ("", "total_"))
            return max(limit - int((group / usage_file).read_text(encoding="ascii")) + files, 0)
    return math.inf


def _limit(group: Path, name: str) -> int | None:
    """Return the memory limit in bytes in the file ``name`` of a control group (cgroup) at folder ``group``.

    None if the file is missing or sets no limit.
    """
    text = (group / name).read_text(encoding="ascii").strip() if (group / name).is_file() else ""
    return int(text) if text.isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    return {name: int(value) for name, value, *_ in map(str.split, lines) if value.isdigit()}
