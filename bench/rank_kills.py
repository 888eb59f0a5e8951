"""Kill -9 of a rank at random instants: what is lost of a unit that several processes train, and where it ends.

Run: python -m bench.rank_kills [KILLS] [SEED] [RANKS]. A run is trained undisturbed; then others, of which one rank,
any, is killed at an instant drawn from SEED between the first rank's start and the time that a whole run took. The rest
must end by itself, with exit code 2 where the first rank was left and work was too; the run is resumed, and ends with
the telemetry, ledgers and weights of the undisturbed one, byte for byte but for seconds. Prints what happened, a line
a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.kills import PATIENCE_SECONDS, Process

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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        spec = folder / "spec.yaml"
        spec.write_text(SPEC.format(ranks=ranks), encoding="utf-8")
        words = ["run", spec, "--only", "train", "--anyway", "--threads", "1", "--out"]
        began = time.monotonic()
        assert Process([*words, folder / "whole"], folder / "whole.log").wait(PATIENCE_SECONDS) == 0, log(folder)
        lasted, whole, different = time.monotonic() - began, outcome(folder / "whole"), 0
        print(f"undisturbed: {lasted:.0f} s, {len(whole)} files", flush=True)
        for number in range(kills):
            run = folder / f"run-{number}"
            began, instant, victim = time.monotonic(), draw.uniform(0.3, 1.0) * lasted, draw.randrange(ranks)
            first = Process([*words, run], folder / f"{number}.log")
            if first.wait(instant) is not None:
                print(f"{number}: done before it could be killed", flush=True)
                continue
            others = children(first.pid)
            os.kill([first.pid, *others][victim] if len(others) == ranks - 1 else first.pid, signal.SIGKILL)
            code = first.wait(PATIENCE_SECONDS)
            left = [pid for pid in others if not ended(pid)]
            steps = sum(path.read_bytes().count(b"\n") for path in run.glob("checkpoints/*/*/telemetry.jsonl"))
            # a rank that goes once all is trained takes nothing with it
            sound = code in (STUCK, -signal.SIGKILL) or (code == 0 and outcome(run) == whole)
            resumed = Process([*words, run, "--resume"], folder / f"{number}-resumed.log").wait(PATIENCE_SECONDS)
            same = resumed == 0 and outcome(run) == whole
            different += not (same and sound and not left)
            said = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            print(
                f"{number}: rank {victim} of {ranks} at {instant:.1f} s, {steps} steps written; exit code {code}, "
                f"{len(left)} processes left; resumed: {resumed}, {'the same' if same else 'DIFFERENT'}; {said}",
                flush=True,
            )
    print(f"{kills} kills, {different} with something lost")
    sys.exit(bool(different))


def children(pid: int) -> list[int]:
    """The ranks that the first one has started, in their order (Linux)."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {int(word) for word in task.read_text(encoding="ascii").split()}
    return sorted(child for child in found if b"--join" in Path(f"/proc/{child}/cmdline").read_bytes())


def ended(pid: int) -> bool:
    """Whether a process is gone within the time that ranks may take."""
    until = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2]:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def outcome(run: Path) -> dict[str, str]:
    """What training left behind, by name: sha256 of each file, of telemetry without seconds."""
    found = {}
    for path in sorted((run / "checkpoints").rglob("*")):
        if path.suffix == ".safetensors":
            found[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "telemetry.jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            plain = [{key: value for key, value in row.items() if not key.startswith("seconds_")} for row in rows]
            found[str(path.relative_to(run))] = json.dumps(plain)
    return found


def log(folder: Path) -> str:
    return (folder / "whole.log").read_text(encoding="utf-8", errors="replace")[-500:]


if __name__ == "__main__":
    main()
