"""The command line: parses options, calls ``audit.commands``, and turns what users can mend into one line.

Heavy imports wait inside the commands, so that ``--help`` answers at once.
Exit codes: 0 done (gate: PASS), 1 crash, 2 usage or input, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 looks exhausted,
130 interrupted.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from audit import __version__
from audit.errors import AuditError

USAGE, INTERRUPTED = 2, 130
_DISK_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT}

app = typer.Typer(
    name="kvaudit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure what KV-cache compression did to the alignment of a model.",
)
listing = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show what can be named in a spec.")
app.add_typer(listing, name="list")

SpecFile = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Out = Annotated[
    Path | None, typer.Option(help="The run folder; by default runs/<name of the spec>.", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder; starts it if there is none.")]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="At most this many items per suite; counts as another spec.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads of this process; default: what the run began with, or the idle cores. Above 1: no other workers.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes of one thread each that share the work; default: idle cores if the model is embedded, else 1. "
        "A run that began with more threads has one process.",
        show_default=False,
    ),
]
Plugins = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file with policies or suites.", show_default=False)
]


GateFile = Annotated[
    Path | None,
    typer.Option("--gate", help="A gate file; default: what the run's spec declares.", show_default=False),
]
Waivers = Annotated[
    Path | None, typer.Option(help="A file of waivers: who, why, until when, which cells.", show_default=False)
]
Look = Annotated[int | None, typer.Option(min=1, help="Which of the declared looks this is.", show_default=False)]
OnInconclusive = Annotated[
    str | None,
    typer.Option(help="block: exit with 4; warn: exit with 0 and a warning.", show_default=False),
]


@contextmanager
def user_errors(hint: str = "") -> Iterator[None]:
    """Print what the user can mend as one line on stderr and exit with 2; ctrl-C prints how to go on."""
    try:
        yield
    except AuditError as error:
        raise _failed(str(error)) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: {hint}" if hint else "interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f" {str(error.filename)!r}" if error.filename else ""
        more = f"; what is written stays, continue with: {hint}" if hint else ""
        raise _failed(f"cannot write{where} ({error.strerror}){more}") from None


def _failed(message: str) -> typer.Exit:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return typer.Exit(USAGE)


def _resume_hint(command: str, spec: Path, out: Path | None, limit: int | None) -> str:
    words = ["kvaudit", command, str(spec)]
    words += ["--out", str(out)] if out else []
    words += ["--limit", str(limit)] if limit else []
    return " ".join([*words, "--resume"])


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Measure what KV-cache compression did to the alignment of a model."""


@app.command()
def run(
    spec: SpecFile,
    *,
    out: Out = None,
    resume: Resume = False,
    limit: Limit = None,
    threads: Threads = None,
    workers: Workers = None,
    plugin: Plugins = None,
) -> None:
    """Train the arms, evaluate the grid, write the report. Exits with 0 once it is written; `gate` decides."""
    with user_errors(_resume_hint("run", spec, out, limit)):
        from audit.commands.run import Options, run_all

        options = Options(limit=limit, threads=threads, workers=workers, plugins=tuple(plugin or ()))
        run_all(spec, out, options, resume=resume)


@app.command()
def join(run: Run, threads: Threads = None, plugin: Plugins = None) -> None:
    """Help with a run that another process has started, until nothing of it is left to do."""
    with user_errors(f"kvaudit join {run}"):
        from audit.commands.run import Options, join_run

        join_run(run, Options(threads=threads, plugins=tuple(plugin or ())))


@app.command()
def train(
    spec: SpecFile,
    *,
    out: Out = None,
    resume: Resume = False,
    limit: Limit = None,
    threads: Threads = None,
    plugin: Plugins = None,
) -> None:
    """Only train the arms of a spec."""
    with user_errors(_resume_hint("train", spec, out, limit)):
        from audit.commands.run import Options, train_only

        options = Options(limit=limit, threads=threads, plugins=tuple(plugin or ()))
        train_only(spec, out, options, resume=resume)


@app.command()
def evaluate(
    spec: SpecFile, *, out: Out = None, limit: Limit = None, threads: Threads = None, plugin: Plugins = None
) -> None:
    """Only evaluate the grid of a spec, on the checkpoints that `train` left in the run folder."""
    with user_errors(_resume_hint("evaluate", spec, out, limit).removesuffix(" --resume")):
        from audit.commands.run import Options, evaluate_only

        evaluate_only(spec, out, Options(limit=limit, threads=threads, plugins=tuple(plugin or ())))


@app.command()
def report(
    run: Run,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    look: Look = None,
    on_inconclusive: OnInconclusive = None,
) -> None:
    """Write a run's report again from its records."""
    with user_errors(f"kvaudit report {run}"):
        from audit.commands.gate_options import GateOptions
        from audit.commands.report import write

        write(run, GateOptions(gate_file, waivers, look, on_inconclusive))


