"""Workers as tasks of a ray cluster, one task each; they end with the process that started them.

Ray restarts a task whose node is lost. The task joins the run again and resumes at the last complete batch or saved
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvaudit.audit.runs.launchers.base import Job, Launcher, PrintLine, WorkerGroup
from kvaudit.audit.runs.launchers.local import run_worker
from kvaudit.core.errors import RunError
from kvaudit.core.text import inline, install_command

_POLL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Ray(Launcher):
    """Runs tasks on the nodes of a running ray cluster.

    ``address`` is ray's: ``auto`` for the cluster of this machine, ``local`` to start one here, HOST:PORT for
    another. A task whose node is lost is restarted up to ``retries`` times.
    """

    name = "ray"
    says = f"tasks of a ray cluster ({install_command('ray')})"
    trial = "ray:address=local,gpus=0"

    gpus: float = 1.0
    cpus: float = 1.0
    address: str = "auto"
    retries: int = 3

    def check(self) -> None:
        try:
            import ray  # noqa: F401
        except ImportError:
            raise RunError(f"launcher ray needs another package: {install_command('ray')}") from None

    @contextmanager
    def start_workers(self, count: int, job: Job, print_line: PrintLine) -> Iterator[WorkerGroup]:
        """Start the tasks, as many at a time as the cluster has GPUs for; end the running ones when the body ends."""
        import ray

        job.logs.mkdir(parents=True, exist_ok=True)
        self._connect()
        try:
            if (gpus := ray.cluster_resources().get("GPU", 0.0)) < self.gpus:
                print_line(
                    f"the ray cluster has {gpus:g} GPUs now, a worker waits for {self.gpus:g}; ray:gpus=N asks for N"
                )
            task = ray.remote(num_gpus=self.gpus, num_cpus=self.cpus, max_retries=self.retries)(run_worker)
            yield _Tasks({task.remote(job, number): number for number in range(1, count + 1)}, print_line)
        finally:
            ray.shutdown()  # ends only what this process has started

    def _connect(self) -> None:
        import ray

        try:
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # ray raises nothing narrower if its own processes do not start
            raise RunError(
                f"ray has no cluster at address {self.address!r} ({inline(' '.join(str(error).split()))[:200]}); begin "
                f"one with 'ray start --head', or try it out with --launcher {self.trial}"
            ) from None


class _Tasks:
    def __init__(self, started: dict[Any, int], print_line: PrintLine) -> None:
        self._left, self._print_line = started, print_line

    def wait(self, done: Callable[[], bool]) -> None:
        import ray

        while self._left and not done():
            ended, _ = ray.wait(list(self._left), num_returns=len(self._left), timeout=_POLL_SECONDS)
            for task in ended:
                if line := _failure(self._left.pop(task), task):
                    self._print_line(line)


def _failure(number: int, task: Any) -> str:
    """Wait for a task, and return a line about its failure, or an empty text."""
    import ray

    try:
        return str(ray.get(task))
    except ray.exceptions.RayError as error:
        reason = inline(" ".join(str(error).split()))[:300]
        return f"worker {number}, a ray task, was lost; its claims go back to the others: {reason}"
