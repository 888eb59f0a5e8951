"""Disks that are full, read-only or gone while a run works on them, clocks that jump, and run folders in odd places.

A command that cannot write says so in one line (exit code 2), and once the cause is gone --resume ends with the records
of a run that nobody disturbed. Small disks are mounted in memory, which needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

from bench.attack.folders import EDITS, NAMES, SAME, SPEC, said
from bench.attack.trial import PATIENCE, Trial, expect, timeless

MANY = 24  # items of the run that is disturbed while it works
# of the disk that a run begins on: from no byte to one that holds all but the report
KILOBYTES = (4, 16, 32, 48, 64, 96, 160, 320, 640, 900)
FILES = (1, 2, 4, 8, 12, 16, 20)  # that a disk may hold, its own folder included
# what writes beside a finished run, or into it
WRITERS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{run}"),
    "a run that goes on": ("run", "{run}/spec.yaml", "--out", "{run}", "--resume", "--threads", "1"),
    "another run": ("run", "{spec}", "--out", "{disk}/other", "--threads", "1", "--anyway"),
    "a judged run": ("grade", "judge", "{run}", "--out", "{disk}/judged"),
    "a comparison": (
        *("compare", "{run}", "{run}", "--select-a", "policy=none", "--select-b", "policy=none"),
        *("--items-are-independent", "--out", "{disk}/compared"),
    ),
    "a spec": ("init", "audit", "--out", "{disk}/new.yaml"),
    "a log": ("harness", "export", "{run}", "--out", "{disk}/logs"),
}
READERS: dict[str, tuple[str, ...]] = {"gate": ("gate", "{run}"), "card": ("card", "{run}")}
_NOW = time.time
CLOCKS: dict[str, Callable[[], float]] = {
    "a clock that goes backwards": lambda: 4e9 - _NOW(),
    "a clock that stands": lambda: 1.7e9,
    "a clock before 1970": lambda: -1e9,
    "a clock of the year 2999": lambda: 3.25e10,
}


def trials(folder: Path) -> Iterator[Trial]:
    """One run that nobody disturbs, then all that may happen to others."""
    for name, items in (("small", 4), ("many", MANY)):
        (folder / f"{name}.yaml").write_text(SPEC.replace("items: 4", f"items: {items}"), encoding="utf-8")
        yield Trial(f"a run of {items} items", partial(_done, *_run(folder, folder / name, name)))
    yield from _on_disks(folder)
    yield from _at_work(folder)
    for name, clock in CLOCKS.items():
        yield Trial(name, partial(_clocked, folder, clock))
    for stamp in (0, 2**31 - 1, 2**33):
        yield Trial(f"files of second {stamp}", partial(_stamped, folder, stamp))
    for mask in (0o077, 0o777, 0o000):
        yield Trial(f"umask {mask:03o}", partial(_masked, folder, mask))
    for number, name in enumerate(NAMES):
        yield Trial(f"a run in a folder of name {number}", partial(_named, folder, name))
    for name, (edit, codes) in EDITS.items():
        if codes != SAME and name.startswith(("a byte", "a record", "records", "half", "no record")):
            yield Trial(f"{name}, and it goes on", partial(_edited, folder, edit))


def _on_disks(folder: Path) -> Iterator[Trial]:
    for size in KILOBYTES:
        yield Trial(f"a disk of {size} KB", partial(_full, folder, f"size={size}k"))
    for number in FILES:
        yield Trial(f"a disk of {number} files", partial(_full, folder, f"size=64m,nr_inodes={number}"))
    for name, words in WRITERS.items():
        yield Trial(f"{name} on a full disk", partial(_written, folder, words, is_full=True))
        yield Trial(f"{name} on a read-only disk", partial(_written, folder, words, is_full=False))
    for name, words in READERS.items():
        yield Trial(f"{name} of a read-only disk", partial(_read_only, folder, words))


def _at_work(folder: Path) -> Iterator[Trial]:
    draws = random.Random(0)
    for number in range(2):
        yield Trial(f"deleted while it works, {number}", partial(_gone, folder, draws, shutil.rmtree))
        yield Trial(f"moved while it works, {number}", partial(_gone, folder, draws, _moved))
        yield Trial(f"copied while it works, and both go on, {number}", partial(_copied, folder, draws))


def _run(folder: Path, out: Path, spec: str = "small", *more: str) -> tuple[str, ...]:
    return ("run", str(folder / f"{spec}.yaml"), "--out", str(out), "--threads", "1", "--anyway", *more)


def _refused(*words: str) -> None:
    code, stderr = said(*words)
    expect(code == 2 and stderr.count("error: ") == 1, f"exit code {code}: {stderr[-300:]}")


def _done(*words: str) -> None:
    code, stderr = said(*words)
    expect(code == 0, f"exit code {code}: {stderr[-300:]}")


def _same(folder: Path, out: Path, name: str = "small", allowed: str = "") -> None:
    """Raise Broken for other records, or for leftovers whose suffix is not ``allowed``.

    The lock of a unit that was sealed a moment before comes along with a copy, where nobody looks for it.
    """
    expect(timeless(out) == timeless(folder / name), "other records than those of the run that nobody disturbed")
    suffixes = {".partial", ".lock"} - {allowed}
    left = [path.name for path in out.rglob("*") if path.suffix in suffixes and path.name[0] != "."]
    expect(not left, f"left behind: {left}")


@contextmanager
def _disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True, capture_output=True)


def _full(folder: Path, options: str) -> None:
    """A run that finds no room goes on where there is some."""
    with _disk(folder, options) as disk:
        out = disk / "run"
        code, stderr = said(*_run(folder, out))
        expect(code in (0, 2) and stderr.count("error: ") == (code != 0), f"exit code {code}: {stderr[-300:]}")
        _remount(disk, "size=64m,nr_inodes=1000")
        _done(*_run(folder, out, "small", *(["--resume"] if (out / "provenance.json").exists() else [])))
        _same(folder, out)


def _written(folder: Path, words: Sequence[str], *, is_full: bool) -> None:
    """A command that cannot write says so, and leaves the run as it was."""
    with _disk(folder, "size=64m") as disk:
        run = disk / "run"
        shutil.copytree(folder / "small", run)
        if is_full:
            _fill(disk / "ballast")
        else:
            _remount(disk, "ro")
        _refused(*(word.format(run=run, disk=disk, spec=folder / "small.yaml") for word in words))
        expect(timeless(run) == timeless(folder / "small"), "the run was changed")


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def _read_only(folder: Path, words: Sequence[str]) -> None:
    with _disk(folder, "size=64m") as disk:
        shutil.copytree(folder / "small", disk / "run")
        _remount(disk, "ro")
        code, stderr = said(*(word.format(run=disk / "run") for word in words))
        expect(code in SAME, f"exit code {code}: {stderr[-300:]}")


@contextmanager
def _working(folder: Path, draws: random.Random) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run in a process of its own, at a moment after its first record."""
    out = folder / "working"
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "kvaudit", *_run(folder, out, "many")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60 * PATIENCE
        while not any((out / "records").glob("*.jsonl")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draws.uniform(0.0, 1.0))
        yield out, process
    finally:
        process.kill()
        process.communicate()


