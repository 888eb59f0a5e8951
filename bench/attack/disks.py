"""Disks that are full, read-only or gone while a run works on them, clocks that jump, and run folders in odd places.

A command that cannot write says so in one line (exit code 2), and once the cause is gone --resume ends with the records
of a run that nobody disturbed. Small disks are mounted in memory, which needs root.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.attack.folders import EDITS, NAMES, SAME, SPEC
from bench.attack.trial import Trial, expect, timeless

MANY = 24  # items of the run that is disturbed while it works
# of the disk that a run begins on: from no byte to one that holds all but the report
KILOBYTES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896)
FILES = (1, 2, 3, 5, 8, 12, 16, 20)  # that a disk may hold, its own folder included
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
# what a clock says to whoever asks it, as Python to be run first
CLOCKS = {
    "a clock that goes backwards": "import time; real = time.time; time.time = lambda: 4e9 - real()",
    "a clock that stands": "import time; time.time = lambda: 1.7e9",
    "a clock before 1970": "import time; time.time = lambda: -1e9",
    "a clock of the year 3000": "import time; time.time = lambda: 3.25e10",
}


def trials(folder: Path) -> Iterator[Trial]:
    """One run that nobody disturbs, then all that may happen to others."""
    for name, items in (("small", 4), ("many", MANY)):
        (folder / f"{name}.yaml").write_text(SPEC.replace("items: 4", f"items: {items}"), encoding="utf-8")
        yield Trial(f"a run of {items} items", partial(_done, *_run(folder, folder / name, name)))
    for size in KILOBYTES:
        yield Trial(f"a disk of {size} KB", partial(_full, folder, f"size={size}k"))
    for number in FILES:
        yield Trial(f"a disk of {number} files", partial(_full, folder, f"size=64m,nr_inodes={number}"))
    for name, words in WRITERS.items():
        yield Trial(f"{name} on a full disk", partial(_written, folder, words, is_full=True))
        yield Trial(f"{name} on a read-only disk", partial(_written, folder, words, is_full=False))
    for name, words in READERS.items():
        yield Trial(f"{name} of a read-only disk", partial(_read_only, folder, words))
    draws = random.Random(0)
    for number in range(5):
        yield Trial(f"deleted while it works, {number}", partial(_gone, folder, draws, shutil.rmtree))
        yield Trial(f"moved while it works, {number}", partial(_gone, folder, draws, _moved))
        yield Trial(f"copied while it works, and both go on, {number}", partial(_copied, folder, draws))
    for name, code in CLOCKS.items():
        yield Trial(name, partial(_clocked, folder, code))
    for stamp in (0, 2**31 - 1, 2**33):
        yield Trial(f"files of second {stamp}", partial(_stamped, folder, stamp))
    for mask in ("077", "777", "000"):
        yield Trial(f"umask {mask}", partial(_masked, folder, mask))
    for number, name in enumerate(NAMES):
        yield Trial(f"a run in a folder of name {number}", partial(_named, folder, name))
    for name, (edit, codes) in EDITS.items():
        if codes != SAME and name.startswith(("a byte", "a record", "records", "half", "no record")):
            yield Trial(f"{name}, and it goes on", partial(_edited, folder, edit))


def _run(folder: Path, out: Path, spec: str = "small", *more: str) -> tuple[str, ...]:
    return ("run", str(folder / f"{spec}.yaml"), "--out", str(out), "--threads", "1", "--anyway", *more)


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "kvaudit", *words]


def _said(*words: str, command: Callable[[Sequence[str]], list[str]] = _command) -> tuple[int, str]:
    """Exit code and stderr of a command in a process of its own."""
    done = subprocess.run(command(words), capture_output=True, text=True, timeout=100, check=False)
    _check(done.stderr)
    return done.returncode, done.stderr


def _check(stderr: str) -> None:
    expect("Traceback" not in stderr, stderr[-400:])
    expect(all(line.isprintable() for line in stderr.splitlines()), f"a terminal obeys it: {stderr[-200:]!r}")


def _refused(*words: str) -> None:
    code, said = _said(*words)
    expect(code == 2 and said.count("error: ") == 1, f"exit code {code}: {said[-300:]}")


def _done(*words: str) -> None:
    code, said = _said(*words)
    expect(code == 0, f"exit code {code}: {said[-300:]}")


def _same(folder: Path, out: Path, name: str = "small") -> None:
    expect(timeless(out) == timeless(folder / name), "other records than those of the run that nobody disturbed")
    left = [path.name for path in out.rglob("*") if path.suffix in (".partial", ".lock") and path.name[0] != "."]
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
        code, said = _said(*_run(folder, disk / "run"))
        expect(code in (0, 2) and said.count("error: ") == (code != 0), f"exit code {code}: {said[-300:]}")
        _remount(disk, "size=64m,nr_inodes=1000")
        if (disk / "run").exists():
            _done(*_run(folder, disk / "run", "small", "--resume"))
        else:
            _done(*_run(folder, disk / "run"))
        _same(folder, disk / "run")


def _written(folder: Path, words: Sequence[str], *, is_full: bool) -> None:
    """A command that cannot write says so, and leaves the run as it was."""
    with _disk(folder, "size=64m") as disk:
        run = disk / "run"
        shutil.copytree(folder / "small", run)
        before = {path: path.read_bytes() for path in run.glob("records/*")}
        if is_full:
            with suppress_full(), (disk / "ballast").open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
        else:
            _remount(disk, "ro")
        code, said = _said(*(word.format(run=run, disk=disk, spec=folder / "small.yaml") for word in words))
        expect(code == 2 and said.count("error: ") == 1, f"exit code {code}: {said[-300:]}")
        expect(before == {path: path.read_bytes() for path in run.glob("records/*")}, "the run was changed")


@contextmanager
def suppress_full() -> Iterator[None]:
    """Let a disk fill up."""
    try:
        yield
    except OSError as error:
        expect(error.strerror == "No space left on device", str(error))


def _read_only(folder: Path, words: Sequence[str]) -> None:
    with _disk(folder, "size=64m") as disk:
        shutil.copytree(folder / "small", disk / "run")
        _remount(disk, "ro")
        code, said = _said(*(word.format(run=disk / "run") for word in words))
        expect(code in SAME, f"exit code {code}: {said[-300:]}")


@contextmanager
def _working(folder: Path, draws: random.Random) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run at a moment after its first record."""
    out = folder / "working"
    shutil.rmtree(out, ignore_errors=True)
    process = subprocess.Popen(
        _command(_run(folder, out, "many")), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
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
    """A run whose folder is gone ends in one line; where the folder is still there, it goes on."""
    with _working(folder, draws) as (out, process):
        act(out)
        said = process.communicate(timeout=100)[1]
        _check(said)
        expect(process.returncode in (0, 2), f"exit code {process.returncode}: {said[-300:]}")
    moved = out.with_name("moved")
    if act is _moved:
        shutil.rmtree(out, ignore_errors=True)
        _done(*_run(folder, moved, "many", "--resume"))
        _same(folder, moved, "many")


def _copied(folder: Path, draws: random.Random) -> None:
    """A copy of a run that works is a run of its own, or is refused; the first one is not disturbed."""
    copy = folder / "copied"
    shutil.rmtree(copy, ignore_errors=True)
    with _working(folder, draws) as (out, process):
        process.send_signal(signal.SIGSTOP)
        shutil.copytree(out, copy)
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=100)[1]
        expect(process.returncode == 0, f"exit code {process.returncode}: {said[-300:]}")
    _done(*_run(folder, copy, "many", "--resume"))
    for place in (out, copy):
        _same(folder, place, "many")


