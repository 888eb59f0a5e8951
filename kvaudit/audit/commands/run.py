"""``kvaudit run``: the phases of a spec, all of them or one, alone or beside other processes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import (
    Anyway,
    LauncherText,
    Limit,
    Plugins,
    Resume,
    RunOut,
    SpecFile,
    Takeover,
    Threads,
    Workers,
    check_report_folder,
    print_line,
    set_data_folder,
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


HERE = "local"  # the launcher under which this process works too


@dataclass(frozen=True)
class RunOptions:
    """How this process works; none of it changes what is measured, but ``limit``, which makes another spec."""

    limit: int | None = None
    threads: int | None = None
    workers: int | None = None
    plugins: tuple[Path, ...] = ()
    takeover: bool = False
    launcher: str = HERE
    anyway: bool = False
    ask_refused: bool = False

    def __post_init__(self) -> None:
        """Raise SpecError for numbers that cannot be, as they may come from Python."""
        for name, number in (("limit", self.limit), ("threads", self.threads), ("workers", self.workers)):
            if number is not None and number < 1:
                raise SpecError(f"{name} is {number}, wanted a whole number of at least 1")


Only = Annotated[
    str | None,
    option(
        help="train: only train the arms; evaluate: only ask the checkpoints that are there. In this process alone."
    ),
]
Join = Annotated[
    bool,
    typer.Option("--join", help="SPEC is the folder of a run that another process has begun: help until it is done."),
]
AskRefused = Annotated[
    bool, typer.Option("--ask-refused", help="With --resume: ask anew what a server refused; answers stay.")
]
_PHASES = ("train", "evaluate")


def run(
    spec: SpecFile,
    *,
    out: RunOut = None,
    resume: Resume = False,
    only: Only = None,
    join: Join = False,
    limit: Limit = None,
    threads: Threads = None,
    workers: Workers = None,
    launcher: LauncherText = HERE,
    plugin: Plugins = None,
    takeover: Takeover = False,
    anyway: Anyway = False,
    ask_refused: AskRefused = False,
) -> None:
    """Run a spec: train its arms, ask every question, report.

    Exits with 0 once the report is written, whatever it says: `gate` decides. Exits with 6, before the grid is served,
    where the pilot of a suite has nothing to lose.
    """
    options = RunOptions(
        limit=limit,
        threads=threads,
        workers=workers,
        plugins=tuple(plugin or ()),
        takeover=takeover,
        launcher=launcher,
        anyway=anyway,
        ask_refused=ask_refused,
    )
    with user_errors(*_how_to_go_on(spec, out, limit, only=only, join=join)):
        if ask_refused and not resume:
            raise SpecError("--ask-refused is given without --resume: only a run that is there has refused answers")
        if join:
            of_a_new_run = {"--limit": limit, "--workers": workers, "--launcher": launcher != HERE, "--anyway": anyway}
            _refuse("--join", {"--only": only, "--out": out, "--resume": resume, **of_a_new_run})
            _join(spec, options)
        elif only is None:
            run_spec(spec, out, options, resume=resume)
        else:
            if only not in _PHASES:
                raise UnknownName("phase of --only", only, _PHASES)
            _refuse(f"--only {only}", {"--workers": workers, "--launcher": launcher != HERE})
            _work_on_phase(only, spec, out, options, resume=resume)


def _how_to_go_on(spec: Path, out: Path | None, limit: int | None, *, only: str | None, join: bool) -> list[str]:
    """The command that goes on where this one was stopped; joining and evaluating begin where the run is anyway."""
    if join:
        return ["kvaudit", "run", "--join", str(spec)]
    words = ["kvaudit", "run", *(["--only", only] if only else []), str(spec)]
    words += ["--out", str(out)] if out else []
    words += ["--limit", str(limit)] if limit else []
    return [*words, *([] if only == "evaluate" else ["--resume"])]


def _refuse(way: str, given: Mapping[str, object]) -> None:
    """Raise SpecError for an option that means nothing beside another."""
    for name, value in given.items():
        if value:
            raise SpecError(f"{name} is given beside {way}, where it means nothing; leave one of the two out")


def run_spec(spec: Path | Mapping[str, Any], out: Path | None, options: RunOptions, *, resume: bool) -> Path:
    """Every phase, then the verdict and where the report lies; returns the run's folder."""
    from rich.console import Console

    from kvaudit.audit.commands.judge import judge_all
    from kvaudit.audit.commands.report import write_report
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.runs.launchers.base import Job, parse_launcher
    from kvaudit.core.plugins import parse_plugin

    asked = _asked(spec, out, options)
    if _followed(asked, options):
        return asked.folder
    launcher = parse_launcher(options.launcher)
    launcher.check()
    begun_with = read_provenance(asked.folder).get("threads") if os.path.isfile(asked.folder / PROVENANCE) else None
    workers, threads = plan_workers(options, asked.spec, begun_with, here=launcher.here)
    for text in asked.spec.judge:
        parse_plugin(JUDGES, text).check()
    pipeline, run = opened_run(asked, options, threads, resume=resume, works=launcher.here, processes=workers)
    words = [*_joining(run.path, options), "--threads", "1", *(["--takeover"] if options.takeover else [])]
    job = Job(words, run.path / "logs", Path.cwd(), asked.spec.device in ("auto", "cuda"), _ranks(asked.spec))
    # this process is one of the workers, or only waits for them
    with launcher.start_workers(
        workers - launcher.here, job, lambda line: print_line(Console(stderr=True), line)
    ) as crew:
        if not launcher.here:
            crew.wait(lambda: pipeline.is_done)
            pipeline.check_pilot()
            pipeline.check_done()
        pipeline.work_on()
    write_report(run.path)
    judge_all(run.path, run.spec, asked.plugins)
    return run.path


