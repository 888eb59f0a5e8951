"""Holds an engine in a process group of its own, and ends all of it once whoever asked for it is gone.

    python keeper.py LIFELINE COMMAND...

LIFELINE is the number of a pipe's reading end. Its other end is held by the process that wants the engine, however that
ends; then, or once the engine ends by itself, everything in the group is asked to end, and what is left soon after is
killed: an engine that is killed at once leaves memory behind that it shares with its workers. What Python has beside a
process to take such memory back goes last. It is run by its path.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_LOOK = 0.2  # seconds between two looks at the engine
_GRACE, _TAKEN_BACK = 5.0, 2.0  # seconds in which what was asked to end may do so, and shared memory is taken back
PROCESS_ENDED = "the engine's process ended"  # begins the line that says so in its log
_TRACKER = b"resource_tracker"


def keep(words: list[str]) -> None:
    """Run the command until it ends, or the lifeline does."""
    lifeline = int(words[0])
    child = subprocess.Popen(words[1:], close_fds=True)
    sys.stdin.close()
    wanted = True
    while wanted and child.poll() is None:
        # nobody writes into the lifeline, so that what can be read is its end
        wanted = not select.select([lifeline], [], [], _LOOK)[0] or bool(os.read(lifeline, 1))
    if wanted:
        how = f"with exit code {child.returncode}" if child.returncode >= 0 else f"by signal {-child.returncode}"
        print(f"{PROCESS_ENDED} {how}", file=sys.stderr, flush=True)
    # this process is of the group that it asks to end, and has to outlive that
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.killpg(0, signal.SIGTERM)
    _wait_for_others(_GRACE)
    for pid in _others():
        with suppress(OSError):
            if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _wait_for_others(_TAKEN_BACK)
    os.killpg(0, signal.SIGKILL)  # this process too: a group is gone at once, or it is not


def _wait_for_others(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and _others():
        time.sleep(_LOOK / 4)


def _others() -> list[int]:
    """The living processes of the group beside this one; none where the system does not say."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # a command's name may hold spaces and brackets: fields are counted from behind the last one
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # gone meanwhile
            continue
        if int(group) == os.getpgrp() and state != "Z" and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    keep(sys.argv[1:])
