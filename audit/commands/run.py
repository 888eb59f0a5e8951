"""``kvaudit run``, ``train`` and ``evaluate``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from audit.commands.gate_options import kept_gate
from audit.commands.plugins import load_plugins
from audit.core.errors import SpecError
from audit.core.provenance import PROVENANCE, read_provenance
from audit.core.spec import RunSpec, expand
from audit.core.spec_file import load_spec
from audit.runs.folder import SPEC, RunFolder, check_folder, open_run
from audit.runs.launchers.local import companions, idle_cores
from audit.runs.names import NAMES
from audit.runs.pipeline import Pipeline, prepare
from audit.sampling.model import EMBEDDED


@dataclass(frozen=True)
class Options:
    """How this process works; none of it changes what is measured, but ``limit``, which makes another spec."""

    limit: int | None = None
    threads: int | None = None
    workers: int | None = None
    plugins: tuple[Path, ...] = ()
    takeover: bool = False


def run_all(path: Path, out: Path | None, options: Options, *, resume: bool) -> None:
    """Every phase, then the verdict and where the report lies."""
    from audit.commands.report import write_checked

    asked = _asked(path, out, options)
    workers, threads = share(options, asked.spec, _begun_with(asked.folder))
    pipeline, run = _open(asked, options, threads, resume=resume)
    words = ["join", str(run.path), "--threads", "1", *(f"--plugin={plugin}" for plugin in options.plugins)]
    words += ["--takeover"] if options.takeover else []
    with companions(workers - 1, words, run.path / "logs", lambda line: _say(Console(stderr=True), line)):
        pipeline.train()
        pipeline.evaluate()
    write_checked(run.path)


def share(options: Options, spec: RunSpec, begun: int | None) -> tuple[int, int | None]:
    """Number of processes, and threads of each, None for the idle cores; ``begun`` is what the run began with.

    Rounding can depend on the number of threads, so a run keeps it: several processes have one each, and a run that
    has more goes on with one process.
    """
    threads = options.threads or begun
    if threads is not None and threads > 1:
        return 1, threads
    workers = options.workers or (idle_cores() if spec.model == EMBEDDED else 1)
    return workers, 1 if workers > 1 else threads


def _begun_with(folder: Path) -> int | None:
    """The threads that the run in ``folder`` began with, None for a new one."""
    return read_provenance(folder).get("threads") if os.path.isfile(folder / PROVENANCE) else None


def join_run(path: Path, options: Options) -> None:
    """Claim units of a run that exists until none is left; raises DataError where there is no run."""
    pipeline, _ = _open(_asked(path / SPEC, path, options), options, options.threads, resume=True)
    pipeline.train()
    pipeline.evaluate()


def train_only(path: Path, out: Path | None, options: Options, *, resume: bool) -> None:
    """The training phase; raises SpecError for a spec without one."""
    asked = _asked(path, out, options)
    if asked.spec.train is None:
        raise SpecError(f"{str(path)!r} has no train section; evaluate the base model with: kvaudit evaluate {path}")
    pipeline, run = _open(asked, options, options.threads, resume=resume)
    pipeline.train()
    _say(Console(), f"checkpoints: {run.path / 'checkpoints'}")


def evaluate_only(path: Path, out: Path | None, options: Options) -> None:
    """The evaluation phase; goes on with whatever the folder holds."""
    pipeline, run = _open(_asked(path, out, options), options, options.threads, resume=True)
    pipeline.evaluate()
    _say(Console(), f"records: {run.records}")


class _Asked(NamedTuple):
    spec: RunSpec
    folder: Path
    plugins: dict[str, str]  # file name -> sha256


def _asked(path: Path, out: Path | None, options: Options) -> _Asked:
    """Plug-ins first: the spec may name what they bring."""
    plugins = load_plugins(options.plugins)
    spec = load_spec(path, NAMES)
    if options.limit is not None:
        spec = spec.limited(options.limit)
    set_data(spec)
    return _Asked(spec, out or Path("runs") / spec.name, plugins)


def _open(asked: _Asked, options: Options, threads: int | None, *, resume: bool) -> tuple[Pipeline, RunFolder]:
    """Whatever is wrong with a new run comes up before its folder is claimed."""
    console = Console()
    begun = check_folder(asked.folder, asked.spec, resume=resume)
    kept = None if begun else kept_gate(asked.spec, NAMES)
    prepared = None if begun else prepare(asked.spec)
    run = open_run(asked.folder, asked.spec, resume=resume, kept=kept)
    _say(console, f"run {asked.spec.name} ({asked.spec.sha256[:12]}) in {run.path}")
    return Pipeline(run, console, threads, prepared, asked.plugins, takeover=options.takeover), run


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def set_data(spec: RunSpec) -> None:
    """Public suites find their rows through one variable, whoever names the folder."""
    if spec.data is not None:
        os.environ["KVAUDIT_DATA"] = expand("data", spec.data)
