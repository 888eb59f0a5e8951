"""Does a run survive ``kill -9``? One or two processes are killed at random instants, and the folder is checked.

    python -m bench.kills [KILLS] [SEED]

Takes about 10 seconds per kill on an idle core (default 200 kills); results: docs/results/bench.md, and
tests/test_kill_chains.py runs it.

A chain is a series of attempts on one run folder: a process starts or resumes the run, alone or with one that joins,
and is killed at a random instant; then the folder is read. A chain ends when an attempt finishes, and its folder is
compared with that of an undisturbed run. Prints the figures as JSON.

Processes are forked from this one, which has imported everything and computed nothing, so that starting again is cheap.
They render chat templates themselves, since the process for it takes longer to start than a run lasts.
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
PATIENCE_SECONDS = 300.0  # for an attempt that is not killed; on an idle core a run takes a few seconds
LIMITS = {"lost": 0, "doubled": 0, "corrupt": 0, "endless": 0, "failed": 0, "different": 0}


class FolderState(NamedTuple):
    """The state of a run folder between two attempts."""

    phase: str  # the next work: train, evaluate or report
    sealed: dict[str, str]  # files that may never change again -> sha256
    wrong: tuple[tuple[str, str], ...]  # kind of fault, file


class Process:
    """A forked ``kvaudit WORDS``, whose output goes to ``log``."""

    def __init__(self, words: Sequence[object], log: Path) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _exec_kvaudit(words, log)
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal, or None if the process still runs after ``seconds``."""
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
        """Kill the process; returns whether it was still running."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(PATIENCE_SECONDS)
        return self.code == -signal.SIGKILL


def _exec_kvaudit(words: Sequence[object], log: Path) -> None:
    """Run kvaudit in the forked process and exit; never returns."""
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


class KillChains:
    """Chains of attempts on run folders, until enough processes were killed."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self._folder, self._kills, self._rng = folder, kills, random.Random(seed)
        self._spec = folder / "spec.yaml"
        self._spec.write_text(SPEC, encoding="utf-8")
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        started = time.monotonic()
        self._run_to_end(folder / "whole", "unbroken.log", resume=False)
        assert self.counts["finished"] == 1, (folder / "unbroken.log").read_text(encoding="utf-8")
        self._seconds = time.monotonic() - started
        self._undisturbed = outcome_of(folder / "whole")

    def run(self) -> dict[str, Any]:
        """Run the chains; returns the figures."""
        number = 0
        while self.counts["kills"] < self._kills:
            self._chain(self._folder / f"chain-{number}", alone=number % 2 == 0)
            number += 1
            print(f"{number} chains: {dict(self.counts)}", file=sys.stderr, flush=True)
        return {"chains": number, **LIMITS, **dict(sorted(self.counts.items())), "slowest finish, s": self.slowest}

    def _chain(self, run: Path, *, alone: bool) -> None:
        """Kill attempts on one folder until one finishes, or let the ninth finish."""
        before, is_finished = _read_state(run), False
        for _ in range(8):
            killed, is_finished = self._kill_one(run) if alone else self._kill_two(run)
            self.counts["kills"] += killed
            self.counts[f"{before.phase}, {'one' if alone else 'two'} at work"] += killed
            before = self._check_state(run, before)
            if is_finished or self.counts["kills"] >= self._kills:
                break
        if not is_finished:
            started = time.monotonic()
            self._run_to_end(run, "finish.log", resume=True)
            self.slowest = round(max(self.slowest, time.monotonic() - started), 1)
            self._check_state(run, before)
        self._compare_outcome(outcome_of(run))
        shutil.rmtree(run, ignore_errors=True)

    def _compare_outcome(self, outcome: dict[str, object]) -> None:
        """Count a run whose outcome differs from that of the undisturbed run, and print what differs."""
        names = {
            name
            for name in outcome.keys() | self._undisturbed.keys()
            if outcome.get(name) != self._undisturbed.get(name)
        }
        self.counts["different"] += bool(names)
        if names:
            print(f"different: {', '.join(sorted(names))}", file=sys.stderr)

    def _kill_one(self, run: Path) -> tuple[int, bool]:
        """Kill one process; returns the number of kills, and whether the run had finished before."""
        process = self._start(run)
        process.wait(self._random_delay())
        return int(process.kill()), process.code == 0

    def _kill_two(self, run: Path) -> tuple[int, bool]:
        """Kill a process and one that joins it, each at its own instant; returns the same as _kill_one."""
        first = self._start(run)
        first.wait(self._random_delay() / 4)
        second = Process(["run", "--join", run, "--threads", 1], self._folder / "join.log")
        order = [first, second] if self._rng.random() < 0.5 else [second, first]
        killed = 0
        for process in order:
            process.wait(self._random_delay())
            killed += process.kill()
        return killed, first.code == 0

    def _start(self, run: Path) -> Process:
        return Process(self._command(run), self._folder / "run.log")

    def _command(self, run: Path) -> list[object]:
        return ["run", self._spec, "--out", run, "--resume", "--workers", 1, "--threads", 1, "--anyway"]

    def _random_delay(self) -> float:
        return 0.8 * self._rng.random() * self._seconds

    def _run_to_end(self, run: Path, log: str, *, resume: bool) -> None:
        """Run an attempt without a kill."""
        words = [word for word in self._command(run) if resume or word != "--resume"]
        process = Process(words, self._folder / log)
        code = process.wait(PATIENCE_SECONDS)
        if code is None:
            process.kill()
        self.counts["endless" if code is None else "finished" if code == 0 else "failed"] += 1

    def _check_state(self, run: Path, before: FolderState) -> FolderState:
        """Return the folder's state; counts its faults and the sealed files that changed or disappeared."""
        state = _read_state(run)
        for kind, file in state.wrong:
            self.counts[kind] += 1
            print(f"{kind}: {file}", file=sys.stderr)
        self.counts["lost"] += sum(state.sealed.get(name) != digest for name, digest in before.sealed.items())
        return state


