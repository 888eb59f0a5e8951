"""Workers as tasks of a ray cluster, one task each; they end with the process that started them.

Ray restarts a task whose node is lost. The task joins the run again and resumes at the last complete batch or saved
step.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.launchers.base import Job, Launcher, PrintLine, WorkerGroup
from kvaudit.audit.runs.launchers.local import run_worker
from kvaudit.core.errors import RunError
from kvaudit.core.text import inline, install_command

_POLL_SECONDS = 2.0
_TRIES = 3  # of a cluster on this machine, whose start may take 30 seconds and no more: too few beside other work
_ADDRESS = "RAY_ADDRESS"  # ray's own variable, which goes before what ``auto`` finds
_LOGS = ("gcs_server.out", "raylet.out", "gcs_server.err", "raylet.err")
_ERROR_LINE = re.compile(
    r"^\[[^\]]* [ECF] [^\]]*\] (?:.*Check failed: )?(.+)$", re.MULTILINE
)  # [2026-11-27 19:27:16,968 E 2 2] (raylet) ...


@dataclass(frozen=True, kw_only=True)
class Ray(Launcher):
    """Runs tasks on the nodes of a running ray cluster.

    ``address`` is ray's own option: ``auto`` for the cluster of this machine, ``local`` to start one here, HOST:PORT
    for another cluster. A task whose node is lost is restarted up to ``retries`` times.
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
        self._connect(print_line)
        try:
            if (gpus := ray.cluster_resources().get("GPU", 0.0)) < self.gpus:
                print_line(
                    f"the ray cluster has {gpus:g} GPUs now, a worker waits for {self.gpus:g}; ray:gpus=N asks for N"
                )
            cpus = ray.cluster_resources().get("CPU", 0.0)
            if cpus < count * self.cpus:
                print_line(
                    f"the ray cluster has {cpus:g} CPUs now, {count} workers of {self.cpus:g} each run in turn; "
                    "ray:cpus=N asks for N"
                )
            task = ray.remote(num_gpus=self.gpus, num_cpus=self.cpus, max_retries=self.retries)(run_worker)
            yield _Tasks({task.remote(job, number): number for number in range(1, count + 1)}, print_line)
        finally:
            ray.shutdown()  # ends only what this process has started

    def _connect(self, print_line: PrintLine) -> None:
        import ray

        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        for tries_left in reversed(range(_TRIES if self.address == "local" else 1)):
            started, address = time.time(), self.address
            try:
                address = _find(self.address)
                _reach(address)
                ray.init(address=self.address, **options)
                return
            except (Exception, SystemExit) as error:  # ray raises nothing narrower, and may end the process itself
                where = repr(self.address) + (f" ({inline(address)})" if address != self.address else "")
                why = f"ray did not come up at address {where}: {_cause(error)}{_logged_since(started)}"
                if not tries_left:
                    raise RunError(f"{why}; {self._advice()}") from None
                ray.shutdown()
                print_line(f"{why}; tries again")

    def _advice(self) -> str:
        """Return what the user can try when ray cannot be reached at ``address``."""
        if self.address == "auto" and os.environ.get(_ADDRESS):
            return f"set {_ADDRESS} to a running cluster, or unset it"
        if self.address == "auto":
            return f"begin a cluster with 'ray start --head', or try it out with --launcher {self.trial}"
        if self.address == "local":
            return "begin a cluster with 'ray start --head' and leave out address=local"
        return f"try 'ray status --address {inline(self.address)}'"


def _find(address: str) -> str:
    """Return the address to connect to: ``address``, or what ray finds for ``auto``.

    For ``auto`` ray takes RAY_ADDRESS, else a cluster on this machine, else the one last used.
    """
    if address != "auto":
        return address
    if variable := os.environ.get(_ADDRESS):
        return variable
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # ray may move what it calls private; without it nothing is asked before ray.init
        return address
    return str(canonicalize_bootstrap_address(address) or address)


def _reach(address: str) -> None:
    """Raise OSError at once if nothing listens at HOST:PORT; ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_SECONDS * 5).close()


def _cause(error: BaseException) -> str:
    """Return the last line of the error's root cause; ray's own error texts quote whole tracebacks."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return inline(lines[-1].strip(" .") if lines else type(error).__name__)[:300]


def _logged_since(started: float) -> str:
    """Return the first error in the logs of ray's own processes written after ``started``, or an empty text."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "session_latest" / "logs"
    for path in (folder / name for name in _LOGS):
        try:
            if path.stat().st_mtime < started:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if error_line := _ERROR_LINE.search(text):
            return f"; ray's log {path} says: {inline(error_line[1])[:300]}"
    return ""


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
    """Wait for the task of worker ``number``; return a line about its failure, or an empty text."""
    import ray

    try:
        return str(ray.get(task))
    except ray.exceptions.RayError as error:
        reason = inline(" ".join(str(error).split()))[:300]
        return f"worker {number}, a ray task, was lost; its claims go back to the others: {reason}"
