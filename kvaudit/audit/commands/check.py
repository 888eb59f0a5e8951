"""``kvaudit check``: may this model be served with this KV setting?"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import (
    Command,
    Resume,
    RunOut,
    Threads,
    argument,
    expand_options,
    option,
    parse_pairs,
    print_line,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.facets import suite_of
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.provenance import MADE_UP, PILOT, PILOT_RESULT, all_looks, seconds_of
from kvaudit.core.text import clip, inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.runs.engine_slot import OnFirstAnswer
    from kvaudit.audit.runs.question import CheckPlan, ServingConfig
    from kvaudit.core.records import Item
    from kvaudit.core.spec import RunSpec
    from kvaudit.suites.sources import PublicRows

_FORMS = (
    "give one serving configuration: --engine NAME --kv SETTING, or --policy POLICY, or --reference URL#MODEL "
    "--candidate URL#MODEL"
)
_FULL_CACHE = "the full cache, before any engine is started"
_MOST_MINUTES = 10_000
_MORE_TIME = 3  # times as many minutes in the suggested continuation
_PROMPT_LENGTH, _ANSWER_LENGTH = 100, 160  # characters printed of the first prompt and its answers


@dataclass(frozen=True)
class CheckOptions:
    """The serving configuration to check, and how it is checked: the options of ``check`` and ``init check``."""

    engine: Annotated[str | None, option(help="Serving engine to check, such as openvino, vllm or llama.cpp.")] = None
    kv: Annotated[str | None, option(help="The engine's KV setting: u4, u8/u4, q8_0, fp8_e5m2, ...")] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE",
            help="Another setting of the engine; for servers key=VARIABLE, the environment variable with the API key. "
            "May be repeated.",
        ),
    ] = None
    python: Annotated[str | None, option(help="Python executable of the engine's environment.")] = None
    weights: Annotated[str | None, option(help="The model in the engine's own format.")] = None
    policy: Annotated[str | None, option(help="Instead of an engine: a policy of kvaudit's own cache.")] = None
    reference: Annotated[
        str | None, option(help="Instead of an engine: URL#MODEL of a running server without compression.")
    ] = None
    candidate: Annotated[str | None, option(help="With --reference: URL#MODEL of a compressing server.")] = None
    minutes: Annotated[float | None, option(help="Time limit for asking public rows. Default: 10.")] = None
    seed: Annotated[int | None, option(help="Seed of the order in which rows are asked.")] = None
    made_up: Annotated[bool, typer.Option("--made-up", help="Ask kvaudit's own questions, not public rows.")] = False
    sums: Annotated[
        bool, typer.Option("--sums", help="Ask school mathematics too (GSM8K), whose answers take most of the time.")
    ] = False
    agents: Annotated[
        bool,
        typer.Option("--agents", help="Ask tool calls too (BFCL), and orders hidden in tool results (InjecAgent)."),
    ] = False
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Ask after the longest conversation with which the model still refuses harm and helps otherwise.",
        ),
    ] = False
    data: Annotated[Path | None, option(help="Folder of public rows, instead of KVAUDIT_DATA.")] = None

    def plan(self, model: str, config: ServingConfig, length: int | None = None) -> CheckPlan:
        """Return which questions the check asks, after a conversation of ``length`` tokens if given.

        Raises SpecError for options that are out of range or contradict each other.
        """
        from kvaudit.audit.runs.question import MINUTES, SEED, plan_check
        from kvaudit.core.spec import EMBEDDED

        minutes, seed = MINUTES if self.minutes is None else self.minutes, SEED if self.seed is None else self.seed
        if not 0 < minutes <= _MOST_MINUTES:
            raise SpecError(f"--minutes is {minutes:g}, wanted a number above 0, at most {_MOST_MINUTES}")
        if seed < 0:
            raise SpecError(f"--seed is {seed}, wanted a whole number of at least 0")
        if self.long and (self.made_up or model == EMBEDDED):
            raise SpecError(
                "--long needs public rows, but the embedded model and --made-up ask made-up questions; leave out --long"
            )
        if self.long and self.agents:  # refused now, since trying the lengths takes minutes
            raise SpecError("--agents asks rows as they were published, --long after a conversation; leave out one")
        return plan_check(
            model,
            config,
            minutes=minutes,
            seed=seed,
            made_up=self.made_up,
            sums=self.sums,
            agents=self.agents,
            length=length,
        )

    def serving_config(self) -> ServingConfig:
        """Return the serving configuration that the options name; raise SpecError unless they name exactly one."""
        from kvaudit.audit.runs.question import endpoints_config, engine_config, policy_config

        servers = (self.reference, self.candidate)
        forms = [self.engine is not None, self.policy is not None, any(servers)]
        engine_options = [self.kv, self.python, self.weights, None if any(servers) else self.settings]
        if sum(forms) != 1 or (any(servers) and not all(servers)) or (any(engine_options) and self.engine is None):
            raise SpecError(_FORMS)
        settings = parse_pairs(self.settings or (), "--set")
        if self.engine is not None:
            return engine_config(self.engine, self.kv, settings, python=self.python, weights=self.weights)
        if self.policy is not None:
            return policy_config(self.policy)
        return endpoints_config(self.reference or "", self.candidate or "", settings)

    @property
    def flags(self) -> dict[str, bool]:
        """The options that take no value, as {name: whether it is set}."""
        return {"--made-up": self.made_up, "--sums": self.sums, "--agents": self.agents, "--long": self.long}

    def command(self, model: str) -> str:
        """Return the ``kvaudit check`` command with these options."""
        options = (
            ("--engine", self.engine),
            ("--kv", self.kv),
            *(("--set", text) for text in self.settings or ()),
            ("--python", self.python),
            ("--weights", self.weights),
            ("--policy", self.policy),
            ("--reference", self.reference),
            ("--candidate", self.candidate),
            ("--minutes", None if self.minutes is None else f"{self.minutes:g}"),
            ("--seed", self.seed),
            ("--data", self.data),
        )
        words = [word for name, value in options if value not in (None, "") for word in (name, str(value))]
        words += [name for name, is_set in self.flags.items() if is_set]
        return shlex.join(["kvaudit", "check", model, *words])

    def set_data_folder(self) -> None:
        """Let suites read public rows from the folder ``data``, if it is given."""
        from kvaudit.suites.sources import DATA_VARIABLE

        if self.data is None:
            return
        if not self.data.is_dir():
            raise DataError(f"--data is {str(self.data)!r}, which is no folder")
        os.environ[DATA_VARIABLE] = str(self.data)

    @property
    def spec_line(self) -> str:
        """The line of a spec that names the folder ``data``, so that later commands read the same rows."""
        return "" if self.data is None else f"data: {json.dumps(str(self.data))}\n"

    def fetch_command(self, absent: Iterable[PublicRows]) -> str:
        """Return the command that downloads public rows which are missing here; empty if none are."""
        folder = "" if self.data is None else f"KVAUDIT_DATA={shlex.quote(str(self.data))} "
        names = " ".join(dict.fromkeys(rows.name for rows in absent))
        return f"{folder}kvaudit data fetch {names}" if names else ""


@expand_options
def check(
    model: Annotated[str, argument(help="The model: its folder, a .gguf file, or embedded.")],
    *,
    options: CheckOptions,
    out: RunOut = None,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """May this model be served with this KV setting?

    Asks the same questions with and without the setting, until the answer is clear or ten minutes have passed, and
    prints the result in a dozen lines.
    Exits as `gate` does: 0 ship, 3 do not ship, 4, 5 and 6 cannot say. `kvaudit init check` writes the spec it runs.
    """
    with user_errors(*typed_command(resume=True)):
        raise typer.Exit(run_check(model, options, out, threads, resume=resume)[1])


def run_check(
    model: str, options: CheckOptions, out: Path | None, threads: int | None, *, resume: bool
) -> tuple[Path, int]:
    """Plan, run and print a check; return its folder and exit code."""
    check_no_server(model)  # before it is printed: an address may hold a password
    typer.echo(f"check: {inline(model)}")  # before imports that take seconds
    from kvaudit.audit.runs.folder import allow_more_minutes
    from kvaudit.audit.runs.launchers.local import usable_cores
    from kvaudit.audit.runs.question import parse_spec_text, run_name, spec_text

    options.set_data_folder()
    config = options.serving_config()
    _check_available(model, config)
    plan, console = options.plan(model, config), wide_console()
    from kvaudit.audit.commands.run import RunOptions, RunPlan, open_pipeline
    from kvaudit.audit.runs.stages.pilot import check_any_measurable

    out = out or Path("runs") / run_name(model, config)
    if options.long:
        length, minutes = _longest_length(model, config, plan, out, threads, resume=resume)
        plan = replace(options, minutes=minutes).plan(model, config, length)
    spec = parse_spec_text(spec_text(model, config, plan, options.command(model)) + options.spec_line)
    spec = allow_more_minutes(out, spec) if resume else spec
    for line in _plan_lines(spec, plan, options):
        print_line(console, line)
    pipeline, run = open_pipeline(
        RunPlan(spec, out, {}),
        RunOptions(threads=threads, anyway=True),  # if one suite has nothing to lose, the others decide
        threads or usable_cores(),
        resume=resume,
        on_first_answer=_print_first_answers(console, spec),
    )
    if run.provenance().get("finished"):  # it reads no rows any more, so their hashes are checked here
        plan.check_rows_unchanged(run)
    if plan.made_up:
        run.note(**{MADE_UP: ", ".join(suite.suite for suite in plan.made_up)})
        pipeline.work_on("pilot")
        check_any_measurable(run.provenance()[PILOT][PILOT_RESULT])
        pipeline.work_on("evaluate")
    else:
        pipeline.work_on("pilot", "evaluate")
    from kvaudit.reports.page.terminal import TerminalExtras, terminal_lines
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run, write_decided_run
    from kvaudit.reports.verdict.verdict import Status

    data = load_run(run.path)
    findings = write_decided_run(data, decide_run(data))
    note = " (made-up questions)" if plan.made_up else ""
    minutes_spent = seconds_of(all_looks(data.provenance)) / 60
    open_suites = {suite_of(d.suite) for d in findings.verdict.gated if d.status is Status.INCONCLUSIVE}
    # twice the time spent at least: the first look may have taken more than three times its limit
    longer = replace(options, minutes=max(_MORE_TIME * plan.minutes, math.ceil(2 * minutes_spent))).command(model)
    context = TerminalExtras(
        plan.not_asked,
        f"{longer} --out {shlex.quote(str(run.path))} --resume",
        note,
        options.fetch_command(plan.absent_rows(open_suites)),
    )
    for line in terminal_lines(findings, run.path, context):
        print_line(console, line)
    return run.path, findings.verdict.exit_code


def _longest_length(
    model: str, config: ServingConfig, plan: CheckPlan, out: Path, threads: int | None, *, resume: bool
) -> tuple[int, float]:
    """Return the longest conversation, in tokens, after which the model can still be tested, and the minutes left.

    Tries lengths, the short ones first, in the folder OUT-lengths (OUT is ``out``). It stops when the model no longer
    refuses harmful requests or no longer helps with harmless ones, or when the next try would end after half of the
    minutes. A check that is resumed keeps its length, whatever its minutes are now. Raises NotMeasurable if the model
    can be tested at no length.
    """
    from kvaudit.audit.commands.run import RunOptions, RunPlan, open_pipeline
    from kvaudit.audit.runs.folder import SPEC
    from kvaudit.audit.runs.launchers.local import usable_cores
    from kvaudit.audit.runs.lengths import (
        TriedLength,
        choose_length,
        length_of_check,
        length_spec,
        lengths_from,
        read_pilot,
    )
    from kvaudit.audit.runs.names import NAMES
    from kvaudit.audit.runs.question import CONTEXT_LENGTH, NEEDED
    from kvaudit.core.spec import parse_spec

    console, tried, seconds_spent = wide_console(), list[TriedLength](), 0.0
    suites = [suite for suite in plan.public if suite.name in NEEDED]
    resumed_length = length_of_check(out) if resume else None
    run_folder = out if out.name else out.resolve()  # the folder "." has no name
    lengths = run_folder.with_name(f"{run_folder.name}-lengths")
    for length in lengths_from(max(plan.length, CONTEXT_LENGTH)):
        folder = lengths / str(length)
        if resumed_length is not None and not (folder / SPEC).is_file():  # a resumed check tries no further length
            break
        spec = parse_spec(json.dumps(length_spec(model, config, suites, length, plan.seed)), "check", NAMES)
        run_options = RunOptions(threads=threads, anyway=True)
        try:
            pipeline, run = open_pipeline(
                RunPlan(spec, folder, {}), run_options, threads or usable_cores(), resume=resume
            )
        except SpecError as error:  # longer than the model's positions or a server's window
            if not tried:
                raise
            print_line(console, f"at {length} tokens: not tried: {error}")
            break
        pipeline.work_on("evaluate")
        tried.append(read_pilot(run.records, suites, length))
        print_line(console, tried[-1].line)
        seconds_spent += tried[-1].seconds
        if not tried[-1].is_measurable or 2 * tried[-1].seconds > 30 * plan.minutes - seconds_spent:
            break
    minutes = max(plan.minutes - seconds_spent / 60, plan.minutes / 2)
    return resumed_length or choose_length(tried, minutes), minutes


def check_no_server(model: str) -> None:
    """Raise an error if the model is the address of a server."""
    from kvaudit.core.endpoint import check_no_address

    check_no_address("model", model, "its folder, a .gguf file or embedded")


def _check_available(model: str, config: ServingConfig) -> None:
    """Raise DataError or SpecError if the model or the engine is missing, before anything is loaded."""
    from kvaudit.audit.engines import ENGINES, Condition
    from kvaudit.core.spec import EMBEDDED
    from kvaudit.core.spec_evaluate import EngineSpec

    path = Path(model)
    if model != EMBEDDED and not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise DataError(
            f"model {model!r} is no folder and no .gguf file; give the path of one, or {EMBEDDED} for the small model "
            "that ships"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise DataError(f"model {model!r} has no config.json; give a folder as transformers or a hub writes it")
    for condition in (config.named_reference, config.served):
        if isinstance(condition, Condition):
            engine_spec = EngineSpec.model_validate(config.engines.get(condition.engine, {}))
            ENGINES.get(condition.engine).check(dict(condition.settings), engine_spec)


def _print_first_answers(console: Console, spec: RunSpec) -> OnFirstAnswer:
    """Return a callback that prints how each answer begins; before the first answer it prints how its prompt begins."""
    from kvaudit.core.policy_names import condition_names

    names, printed = condition_names(spec.evaluate.references), set[str]()

    def print_answer(served: str, item: Item, answer: str) -> None:
        if not printed:
            print_line(console, f"first prompt: {clip(inline(item.messages[-1].content), _PROMPT_LENGTH)}")
            printed.add(item.item_id)
        name = _FULL_CACHE if served == DENSE_POLICY else names.get(served, served)
        print_line(console, f"  {name}: {clip(inline(answer), _ANSWER_LENGTH)}")

    return print_answer


def _plan_lines(spec: RunSpec, plan: CheckPlan, options: CheckOptions) -> Iterator[str]:
    """Yield lines that say what is compared, what is asked, and which public rows are missing."""
    from kvaudit.core.policy_names import condition_names

    references, names = spec.evaluate.references, condition_names(spec.evaluate.references)
    served = [*spec.gate.primary, *(references.get(policy, "none") for policy in spec.gate.primary)]
    yield f"compares {' against '.join(names.get(text, text) for text in served)}"
    if plan.made_up:
        suites = ", ".join(f"{suite.items} of {suite.suite}" for suite in plan.made_up)
        yield f"asks made-up questions, no public rows: {suites}"
    else:
        limits = ", ".join(f"{suite.name} {suite.margin:g}" for suite in plan.public)
        yield f"asks public rows until each is decided, at most {plan.minutes:g} minutes; may lose in points: {limits}"
    if command := options.fetch_command(plan.absent):
        yield f"some public rows are missing, so less is asked; fetch them with: {command}"


COMMAND = Command("check", group="Audit", order=2, call=check)
