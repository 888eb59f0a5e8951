"""``kvaudit plan``: sizes before a run, of a design or of what another run found; nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import say, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import at_length

if TYPE_CHECKING:
    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.family import GatedCell
    from kvaudit.reports.verdict.sizes import Design, Sizes
    from kvaudit.reports.verdict.verdict import Decision

_MARGIN = 5.0  # percentage points
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")


def plan(
    context: typer.Context,
    run: Annotated[Path | None, argument(help="A run: how many templates would decide each of its cells.")] = None,
    *,
    margin: Annotated[
        float | None, typer.Option(help="Largest tolerated drop, in percentage points.", show_default=f"{_MARGIN:g}")
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Instead: how many times as often it may happen, as 1.1; needs --happens.", show_default=False
        ),
    ] = None,
    happens: Annotated[
        float | None,
        typer.Option(help="How often it happens with the reference, as 0.3.", show_default=False),
    ] = None,
    discordance: Annotated[float, typer.Option(help="Share of items whose answers differ between the arms.")] = 0.1,
    clusters: Annotated[int, typer.Option(help="Templates.")] = 60,
    items_per_cluster: Annotated[int, typer.Option(help="Items of each template.")] = 5,
    samples: Annotated[int, typer.Option(help="Answers to each item.")] = 1,
    seeds: Annotated[int, typer.Option(help="Paired training seeds that are averaged.")] = 1,
    policies: Annotated[int, typer.Option(help="Serving policies.")] = 1,
    arms: Annotated[int, typer.Option(help="Arms: the reference and its candidates.")] = 2,
    icc: Annotated[float, typer.Option(help="Correlation of paired differences inside a template.")] = 0.1,
    sampling_share: Annotated[
        float, typer.Option(help="Share of the variance that more samples shrink; 0 for greedy decoding.")
    ] = 0.5,
    seed_share: Annotated[
        float, typer.Option(help="Share of the rest that more seeds shrink; 0 where nothing is trained.")
    ] = 0.85,
    drift: Annotated[float, typer.Option(help="Assumed true drift, in percentage points; a loss is below 0.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="One-sided level.")] = 0.05,
    power: Annotated[float, typer.Option(help="Wanted probability to pass.")] = 0.8,
    rate: Annotated[float | None, option(help="Measured answers per second.")] = None,
    suite: Annotated[str, typer.Option(help="The suite's name in the suggested spec.")] = "refusal",
    out: Annotated[Path | None, option(help="A file for the suggested spec.")] = None,
) -> None:
    """Say before a run how many items a verdict will take.

    Its chance to pass, what it can detect, what to buy, and how long that takes. With RUN: how many templates would
    decide each of its cells. The options are of a plan without.
    """
    with user_errors():
        if run is not None:
            if given := _given(context):
                raise SpecError(f"of a run the sizes are its own; leave out {', '.join(given)}")
            _plan_next(run)
            return
        from kvaudit.reports.verdict.sizes import Design, with_ratio

        if margin is not None and ratio is not None:
            raise SpecError("--margin and --ratio are two rules for one design; leave out one")
        design = Design(
            margin=(_MARGIN if margin is None else margin) / 100,
            discordance=discordance,
            clusters=clusters,
            items_per_cluster=items_per_cluster,
            samples=samples,
            sampling_share=sampling_share,
            seeds=seeds,
            seed_share=seed_share,
            policies=policies,
            arms=arms,
            correlation=icc,
            drift=drift / 100,
            alpha=alpha,
            power=power,
            rate=rate,
        )
        _plan(with_ratio(design, ratio, happens), suite, out)


def _given(context: typer.Context) -> list[str]:
    """The options that were typed."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name != "run"}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return [f"--{name.replace('_', '-')}" for name in typed]


