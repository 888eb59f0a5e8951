"""The commands that read, plan and decide; no model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from audit.commands.command_line import GateFile, OnInconclusive, Run, Waivers, user_errors

verdicts = typer.Typer(rich_markup_mode=None)


@verdicts.command()
def report(
    run: Run,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    on_inconclusive: OnInconclusive = None,
) -> None:
    """Write a run's report again from its records."""
    with user_errors(f"kvaudit report {run}"):
        from audit.commands.gate_options import GateOptions
        from audit.commands.report import write

        write(run, GateOptions(gate_file, waivers, on_inconclusive))


@verdicts.command()
def gate(
    run: Run,
    *,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    on_inconclusive: OnInconclusive = None,
) -> None:
    """Print a run's verdict; exits with 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID."""
    with user_errors(f"kvaudit gate {run}"):
        from audit.commands.gate import decide_run
        from audit.commands.gate_options import GateOptions

        raise typer.Exit(decide_run(run, GateOptions(gate_file, waivers, on_inconclusive)))


@verdicts.command("pin")
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


@verdicts.command()
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


@verdicts.command()
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


@verdicts.command()
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
        from reports.gate.sizes import Design

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


@verdicts.command("calibrate")
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