def _read_state(run: Path) -> FolderState:
    grid = list(run.glob("records/*.done.json"))
    seals = [*grid, *run.glob("pilot/*.done.json")]
    provenances = list(run.glob("checkpoints/*/*/provenance.json"))
    sealed = {str((path := _records(seal)).relative_to(run)): _sha256(path) for seal in seals}
    for provenance in provenances:
        for path in provenance.parent.glob("*.safetensors"):
            sealed[f"{provenance.parent.parent.name}/{path.name}"] = _sha256(path)
    phase = "train" if len(provenances) < 2 else "evaluate" if len(grid) < 4 else "report"
    return FolderState(phase, sealed, (*_corrupt(run, seals), *_duplicates(run)))


def _corrupt(run: Path, seals: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield files that exist but are not whole."""
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


def _duplicates(run: Path) -> Iterator[tuple[str, str]]:
    """Yield files with an answer or step twice, or with steps out of order."""
    for records in [*run.glob("records/*.jsonl"), *run.glob("pilot/*.jsonl")]:
        keys = [(row.item_id, row.sample_index) for row in map(Record.from_json, _complete_lines(records))]
        if len(set(keys)) < len(keys):
            yield "doubled", records.name
    for telemetry in run.glob("checkpoints/*/*/telemetry.jsonl"):
        steps = [json.loads(line)["step"] for line in _complete_lines(telemetry)]
        if steps != list(range(1, len(steps) + 1)):
            yield "doubled", str(telemetry)


def _records(seal: Path) -> Path:
    return seal.with_name(seal.name.replace(".done.json", ".jsonl"))


def _complete_lines(path: Path) -> list[str]:
    """Return the lines that end with a line break; a kill may leave half a line."""
    return [line.decode() for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def outcome_of(run: Path) -> dict[str, object]:
    """Return what two runs must agree in: weights, ledgers, telemetry and records, without times."""
    outcome: dict[str, object] = {}
    for path in sorted(run.glob("checkpoints/*/*/**/*.safetensors")):
        outcome[str(path.relative_to(run))] = _sha256(path)
    patterns = ("records/*.jsonl", "pilot/*.jsonl", "checkpoints/*/*/telemetry.jsonl")
    for path in sorted(path for pattern in patterns for path in run.glob(pattern)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        without_times = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
        outcome[str(path.relative_to(run))] = without_times
    outcome["seals"] = sorted(path.name for path in run.glob("records/*.done.json"))
    outcome["left over"] = sorted(path.name for path in run.rglob("*.partial"))
    outcome["report"] = (run / "report" / "report.html").is_file()
    return outcome


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    return rendering._render(render_jinja_template, request)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Print the figures; exits with 1 if one of them is not as required."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for name in (
        "kvaudit.audit.runs.pipeline",
        "kvaudit.audit.runs.names",
        "kvaudit.reports.run",
        "kvaudit.reports.sections.base",
    ):  # import everything before the first fork
        importlib.import_module(name)
    formats()  # imports every format and section
    sections()
    rendering.renderer._answer = _render
    with tempfile.TemporaryDirectory() as folder:
        figures = KillChains(Path(folder), kills, seed).run()
    print(json.dumps(figures, indent=1))
    sys.exit(any(figures[kind] != limit for kind, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
