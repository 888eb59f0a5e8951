"""What happens to runs on full or read-only disks, in folders that move, under wrong clocks, and in odd places?

    python -m bench.attack disks

Takes up to half an hour and needs root to mount small disks in memory; results: docs/results/attack.md. A command that
cannot write must say so in one line, with exit code 2; once the cause is gone, --resume must end with the records of an
undisturbed run.
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

from bench.attack.folders import ANY_VERDICT, EDITS, NAMES, SPEC, run_command
from bench.attack.trial import PATIENCE, Trial, check_same_records, expect, records_without_times

MANY = 24  # items of the run that is disturbed
# sizes of the disk on which a run begins: from almost none to all but the report
KILOBYTES = (4, 16, 32, 48, 64, 96, 160, 320, 640, 900)
FILES = (1, 2, 4, 8, 12, 16, 20)  # most files on a disk, its root folder included
# commands that write next to a finished run, or into it
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
_REAL_TIME = time.time
CLOCKS: dict[str, Callable[[], float]] = {
    "a clock that goes backwards": lambda: 4e9 - _REAL_TIME(),
    "a clock that stands": lambda: 1.7e9,
    "a clock before 1970": lambda: -1e9,
    "a clock of the year 2999": lambda: 3.25e10,
}


def trials(folder: Path) -> Iterator[Trial]:
    """Yield two undisturbed runs, then everything that may happen to others."""
    for name, items in (("small", 4), ("many", MANY)):
        (folder / f"{name}.yaml").write_text(SPEC.replace("items: 4", f"items: {items}"), encoding="utf-8")
        yield Trial(f"a run of {items} items", partial(_check_success, *_run_arguments(folder, folder / name, name)))
    yield from _disk_trials(folder)
    yield from _trials_while_working(folder)
    for name, clock in CLOCKS.items():
        yield Trial(name, partial(_check_clock, folder, clock))
    for stamp in (0, 2**31 - 1, 2**33):
        yield Trial(f"files of second {stamp}", partial(_check_timestamps, folder, stamp))
    for mask in (0o077, 0o777, 0o000):
        yield Trial(f"umask {mask:03o}", partial(_check_umask, folder, mask))
    for number, name in enumerate(NAMES):
        yield Trial(f"a run in a folder of name {number}", partial(_check_name, folder, name))
    for name, (edit, codes) in EDITS.items():
        if codes != ANY_VERDICT and name.startswith(("a byte", "a record", "records", "half", "no record")):
            yield Trial(f"{name}, and it goes on", partial(_check_edit, folder, edit))


def _disk_trials(folder: Path) -> Iterator[Trial]:
    for size in KILOBYTES:
        yield Trial(f"a disk of {size} KB", partial(_check_full_disk, folder, f"size={size}k"))
    for number in FILES:
        yield Trial(f"a disk of {number} files", partial(_check_full_disk, folder, f"size=64m,nr_inodes={number}"))
    for name, words in WRITERS.items():
        yield Trial(f"{name} on a full disk", partial(_check_writer, folder, words, is_full=True))
        yield Trial(f"{name} on a read-only disk", partial(_check_writer, folder, words, is_full=False))
    for name, words in READERS.items():
        yield Trial(f"{name} of a read-only disk", partial(_check_reader, folder, words))


def _trials_while_working(folder: Path) -> Iterator[Trial]:
    draws = random.Random(0)
    for number in range(2):
        yield Trial(f"deleted while it works, {number}", partial(_check_folder_lost, folder, draws, shutil.rmtree))
        yield Trial(f"moved while it works, {number}", partial(_check_folder_lost, folder, draws, _move))
        yield Trial(f"copied while it works, and both go on, {number}", partial(_check_copy, folder, draws))


def _run_arguments(folder: Path, out: Path, spec: str = "small", *more: str) -> tuple[str, ...]:
    return ("run", str(folder / f"{spec}.yaml"), "--out", str(out), "--threads", "1", "--anyway", *more)


def _check_refusal(*words: str) -> None:
    code, stderr = run_command(*words)
    expect(code == 2 and stderr.count("error: ") == 1, f"exit code {code}: {stderr[-300:]}")


def _check_success(*words: str) -> None:
    code, stderr = run_command(*words)
    expect(code == 0, f"exit code {code}: {stderr[-300:]}")


@contextmanager
def _disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory; yields its folder."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True, capture_output=True)


def _check_full_disk(folder: Path, options: str) -> None:
    """Check that a run without room goes on once there is some."""
    with _disk(folder, options) as disk:
        out = disk / "run"
        code, stderr = run_command(*_run_arguments(folder, out))
        expect(code in (0, 2) and stderr.count("error: ") == (code != 0), f"exit code {code}: {stderr[-300:]}")
        _remount(disk, "size=64m,nr_inodes=1000")
        _check_success(
            *_run_arguments(folder, out, "small", *(["--resume"] if (out / "provenance.json").exists() else []))
        )
        check_same_records(out, folder / "small")


def _check_writer(folder: Path, words: Sequence[str], *, is_full: bool) -> None:
    """Check that a command that cannot write says so, and leaves the run as it was."""
    with _disk(folder, "size=64m") as disk:
        run = disk / "run"
        shutil.copytree(folder / "small", run)
        if is_full:
            _fill(disk / "ballast")
        else:
            _remount(disk, "ro")
        _check_refusal(*(word.format(run=run, disk=disk, spec=folder / "small.yaml") for word in words))
        expect(records_without_times(run) == records_without_times(folder / "small"), "the run was changed")


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def _check_reader(folder: Path, words: Sequence[str]) -> None:
    with _disk(folder, "size=64m") as disk:
        shutil.copytree(folder / "small", disk / "run")
        _remount(disk, "ro")
        code, stderr = run_command(*(word.format(run=disk / "run") for word in words))
        expect(code in ANY_VERDICT, f"exit code {code}: {stderr[-300:]}")


@contextmanager
def _working_run(folder: Path, draws: random.Random) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a run in its own process; yields its folder and process after its first record."""
    out = folder / "working"
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "kvaudit", *_run_arguments(folder, out, "many")]
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


