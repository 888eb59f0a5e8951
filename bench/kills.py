"""Kill -9 at random instants: what a run of one or two processes looks like afterwards, and where it ends.

Run: python -m bench.kills [KILLS] [SEED]. Chains of attempts on one run folder: a process starts or resumes it, alone
or beside one that joins, and is killed at an instant drawn from SEED; then the folder is read. A chain ends when an
attempt comes through, and its folder is compared with that of a run nobody disturbed. Prints the figures as JSON.

Processes are forked from this one, which has imported everything and computed nothing, so a kill costs no second start.
They render chat templates themselves, since the process that otherwise does takes longer to start than a run lasts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from kvaudit.audit.cli import main as kvaudit
from kvaudit.audit.sampling import rendering
from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import check_checkpoints
from kvaudit.core.records import Record
from kvaudit.reports.page.formats import formats
from kvaudit.reports.sections.base import sections

SPEC = """\
name: kills
model: embedded
train: {arms: [dense, smd], seeds: [1], policy: "streaming:budget=48,sink=4,window=8", suites: [math],
  context_tokens: 72, steps: 2, prompts_per_step: 1, group: 2, save_every: 1, ledger_every: 1, warmup_steps: 1}
evaluate: {policies: [none, "streaming:budget=48,sink=4,window=8"], suites: {math: {items: 2}}, context_tokens: [72],
  batch_tokens: 100}
"""
PATIENCE_SECONDS = 300.0  # of an attempt that nobody kills; a run takes a few on an idle core
LIMITS = {"lost": 0, "doubled": 0, "corrupt": 0, "endless": 0, "failed": 0, "different": 0}


class Look(NamedTuple):
    """A run folder between two attempts."""

    phase: str  # of the work that is not done
    sealed: dict[str, str]  # files that may never change again, and their sha256
    wrong: tuple[tuple[str, str], ...]  # what kind, which file


class Process:
    """A forked ``kvaudit WORDS``; what it prints goes to ``log``."""

    def __init__(self, words: Sequence[object], log: Path) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, log)
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Its exit code, below zero for a signal, or None where it still works then."""
        until = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= until:
                return None
            else:
                time.sleep(0.002)
        return self.code

    def kill(self) -> bool:
        """Whether it was still there to be killed."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(PATIENCE_SECONDS)
        return self.code == -signal.SIGKILL


def _become(words: Sequence[object], log: Path) -> None:
    """Never returns: the forked process is the command from here on."""
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.argv = ["kvaudit", *map(str, words)]
        kvaudit()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


class Chains:
    """Chains of kills until there are enough of them."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self._folder, self._kills, self._rng = folder, kills, random.Random(seed)
        self._spec = folder / "spec.yaml"
        self._spec.write_text(SPEC, encoding="utf-8")
        self.found: Counter[str] = Counter()
        self.slowest = 0.0
        started = time.monotonic()
        self._attempt(folder / "whole", "unbroken.log", resume=False)
        assert self.found["finished"] == 1, (folder / "unbroken.log").read_text(encoding="utf-8")
        self._seconds = time.monotonic() - started
        self._whole = outcome(folder / "whole")

    def all(self) -> dict[str, Any]:
        """Run them; returns the figures."""
        number = 0
        while self.found["kills"] < self._kills:
            self._chain(self._folder / f"chain-{number}", alone=number % 2 == 0)
            number += 1
            print(f"{number} chains: {dict(self.found)}", file=sys.stderr, flush=True)
        return {"chains": number, **LIMITS, **dict(sorted(self.found.items())), "slowest finish, s": self.slowest}

    def _chain(self, run: Path, *, alone: bool) -> None:
        """Kills until an attempt comes through by itself, or is let through after eight."""
        before, through = _look(run), False
        for _ in range(8):
            killed, through = self._one(run) if alone else self._two(run)
            self._count(f"{before.phase}, {'one' if alone else 'two'} at work", killed)
            before = self._compared(run, before)
            if through or self.found["kills"] >= self._kills:
                break
        if not through:
            started = time.monotonic()
            self._attempt(run, "finish.log", resume=True)
            self.slowest = round(max(self.slowest, time.monotonic() - started), 1)
            self._compared(run, before)
        self._judge(outcome(run))
        shutil.rmtree(run, ignore_errors=True)

    def _judge(self, outcome: dict[str, object]) -> None:
        names = {name for name in outcome.keys() | self._whole.keys() if outcome.get(name) != self._whole.get(name)}
        self.found["different"] += bool(names)
        if names:
            print(f"different: {', '.join(sorted(names))}", file=sys.stderr)

    def _one(self, run: Path) -> tuple[int, bool]:
        """Number of kills, and whether the run came through before."""
        process = self._start(run)
        process.wait(self._instant())
        return int(process.kill()), process.code == 0

    def _two(self, run: Path) -> tuple[int, bool]:
        """One process runs and one joins; they are killed at instants of their own."""
        first = self._start(run)
        first.wait(self._instant() / 4)
        second = Process(["run", "--join", run, "--threads", 1], self._folder / "join.log")
        ends = [first, second] if self._rng.random() < 0.5 else [second, first]
        killed = 0
        for process in ends:
            process.wait(self._instant())
            killed += process.kill()
        return killed, first.code == 0

    def _start(self, run: Path) -> Process:
        return Process(self._words(run), self._folder / "run.log")

    def _words(self, run: Path) -> list[object]:
        return ["run", self._spec, "--out", run, "--resume", "--workers", 1, "--threads", 1, "--anyway"]

    def _instant(self) -> float:
        return 0.8 * self._rng.random() * self._seconds

    def _attempt(self, run: Path, log: str, *, resume: bool) -> None:
        """A run that has to come through."""
        words = [word for word in self._words(run) if resume or word != "--resume"]
        process = Process(words, self._folder / log)
        code = process.wait(PATIENCE_SECONDS)
        if code is None:
            process.kill()
        self.found["endless" if code is None else "finished" if code == 0 else "failed"] += 1

    def _count(self, what: str, killed: int) -> None:
        self.found["kills"] += killed
        self.found[what] += killed

    def _compared(self, run: Path, before: Look) -> Look:
        """The folder now; what was sealed and is not there as it was is lost."""
        look = _look(run)
        for kind, what in look.wrong:
            self.found[kind] += 1
            print(f"{kind}: {what}", file=sys.stderr)
        self.found["lost"] += sum(look.sealed.get(name) != digest for name, digest in before.sealed.items())
        return look


