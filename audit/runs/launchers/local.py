"""More processes on this machine: they claim units of the same run folder and leave when none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GRACE_SECONDS = 10.0
TERMINATED = 128 + signal.SIGTERM
PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from audit.runs.launchers.local import tie; tie(); "
    "from audit.cli import main; sys.argv[0] = 'kvaudit'; main()",
)
SAMPLE_SECONDS = 0.3
CPU_TIMES = Path("/proc/stat")  # Linux


def idle_cores() -> int:
    """Cores that stand idle now, at least one: two processes on one core are slower than one.

    Measured over a moment, because a load average still counts what has just ended, such as an installation.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not CPU_TIMES.exists():
        return max(1, min(cores, round(cores - os.getloadavg()[0])))
    idle, total = _cpu_times()
    time.sleep(SAMPLE_SECONDS)
    idle_later, total_later = _cpu_times()
    share = (idle_later - idle) / max(1, total_later - total)
    return max(1, min(cores, round(share * (os.cpu_count() or cores))))


def _cpu_times() -> tuple[int, int]:
    """Ticks that all cores together spent idle (waiting for a disk included), and in all."""
    # user to steal: the guests' times that follow are in the users' already
    ticks = [int(n) for n in CPU_TIMES.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def tie() -> None:
    """End this process as soon as the one that started it has ended, however that ended.

    Its standard input is a pipe whose other end only that process has, so the kernel closes it. An interrupt from the
    terminal is left to that process too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.write(2, b"the process that started this worker has ended, and so does the worker\n")
        os._exit(TERMINATED)  # sys.exit would end this thread alone

    threading.Thread(target=watch, name="tie", daemon=True).start()


class Companion:
    """One more process on the run; says by itself, from a thread, when it ends and should not have."""

    def __init__(self, number: int, words: Sequence[str], logs: Path, say: Callable[[str], None]) -> None:
        self._number, self._log, self._say = number, logs / f"worker-{number}.log", say
        self._is_stopped = False
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [*PROGRAM, *words], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
            )
        self._watch = threading.Thread(target=self._wait, name=self._log.stem, daemon=True)
        self._watch.start()

    def stop(self, patience: float) -> None:
        """Wait ``patience`` seconds for its own end, then end it; nothing is said of an end that was asked for."""
        self._watch.join(patience)
        self._is_stopped = True
        self.process.terminate()
        self._watch.join(GRACE_SECONDS)
        self.process.kill()
        self._watch.join()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _wait(self) -> None:
        code = self.process.wait()
        if code and not self._is_stopped:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how = f"was killed by {_signal(-code)}" if code < 0 else f"stopped with exit code {code}"
            self._say(
                f"worker {self._number} {how}; what it held goes back to the others; see {self._log}: {lines[-1:]}"
            )


def _signal(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


@contextmanager
def companions(
    count: int, words: Sequence[str], logs: Path, say: Callable[[str], None]
) -> Iterator[Sequence[Companion]]:
    """Run ``kvaudit WORDS`` in ``count`` more processes while the body works; what they print goes to ``logs``.

    Whatever a companion leaves undone, a failed or killed one included, the body's own claims pick up; ``say`` hears of
    it at once. They end when the body is done or fails, and with this process.
    """
    logs.mkdir(parents=True, exist_ok=True)
    started = [Companion(number, words, logs, say) for number in range(1, count + 1)]
    patience = 0.0
    try:
        yield started
        patience = GRACE_SECONDS  # every unit is done: they find that out, and nothing they still do matters
    finally:
        for companion in started:
            companion.stop(patience)