def _move(out: Path) -> None:
    moved = out.with_name("moved")
    shutil.rmtree(moved, ignore_errors=True)
    out.rename(moved)


def _check_folder_lost(folder: Path, draws: random.Random, act: Callable[[Path], object]) -> None:
    """Check that a run without its folder ends in one line, and goes on if the folder was moved."""
    with _working_run(folder, draws) as (out, process):
        act(out)
        stderr = process.communicate(timeout=100 * PATIENCE)[1]
        expect("Traceback" not in stderr, stderr[-400:])
        expect(process.returncode in (0, 2), f"exit code {process.returncode}: {stderr[-300:]}")
    if act is _move:
        moved = out.with_name("moved")
        _check_success(*_run_arguments(folder, moved, "many", "--resume"))
        check_same_records(moved, folder / "many", allowed=".lock")  # a copy may have the lock of a sealed unit


def _check_copy(folder: Path, draws: random.Random) -> None:
    """Check that a copy of a working run goes on as a run of its own."""
    copy = folder / "copied"
    shutil.rmtree(copy, ignore_errors=True)
    with _working_run(folder, draws) as (out, process):
        process.send_signal(signal.SIGSTOP)
        shutil.copytree(out, copy)
        process.send_signal(signal.SIGCONT)
        stderr = process.communicate(timeout=100 * PATIENCE)[1]
        expect(process.returncode == 0, f"exit code {process.returncode}: {stderr[-300:]}")
    _check_success(*_run_arguments(folder, copy, "many", "--resume"))
    check_same_records(out, folder / "many")
    check_same_records(copy, folder / "many", allowed=".lock")  # as in a moved folder


def _check_clock(folder: Path, clock: Callable[[], float]) -> None:
    """Check that a run under a wrong clock goes on under the right one."""
    out = folder / "clocked"
    shutil.rmtree(out, ignore_errors=True)
    with patch("time.time", clock):
        _check_success(*_run_arguments(folder, out))
    (sorted(out.glob("records/*.done.json"))[0]).unlink()
    _check_success(*_run_arguments(folder, out, "small", "--resume"))
    check_same_records(out, folder / "small")


def _check_timestamps(folder: Path, stamp: int) -> None:
    out = folder / "stamped"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "small", out)
    sorted(out.glob("records/*.done.json"))[0].unlink()
    for path in (out, *out.rglob("*")):
        os.utime(path, (stamp, stamp))
    _check_success(*_run_arguments(folder, out, "small", "--resume"))
    check_same_records(out, folder / "small")


def _check_umask(folder: Path, mask: int) -> None:
    out = folder / "masked"
    shutil.rmtree(out, ignore_errors=True)
    before = os.umask(mask)
    try:
        _check_success(*_run_arguments(folder, out))
    finally:
        os.umask(before)
    check_same_records(out, folder / "small")


def _check_name(folder: Path, name: str) -> None:
    out = folder / "names" / name
    _check_success(*_run_arguments(folder, out))
    _check_success(*_run_arguments(folder, out, "small", "--resume"))
    check_same_records(out, folder / "small")


def _check_edit(folder: Path, edit: Callable[[Path], object]) -> None:
    out = folder / "edited"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "small", out)
    edit(out)
    _check_refusal(*_run_arguments(folder, out, "small", "--resume"))
