"""More processes on this machine, each on the GPU whose turn it is: they claim units and leave when none is left.

The workers of the other launchers, wherever they are, are such processes too (``run_worker``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvaudit.audit.runs.launchers.base import Job, Launcher, PrintLine, WorkerGroup

GRACE_SECONDS = 10.0
TERMINATED = 128 + signal.SIGTERM
PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from kvaudit.audit.runs.launchers.local import tie; tie(); "
    "from kvaudit.audit.cli import main; sys.argv[0] = 'kvaudit'; main()",
)
SAMPLE_SECONDS, POLL_SECONDS = 0.3, 1.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    # of the whole machine, of which this process may be given a part
    share = (idle_later - idle) / max(1, total_later - total)
    return max(1, min(cores, round(share * (os.cpu_count() or cores))))


def _cpu_times() -> tuple[int, int]:
    """Ticks that all cores together spent idle (waiting for a disk included), and in all."""
    # user to steal: the guests' times that follow are in the users' already
    ticks = [int(n) for n in CPU_TIMES.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def exit_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that ended.

    Its standard input is a pipe whose other end only that process has, so the kernel closes it. An interrupt from the
    terminal is left to that process too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.write(2, b"the process that started this worker has ended, and so does the worker\n")
        os._exit(TERMINATED)  # sys.exit would end this thread alone

    threading.Thread(target=wait, name="tie", daemon=True).start()


def visible_gpus() -> list[str]:
    """The GPUs that a process started from here sees, by the names that CUDA_VISIBLE_DEVICES has for them."""
    import torch

    named = os.environ.get(VISIBLE)
    return [name for name in named.split(",") if name] if named else [str(n) for n in range(torch.cuda.device_count())]


class ExtraWorker:
    """One more process on the run; says by itself, from a thread, when it ends and should not have.

    ``env`` are variables that it has besides those of this process.
    """

    kind = "worker"
    loss = "what it held goes back to the others"

    def __init__(self, number: int, job: Job, say: PrintLine, env: Mapping[str, str] | None = None) -> None:
        self._number, self._log, self._say = number, job.logs / f"{self.kind}-{number}.log", say
        self._is_stopped = False
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [*PROGRAM, *job.arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=job.folder,
                env=os.environ | dict(env or {}),
            )
        self._waiter = threading.Thread(target=self._wait, name=self._log.stem, daemon=True)
        self._waiter.start()

    def wait(self, patience: float | None = None) -> bool:
        """Whether it has ended by itself, after ``patience`` seconds at most."""
        self._waiter.join(patience)
        return not self._waiter.is_alive()

    def ask_to_end(self) -> None:
        """Have it let go of what it holds and end; nothing is said of that end."""
        self._is_stopped = True
        self.process.terminate()

    def stop(self, patience: float, grace: float = GRACE_SECONDS) -> None:
        """Wait ``patience`` seconds for its own end, then end it; nothing is said of an end that was asked for.

        ``grace`` is how long it may take to let go of what it holds.
        """
        self._waiter.join(patience)
        self.ask_to_end()
        self._waiter.join(grace)
        self.process.kill()
        self._waiter.join()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _wait(self) -> None:
        code = self.process.wait()
        if code and not self._is_stopped:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            # what a signal ended has minus its number as code
            known = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            why = f"{known} (out of memory?)" if known == "SIGKILL" else known
            how = f"was killed by {why}" if code < 0 else f"stopped with exit code {code}"
            self._say(f"{self.kind} {self._number} {how}; {self.loss}; see {self._log}: {lines[-1:]}")


def run_worker(job: Job, number: int) -> str:
    """Work on a job in one more process on this machine, to its end; what there is to say of that end.

    A launcher has a cluster call this; the process it starts ends with the one that called.
    """
    if not job.logs.is_dir():
        return (
            f"worker {number}: {socket.gethostname()!r} sees no {str(job.logs)!r}; what others computed stays; put the "
            "run on a file system that every node sees, under one path"
        )
    said: list[str] = []
    companion = ExtraWorker(number, job, said.append)
    try:
        companion.wait()
    finally:
        companion.stop(0.0)
    return "".join(said)


@contextmanager
def local_workers(count: int, job: Job, say: PrintLine) -> Iterator[Sequence[ExtraWorker]]:
    """Work on a job in ``count`` more processes while the body works too.

    Whatever a companion leaves undone, a failed or killed one included, the body's own claims pick up; ``say`` hears of
    it at once. They end when the body is done or fails, and with this process.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    turns = visible_gpus() if count and job.any_gpu else []
    # the body is number 0 and takes the first
    started = []
    for number in range(1, count + 1):
        places = range(number * job.gpus, (number + 1) * job.gpus) if turns else ()
        own = dict.fromkeys(turns[place % len(turns)] for place in places)
        started.append(ExtraWorker(number, job, say, {VISIBLE: ",".join(own)} if own else {}))
    patience = 0.0  # of a body that fails: they are ended at once
    try:
        yield started
        patience = GRACE_SECONDS  # every unit is done: they find that out, and nothing they still do matters
    finally:
        until = time.monotonic() + patience
        for companion in started:
            companion.wait(max(0.0, until - time.monotonic()))
        for companion in started:  # all at once: a scheduler that ends this run gives it some seconds in all
            companion.ask_to_end()
        until = time.monotonic() + GRACE_SECONDS
        for companion in started:
            companion.stop(0.0, max(0.0, until - time.monotonic()))


class _LocalWorkers(list[ExtraWorker]):
    def wait(self, done: Callable[[], bool]) -> None:
        while not all(companion.wait(POLL_SECONDS) for companion in self) and not done():
            continue


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Processes on this machine, of which the one that starts them is the first."""

    name = "local"
    says = "processes on this machine, on its GPUs in turn"
    here = True
    trial = "local"

    @contextmanager
    def start_workers(self, count: int, job: Job, say: PrintLine) -> Iterator[WorkerGroup]:
        """``count`` companions; see ``local_workers``."""
        with local_workers(count, job, say) as started:
            yield _LocalWorkers(started)
