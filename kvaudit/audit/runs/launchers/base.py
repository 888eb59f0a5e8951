"""The base class of launchers, which start the worker processes of a run.

Each worker is a ``kvaudit run --join``. Units are claimed in the run folder, so a launcher distributes no work and
collects no results: it starts processes, and reports each one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from kvaudit.core.plugins import Registry, parse_plugin

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What every worker runs: ``kvaudit ARGUMENTS`` in ``folder``, with its output in ``logs``/worker-N.log.

    If the run names no GPU (``any_gpu``), a launcher may give each worker any ``gpus`` GPUs.
    """

    arguments: Sequence[str]
    logs: Path
    folder: Path
    any_gpu: bool = True
    gpus: int = 1


class WorkerGroup(Protocol):
    """The running workers of a launcher."""

    def wait(self, done: Callable[[], bool]) -> None:
        """Return when every worker has ended, or when ``done`` returns True because no work is left."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts workers; subclass it as a frozen dataclass in a separate file, with a ``name``.

    The fields are its options: ``NAME:field=value,field=value`` in a command.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # where the workers run, for ``kvaudit list launchers``
    here: ClassVar[bool] = False  # whether the process that starts the workers is one of them
    trial: ClassVar[str] = ""  # name and options that work on one machine without GPU or cluster

    def check(self) -> None:
        """Raise RunError if a package or the cluster is missing; called before any work on the run."""

    def start_workers(self, count: int, job: Job, print_line: PrintLine) -> AbstractContextManager[WorkerGroup]:
        """Start ``count`` workers for the body of a with statement; print a line for each that fails."""
        raise NotImplementedError


LAUNCHERS: Registry[Launcher] = Registry("launcher", "kvaudit.audit.runs.launchers", Launcher)


def parse_launcher(text: str) -> Launcher:
    """Return the launcher of ``NAME`` or ``NAME:field=value,field=value``; raise SpecError for an unknown one."""
    return parse_plugin(LAUNCHERS, text)