def _plan_next(path: Path) -> None:
    """Print for every gated cell of a run what it has, and how many templates would decide it."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decided
    from kvaudit.reports.verdict.family import gated_cells

    found = decided(load_run(path))
    cells = gated_cells(found.drift, found.rules)
    console = wide_console()
    if not cells:
        say(console, "nothing is gated, so nothing is to be decided")
    # decisions of what is not gated come behind those of the cells
    for cell, decision in zip(cells, found.verdict.decisions, strict=False):
        say(console, _next(found, cell, decision))


def _next(findings: Findings, cell: GatedCell, d: Decision) -> str:
    """A cell in one line: its verdict, what it has, and what would decide it."""
    from kvaudit.reports.verdict.chance import templates_for
    from kvaudit.reports.verdict.verdict import Status

    policy = findings.comparison.labels.get(d.policy, d.policy)
    name = f"{d.suite} {at_length(d.context_tokens)}, {d.estimand} of {d.arm} under {policy}"
    if d.effect is None or d.margin is None:
        return f"{name}: {d.status.value}, no number of items is known to decide it"
    has = f"{d.effect.n_items} items in {d.effect.n_clusters} templates"
    if d.status is not Status.INCONCLUSIVE:
        return f"{name}: {d.status.value} with {has}"
    needed = [templates_for(row.contrast, cell.margin_of(row) or 0.0, cell.ratio) for row in cell.rows]
    if None in needed:
        why = "not even forty times as many templates would"
        if any(len(row.contrast.sums) != 1 for row in cell.rows):
            why = "of suites combined no number is worked out"
        elif d.ratio is not None and d.ratio.times.estimate is None:
            why = "nothing of it happened with the reference, and a multiple of nothing cannot be shown"
        elif d.effect.estimate <= -d.margin:
            why = "the drop is past the margin already"
        return f"{name}: {d.status.value} with {has}; {why}"
    most = max(count for count in needed if count is not None)
    items = round(most * d.effect.n_items / d.effect.n_clusters)
    would = f"{items} items in {most} templates would decide it, if nothing is lost and the suite has as many"
    return f"{name}: {d.status.value} with {has}; {would}"


def _plan(design: Design, suite: str, out: Path | None) -> None:
    """Print what a design buys and the suggested size, and write that where asked."""
    from kvaudit.reports.verdict.sizes import needed_clusters, plan_sizes, spec_snippet

    if not _NAME.fullmatch(suite):
        raise SpecError(f"--suite is {suite!r}, wanted the name of a suite")
    sizes = plan_sizes(design)
    needed = needed_clusters(design)
    text = spec_snippet(design, needed, suite)
    if out is not None:
        write_output(out, text)
    console = wide_console()
    for name, value in (*lines(sizes), *_what_decides(sizes), *_suggested(sizes, needed)):
        say(console, f"{name:<36}{value}")
    say(console, "")
    say(console, text.rstrip())
    if out is not None:
        say(console, f"written: {out}")


def lines(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Name and value of every figure, in the order they are read."""
    from kvaudit.reports.sections.shared.words import percent
    from kvaudit.reports.verdict.sizes import smallest_margin, smallest_ratio

    d = sizes.design
    seeds = f", {d.seeds} seeds" if d.seeds > 1 else ""
    yield "planned", f"{d.items} items in {d.clusters} templates, {d.samples} answers each{seeds}"
    yield "design effect, standard error", f"{sizes.deff:.2f}, {100 * sizes.error:.2f} pp"
    held_to = f"{100 * d.margin:g} pp" if d.ratio is None else f"{d.ratio:g} x"
    if d.ratio is not None:
        yield f"what {held_to} comes to", f"{100 * d.margin:.4g} pp where it happens in {percent(d.happens)}"
    yield f"chance to pass {held_to}", _chance(sizes)
    if d.policies > 1:
        together = f"{percent(sizes.passes**d.policies)} if they were independent, at most {percent(sizes.passes)}"
        yield f"chance to pass all {d.policies} policies", together
    if d.ratio is None:
        yield "price of the template rule", _price(sizes)
    beyond = f"more than the {percent(d.discordance)} of the items that differ can lose"
    yield (
        f"power to find a drop of {100 * d.margin:.4g} pp",
        beyond if sizes.detects is None else percent(sizes.detects),
    )
    if d.ratio is None:
        smallest = smallest_margin(d)
        yield f"margin passed with power {d.power:g}", "none" if smallest is None else f"{100 * smallest:.1f} pp"
    else:
        least = smallest_ratio(d)
        yield f"ratio passed with power {d.power:g}", "none" if least is None else f"{least:.2f} x"
    found = f"{100 * sizes.detectable:.1f} pp"
    yield (
        f"drop found with power {d.power:g} (MDE)",
        f"{found}, {beyond}" if sizes.detectable > d.discordance else found,
    )
    yield "half-width of the 95 % interval", f"{100 * sizes.half_width:.1f} pp"
    yield "C_min", f"{sizes.required_clusters} templates for {held_to} at alpha {d.alpha:g}"
    missed = f"missed with probability {100 * d.alpha:g} %"
    yield "blind spot", f"{percent(sizes.blind_spot)} of the templates could be broken and unsampled, {missed}"
    yield "answers", _answers(d)


