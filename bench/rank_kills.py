"""Does training on several ranks survive ``kill -9`` of one rank, and does the resumed run end the same?

    python -m bench.rank_kills [KILLS] [SEED] [RANKS]

Takes about a minute per kill (default 5 kills, 2 ranks); results: docs/use-many-gpus.md.

A run is trained undisturbed. Then a random rank of other runs is killed at a random instant after the first rank's
start. The other ranks must end by themselves, with exit code 2 if the first rank is alive and work is left; the resumed
run must end with the same telemetry, ledgers and weights, except for times. Prints one line per kill.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.kills import PATIENCE_SECONDS, Process, outcome_of

SPEC = """\
name: rank-kills
model: embedded
device: cpu
train: {{arms: [dense, smd], seeds: [1], policy: "streaming:budget=48,sink=4,window=8", suites: [math], loss: ppo,
  context_tokens: 72, steps: 4, prompts_per_step: 4, group: 2, minibatches: 1, save_every: 1, ledger_every: 2,
  ranks: {ranks}}}
evaluate: {{policies: [none], suites: {{math: {{items: 2}}}}, context_tokens: [72]}}
"""
STUCK = 2


def main() -> None:
    kills, seed, ranks = (int(word) for word in (*sys.argv[1:], *("5", "1", "2")[len(sys.argv) - 1 :]))
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "spec.yaml"
        spec.write_text(SPEC.format(ranks=ranks), encoding="utf-8")
        words = ["run", spec, "--only", "train", "--anyway", "--threads", "1", "--out"]
        began = time.monotonic()
        assert Process([*words, folder / "whole"], folder / "whole.log").wait(PATIENCE_SECONDS) == 0, log_tail(folder)
        duration, whole, failures = time.monotonic() - began, outcome_of(folder / "whole"), 0
        print(f"undisturbed: {duration:.0f} s", flush=True)
        for number in range(kills):
            run = folder / f"run-{number}"
            began, instant, victim = time.monotonic(), draw.uniform(0.3, 1.0) * duration, draw.randrange(ranks)
            first = Process([*words, run], folder / f"{number}.log")
            if first.wait(instant) is not None:
                print(f"{number}: done before it could be killed", flush=True)
                continue
            others = children(first.pid)
            os.kill([first.pid, *others][victim] if len(others) == ranks - 1 else first.pid, signal.SIGKILL)
            code = first.wait(PATIENCE_SECONDS)
            alive = [pid for pid in others if not has_ended(pid)]
            steps = sum(path.read_bytes().count(b"\n") for path in run.glob("checkpoints/*/*/telemetry.jsonl"))
            # a rank that is killed after training changes nothing
            is_sound = code in (STUCK, -signal.SIGKILL) or (code == 0 and outcome_of(run) == whole)
            resumed = Process([*words, run, "--resume"], folder / f"{number}-resumed.log").wait(PATIENCE_SECONDS)
            is_same = resumed == 0 and outcome_of(run) == whole
            failures += not (is_same and is_sound and not alive)
            last_line = (
                (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            )
            end = f"{resumed}, {'the same' if is_same else 'DIFFERENT'}"
            print(
                f"{number}: rank {victim} of {ranks} at {instant:.1f} s, {steps} steps written; exit code {code}, "
                f"{len(alive)} processes alive; resumed: {end}; {last_line}",
                flush=True,
            )
    print(f"{kills} kills, {failures} with something lost or different")
    sys.exit(bool(failures))


def children(pid: int) -> list[int]:
    """Return the other ranks' process ids, which the first rank has started (Linux)."""
    processes = set[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        processes |= {int(word) for word in task.read_text(encoding="ascii").split()}
    return sorted(child for child in processes if b"--join" in Path(f"/proc/{child}/cmdline").read_bytes())


def has_ended(pid: int) -> bool:
    """Wait up to a minute for a process to end; returns whether it did."""
    until = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2]:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def log_tail(folder: Path) -> str:
    return (folder / "whole.log").read_text(encoding="utf-8", errors="replace")[-500:]


if __name__ == "__main__":
    main()
