"""Workers as tasks of a ray cluster, one task each. They end with the process that started them.

A task whose node is lost is started again by ray and joins the run anew: records go on at the last whole batch,
training at its last saved step.
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
    """Tasks on the nodes of a cluster that runs already.

    ``address`` is ray's word: ``auto`` the cluster of this machine, ``local`` one of its own on this machine, HOST:PORT
    another. A task starts ``retries`` times more where its node is lost.
    """

    name = "ray"
    says = f"tasks of a ray cluster ({install_command('ray')})"
    trial = "ray:address=local,gpus=0"

    gpus: float = 1.0
    cpus: float = 1.0
    address: str = "auto"
    retries: int = 3

    def check(self) -> None:
        """Raise RunError without ray."""
        try:
            import ray  # noqa: F401
        except ImportError:
            raise RunError(f"launcher ray needs another package: {install_command('ray')}") from None

    @contextmanager
    def start_workers(self, count: int, job: Job, say: PrintLine) -> Iterator[WorkerGroup]:
        """Start the tasks, as many at a time as the cluster has GPUs for; whatever still works is ended."""
        import ray

        job.logs.mkdir(parents=True, exist_ok=True)
        self._connect()
        try:
            if (found := ray.cluster_resources().get("GPU", 0.0)) < self.gpus:
                say(f"the ray cluster has {found:g} GPUs now, a worker waits for {self.gpus:g}: ray:gpus=N asks for N")
            task = ray.remote(num_gpus=self.gpus, num_cpus=self.cpus, max_retries=self.retries)(run_worker)
            yield _Tasks({task.remote(job, number): number for number in range(1, count + 1)}, say)
        finally:
            ray.shutdown()  # ends what this process has started, and nobody else's

    def _connect(self) -> None:
        import ray

        try:
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # ray raises nothing narrower where its own processes do not start
            raise RunError(
                f"ray has no cluster at address {self.address!r} ({inline(' '.join(str(error).split()))[:200]}); begin "
                f"one with 'ray start --head', or try it out with --launcher {self.trial}"
            ) from None


class _Tasks:
    def __init__(self, started: dict[Any, int], say: PrintLine) -> None:
        self._left, self._say = started, say

    def wait(self, done: Callable[[], bool]) -> None:
        import ray

        while self._left and not done():
            ended, _ = ray.wait(list(self._left), num_returns=len(self._left), timeout=_POLL_SECONDS)
            for task in ended:
                if said := _end(self._left.pop(task), task):
                    self._say(said)


def _end(number: int, task: Any) -> str:
    import ray

    try:
        return str(ray.get(task))
    except ray.exceptions.RayError as error:
        reason = inline(" ".join(str(error).split()))[:300]
        return f"worker {number}, a ray task, was lost; what it held goes back to the others: {reason}"