def _look(run: Path) -> Look:
    grid = list(run.glob("records/*.done.json"))
    seals = [*grid, *run.glob("pilot/*.done.json")]
    provenances = list(run.glob("checkpoints/*/*/provenance.json"))
    sealed = {str((path := _records(seal)).relative_to(run)): _sha256(path) for seal in seals}
    for provenance in provenances:
        for path in provenance.parent.glob("*.safetensors"):
            sealed[f"{provenance.parent.parent.name}/{path.name}"] = _sha256(path)
    phase = "train" if len(provenances) < 2 else "evaluate" if len(grid) < 4 else "report"
    return Look(phase, sealed, (*_corrupt(run, seals), *_doubled(run)))


def _corrupt(run: Path, seals: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Files that are neither absent nor whole."""
    for path in sorted(run.rglob("*.json")):
        try:
            read_json(path)
        except DataError as error:
            yield "corrupt", str(error)
    for seal in seals:
        if read_json(seal)["sha256"] != _sha256(_records(seal)):
            yield "corrupt", seal.name
    for page in run.glob("report/report.html"):
        if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
            yield "corrupt", page.name
    try:
        check_checkpoints(run)
    except DataError as error:
        yield "corrupt", str(error)


def _doubled(run: Path) -> Iterator[tuple[str, str]]:
    """Answers that stand twice, and steps that do, or are out of order."""
    for records in [*run.glob("records/*.jsonl"), *run.glob("pilot/*.jsonl")]:
        keys = [(row.item_id, row.sample_index) for row in map(Record.from_json, _whole_lines(records))]
        if len(set(keys)) < len(keys):
            yield "doubled", records.name
    for telemetry in run.glob("checkpoints/*/*/telemetry.jsonl"):
        steps = [json.loads(line)["step"] for line in _whole_lines(telemetry)]
        if steps != list(range(1, len(steps) + 1)):
            yield "doubled", str(telemetry)


def _records(seal: Path) -> Path:
    return seal.with_name(seal.name.replace(".done.json", ".jsonl"))


def _whole_lines(path: Path) -> list[str]:
    """The lines that were written to their end; a kill may leave half of one."""
    return [line.decode() for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def outcome(run: Path) -> dict[str, object]:
    """What two runs have to agree in: weights, ledgers, telemetry and records, without what a clock decides."""
    found: dict[str, object] = {}
    for path in sorted(run.glob("checkpoints/*/*/**/*.safetensors")):
        found[str(path.relative_to(run))] = _sha256(path)
    rows_in = ("records/*.jsonl", "pilot/*.jsonl", "checkpoints/*/*/telemetry.jsonl")
    for path in sorted(path for pattern in rows_in for path in run.glob(pattern)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        timeless = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
        found[str(path.relative_to(run))] = timeless
    found["seals"] = sorted(path.name for path in run.glob("records/*.done.json"))
    found["left over"] = sorted(path.name for path in run.rglob("*.partial"))
    found["report"] = (run / "report" / "report.html").is_file()
    return found


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    return rendering._render(render_jinja_template, request)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Print the figures; exit code 1 where one of them is not what it has to be."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for name in (
        "kvaudit.audit.runs.pipeline",
        "kvaudit.audit.runs.names",
        "kvaudit.reports.run",
        "kvaudit.reports.sections.base",
    ):  # before any fork
        importlib.import_module(name)
    formats()  # imports them
    sections()
    rendering.renderer._answer = _render
    with tempfile.TemporaryDirectory() as folder:
        found = Chains(Path(folder), kills, seed).all()
    print(json.dumps(found, indent=1))
    sys.exit(any(found[kind] != most for kind, most in LIMITS.items()))


if __name__ == "__main__":
    main()
