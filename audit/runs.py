"""The run folder: one spec each, claimed unit by unit by any number of plain processes, resumed after a kill.

spec.yaml  provenance.json  checkpoints/<arm>/seed-<n>/  records/<unit>.jsonl + <unit>.done.json  report/

A claim is a lock file that names its process. What a dead process of this host has claimed is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from audit.errors import DataError, RunError
from audit.spec import RunSpec
from audit.spec_file import dump_spec, load_spec

T = TypeVar("T")

SPEC, PROVENANCE = "spec.yaml", "provenance.json"
_PACKAGES = ("kvaudit", "torch", "transformers", "tokenizers", "numpy")
_POLL_SECONDS = 1.0
_IMPOSSIBLE = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}


class RunFolder:
    """An open run folder; make one with ``open_run``."""

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path, self.spec = path, spec

    @property
    def records(self) -> Path:
        """Where the record files lie."""
        return self.path / "records"

    def checkpoint(self, arm: str, seed: int) -> Path:
        """The checkpoint folder of one trained arm and seed."""
        return self.path / "checkpoints" / arm / f"seed-{seed}"

    def provenance(self) -> dict[str, Any]:
        """What is known so far about where the numbers come from."""
        return read_json(self.path / PROVENANCE)

    def note(self, **entries: Any) -> None:
        """Add entries to provenance.json; mappings are merged one level deep. Safe between processes."""
        with _mutex(self.path / ".provenance.lock"):
            known = self.provenance() if (self.path / PROVENANCE).exists() else {}
            for key, value in entries.items():
                known[key] = {**known.get(key, {}), **value} if isinstance(value, Mapping) else value
            write_json(self.path / PROVENANCE, known)


def check_folder(path: Path, spec: RunSpec, *, resume: bool) -> bool:
    """Whether ``path`` holds this run already; writes nothing.

    Raises RunError when the folder holds another spec or something else, or the same run and ``resume`` is not given.
    """
    with _usable(path):
        if not (path / SPEC).exists():
            if path.exists() and (not path.is_dir() or any(_visible(path))):
                raise RunError(f"{str(path)!r} is not empty and holds no run; give another --out")
            return False
    _check_same(path, spec)
    if not resume:
        raise RunError(f"folder {str(path)!r} already holds this run; add --resume to go on, or give another --out")
    return True


def open_run(path: Path, spec: RunSpec, *, resume: bool, kept: Mapping[str, Any] | None = None) -> RunFolder:
    """Start a run in ``path``, or go on with it; raises RunError as ``check_folder`` does.

    ``kept`` is what the provenance of a new run holds besides: the gate it was declared with.
    """
    folder = RunFolder(path, spec)
    if check_folder(path, spec, resume=resume):
        return folder
    make_folder(path)
    folder.note(
        format=1,
        name=spec.name,
        spec_sha256=spec.sha256,
        spec_file_sha256=hashlib.sha256(dump_spec(spec).encode()).hexdigest(),
        versions=_versions(),
        host={"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()},
        started=utc_now(),
        finished=None,
        **(kept or {}),
    )
    folder.records.mkdir(exist_ok=True)
    _write_new(path / SPEC, dump_spec(spec))
    _check_same(path, spec)  # another process may have started a run here in the same moment
    return folder


def make_folder(path: Path) -> None:
    """Make a folder and its parents; raises RunError for a path that can be none."""
    with _usable(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn what the system says of an impossible path into one line; a full or read-only disk is said elsewhere."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:
            raise
        raise RunError(f"{str(path)!r} cannot be a folder ({error.strerror}); give another --out") from None


def _visible(path: Path) -> Iterator[Path]:
    """What is in a folder besides the traces of a start that was cut short."""
    starting = {PROVENANCE, "records", "spec.yaml.partial"}
    return (entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.name not in starting)


def _check_same(path: Path, spec: RunSpec) -> None:
    held = load_spec(path / SPEC)
    if held.sha256 != spec.sha256:
        raise RunError(
            f"folder {str(path)!r} holds another spec ({held.name} {held.sha256[:12]}, yours is {spec.name} "
            f"{spec.sha256[:12]}); give another --out"
        )


def work_through(
    units: Sequence[T],
    *,
    done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[T], None],
    waiting: Callable[[int], None],
) -> None:
    """Do every unit that is not done and not claimed; wait for those that other living processes have claimed.

    ``waiting`` is called with their number whenever it changes.
    """
    last = 0
    while open_units := [unit for unit in units if not done(unit)]:
        busy = 0
        for unit in open_units:
            with claim(lock(unit)) as mine:
                if not mine:
                    busy += 1
                elif not done(unit):
                    work(unit)
        if busy and busy != last:
            waiting(busy)
        last = busy
        if busy:
            time.sleep(_POLL_SECONDS)


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock file; yields False when a living process, or one on another host, holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _mutex(path.parent / ".claims.lock"):
        mine = not path.exists() or _is_stale(path)
        if mine:
            me = os.getpid()
            write_json(path, {"pid": me, "host": socket.gethostname(), "ticks": _start_ticks(me), "since": utc_now()})
    try:
        yield mine
    finally:
        if mine:
            path.unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    """Whether the process that wrote the lock ran on this host and is gone."""
    try:
        holder = read_json(path)
        pid, host, ticks = int(holder["pid"]), holder["host"], holder["ticks"]
    except (DataError, KeyError, TypeError, ValueError):
        raise RunError(f"lock {str(path)!r} is unreadable; delete it if no other process works on this run") from None
    return host == socket.gethostname() and (not _is_alive(pid) or _start_ticks(pid) != ticks)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_ticks(pid: int) -> int | None:
    """When a process started, in kernel ticks, so that a number given out again is not taken for it; None off Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


@contextmanager
def _mutex(path: Path) -> Iterator[None]:
    """Serialise a few milliseconds of work between processes; the kernel lets go when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises DataError when it is missing, torn or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DataError(f"{str(path)!r} is missing") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{str(path)!r} holds a {type(value).__name__}, wanted an object")
    return value


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all: synced beside its place, then renamed. ``indent`` None: on one line."""
    _write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    _sync_folder(path.parent)


def _write_new(path: Path, text: str) -> None:
    with _mutex(path.parent / ".provenance.lock"):
        if not path.exists():
            _write_whole(path, text)


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # running from a source tree that is not installed
            found[name] = "not installed"
    return found


def utc_now() -> str:
    """The time as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