def _clocked(folder: Path, code: str) -> None:
    """A run under a clock that lies, which then goes on under a right one."""
    out = folder / "clocked"
    shutil.rmtree(out, ignore_errors=True)

    def command(words: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", f"{code}\nfrom kvaudit.audit.cli import main\nmain()", *words]

    code_, said = _said(*_run(folder, out), command=command)
    expect(code_ == 0, f"exit code {code_}: {said[-300:]}")
    _done(*_run(folder, out, "small", "--resume"))
    _same(folder, out)


def _stamped(folder: Path, stamp: int) -> None:
    out = folder / "stamped"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "small", out)
    for seal in [*out.glob("records/*.done.json")][:1]:
        seal.unlink()
    for path in (out, *out.rglob("*")):
        os.utime(path, (stamp, stamp))
    _done(*_run(folder, out, "small", "--resume"))
    _same(folder, out)


def _masked(folder: Path, mask: str) -> None:
    out = folder / "masked"
    shutil.rmtree(out, ignore_errors=True)
    code, said = _said(
        *_run(folder, out), command=lambda words: ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *_command(words)]
    )
    expect(code == 0, f"exit code {code}: {said[-300:]}")
    _same(folder, out)
    expect(json.loads((out / "provenance.json").read_bytes())["finished"], "it is not finished")


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
