"""``kvaudit plan``: sizes before a run; nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from audit.commands.command_line import say, user_errors, wide_console
from audit.core.errors import SpecError
from audit.core.files import write_output

if TYPE_CHECKING:
    from rich.console import Console

    from reports.gate.sizes import Design, Sizes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")


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
        _plan(design, suite, out)


def _plan(design: Design, suite: str, out: Path | None) -> None:
    """Print what a design buys and the suggested size, and write that where asked."""
    from reports.gate.sizes import plan_sizes, snippet

    if not _NAME.fullmatch(suite):
        raise SpecError(f"--suite is {suite!r}, wanted the name of a suite")
    sizes = plan_sizes(design)
    text = snippet(sizes, suite)
    if out is not None:
        write_output(out, text)
    console = wide_console()
    for name, value in lines(sizes):
        say(console, f"{name:<36}{value}")
    _suggest(console, sizes, text, out)


def lines(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Name and value of every figure, in the order they are read."""
    from reports.page.words import percent

    d = sizes.design
    yield "planned", f"{d.items} items in {d.clusters} templates, {d.samples} answers each"
    yield "design effect, standard error", f"{sizes.deff:.2f}, {100 * sizes.error:.2f} pp"
    yield f"power to pass {100 * d.margin:g} pp", _chance(sizes)
    if d.policies > 1:
        together = f"{percent(sizes.passes**d.policies)} if they were independent, at most {percent(sizes.passes)}"
        yield f"power to pass all {d.policies} policies", together
    beyond = f"more than the {percent(d.discordance)} of the items that differ can lose"
    yield f"power to find a drop of {100 * d.margin:g} pp", beyond if sizes.detects is None else percent(sizes.detects)
    smallest = f"{100 * sizes.smallest_margin:.1f} pp" if sizes.smallest_margin else "any, the gain is large enough"
    yield f"margin passed with power {d.power:g}", smallest
    found = f"{100 * sizes.detectable:.1f} pp"
    yield f"drop found with power {d.power:g} (MDE)", f"{found}, {beyond}" if _beyond(sizes) else found
    yield "half-width of the 95 % interval", f"{100 * sizes.half_width:.1f} pp"
    yield "C_min", f"{sizes.required_clusters} templates for {100 * d.margin:g} pp at alpha {d.alpha:g}"
    yield "blind spot", f"{percent(sizes.blind_spot)} of the templates could be broken and entirely unsampled"
    yield "answers", _answers(sizes, sizes.answers, sizes.seconds)


def _beyond(sizes: Sizes) -> bool:
    return sizes.detectable > sizes.design.discordance


def _chance(sizes: Sizes) -> str:
    from reports.page.words import percent

    assumed = f"at a true drift of {100 * sizes.design.drift:g} pp"
    if sizes.passes < sizes.power:
        return (
            f"0 %: fewer templates than C_min; the interval alone passes {percent(sizes.power)} of the time {assumed}"
        )
    return f"{percent(sizes.passes)} {assumed}"


def _answers(sizes: Sizes, count: int, seconds: float | None) -> str:
    from reports.gate.sizes import SECONDS_PER_HOUR

    d = sizes.design
    grid = f"{count} ({d.arms} checkpoints, {d.policies} policies, {d.samples} answers to an item)"
    if seconds is None:
        return f"{grid}; --rate ANSWERS_PER_SECOND gives the time"
    return f"{grid}: {seconds / 60:.1f} minutes, {seconds / SECONDS_PER_HOUR:.2f} GPU-hours at {d.rate:g} per second"


def _suggest(console: Console, sizes: Sizes, text: str, out: Path | None) -> None:
    d = sizes.design
    buy = sizes.needed_clusters - d.clusters
    items = sizes.needed_clusters * d.items_per_cluster
    verb = f"buy {buy} more templates" if buy > 0 else "enough"
    say(
        console,
        f"{'to reach power ' + format(d.power, 'g'):<36}{verb}: {items} items in {sizes.needed_clusters} templates "
        f"({sizes.needed_items} items for the power, {sizes.required_clusters} templates for C_min)",
    )
    say(console, f"{'answers then':<36}{_answers(sizes, sizes.needed_answers, sizes.needed_seconds)}")
    say(console, "")
    say(console, text.rstrip())
    if out is not None:
        say(console, f"written: {out}")
