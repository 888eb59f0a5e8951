"""Workers as jobs of a slurm cluster, one job each, through submitit.

A job that slurm preempts or ends for its time limit is queued again under its number. It joins the run again and
resumes at the last complete batch or saved step. The jobs go on when the process that queued them ends.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvaudit.audit.runs.launchers.base import Job, Launcher, PrintLine, WorkerGroup
from kvaudit.audit.runs.launchers.local import GRACE_SECONDS, TERMINATED, run_worker
from kvaudit.core.errors import RunError
from kvaudit.core.text import inline, install_command

if TYPE_CHECKING:
    from submitit import Job as Queued
    from submitit.helpers import DelayedSubmission

_POLL_SECONDS = 2.0
KILL_SECONDS = 120.0  # slurm's KillWait is 30 s by default
MOST_TIMEOUTS = 1000  # a job that ran out of time resumes in another


@dataclass(frozen=True)
class SlurmTask:
    """The callable that submitit runs in a job; it runs one worker and returns a line about its failure or "".

    After a preemption, submitit queues what ``checkpoint`` returns.
    """

    job: Job
    number: int

    def __call__(self) -> str:
        failure = run_worker(self.job, self.number)
        if f"exit code {TERMINATED}" in failure:  # slurm is ending this job; if it returned, it would count as finished
            time.sleep(KILL_SECONDS)
        return failure

    def checkpoint(self) -> DelayedSubmission:
        """Return the same task, since the state of the run is in its folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Queues jobs on the nodes of a cluster, from a machine that has ``sbatch``.

    ``memory`` is in GB; 0 means the cluster's default. ``cluster`` is ``slurm``, or ``local``, with which submitit runs
    the jobs on this machine.
    """

    name = "slurm"
    says = f"jobs of a slurm cluster ({install_command('slurm')})"
    trial = "slurm:cluster=local,gpus=0"

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gpus: int = 1
    cpus: int = 2
    memory: int = 0
    hours: float = 24.0
    cluster: str = "slurm"

    def check(self) -> None:
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise RunError(f"launcher slurm needs another package: {install_command('slurm')}") from None
        if self.cluster not in ("slurm", "local"):
            raise RunError(f"launcher slurm: cluster is {self.cluster!r}, wanted slurm, or local to try it out here")
        if self.cluster == "slurm" and (shutil.which("sbatch") is None or shutil.which("srun") is None):
            raise RunError(
                "launcher slurm finds no sbatch and srun here; start from a login node, or try it out with "
                f"--launcher {self.trial}"
            )

    @contextmanager
    def start_workers(self, count: int, job: Job, print_line: PrintLine) -> Iterator[WorkerGroup]:
        """Queue ``count`` workers as slurm jobs for a ``with`` block; at its end, cancel those that do not end soon.

        If the block is interrupted, jobs on a slurm cluster go on, and the command that ends them is printed (such as
        "scancel 4711 4712"). Jobs that only try the launcher out on this machine (cluster "local") end.
        """
        job.logs.mkdir(parents=True, exist_ok=True)
        queued = self._queue(count, job)
        ids = " ".join(queued_job.job_id for queued_job in queued)
        print_line(f"{count} slurm jobs: {ids}; their logs: {job.logs}")
        jobs = _Jobs(queued, print_line)
        try:
            yield jobs
        except BaseException:
            if self.cluster == "slurm":
                print_line(f"slurm's jobs go on; end them with: scancel {ids}")
            else:
                jobs.dismiss(0.0)
            raise
        jobs.dismiss(GRACE_SECONDS)

    def _queue(self, count: int, job: Job) -> list[Queued[str]]:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = AutoExecutor(job.logs / "slurm", cluster=self.cluster, slurm_max_num_timeout=MOST_TIMEOUTS)
        executor.update_parameters(name="kvaudit", **self._parameters())
        try:
            return list(executor.submit_array([SlurmTask(job, number) for number in range(1, count + 1)]))
        except (FailedJobError, FailedSubmissionError) as error:
            raise RunError(f"slurm accepts no job: {inline(' '.join(str(error).split()))}") from None

    def _parameters(self) -> dict[str, Any]:
        options = {"partition": self.partition, "account": self.account, "qos": self.qos, "constraint": self.constraint}
        return {
            "timeout_min": max(round(self.hours * 60), 1),
            "gpus_per_node": self.gpus,
            "cpus_per_task": self.cpus,
            "mem_gb": self.memory or None,
            **{f"slurm_{key}": value for key, value in options.items() if value},
        }


class _Jobs:
    def __init__(self, queued: list[Queued[str]], print_line: PrintLine) -> None:
        self._left, self._print_line = dict(enumerate(queued, 1)), print_line

    def wait(self, done: Callable[[], bool]) -> None:
        while self._left and not done():
            for number in [number for number, job in self._left.items() if job.done()]:
                if line := _failure(number, self._left.pop(number)):
                    self._print_line(line)
            time.sleep(_POLL_SECONDS if self._left else 0.0)

    def dismiss(self, patience: float) -> None:
        """Wait ``patience`` seconds for the jobs to notice that no work is left, then cancel the remaining ones."""
        until = time.monotonic() + patience
        self.wait(lambda: time.monotonic() > until)
        for job in self._left.values():
            job.cancel(check=False)


def _failure(number: int, job: Queued[str]) -> str:
    """Return a line about the failure of a finished job, or an empty text."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return str(job.result())
    except (FailedJobError, UncompletedJobError):
        logs = [path for path in (job.paths.stderr, job.paths.stdout) if path.exists()]
        advice = f"see {logs[0]}" if logs else f"it left no log: does every node see {str(job.paths.folder)!r}?"
        return (
            f"worker {number}, slurm job {job.job_id}, ended as {job.state} without a result; its claims go back to "
            f"the others; {advice}"
        )