def plan_workers(options: RunOptions, spec: RunSpec, begun: int | None, *, here: bool = True) -> tuple[int, int | None]:
    """Number of processes, and threads of each, None for the idle cores; ``begun`` is what the run began with.

    Rounding can depend on the number of threads, so a run keeps it: several processes have one each, and a run that
    has more goes on with one process. ``here``: whether this is one of them; where it is not, its cores say nothing.
    """
    from kvaudit.audit.runs.ranks import is_launched

    threads = options.threads or begun
    if _ranks(spec) > 1 and is_launched():  # other workers would take themselves for the same ranks
        if (options.workers or 1) > 1 or not here:
            raise SpecError(
                "the processes that were launched are the ranks of one worker; leave out --workers and --launcher, or "
                "let this command start the ranks"
            )
        return 1, threads
    if threads is not None and threads > 1:
        if here:
            return 1, threads
        raise SpecError(
            f"launcher {options.launcher!r}: workers have one thread each, the run has {threads}; go on with it here, "
            "or give another --out and no --threads"
        )
    # away from here nobody knows how many places there are
    workers = options.workers or (_places(spec) if here else 1)
    return workers, 1 if workers > 1 or not here else threads


def _places(spec: RunSpec) -> int:
    """How many processes this machine has a place for, a GPU or a core each; one of a model that needs all there is."""
    from kvaudit.audit.runs.launchers.local import idle_cores, visible_gpus
    from kvaudit.audit.sampling.model import EMBEDDED

    if spec.model == EMBEDDED:
        return max(idle_cores() // _ranks(spec), 1)
    return max(len(visible_gpus()) // _ranks(spec), 1) if spec.device in ("auto", "cuda") else 1


def _ranks(spec: RunSpec) -> int:
    return 1 if spec.train is None else spec.train.ranks


def _joining(folder: Path, options: RunOptions) -> list[str]:
    return ["run", "--join", str(folder), *(f"--plugin={plugin}" for plugin in options.plugins)]


def _followed(asked: AskedRun, options: RunOptions) -> bool:
    """Whether this process is another rank of what the first one trains; if so, its work is done with this."""
    from rich.console import Console

    from kvaudit.audit.runs.folder import open_run
    from kvaudit.audit.runs.pipeline import Pipeline
    from kvaudit.audit.runs.ranks import is_follower, join_ranks

    if not is_follower(_ranks(asked.spec)):
        return False
    with join_ranks(_ranks(asked.spec), any_gpu=asked.spec.device in ("auto", "cuda")) as ranks:
        run = open_run(asked.folder, asked.spec, resume=True)  # which the first has made before it comes here
        Pipeline(run, Console(), options.threads, plugins=asked.plugins).follow(ranks)
    return True


def _join(path: Path, options: RunOptions) -> None:
    """Claim units of a run that exists until none is left; raises DataError where there is no run."""
    from kvaudit.audit.runs.folder import SPEC

    if not os.path.exists(path / SPEC):
        raise DataError(
            f"{str(path)!r} holds no run that {socket.gethostname()!r} sees; begin one with: kvaudit run SPEC, or put "
            "it where every machine sees it"
        )
    asked = _asked(path / SPEC, path, options)
    if _followed(asked, options):
        return
    pipeline, _ = opened_run(asked, options, options.threads, resume=True)
    pipeline.work_on()


def _work_on_phase(only: str, path: Path, out: Path | None, options: RunOptions, *, resume: bool) -> None:
    """Training or evaluation alone; the latter goes on with whatever the folder holds."""
    from rich.console import Console

    asked = _asked(path, out, options)
    if only == "train":
        if _followed(asked, options):
            return
        if asked.spec.train is None:
            raise SpecError(
                f"{str(path)!r} has no train section; evaluate the base model with: kvaudit run --only evaluate {path}"
            )
        pipeline, run = opened_run(asked, options, options.threads, resume=resume)
        pipeline.work_on("train")
        print_line(Console(), f"checkpoints: {run.path / 'checkpoints'}")
        return
    pipeline, run = opened_run(asked, options, options.threads, resume=True)
    pipeline.work_on("pilot", "evaluate")
    print_line(Console(), f"records: {run.records}")


class AskedRun(NamedTuple):
    """A run that is to be begun or gone on with: its spec, its folder, and its plug-in files with their sha256."""

    spec: RunSpec
    folder: Path
    plugins: dict[str, str]


def _asked(source: Path | Mapping[str, Any], out: Path | None, options: RunOptions) -> AskedRun:
    """A spec, read from a file or given as its table. Plug-ins first: the spec may name what they bring."""
    if isinstance(source, Path):
        typer.echo(f"reading {hide_passwords(inline(str(source)))}")  # at once: what is imported next takes seconds
    from kvaudit.audit.runs.names import NAMES, load_plugins
    from kvaudit.core.spec import load_spec, parse_spec

    plugins = load_plugins(options.plugins)
    name, text = (str(source), None) if isinstance(source, Path) else ("SPEC", json.dumps(dict(source)))
    spec = load_spec(Path(name), NAMES) if text is None else parse_spec(text, name, NAMES)  # JSON is YAML
    if spec.probe is not None:
        raise SpecError(f"{name!r} is the plan of a probe; ask an endpoint: kvaudit probe {name} --base-url URL")
    if options.ask_refused and spec.evaluate.rounds is not None:
        raise SpecError(
            "--ask-refused is given for a run in rounds (evaluate.rounds), whose looks have counted what was refused; "
            "begin another run with --out"
        )
    if options.limit is not None:
        spec = spec.limited(options.limit)
    set_data_folder(spec)
    return AskedRun(spec, out or Path("runs") / spec.name, plugins)


def opened_run(
    asked: AskedRun,
    options: RunOptions,
    threads: int | None,
    *,
    resume: bool,
    works: bool = True,
    on_first_answer: OnFirstAnswer | None = None,
    processes: int = 1,
) -> tuple[Pipeline, RunFolder]:
    """Whatever is wrong with a new run comes up before its folder is claimed.

    A process that ``works`` no unit loads no model, so what is wrong with that comes up where units are worked on.
    ``on_first_answer``: see ``prepare_run``.
    """
    from rich.console import Console

    console = Console()
    print_line(console, f"run {asked.spec.name} ({asked.spec.sha256[:12]}) in {asked.folder}: loading the model")
    from kvaudit.audit.runs.folder import check_folder, open_run, utc_now
    from kvaudit.audit.runs.names import NAMES
    from kvaudit.audit.runs.pilot import with_kept_gate
    from kvaudit.audit.runs.pipeline import Pipeline
    from kvaudit.audit.runs.prepare import prepare_run
    from kvaudit.reports.verdict.rules import default_margins_line

    check_report_folder(asked.folder)
    begun = check_folder(asked.folder, asked.spec, resume=resume)
    kept = None if begun else gate_provenance(asked.spec, NAMES)
    prepared = None if begun or not works else prepare_run(asked.spec, on_first_answer=on_first_answer)
    # by the gate that the run will be held to
    if not begun:
        _check_possible(with_kept_gate(asked.spec, kept or {}), prepared, options)
    run = open_run(asked.folder, asked.spec, resume=resume, kept=kept)
    # the first time that it was said
    if options.anyway and ANYWAY not in run.provenance():
        run.note(**{ANYWAY: utc_now()})
    if kept and (line := default_margins_line(kept.get(DEFAULT_MARGINS, {}), asked.spec.gate.margins)):
        print_line(console, line)
    return (
        Pipeline(
            run,
            console,
            threads,
            prepared,
            asked.plugins,
            takeover=options.takeover,
            rank_command=_joining(run.path, options),
            processes=processes,
            asks_refused=options.ask_refused,
        ),
        run,
    )


def _check_possible(spec: RunSpec, prepared: Prepared | None, options: RunOptions) -> None:
    """Raise CannotPass for a spec whose gate its items cannot pass; a line each where it is to run anyway.

    ``--limit`` asks for a try of fewer items, which decides nothing and is told so.
    """
    from rich.console import Console

    from kvaudit.audit.runs.pilot import check_possible, impossible
    from kvaudit.audit.sampling.checkpoints import load_base_chat

    chat = load_base_chat(spec.model_path) if prepared is None else prepared.model.chat
    if not options.anyway and options.limit is None:
        check_possible(spec, chat.count_tokens)
        return
    for line in impossible(spec, chat.count_tokens):
        print_line(Console(stderr=True), f"cannot pass: {line}")


def gate_provenance(spec: RunSpec, names: PluginNames) -> dict[str, Any]:
    """What provenance keeps of the gate before a run begins: the gate file's text and hash, the pin, and the suites
    whose margin nobody declared.

    Raises SpecError and DataError where either cannot be used, before anything is computed. A pin is looked for beside
    the gate file that names it, or from here where the spec does.
    """
    from kvaudit.core.spec import expand, with_gate
    from kvaudit.reports.verdict.pin import load_pin
    from kvaudit.reports.verdict.rules import load_gate_file

    kept: dict[str, Any] = {}
    pin, folder, whole = spec.gate.pin, Path(), spec
    if spec.gate.gate_file is not None:
        path = Path(expand("gate.gate_file", spec.gate.gate_file))
        file = load_gate_file(path)
        whole = with_gate(spec, file, names)
        pin = whole.gate.pin
        folder = path.parent if "pin" in file.table else folder
        kept["gate_file"] = {"name": file.name, "sha256": file.sha256, "text": file.text}
    if whole.default_margins is not None and spec.probe is None:
        kept[DEFAULT_MARGINS] = {suite: names.kind(suite) for suite in whole.default_margins}
    if pin is not None:
        kept["gate_pin"] = json.loads(load_pin(folder / pin).to_json())
    return kept


COMMAND = Command(
    "run",
    group="Audit",
    order=3,
    call=run,
    old={"train": "run --only train", "evaluate": "run --only evaluate", "join": "run --join"},
)
