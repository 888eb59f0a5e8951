"""``kvaudit run``: run a spec or one of its phases, alone or with other processes."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvaudit.audit.commands.base import (
    Command,
    Limit,
    Plugins,
    Resume,
    RunOut,
    SpecFile,
    Threads,
    check_report_folder,
    expand_options,
    option,
    print_line,
    set_data_folder,
    typed_command,
    user_errors,
)
from kvaudit.core.errors import DataError, SpecError, UnknownName
from kvaudit.core.provenance import ANYWAY, DEFAULT_MARGINS, PROVENANCE, read_provenance
from kvaudit.core.text import hide_passwords, inline

if TYPE_CHECKING:
    from kvaudit.audit.runs.engine_slot import OnFirstAnswer
    from kvaudit.audit.runs.folder import RunFolder
    from kvaudit.audit.runs.pipeline import Pipeline
    from kvaudit.audit.runs.prepare import Prepared
    from kvaudit.core.spec import RunSpec
    from kvaudit.core.spec_parts import PluginNames

LOCAL = "local"  # the launcher under which this process is a worker too
_PHASES = ("train", "evaluate")


@dataclass(frozen=True)
class RunOptions:
    """The options of ``kvaudit run``; only ``limit``, the most items of a suite, changes what is measured."""

    limit: Limit = None
    threads: Threads = None
    workers: Annotated[
        int | None,
        option(
            min=1,
            help="Number of worker processes with one thread each. Default: one per idle core for the embedded model, "
            "else one per GPU. A run that started with more threads has one process.",
        ),
    ] = None
    launcher: Annotated[
        str,
        typer.Option(
            help="Where workers run: local, or NAME:option=value (see `kvaudit list launchers`). Other launchers than "
            "local need --workers, and this process only waits for them.",
        ),
    ] = LOCAL
    plugins: Plugins = None
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover", help="Take over units claimed by processes on other machines; only if those have ended."
        ),
    ] = False
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Run even if the gate cannot pass, or the pilot found that a suite has nothing to lose. Recorded in "
            "the run.",
        ),
    ] = False
    ask_refused: Annotated[
        bool,
        typer.Option(
            "--ask-refused", help="With --resume: ask again what a server refused to answer; keep the answers."
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raise SpecError for numbers below 1, which Python callers can pass."""
        for name, number in (("limit", self.limit), ("threads", self.threads), ("workers", self.workers)):
            if number is not None and number < 1:
                raise SpecError(f"{name} is {number}, wanted a whole number of at least 1")