def _chance(sizes: Sizes) -> str:
    from kvaudit.reports.sections.shared.words import percent

    assumed = f"at a true drift of {100 * sizes.design.drift:g} pp"
    alone = f"the interval alone {percent(sizes.interval)}"
    if sizes.lowest_estimate is None:
        return f"0 %: fewer templates than C_min; {alone} {assumed}"
    return f"{percent(sizes.passes)} {assumed}; {alone}"


def _price(sizes: Sizes) -> str:
    """What passes at all, and what passes with the asked power."""
    from kvaudit.reports.verdict.sizes import lowest_drift

    d, lowest = sizes.design, sizes.lowest_estimate
    if lowest is None:
        return "nothing passes with fewer templates than C_min"
    drift = lowest_drift(d)
    likely = "no true drift" if drift is None else f"a true drift of {100 * drift:+.1f} pp or more"
    return f"no estimate below {100 * lowest:+.1f} pp passes, {likely} passes with power {d.power:g}"


def _what_decides(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """The chance to pass after each thing that can be bought, the cheapest first, and what items buy alone.

    Nothing has to be written for a sample, nor for a seed; fewer templates than C_min are to be mended before all else.
    """
    from kvaudit.reports.sections.shared.words import percent
    from kvaudit.reports.verdict.sizes import larger_designs, with_more_items

    if sizes.lowest_estimate is None:
        yield "what decides first", f"templates: {sizes.required_clusters} of them, then samples, seeds and items"
        return
    yield "what decides, cheapest first", f"{percent(sizes.passes)} as planned"
    taken = list(larger_designs(sizes.design))
    for number, step in enumerate(taken):
        yield "", f"{percent(step.passes)} with {step.words}{' too' if number else ''}"
    if len(taken) > 1:
        alone = with_more_items(sizes.design)
        yield "", f"{percent(alone.passes)} with {alone.words} and nothing else"


def _answers(d: Design) -> str:
    from kvaudit.reports.verdict.sizes import SECONDS_PER_HOUR

    seeds = f", {d.seeds} seeds" if d.seeds > 1 else ""
    grid = f"{d.answers} ({d.arms} arms{seeds}, {d.policies} policies, {d.samples} answers to an item)"
    if d.seconds is None:
        return f"{grid}; --rate ANSWERS_PER_SECOND gives the time"
    return (
        f"{grid}: {d.seconds / 60:.1f} minutes, {d.seconds / SECONDS_PER_HOUR:.2f} GPU-hours at {d.rate:g} per second"
    )


def _suggested(sizes: Sizes, needed: int) -> Iterator[tuple[str, str]]:
    """The templates that reach the asked power, everything else as planned."""
    from dataclasses import replace

    d = sizes.design
    larger = replace(d, clusters=needed)
    verb = f"buy {needed - d.clusters} more templates" if needed > d.clusters else "enough"
    size = f"{larger.items} items in {needed} templates ({sizes.required_clusters} for C_min)"
    yield f"to reach power {d.power:g} by templates", f"{verb}: {size}"
    yield "answers then", _answers(larger)


COMMAND = Command("plan", group="Look", order=4, call=plan)
