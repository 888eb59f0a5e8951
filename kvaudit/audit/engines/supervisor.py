"""Run an engine in its own process group, and end the whole group as soon as kvaudit's process is gone.

    python supervisor.py LIFELINE COMMAND...      run by its path

LIFELINE is the number of a pipe's reading end; kvaudit holds the writing end, which the kernel closes however kvaudit
ends. Then, or when the engine ends, the group gets SIGTERM and a little later SIGKILL: an engine that is killed at once
leaks the memory that it shares with its workers. Python's resource tracker, which frees such memory, is killed last.
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

_POLL = 0.2  # seconds between two checks of the engine
_TERM_SECONDS, _TRACKER_SECONDS = 5.0, 2.0  # for ending after SIGTERM; for the resource tracker to free memory
PROCESS_ENDED = "the engine's process ended"  # begins the log line about it


def supervise(lifeline: int, command: list[str]) -> None:
    """Run the command until it ends or the other end of the pipe ``lifeline`` closes; then end the process group."""
    child = subprocess.Popen(command, close_fds=True)
    sys.stdin.close()
    is_wanted = True
    while is_wanted and child.poll() is None:
        # nothing is ever written into the lifeline: it is readable only once it is closed
        is_wanted = not select.select([lifeline], [], [], _POLL)[0] or bool(os.read(lifeline, 1))
    if is_wanted:
        code = child.returncode
        cause = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        print(f"{PROCESS_ENDED} {cause}", file=sys.stderr, flush=True)
    # this process belongs to the group and must survive its own SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.killpg(0, signal.SIGTERM)
    _wait_for_group(_TERM_SECONDS)
    for pid in _other_pids():
        with suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _wait_for_group(_TRACKER_SECONDS)
    os.killpg(0, signal.SIGKILL)  # includes this process


def _wait_for_group(seconds: float) -> None:
    """Wait until the other processes of the group have ended, or the seconds are over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and _other_pids():
        time.sleep(_POLL / 4)


def _other_pids() -> list[int]:
    """Return the living processes of the group except this one; empty on systems without /proc."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the command's name may hold spaces and brackets, so fields are counted after the last bracket
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # the process ended meanwhile
            continue
        if int(group) == os.getpgrp() and state != "Z" and int(path.parent.name) != os.getpid():
            pids.append(int(path.parent.name))
    return pids


if __name__ == "__main__":
    supervise(int(sys.argv[1]), sys.argv[2:])