@expand_options
def run(
    spec: SpecFile,
    *,
    out: RunOut = None,
    resume: Resume = False,
    only: Annotated[
        str | None,
        option(
            help="Do one phase, in this process alone. train: train the arms; evaluate: ask the checkpoints that exist."
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Help with a run that another process has started; SPEC is the folder of the run."),
    ] = False,
    options: RunOptions,
) -> None:
    """Run a spec: train its arms, ask every question, report.

    Exits with 0 when the report is written, whatever its verdict: see `gate`. Exits with 6 before the evaluation if
    the pilot finds that a suite has nothing to lose.
    """
    with user_errors(*typed_command(resume=not join and only != "evaluate")):
        if options.ask_refused and not resume:
            raise SpecError("--ask-refused needs --resume: only an existing run has refused answers")
        new_process = {"--workers": options.workers, "--launcher": options.launcher != LOCAL}
        if join:
            new_run = {"--limit": options.limit, **new_process, "--anyway": options.anyway}
            _check_unused("--join", {"--only": only, "--out": out, "--resume": resume, **new_run})
            _join_run(spec, options)
        elif only is None:
            run_spec(spec, out, options, resume=resume)
        else:
            if only not in _PHASES:
                raise UnknownName("phase of --only", only, _PHASES)
            _check_unused(f"--only {only}", new_process)
            _run_phase(only, spec, out, options, resume=resume)


def _check_unused(mode: str, options: Mapping[str, object]) -> None:
    """Raise SpecError if an option is given that has no effect with ``mode`` (an option such as --join).

    ``options`` maps names of options to their values.
    """
    for name, value in options.items():
        if value:
            raise SpecError(f"{name} has no effect with {mode}; leave one of the two out")


def run_spec(spec: Path | Mapping[str, Any], out: Path | None, options: RunOptions, *, resume: bool) -> Path:
    """Run every phase of a spec, write and print the report, and return the run's folder."""
    from rich.console import Console

    from kvaudit.audit.commands.grade import judge_with_spec
    from kvaudit.audit.commands.report import write_report
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.runs.launchers.base import Job, parse_launcher
    from kvaudit.core.plugins import parse_plugin

    plan = _load_plan(spec, out, options)
    launcher = parse_launcher(options.launcher)
    launcher.check()
    first_threads = read_provenance(plan.folder).get("threads") if os.path.isfile(plan.folder / PROVENANCE) else None
    workers, threads = plan_workers(options, plan.spec, first_threads, here=launcher.here)
    for name in plan.spec.judge:
        parse_plugin(JUDGES, name).check()
    pipeline, run = open_pipeline(plan, options, threads, resume=resume, works=launcher.here, processes=workers)
    words = ["run", "--join", str(run.path), *(f"--plugin={path}" for path in options.plugins or ()), "--threads", "1"]
    words += ["--takeover"] if options.takeover else []
    job = Job(words, run.path / "logs", Path.cwd(), plan.spec.device in ("auto", "cuda"), _gpus(plan.spec))
    # this process is one of the workers if they are local, else it only waits
    with launcher.start_workers(
        workers - launcher.here, job, lambda line: print_line(Console(stderr=True), line)
    ) as group:
        if not launcher.here:
            group.wait(lambda: pipeline.is_done)
            pipeline.check_pilot()
            pipeline.check_done()
        pipeline.work_on()
    write_report(run.path)
    judge_with_spec(run.path, run.spec, plan.plugins)
    return run.path


def plan_workers(
    options: RunOptions, spec: RunSpec, first_threads: int | None, *, here: bool = True
) -> tuple[int, int | None]:
    """Return the number of worker processes and the number of threads of each (None: one for each idle core).

    ``first_threads`` is the number with which the run started. Rounding can depend on it, so a run keeps it: with one
    thread it may have several processes, with more threads only one. ``here`` says whether this process is a worker, so
    that its cores count.
    """
    threads = options.threads or first_threads
    if threads is not None and threads > 1:
        if here:
            return 1, threads
        raise SpecError(
            f"launcher {options.launcher!r} gives each worker one thread, but the run has {threads}; continue without "
            "--launcher, or give another --out and no --threads"
        )
    workers = options.workers or (_local_workers(spec) if here else 1)  # the size of a cluster is unknown
    return workers, 1 if workers > 1 or not here else threads


def _local_workers(spec: RunSpec) -> int:
    """Return for how many workers this machine has idle cores (embedded model) or GPUs (other models), at least 1."""
    from kvaudit.audit.runs.launchers.local import idle_cores, visible_gpus
    from kvaudit.core.spec import EMBEDDED

    if spec.model == EMBEDDED:
        return idle_cores()
    return max(len(visible_gpus()) // _gpus(spec), 1) if spec.device in ("auto", "cuda") else 1


def _gpus(spec: RunSpec) -> int:
    """Return the number of GPUs that one worker needs: one, or as many as the largest engine needs."""
    from kvaudit.audit.engines.base import ENGINES, is_engine
    from kvaudit.core.policy_names import engine_name, engine_settings

    served = [policy for policy in spec.evaluate.policies if is_engine(engine_name(policy))]
    return max([1, *(ENGINES.get(engine_name(text)).gpus(engine_settings(text)) for text in served)])


def _join_run(path: Path, options: RunOptions) -> None:
    """Work on the units of an existing run until none is left; raise DataError if there is no run."""
    from kvaudit.audit.runs.folder import SPEC

    if not os.path.exists(path / SPEC):
        raise DataError(
            f"{str(path)!r} holds no run that {socket.gethostname()!r} can read; start one with: kvaudit run SPEC, or "
            "move it to a folder that all machines share"
        )
    plan = _load_plan(path / SPEC, path, options)
    pipeline, _ = open_pipeline(plan, options, options.threads, resume=True)
    pipeline.work_on()


def _run_phase(phase: str, path: Path, out: Path | None, options: RunOptions, *, resume: bool) -> None:
    """Run only one phase: ``train``, or ``evaluate``, which asks the checkpoints that exist in the run's folder."""
    from rich.console import Console

    plan = _load_plan(path, out, options)
    if phase == "train":
        if plan.spec.train is None:
            raise SpecError(
                f"{str(path)!r} has no train section; evaluate the base model with: kvaudit run --only evaluate "
                f"{shlex.quote(str(path))}"
            )
        pipeline, run = open_pipeline(plan, options, options.threads, resume=resume)
        pipeline.work_on("train")
        print_line(Console(), f"checkpoints: {run.path / 'checkpoints'}")
        return
    pipeline, run = open_pipeline(plan, options, options.threads, resume=True)
    pipeline.work_on("pilot", "evaluate")
    print_line(Console(), f"records: {run.records}")


class RunPlan(NamedTuple):
    """A run to start or continue: its spec, its folder, and its plug-in files with their sha256."""

    spec: RunSpec
    folder: Path
    plugins: dict[str, str]


def _load_plan(source: Path | Mapping[str, Any], out: Path | None, options: RunOptions) -> RunPlan:
    """Return the plan of a run, whose spec is a file or a mapping.

    The plug-ins are loaded first, because the spec may name them.
    """
    if isinstance(source, Path):
        typer.echo(f"reading {hide_passwords(inline(str(source)))}")  # before imports that take seconds
    from kvaudit.audit.runs.names import NAMES, load_plugins
    from kvaudit.core.spec import load_spec, parse_spec

    plugins = load_plugins(options.plugins or ())
    if isinstance(source, Path):
        name, spec = str(source), load_spec(source, NAMES)
    else:
        name, spec = "SPEC", parse_spec(json.dumps(dict(source)), "SPEC", NAMES)  # JSON is YAML
    if spec.probe is not None:
        raise SpecError(
            f"{name!r} is the plan of a probe; run it with: kvaudit probe {shlex.quote(name)} --base-url URL"
        )
    if options.ask_refused and spec.evaluate.rounds is not None:
        raise SpecError(
            "--ask-refused cannot be used for a run in rounds (evaluate.rounds), which has already counted the refused "
            "answers; start another run with --out"
        )
    if options.limit is not None:
        spec = spec.limited(options.limit)
    set_data_folder(spec)
    if options.launcher == LOCAL:
        _ = spec.model_path  # refuses a variable that is not set, before imports that take seconds
    return RunPlan(spec, out or Path("runs") / spec.name, plugins)


def open_pipeline(
    plan: RunPlan,
    options: RunOptions,
    threads: int | None,
    *,
    resume: bool,
    works: bool = True,
    on_first_answer: OnFirstAnswer | None = None,
    processes: int = 1,
) -> tuple[Pipeline, RunFolder]:
    """Check a run, open or create its folder, and return the pipeline that works on it, and the run folder.

    A new folder is created only after all checks. With ``works`` False this process works on no unit and loads no
    model; its workers check whether the model fits. ``on_first_answer`` is called with the beginning of an answer under
    every serving configuration. ``processes`` is the number of processes that work on the run on this machine.
    """
    from rich.console import Console

    console = Console()
    from kvaudit.audit.runs.folder import check_folder, open_run, utc_now

    check_report_folder(plan.folder)
    exists = check_folder(plan.folder, plan.spec, resume=resume)
    print_line(console, f"run {plan.spec.name} ({plan.spec.sha256[:12]}) in {plan.folder}: loading the model")
    from kvaudit.audit.runs.models import check_models_unchanged
    from kvaudit.audit.runs.names import NAMES
    from kvaudit.audit.runs.pilot import with_kept_gate
    from kvaudit.audit.runs.pipeline import Pipeline
    from kvaudit.audit.runs.prepare import check_ranks, prepare_run
    from kvaudit.reports.verdict.rules import default_margins_line

    if not exists:
        check_ranks(plan.spec)
    entries = None if exists else gate_provenance(plan.spec, NAMES)
    prepared = None if exists or not works else prepare_run(plan.spec, on_first_answer=on_first_answer)
    if not exists:
        _check_possible(with_kept_gate(plan.spec, entries or {}), prepared, options)
    run = open_run(plan.folder, plan.spec, resume=resume, entries=entries)
    if run.provenance().get("finished"):
        check_models_unchanged(run)
    if options.anyway and ANYWAY not in run.provenance():
        run.note(**{ANYWAY: utc_now()})
    gated = with_kept_gate(plan.spec, entries or {}).gate.margins
    if entries and (line := default_margins_line(entries.get(DEFAULT_MARGINS, {}), gated)):
        print_line(console, line)
    return (
        Pipeline(
            run,
            console,
            threads,
            prepared,
            plan.plugins,
            takeover=options.takeover,
            processes=processes,
            asks_refused=options.ask_refused,
        ),
        run,
    )


def _check_possible(spec: RunSpec, prepared: Prepared | None, options: RunOptions) -> None:
    """Raise CannotPass if the gate cannot pass with the spec's items; with --anyway or --limit only print why."""
    from rich.console import Console

    from kvaudit.audit.runs.pilot import check_possible, impossible_cells
    from kvaudit.audit.sampling.checkpoints import load_base_chat

    chat = load_base_chat(spec.model_path) if prepared is None else prepared.model.chat
    if not options.anyway and options.limit is None:
        check_possible(spec, chat.count_tokens)
        return
    for line in impossible_cells(spec, chat.count_tokens):
        print_line(Console(stderr=True), f"cannot pass: {line}")


def gate_provenance(spec: RunSpec, names: PluginNames) -> dict[str, Any]:
    """Return the entries about the gate that the provenance of a new run stores.

    They are the gate file, the pin (the hashes that the reference must have), and the suites whose margin is a default.
    The path of a pin is relative to the gate file that names it, or to the current folder if the spec names it. Raises
    SpecError and DataError for files that cannot be used.
    """
    from kvaudit.core.facets import suite_of
    from kvaudit.core.spec import expand, with_gate
    from kvaudit.reports.verdict.pin import load_pin
    from kvaudit.reports.verdict.rules import load_gate_file

    entries: dict[str, Any] = {}
    pin, folder, full_spec = spec.gate.pin, Path(), spec
    if spec.gate.gate_file is not None:
        path = Path(expand("gate.gate_file", spec.gate.gate_file))
        file = load_gate_file(path)
        full_spec = with_gate(spec, file, names, defaults=spec.default_margins or ())
        pin = full_spec.gate.pin
        folder = path.parent if "pin" in file.table else folder
        entries["gate_file"] = {"name": file.name, "sha256": file.sha256, "text": file.text}
    if spec.default_margins is not None and spec.probe is None:
        entries[DEFAULT_MARGINS] = {metric: names.kind(suite_of(metric)) for metric in spec.default_margins}
    if pin is not None:
        entries["gate_pin"] = json.loads(load_pin(folder / pin).to_json())
    return entries


COMMAND = Command(
    "run",
    group="Audit",
    order=3,
    call=run,
    former_names={"train": "run --only train", "evaluate": "run --only evaluate", "join": "run --join"},
)
