"""A small run of the default audit's stages as 1, 2 and 4 tasks of ray on this machine, beside one without ray.

Run: python -m bench.ray_tasks PYTHON, where PYTHON has ray and this project. Prints the table of docs/use-many-gpus.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.kills import outcome_of

ROOT = Path(__file__).parent.parent
LOCAL = "ray:address=local,gpus=0,cpus=0.25"
NICENESS = {"RAY_worker_niceness": "0"}  # ray gives its tasks 15, with which they wait for anything else
_POLL_SECONDS = 1.0


class Run(NamedTuple):
    """A run that has ended: ``cpu`` is in seconds, of all its processes as last seen at work."""

    code: int
    log: str
    worker_logs: list[str]
    outcome: dict[str, Any]
    wall: float
    cpu: float


def small_audit(path: Path) -> Path:
    """Write the default audit with one seed, four steps and three policies."""
    spec = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    spec["train"] |= {"seeds": [21], "steps": 4, "prompts_per_step": 2, "group": 2, "warmup_steps": 1}
    spec["train"] |= {"save_every": 2, "ledger_every": 2}
    spec["evaluate"]["policies"] = ["none", "int8", spec["train"]["policy"]]
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def run(
    python: str,
    spec: Path,
    folder: Path,
    *,
    tasks: int = 0,
    launcher: str = LOCAL,
    watch: Callable[[], None] = lambda: None,
    prefix: Sequence[str] = (),
) -> Run:
    """Run the audit with ``--limit 24``, as tasks of ray or else in one process; call ``watch`` as it goes."""
    words = ["run", str(spec), "--out", str(folder), "--limit", "24", "--threads", "1"]
    words += ["--workers", str(tasks), "--launcher", launcher] if tasks else ["--workers", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log, started, seen = spec.parent / f"{folder.name}.log", time.monotonic(), dict[int, float]()
    with log.open("wb") as out:
        process = subprocess.Popen([*prefix, python, "-m", "kvaudit", *words], stdout=out, stderr=out, env=environment)
        while process.poll() is None:
            for pid in (process.pid, *(pid for pid, _ in descendants(process.pid))):
                seen[pid] = max(seen.get(pid, 0.0), _cpu_seconds(pid))
            watch()
            time.sleep(_POLL_SECONDS)
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("logs/worker-*.log"))]
    text = log.read_text(encoding="utf-8", errors="replace")
    return Run(process.returncode, text, logs, outcome_of(folder), time.monotonic() - started, sum(seen.values()))


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return the processes under this one with their commands."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    found, parents = list[tuple[int, str]](), {pid}
    while children := [row for row in rows if int(row[1]) in parents]:
        found += [(int(row[0]), row[2]) for row in children]
        parents = {int(row[0]) for row in children}
    return found


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these processes and everything under them."""
    left = [pid for process in processes for pid in (process.pid, *(pid for pid, _ in descendants(process.pid)))]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        process.wait()


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table."""
    (python,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ |= {**NICENESS, "HOME": folder, "RAY_TMPDIR": folder}
        spec = small_audit(Path(folder) / "spec.yaml")
        plain = run(python, spec, Path(folder) / "plain")
        print("| tasks | records equal | wall, s | CPU, s |\n|---|---|---|---|")
        print(f"| without ray | | {plain.wall:.0f} | {plain.cpu:.0f} |", flush=True)
        for tasks in (1, 2, 4):
            done = run(python, spec, Path(folder) / f"tasks-{tasks}", tasks=tasks)
            equal = "yes" if done.code == 0 and done.outcome == plain.outcome else "NO"
            print(f"| {tasks} | {equal} | {done.wall:.0f} | {done.cpu:.0f} |", flush=True)


if __name__ == "__main__":
    main()