@app.command()
def gate(
    run: Run,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    look: Look = None,
    on_inconclusive: OnInconclusive = None,
    ledger: Annotated[
        Path | None, typer.Option(help="A drift ledger to append to: every drift from the pin.", show_default=False)
    ] = None,
) -> None:
    """Print a run's verdict; exits with 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 looks exhausted."""
    with user_errors(f"kvaudit gate {run}"):
        from audit.commands.gate import decide_run
        from audit.commands.gate_options import GateOptions

        raise typer.Exit(decide_run(run, GateOptions(gate_file, waivers, look, on_inconclusive), ledger))


@app.command("pin")
def pin_reference(
    checkpoint: Annotated[
        list[Path], typer.Argument(help="A finished checkpoint, or the folder of an arm.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("pin.json"),
) -> None:
    """Pin a reference by its weights, for the gates of every later candidate."""
    with user_errors():
        from audit.commands.pin import pin_checkpoints

        pin_checkpoints(checkpoint, out)


@app.command()
def adjudicate(
    run: Run,
    *,
    out: Annotated[Path, typer.Option(help="The sheet to write; its key is written beside it.")] = Path("sheet.csv"),
    read: Annotated[
        Path | None, typer.Option(help="A labelled sheet to read back, with its key beside it.", show_default=False)
    ] = None,
    concordant: Annotated[int, typer.Option(min=1, help="Random pairs of a cell that the judge calls equal.")] = 100,
    select: Annotated[
        list[str] | None,
        typer.Option(help="Only these gated cells: suite=, arm=, policy=, estimand=, context=.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write a blind sheet of a run's answers for a person to label; --read decides by its labels, exits like `gate`."""
    with user_errors():
        from audit.commands.adjudicate import read_sheet, write_sheet

        if read is not None:
            raise typer.Exit(read_sheet(run, read))
        write_sheet(run, out, tuple(select or ()), concordant=concordant, seed=seed)


@app.command()
def displace(
    run: Run,
    *,
    tokens: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="At most this many tokens of a checkpoint, policy and suite.")
    ] = 16384,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: what the run began with.", show_default=False)
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Measure how far next-token distributions moved on the reference's own answers; `report` shows it, no gate."""
    with user_errors(f"kvaudit displace {run}"):
        from audit.commands.displace import displace as measure

        measure(run, tokens=tokens, threads=threads, plugins=tuple(plugin or ()))


@app.command()
def compare(
    reference: Annotated[Path, typer.Argument(metavar="A", help="The reference's result file.", show_default=False)],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The candidate's result file.", show_default=False)],
    *,
    margin: Annotated[float, typer.Option(help="Largest tolerated drop, in percentage points.")] = 5.0,
    alpha: Annotated[float, typer.Option(help="One-sided level.")] = 0.05,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Which items share a template: a field of the file's rows, re:PATTERN of the item's name, or "
            "file:MAP.csv with item and cluster.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="The metric, where there are several; twice for two judges.", show_default=False),
    ] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="A score of 0 is desired.")] = False,
    select_a: Annotated[
        list[str] | None,
        typer.Option(help="Of a run: arm=, policy=, seed=, suite=, context=.", show_default=False),
    ] = None,
    select_b: Annotated[list[str] | None, typer.Option(help="The same for B.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the report.", show_default=False)] = None,
) -> None:
    """Compare two result files: kvaudit runs or records, lm-eval samples, Inspect logs, CSV. Exits like `gate`."""
    with user_errors():
        from audit.commands.compare import Asked, compare_files

        asked = Asked(
            margin,
            alpha,
            cluster,
            metrics=tuple(metric or ()),
            select_reference=tuple(select_a or ()),
            select_candidate=tuple(select_b or ()),
            lower_is_better=lower_is_better,
            out=out,
        )
        raise typer.Exit(compare_files(reference, candidate, asked))


@app.command()
def plan(
    *,
    margin: Annotated[float, typer.Option(help="Largest tolerated drop, in percentage points.")] = 5.0,
    discordance: Annotated[float, typer.Option(help="Share of items whose answers differ between the arms.")] = 0.1,
    clusters: Annotated[int, typer.Option(help="Templates.")] = 60,
    items_per_cluster: Annotated[int, typer.Option(help="Items of each template.")] = 5,
    samples: Annotated[int, typer.Option(help="Answers to each item.")] = 1,
    policies: Annotated[int, typer.Option(help="Serving policies.")] = 1,
    arms: Annotated[int, typer.Option(help="Checkpoints: the reference and its candidates, times their seeds.")] = 2,
    icc: Annotated[float, typer.Option(help="Correlation of paired differences inside a template.")] = 0.1,
    sampling_share: Annotated[
        float, typer.Option(help="Share of the variance that more samples shrink; 0 for greedy decoding.")
    ] = 0.5,
    drift: Annotated[float, typer.Option(help="Assumed true drift, in percentage points; a loss is below 0.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="One-sided level.")] = 0.05,
    power: Annotated[float, typer.Option(help="Wanted probability to pass.")] = 0.8,
    rate: Annotated[float | None, typer.Option(help="Measured answers per second.", show_default=False)] = None,
    suite: Annotated[str, typer.Option(help="The suite's name in the suggested spec.")] = "refusal",
    out: Annotated[Path | None, typer.Option(help="A file for the suggested spec.", show_default=False)] = None,
) -> None:
    """Before a run: its power, what it can detect, the items to buy, and how long that takes."""
    with user_errors():
        from audit.commands.plan import plan_run
        from reports.planner import Design

        design = Design(
            margin=margin / 100,
            discordance=discordance,
            clusters=clusters,
            items_per_cluster=items_per_cluster,
            samples=samples,
            sampling_share=sampling_share,
            policies=policies,
            arms=arms,
            correlation=icc,
            drift=drift / 100,
            alpha=alpha,
            power=power,
            rate=rate,
        )
        plan_run(design, suite, out)


@app.command("calibrate")
def calibrate_statistics(
    *,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer designs and draws: seconds instead of minutes.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("calibration.json"),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: the idle cores.", show_default=False)
    ] = None,
) -> None:
    """Simulate how often the gate and its statistics are wrong; exits with 3 when a figure misses what is asked."""
    with user_errors():
        from audit.commands.calibrate import run

        raise typer.Exit(run(fast=fast, seed=seed, out=out, workers=workers))


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="What to ask; '-' reads it from standard input.", show_default=False)],
    *,
    model: Annotated[str, typer.Option(help="A hub id, a folder, a .gguf file, or 'embedded'.")] = "embedded",
    policy: Annotated[str, typer.Option(help="For example snapkv:budget=96,window=8.")] = "none",
    system: Annotated[str | None, typer.Option(help="A system prompt.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    plugin: Plugins = None,
) -> None:
    """Answer one question with a compressed cache, and show what was kept."""
    with user_errors():
        from audit.commands.generate import Question, answer

        asked = Question(text, system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        answer(asked, model=model, dtype=dtype, policy=policy, plugins=plugin or [])


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="For example snapkv:budget=24,window=8.", show_default=False)],
    *,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt; a quarter more is decoded.")] = 64,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Default: the first that the policy governs.", show_default=False)
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="The KV head.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.", show_default=False)] = None,
    plugin: Plugins = None,
) -> None:
    """Draw what a policy keeps: which keys every query of a short text still sees."""
    with user_errors():
        from audit.commands.show import Asked, show_policy

        show_policy(Asked(policy, length, layer, head, svg, tuple(plugin or ())))