def _moved(out: Path) -> None:
    place = out.with_name("moved")
    shutil.rmtree(place, ignore_errors=True)
    out.rename(place)


def _gone(folder: Path, draws: random.Random, act: Callable[[Path], object]) -> None:
    """A run whose folder is gone ends in one line; where the folder is elsewhere, it goes on there."""
    with _working(folder, draws) as (out, process):
        act(out)
        stderr = process.communicate(timeout=100 * PATIENCE)[1]
        expect("Traceback" not in stderr, stderr[-400:])
        expect(process.returncode in (0, 2), f"exit code {process.returncode}: {stderr[-300:]}")
    if act is _moved:
        moved = out.with_name("moved")
        _done(*_run(folder, moved, "many", "--resume"))
        _same(folder, moved, "many", allowed=".lock")


def _copied(folder: Path, draws: random.Random) -> None:
    """A copy of a run that works goes on as a run of its own."""
    copy = folder / "copied"
    shutil.rmtree(copy, ignore_errors=True)
    with _working(folder, draws) as (out, process):
        process.send_signal(signal.SIGSTOP)
        shutil.copytree(out, copy)
        process.send_signal(signal.SIGCONT)
        stderr = process.communicate(timeout=100 * PATIENCE)[1]
        expect(process.returncode == 0, f"exit code {process.returncode}: {stderr[-300:]}")
    _done(*_run(folder, copy, "many", "--resume"))
    _same(folder, out, "many")
    _same(folder, copy, "many", allowed=".lock")


def _clocked(folder: Path, clock: Callable[[], float]) -> None:
    """A run under a clock that lies, which then goes on under a right one."""
    out = folder / "clocked"
    shutil.rmtree(out, ignore_errors=True)
    with patch("time.time", clock):
        _done(*_run(folder, out))
    (sorted(out.glob("records/*.done.json"))[0]).unlink()
    _done(*_run(folder, out, "small", "--resume"))
    _same(folder, out)


def _stamped(folder: Path, stamp: int) -> None:
    out = folder / "stamped"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "small", out)
    sorted(out.glob("records/*.done.json"))[0].unlink()
    for path in (out, *out.rglob("*")):
        os.utime(path, (stamp, stamp))
    _done(*_run(folder, out, "small", "--resume"))
    _same(folder, out)


def _masked(folder: Path, mask: int) -> None:
    out = folder / "masked"
    shutil.rmtree(out, ignore_errors=True)
    before = os.umask(mask)
    try:
        _done(*_run(folder, out))
    finally:
        os.umask(before)
    _same(folder, out)


def _named(folder: Path, name: str) -> None:
    place = folder / "names" / name
    _done(*_run(folder, place))
    _done(*_run(folder, place, "small", "--resume"))
    _same(folder, place)


def _edited(folder: Path, edit: Callable[[Path], object]) -> None:
    out = folder / "edited"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "small", out)
    edit(out)
    _refused(*_run(folder, out, "small", "--resume"))
