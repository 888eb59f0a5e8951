"""Does a run survive ``kill -9`` of kvaudit, of its serving engine, or of the engine's supervisor?

    python -m bench.engine_kills [KILLS] [SEED]

Takes about a minute per kill (default 30) and needs openvino-genai; results: docs/results/attack.md.

At a random instant after the start of a run one of the three is killed. After kvaudit was killed, none of its engine's
processes may be alive eight seconds later, and the run is resumed; otherwise the run must go on by itself. In the end
the records must equal those of an undisturbed run. Prints the figures as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.attack.trial import records_without_times

SPEC = """\
name: kills
evaluate:
  policies: [none, {engine: openvino, KV_CACHE_PRECISION: u4}]
  suites: {refusal: {items: 72}, agent: {items: 72}}
  context_tokens: [192]
  floor: 16
  pilot: 0
engines: {openvino: {at_once: 4}}
"""
PATIENCE = 600.0  # seconds for a run that is not killed
GRACE = 8.0  # seconds in which all processes of an engine must end
KINDS = ("kvaudit", "engine", "supervisor")


def main() -> None:
    """Kill until there are enough kills, and print the figures."""
    kills, seed = (int(word) for word in (*sys.argv[1:], "30", "1")[:2])
    draws, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kvaudit-kills-") as name:
        folder = Path(name)
        spec = folder / "spec.yaml"
        spec.write_text(SPEC, encoding="utf-8")
        began = time.monotonic()
        assert _start(spec, folder / "whole").wait(PATIENCE) == 0, (folder / "whole.log").read_text(encoding="utf-8")
        seconds = time.monotonic() - began
        number = 0
        while sum(counts[kind] for kind in KINDS) < kills:
            run = folder / f"run-{number}"
            _kill_run(spec, run, folder / "whole", seconds, draws, counts, kills)
            number += 1
            print(f"{number} runs: {dict(counts)}", file=sys.stderr, flush=True)
    wrong = {key: counts[key] for key in ("orphans", "different", "failed")}
    print(json.dumps({"runs": number, **wrong, **{kind: counts[kind] for kind in KINDS}}))
    sys.exit(any(wrong.values()))


def _kill_run(
    spec: Path, run: Path, undisturbed: Path, seconds: float, draws: random.Random, counts: Counter[str], kills: int
) -> None:
    """Kill processes of one run, and resume it, until it finishes."""
    for _ in range(8):
        process = _start(spec, run)
        kind = draws.choice(KINDS)
        time.sleep(draws.uniform(0.2, 0.9) * seconds)
        if process.poll() is not None or sum(counts[kind] for kind in KINDS) >= kills:
            break
        victim = _victim(process.pid, kind)
        if victim is None:
            process.kill()  # there is no engine at that instant
            kind = "kvaudit"
        else:
            os.kill(victim, signal.SIGKILL)
        counts[kind] += 1
        if kind != "kvaudit":
            break  # the run must finish by itself
        process.wait()
        time.sleep(GRACE)
        counts["orphans"] += len(_engines(run))
    counts["failed"] += process.wait(PATIENCE) != 0 and _start(spec, run).wait(PATIENCE) != 0
    counts["different"] += records_without_times(run) != records_without_times(undisturbed)
    counts["orphans"] += len(_engines(run))


def _start(spec: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start a process that begins or resumes the run."""
    command: list[str | Path] = [sys.executable, "-m", "kvaudit.audit.cli", "run", spec, "--out", run]
    command += ["--resume", "--threads", "1", "--anyway"]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "KVAUDIT_MARK": str(run)})


def _victim(pid: int, kind: str) -> int | None:
    """Return the process to kill, or None if there is no engine."""
    if kind == "kvaudit":
        return pid
    supervisors = [child for child, parent, words in _processes() if parent == pid and "supervisor.py" in words]
    if not supervisors or kind == "supervisor":
        return next(iter(supervisors), None)
    return next((child for child, parent, _ in _processes() if parent == supervisors[0]), None)


def _engines(run: Path) -> list[int]:
    """Return the engines and supervisors that were started for a run, whatever their parent is now."""
    engines = []
    for pid, _, words in _processes():
        if "supervisor.py" in words or "worker.py" in words:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            engines += [pid] if f"KVAUDIT_MARK={run}".encode() in environment.split(b"\0") else []
    return engines


def _processes() -> list[tuple[int, int, str]]:
    """Return every process with its parent and command line."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [(int(row[0]), int(row[1]), row[2] if len(row) > 2 else "") for row in rows]


if __name__ == "__main__":
    main()
