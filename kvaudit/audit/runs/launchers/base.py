"""The contract of a launcher: who starts the processes that work on a run.

Every one of them is a ``kvaudit run --join``. Units are claimed in the run folder, so a launcher carries no work and no
results: it starts processes, and says of each that ended when it should not have.
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
    """What every worker does: ``kvaudit WORDS`` in ``folder``, what it prints in ``logs``/worker-N.log.

    ``any_gpu``: it may have whichever GPU the launcher gives it, ``gpus`` of them; the run names none.
    """

    arguments: Sequence[str]
    logs: Path
    folder: Path
    any_gpu: bool = True
    gpus: int = 1


class WorkerGroup(Protocol):
    """Workers under way."""

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once every worker has ended, or nothing is left to do and ``done`` says so."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts workers. Subclass as a frozen dataclass in a file of its own, with a ``name``.

    Fields are its options: ``NAME:field=value,field=value`` in a command.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # where the workers are, for ``kvaudit list launchers``
    here: ClassVar[bool] = False  # whether the process that starts the others is one of them
    trial: ClassVar[str] = ""  # with these options it works on one machine without GPU or cluster

    def check(self) -> None:
        """Raise RunError where a package or the cluster is missing, before a run folder is claimed."""

    def start_workers(self, count: int, job: Job, say: PrintLine) -> AbstractContextManager[WorkerGroup]:
        """``count`` workers on a job while the body works; ``say`` hears one line of each that failed."""
        raise NotImplementedError


LAUNCHERS: Registry[Launcher] = Registry("launcher", "kvaudit.audit.runs.launchers", Launcher)


def parse_launcher(text: str) -> Launcher:
    """The launcher of ``NAME`` or ``NAME:field=value,field=value``; raises SpecError for what it does not know."""
    return parse_plugin(LAUNCHERS, text)
