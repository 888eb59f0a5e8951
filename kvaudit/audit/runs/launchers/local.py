"""Worker processes on this machine, spread over its GPUs. They lock and work on units of a run until none is left.

Launchers for other machines start such a process there by ``run_worker``.
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
    "import sys; from kvaudit.audit.runs.launchers.local import exit_with_parent; exit_with_parent(); "
    "from kvaudit.audit.cli import main; sys.argv[0] = 'kvaudit'; main()",
)
SAMPLE_SECONDS, POLL_SECONDS = 0.3, 1.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_TIMES = Path("/proc/stat")  # Linux


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idle_cores() -> int:
    """Return the number of idle cores, at least one; more processes than idle cores are slower.

    The load is sampled for a moment, because a load average still counts processes that have just ended.
    """
    cores = usable_cores()
    if not CPU_TIMES.exists():
        return max(1, min(cores, round(cores - os.getloadavg()[0])))
    idle, total = _cpu_times()
    time.sleep(SAMPLE_SECONDS)
    idle_later, total_later = _cpu_times()
    # of the whole machine, although this process may be allowed fewer cores
    share = (idle_later - idle) / max(1, total_later - total)
    return max(1, min(cores, round(share * (os.cpu_count() or cores))))


def _cpu_times() -> tuple[int, int]:
    """Return the idle ticks (including waits for a disk) and all ticks since boot, summed over all cores."""
    # from user to steal; the guests' times that follow are included in the users'
    ticks = [int(n) for n in CPU_TIMES.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def exit_with_parent() -> None:
    """End this process as soon as its parent has ended for any reason; let only the parent react to ctrl-C.

    Standard input is a pipe of which only the parent has the other end, so the kernel closes it when the parent ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.write(2, b"the process that started this worker has ended, so the worker ends too\n")
        os._exit(TERMINATED)  # sys.exit would end only this thread

    threading.Thread(target=wait, name="exit_with_parent", daemon=True).start()


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, by their names for CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get(VISIBLE)
    return [name for name in named.split(",") if name] if named else [str(n) for n in range(torch.cuda.device_count())]


class ExtraWorker:
    """A worker process on this machine, with ``env`` added to its environment.

    If the worker fails, a thread of this process prints a line about it.
    """

    def __init__(self, number: int, job: Job, print_line: PrintLine, env: Mapping[str, str] | None = None) -> None:
        self._number, self._log, self._print_line = number, job.logs / f"worker-{number}.log", print_line
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
        """Wait at most ``patience`` seconds; return whether the worker has ended."""
        self._waiter.join(patience)
        return not self._waiter.is_alive()

    def ask_to_end(self) -> None:
        """Ask the worker to release its claims and end; nothing is printed when it does."""
        self._is_stopped = True
        self.process.terminate()

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ask the worker to end, and kill it after ``grace`` seconds."""
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
            # a negative exit code is the number of the signal that ended the process
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            cause = f"{name} (out of memory?)" if name == "SIGKILL" else name
            end = f"was killed by {cause}" if code < 0 else f"stopped with exit code {code}"
            self._print_line(
                f"worker {self._number} {end}; its claims go back to the others; see {self._log}: {lines[-1:]}"
            )


def run_worker(job: Job, number: int) -> str:
    """Run one worker process on this machine to its end; return a line about its failure, or an empty text.

    A launcher for a cluster calls this on the worker's node. The worker ends with the calling process.
    """
    if not job.logs.is_dir():
        return (
            f"worker {number}: {socket.gethostname()!r} sees no {str(job.logs)!r}; finished work is kept; put the run "
            "on a file system that every node sees under the same path"
        )
    lines: list[str] = []
    worker = ExtraWorker(number, job, lines.append)
    try:
        worker.wait()
    finally:
        worker.stop()
    return "".join(lines)


@contextmanager
def local_workers(count: int, job: Job, print_line: PrintLine) -> Iterator[Sequence[ExtraWorker]]:
    """Run ``count`` worker processes while the body of the with statement works as one more worker.

    The body also does the units that a failed or killed worker leaves undone. The workers end when the body ends or
    fails, and with this process.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus() if count and job.any_gpu else []
    workers = []
    for number in range(1, count + 1):  # the body is number 0 and takes the first GPUs
        numbers = range(number * job.gpus, (number + 1) * job.gpus) if gpus else ()
        worker_gpus = dict.fromkeys(gpus[n % len(gpus)] for n in numbers)
        env = {VISIBLE: ",".join(worker_gpus)} if worker_gpus else {}
        workers.append(ExtraWorker(number, job, print_line, env))
    patience = 0.0  # if the body fails, the workers are ended at once
    try:
        yield workers
        patience = GRACE_SECONDS  # every unit is done, and the workers notice that
    finally:
        until = time.monotonic() + patience
        for worker in workers:
            worker.wait(max(0.0, until - time.monotonic()))
        for worker in workers:  # all at once, since a scheduler that ends this run allows it a few seconds in total
            worker.ask_to_end()
        until = time.monotonic() + GRACE_SECONDS
        for worker in workers:
            worker.stop(max(0.0, until - time.monotonic()))


class _LocalWorkers(list[ExtraWorker]):
    def wait(self, done: Callable[[], bool]) -> None:
        while not all(worker.wait(POLL_SECONDS) for worker in self) and not done():
            continue


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Runs processes on this machine; the process that starts them is the first worker."""

    name = "local"
    says = "processes on this machine, on its GPUs in turn"
    here = True
    trial = "local"

    @contextmanager
    def start_workers(self, count: int, job: Job, print_line: PrintLine) -> Iterator[WorkerGroup]:
        with local_workers(count, job, print_line) as workers:
            yield _LocalWorkers(workers)
