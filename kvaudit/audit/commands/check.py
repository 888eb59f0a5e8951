"""``kvaudit check``: may I serve this model with this KV setting?"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import Resume, RunOut, Threads, print_line, parse_pairs, user_errors, wide_console
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import clip, inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.runs.engine_slot import OnFirstAnswer
    from kvaudit.audit.runs.question import CheckPlan, ServingConfig
    from kvaudit.core.records import Item
    from kvaudit.core.spec import RunSpec

_FORMS = (
    "give one way of serving: --engine NAME --kv SETTING, or --policy POLICY, or --reference URL#MODEL --candidate "
    "URL#MODEL"
)
_FULL = "the full cache, before any engine is started"
_LONGEST = 10_000  # minutes
_MORE_TIME = 3  # times as many minutes, where they were too few
_PROMPT, _ANSWER = 100, 160  # characters that are shown of a first prompt and answer

CheckedModel = Annotated[str, argument(help="The model's folder, a .gguf file, or embedded.")]
EngineName = Annotated[str | None, option("--engine", help="The engine that serves it.")]
Kv = Annotated[str | None, option("--kv", help="Its KV setting: u4, u8/u4, q8_0, fp8_e5m2, ...")]
NamedSettings = Annotated[
    list[str] | None, option("--set", help="NAME=VALUE, another setting of the engine; key=VARIABLE of servers.")
]
EnginePython = Annotated[str | None, option("--python", help="The python of the engine's environment.")]
EngineWeights = Annotated[str | None, option("--weights", help="The model in the engine's own format.")]
PolicyText = Annotated[str | None, option("--policy", help="Or a policy of kvaudit's own cache.")]
ReferenceUrl = Annotated[str | None, option("--reference", help="Or two servers: URL#MODEL without compression ...")]
CandidateUrl = Annotated[str | None, option("--candidate", help="... and URL#MODEL with it.")]
Minutes = Annotated[float | None, option("--minutes", help="How long rows are asked; 10 by default.")]
Order = Annotated[int | None, option("--seed", help="Of the order in which rows are asked.")]
AsksMadeUp = Annotated[bool, typer.Option("--made-up", help="Ask what ships instead of public rows.")]
DataFolder = Annotated[Path | None, option("--data", help="The folder of public rows, instead of KVAUDIT_DATA.")]


@dataclass(frozen=True)
class CheckOptions:
    """What the command line says of the model and of how it is to be served."""

    model: str
    engine: str | None
    kv: str | None
    settings: list[str]
    python: str | None
    weights: str | None
    policy: str | None
    reference: str | None
    candidate: str | None
    data: Path | None
    minutes: float | None = None
    seed: int | None = None
    made_up: bool = False

    def check_model(self) -> None:
        """Raise SpecError for a server where the model is to be named."""
        from kvaudit.core.endpoint import check_no_address

        check_no_address("model", self.model, "its folder, a .gguf file or embedded")

    def plan(self, way: ServingConfig) -> CheckPlan:
        """What is asked; raises SpecError for a time that is none."""
        from kvaudit.audit.runs.question import MINUTES, SEED, plan_check

        minutes, seed = MINUTES if self.minutes is None else self.minutes, SEED if self.seed is None else self.seed
        if not 0 < minutes <= _LONGEST:
            raise SpecError(f"--minutes is {minutes:g}, wanted a number above 0, at most {_LONGEST}")
        if seed < 0:
            raise SpecError(f"--seed is {seed}, wanted a whole number from 0 on")
        return plan_check(self.model, way, minutes=minutes, seed=seed, made_up=self.made_up)

    def way(self) -> ServingConfig:
        """The one way of serving that is given; raises SpecError where there is none, or more than one."""
        self.check_model()
        from kvaudit.audit.runs.question import endpoints_config, engine_config, policy_config

        servers = (self.reference, self.candidate)
        forms = [self.engine is not None, self.policy is not None, any(servers)]
        of_an_engine = [self.kv, self.python, self.weights, *([] if any(servers) else self.settings)]
        if sum(forms) != 1 or (any(servers) and not all(servers)) or (any(of_an_engine) and self.engine is None):
            raise SpecError(_FORMS)
        named = parse_pairs(self.settings, "--set")
        if self.engine is not None:
            return engine_config(self.engine, self.kv, named, python=self.python, weights=self.weights)
        if self.policy is not None:
            return policy_config(self.policy)
        return endpoints_config(self.reference or "", self.candidate or "", named)


def check(
    model: CheckedModel,
    *,
    engine: EngineName = None,
    kv: Kv = None,
    settings: NamedSettings = None,
    python: EnginePython = None,
    weights: EngineWeights = None,
    policy: PolicyText = None,
    reference: ReferenceUrl = None,
    candidate: CandidateUrl = None,
    minutes: Minutes = None,
    seed: Order = None,
    made_up: AsksMadeUp = False,
    out: RunOut = None,
    resume: Resume = False,
    data: DataFolder = None,
    threads: Threads = None,
) -> None:
    """May this model be served with this KV setting?

    Asks the model with and without it until the answer is clear, at most ten minutes, and says it in a dozen lines.
    Exits as `gate` does: 0 ship, 3 do not ship, 4, 5 and 6 cannot say. The spec that it runs is written by: kvaudit
    init check.
    """
    asking = CheckOptions(
        *(model, engine, kv, settings or [], python, weights, policy, reference, candidate),
        data=data,
        minutes=minutes,
        seed=seed,
        made_up=made_up,
    )
    # how to go on with it, should it be stopped
    words = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
    with user_errors("kvaudit", *words):
        raise typer.Exit(check_served(asking, out, threads, resume=resume)[1])


def check_served(asking: CheckOptions, out: Path | None, threads: int | None, *, resume: bool) -> tuple[Path, int]:
    """Plan, run, say; where the check lies, and its exit code."""
    asking.check_model()  # before it is shown: an address may hold a password
    typer.echo(f"check: {inline(asking.model)}")  # at once: what is imported next takes seconds
    from kvaudit.audit.commands.run import AskedRun, RunOptions, opened_run
    from kvaudit.audit.runs.question import parse_spec_text, spec_text

    set_rows(asking)
    way = asking.way()
    _check_there(asking, way)
    plan = asking.plan(way)
    spec = parse_spec_text(spec_text(asking.model, way, plan, typed(asking)))
    console = wide_console()
    for line in _plan_lines(spec, plan):
        print_line(console, line)
    asked = AskedRun(spec, out or Path("runs") / spec.name, {})
    options = RunOptions(threads=threads, anyway=True)  # the rest decides where one suite has nothing to lose
    pipeline, run = opened_run(
        asked,
        options,
        threads or len(os.sched_getaffinity(0)),
        resume=resume,
        on_first_answer=_first_heard(console, spec),
    )
    pipeline.work_on("pilot", "evaluate")
    from kvaudit.reports.page.terminal import TerminalExtras, terminal_lines
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run, write_decided_run

    data = load_run(run.path)
    findings = write_decided_run(data, decide_run(data))
    made_up = " (made-up questions)" if plan.made_up else ""
    longer = replace(asking, minutes=_MORE_TIME * plan.minutes)
    beside = TerminalExtras(plan.not_asked, f"{typed(longer)} --out {shlex.quote(f'{run.path}-longer')}", made_up)
    for line in terminal_lines(findings, run.path, beside):
        print_line(console, line)
    return run.path, findings.verdict.exit_code


def _first_heard(console: Console, spec: RunSpec) -> OnFirstAnswer:
    """Shows the beginning of the first answers as they come."""
    from kvaudit.core.policy_names import condition_names

    names, asked = condition_names(spec.evaluate.references), set[str]()

    def heard(served: str, item: Item, answer: str) -> None:
        if not asked:
            print_line(console, f"first prompt: {clip(inline(item.messages[-1].content), _PROMPT)}")
            asked.add(item.item_id)
        name = _FULL if served == DENSE_POLICY else names.get(served, served)
        print_line(console, f"  {name}: {clip(inline(answer), _ANSWER)}")

    return heard


def set_rows(asking: CheckOptions) -> None:
    from kvaudit.suites.sources import DATA_VARIABLE

    if asking.data is None:
        return
    if not asking.data.is_dir():
        raise DataError(f"--data is {str(asking.data)!r}, which is no folder")
    os.environ[DATA_VARIABLE] = str(asking.data)


def _check_there(asking: CheckOptions, way: ServingConfig) -> None:
    """Raise for a model that is not there, and for an engine that is not, before anything is loaded."""
    from kvaudit.audit.engines import ENGINES, Condition
    from kvaudit.audit.sampling.model import EMBEDDED
    from kvaudit.core.spec_evaluate import EngineSpec

    path = Path(asking.model)
    if asking.model != EMBEDDED and not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise DataError(f"model {asking.model!r} is no folder and no .gguf file; give where it lies, or {EMBEDDED}")
    for served in (way.named_reference, way.served):
        if isinstance(served, Condition):
            part = EngineSpec.model_validate(way.engines.get(served.engine, {}))
            ENGINES.get(served.engine).check(dict(served.settings), part)


def _plan_lines(spec: RunSpec, plan: CheckPlan) -> Iterator[str]:
    """What is asked of whom, and which public rows are absent."""
    from kvaudit.core.policy_names import condition_names

    references, names = spec.evaluate.references, condition_names(spec.evaluate.references)
    served = [*spec.gate.primary, *(references.get(policy, "none") for policy in spec.gate.primary)]
    yield f"compares {' against '.join(names.get(text, text) for text in served)}"
    if plan.made_up:
        suites = ", ".join(f"{one.items} of {one.suite}" for one in plan.made_up)
        yield f"asks made-up questions, no public rows: {suites}"
    else:
        limits = ", ".join(f"{one.name} {one.margin:g}" for one in plan.endpoints)
        yield f"asks public rows until each is decided, at most {plan.minutes:g} minutes; may lose in points: {limits}"
    if plan.absent:
        absent = " ".join(one.name for one in plan.absent)
        yield f"public rows that are not here, with which it could ask more: kvaudit data fetch {absent}"


def typed(asking: CheckOptions) -> str:
    """The command that asks this, as it would be typed."""
    named = (
        ("--engine", asking.engine),
        ("--kv", asking.kv),
        *(("--set", text) for text in asking.settings),
        ("--policy", asking.policy),
        ("--reference", asking.reference),
        ("--candidate", asking.candidate),
    )
    words = [word for option, value in named if value is not None for word in (option, value)]
    words += [] if asking.minutes is None else ["--minutes", f"{asking.minutes:g}"]
    words += [] if asking.seed is None else ["--seed", str(asking.seed)]
    return shlex.join(["kvaudit", "check", asking.model, *words, *(["--made-up"] if asking.made_up else [])])


COMMAND = Command("check", group="Audit", order=2, call=check)
