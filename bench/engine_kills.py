"""Kill -9 at random instants of a run that an engine serves: kvaudit, its engine, or the process that keeps it.

Run: python -m bench.engine_kills [KILLS] [SEED]. One run folder is begun and gone on with; an instant drawn from SEED
after a start, one of the three is killed. Where kvaudit was killed, nothing of its engine may be left eight seconds
later; where the engine or its keeper was, the run goes on by itself. In the end the records are those of a run that
nobody disturbed. Prints the figures as JSON.
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
from typing import Any

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
PATIENCE = 600.0  # seconds of a run that nobody kills
GONE = 8.0  # seconds after which nothing of an engine may be left
KINDS = ("kvaudit", "engine", "keeper")


def main() -> None:
    """Kill until there are enough; the figures."""
    kills, seed = (int(word) for word in (*sys.argv[1:], "30", "1")[:2])
    draws, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kvaudit-kills-") as name:
        folder = Path(name)
        spec = folder / "spec.yaml"
        spec.write_text(SPEC, encoding="utf-8")
        began = time.monotonic()
        assert _ends(_started(spec, folder / "whole")) == 0, (folder / "whole.log").read_text(encoding="utf-8")
        seconds = time.monotonic() - began
        number = 0
        while sum(found[kind] for kind in KINDS) < kills:
            run = folder / f"run-{number}"
            _chain(spec, run, folder / "whole", seconds, draws, found, kills)
            number += 1
            print(f"{number} runs: {dict(found)}", file=sys.stderr, flush=True)
    wrong = {key: found[key] for key in ("orphans", "different", "failed")}
    print(json.dumps({"runs": number, **wrong, **{kind: found[kind] for kind in KINDS}}))
    sys.exit(any(wrong.values()))


def _chain(
    spec: Path, run: Path, whole: Path, seconds: float, draws: random.Random, found: Counter[str], kills: int
) -> None:
    """One run folder, killed at until it comes through."""
    for _ in range(8):
        process = _started(spec, run)
        kind = draws.choice(KINDS)
        time.sleep(draws.uniform(0.2, 0.9) * seconds)
        if process.poll() is not None or sum(found[one] for one in KINDS) >= kills:
            break
        victim = _victim(process.pid, kind)
        if victim is None:
            process.kill()  # no engine at that instant: kvaudit itself instead
            kind = "kvaudit"
        else:
            os.kill(victim, signal.SIGKILL)
        found[kind] += 1
        if kind != "kvaudit":
            break  # it is to come through by itself
        process.wait()
        time.sleep(GONE)
        found["orphans"] += len(_engines(run))
    found["failed"] += _ends(process) != 0 and _ends(_started(spec, run)) != 0
    found["different"] += _records(run) != _records(whole)
    found["orphans"] += len(_engines(run))


def _started(spec: Path, run: Path) -> subprocess.Popen[bytes]:
    """A process that begins the run, or goes on with it."""
    command = [
        sys.executable,
        "-m",
        "kvaudit.audit.cli",
        "run",
        str(spec),
        "--out",
        str(run),
        "--resume",
        "--threads",
        "1",
    ]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--anyway"], stdout=log, stderr=log, env={**os.environ, "KVAUDIT_MARK": str(run)}
        )


def _ends(process: subprocess.Popen[bytes]) -> int:
    return process.wait(PATIENCE)


def _victim(pid: int, kind: str) -> int | None:
    """The process to kill, None where there is no engine."""
    if kind == "kvaudit":
        return pid
    keepers = [child for child, parent, words in _processes() if parent == pid and "supervisor.py" in words]
    if not keepers or kind == "keeper":
        return next(iter(keepers), None)
    return next((child for child, parent, _ in _processes() if parent == keepers[0]), None)


def _engines(run: Path) -> list[int]:
    """Engines and keepers that were started for a run, whoever is their parent now."""
    found = []
    for pid, _, words in _processes():
        if "supervisor.py" in words or "worker.py" in words:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            found += [pid] if f"KVAUDIT_MARK={run}".encode() in environment.split(b"\0") else []
    return found


def _processes() -> list[tuple[int, int, str]]:
    """Every process, its parent, its words."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [(int(row[0]), int(row[1]), row[2] if len(row) > 2 else "") for row in rows]


def _records(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Every record without its seconds, which no two runs share."""
    files = [*run.glob("records/*.jsonl"), *run.glob("floor/*/*.jsonl")]
    rows = {str(file.relative_to(run)): list(map(json.loads, file.read_text("utf-8").splitlines())) for file in files}
    return {name: [{k: v for k, v in row.items() if k != "seconds"} for row in own] for name, own in rows.items()}


if __name__ == "__main__":
    main()