@app.command()
def verify(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="The folder of a finished checkpoint.", show_default=False)
    ] = None,
    *,
    rollouts: Annotated[
        str | None,
        typer.Option(help="How many of its rollouts, default all; or a file of rollouts.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that sampled a file.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as it was sampled.")] = "auto",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Nats on the worst token; default: the dtype's.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.", show_default=False),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Replay recorded rollouts; exits with 3 where their policy does not explain their log-probs."""
    with user_errors():
        from audit.commands.verify import Asked, verify_recorded

        asked = Asked(checkpoint, rollouts, model, dtype, tolerance, temperature, tuple(plugin or ()))
        raise typer.Exit(verify_recorded(asked))


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option(help="The folder for the model.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="0 gave the model that ships.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop the recipe early.", show_default=False)] = None,
) -> None:
    """Train the small model that ships with the package, from procedural text."""
    with user_errors(f"kvaudit pretrain --out {out}"):
        from audit.commands.pretrain import pretrain_model

        pretrain_model(out, seed=seed, steps=steps)


@listing.command("policies")
def list_policies(plugin: Plugins = None) -> None:
    """Compression policies: what each keeps, its fields, its paper."""
    with user_errors():
        from audit.commands.listing import policies

        policies(plugin or [])


@listing.command("suites")
def list_suites(plugin: Plugins = None) -> None:
    """Suites: what is asked, and where it comes from."""
    with user_errors():
        from audit.commands.listing import suites

        suites(plugin or [])


@listing.command("arms")
def list_arms() -> None:
    """Training arms: how rollouts are sampled and what the learner makes of them."""
    with user_errors():
        from audit.commands.listing import arms

        arms()


def main() -> None:
    """Entry point of the ``kvaudit`` command."""
    try:
        app()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()


if __name__ == "__main__":
    main()
