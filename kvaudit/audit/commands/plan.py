"""``kvaudit plan``: sample sizes before a run, for a planned design or from an earlier run; loads no model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option, print_line, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import at_length

if TYPE_CHECKING:
    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.family import GatedCell
    from kvaudit.reports.verdict.sizes import Design, Sizes
    from kvaudit.reports.verdict.verdict import Decision

_MARGIN = 5.0  # percentage points
_SUITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")


def plan(
    context: typer.Context,
    run: Annotated[Path | None, argument(help="A run: print how many templates would decide its cells.")] = None,
    *,
    margin: Annotated[
        float | None, option(help=f"Largest tolerated drop, in percentage points. Default: {_MARGIN:g}.")
    ] = None,
    ratio: Annotated[
        float | None,
        option(
            help="Instead of a margin: largest tolerated ratio of an unwanted event's rates, such as 1.1. Needs "
            "--happens."
        ),
    ] = None,
    happens: Annotated[float | None, option(help="With --ratio: the event's reference rate, such as 0.3.")] = None,
    discordance: Annotated[float, typer.Option(help="Share of items whose answers differ between arms.")] = 0.1,
    clusters: Annotated[int, typer.Option(help="Number of templates.")] = 60,
    items_per_cluster: Annotated[int, typer.Option(help="Items per template.")] = 5,
    samples: Annotated[int, typer.Option(help="Answers per item.")] = 1,
    seeds: Annotated[int, typer.Option(help="Paired training seeds, over which results are averaged.")] = 1,
    policies: Annotated[int, typer.Option(help="Number of serving policies.")] = 1,
    arms: Annotated[int, typer.Option(help="Number of arms: the reference and its candidates.")] = 2,
    icc: Annotated[float, typer.Option(help="Correlation of paired differences within a template.")] = 0.1,
    sampling_share: Annotated[float, typer.Option(help="Variance share that samples reduce; 0 if greedy.")] = 0.5,
    seed_share: Annotated[float, typer.Option(help="Share of the rest that seeds reduce; 0 without training.")] = 0.85,
    drift: Annotated[float, typer.Option(help="Assumed true drift, in percentage points; negative for a loss.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="One-sided significance level.")] = 0.05,
    power: Annotated[float, typer.Option(help="Wanted probability of a PASS.")] = 0.8,
    rate: Annotated[float | None, option(help="Measured answers per second, to estimate the time.")] = None,
    suite: Annotated[str, typer.Option(help="Name of the suite in the suggested spec.")] = "refusal",
    out: Annotated[Path | None, option(help="File to write the suggested spec part to.")] = None,
) -> None:
    """Say before a run how many items a verdict will take.

    Prints the chance of a PASS, the smallest drop that is found, what to add first, and the time. With RUN: how many
    templates would decide each of its cells; the options are for a plan without RUN.
    """
    with user_errors():
        if run is not None:
            _plan_next(run, _typed_options(context))
            return
        from kvaudit.reports.verdict.sizes import Design, with_ratio

        if margin is not None and ratio is not None:
            raise SpecError("--margin and --ratio are both given, but a design has one rule; leave out one")
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
        _plan_design(with_ratio(design, ratio, happens), suite, out)


def _typed_options(context: typer.Context) -> list[str]:
    """Return the names of the options typed on the command line, as --NAME; the argument RUN is left out."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name != "run"}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return [f"--{name.replace('_', '-')}" for name in typed]


def _plan_next(path: Path, typed_options: Sequence[str]) -> None:
    """Print a line for every gated cell of a run: its size, and how many templates would decide it.

    Raises SpecError if ``path`` is no folder, or if options of a plan without a run were typed.
    """
    if not path.is_dir():
        raise SpecError(
            f"{str(path)[:80]!r} is no folder of a finished run; plan takes no spec: leave it out and give the "
            "design by options"
        )
    if typed_options:
        raise SpecError(f"the sizes of RUN come from the run itself; leave out {', '.join(typed_options)}")
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run
    from kvaudit.reports.verdict.family import gated_cells

    findings = decide_run(load_run(path))
    cells = gated_cells(findings.drift, findings.rules)
    console = wide_console()
    if not cells:
        print_line(console, "the run has no gated cells, so there is nothing to decide")
    # decisions of cells that are not gated come after those of gated ones
    for cell, decision in zip(cells, findings.verdict.decisions, strict=False):
        print_line(console, _cell_line(findings, cell, decision))


def _cell_line(findings: Findings, cell: GatedCell, d: Decision) -> str:
    """Return a line on a gated cell: its verdict and size, and if INCONCLUSIVE how many items would decide it."""
    from kvaudit.reports.verdict.chance import templates_for
    from kvaudit.reports.verdict.verdict import Status

    policy = findings.comparison.labels.get(d.policy, d.policy)
    name = f"{d.suite} {at_length(d.context_tokens)}, {d.estimand} of {d.arm} under {policy}"
    if d.effect is None or d.margin is None:
        return f"{name}: {d.status.value}, no number of items is known to decide it"
    state = f"{name}: {d.status.value} with {d.effect.n_items} items in {d.effect.n_clusters} templates"
    if d.status is not Status.INCONCLUSIVE:
        return state
    counts = [templates_for(row.contrast, cell.margin_of(row) or 0.0, cell.ratio) for row in cell.rows]
    if None in counts:
        reason = "not even forty times as many templates would decide it"
        if any(len(row.contrast.sums) != 1 for row in cell.rows):
            reason = "for combined suites the number cannot be computed"
        elif d.ratio is not None and d.ratio.times.estimate is None:
            reason = "the event never happened with the reference, so no ratio can be shown"
        elif d.effect.estimate <= -d.margin:
            reason = "the drop is beyond the margin already"
        return f"{state}; {reason}"
    templates = max(count for count in counts if count is not None)
    items = round(templates * d.effect.n_items / d.effect.n_clusters)
    return (
        f"{state}; {items} items in {templates} templates would decide it, if nothing is lost and the suite has as many"
    )


def _plan_design(design: Design, suite: str, out: Path | None) -> None:
    """Print what a design can show, and a suggested size; write the size to ``out``."""
    from kvaudit.reports.verdict.sizes import needed_clusters, plan_sizes, spec_snippet

    if not _SUITE_NAME.fullmatch(suite):
        raise SpecError(f"--suite is {suite!r}, wanted the name of a suite")
    sizes = plan_sizes(design)
    clusters = needed_clusters(design)
    text = spec_snippet(design, clusters, suite)
    if out is not None:
        write_output(out, text)
    console = wide_console()
    for name, value in (*_figures(sizes), *_improvements(sizes), *_suggestion(sizes, clusters)):
        print_line(console, f"{name:<36}{value}")
    print_line(console, "")
    print_line(console, text.rstrip())
    if out is not None:
        print_line(console, f"written: {out}")


def _figures(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Yield name and value of every figure of a plan, such as the chance to pass, in the order they are printed."""
    from kvaudit.reports.sections.shared.words import percent
    from kvaudit.reports.verdict.sizes import smallest_margin, smallest_ratio

    d = sizes.design
    yield "planned", f"{d.items} items in {d.clusters} templates, {d.samples} answers each{_seeds_text(d)}"
    yield "design effect, standard error", f"{sizes.deff:.2f}, {100 * sizes.error:.2f} pp"
    limit = f"{100 * d.margin:g} pp" if d.ratio is None else f"{d.ratio:g} x"
    if d.ratio is not None:
        yield f"{limit} in percentage points", f"{100 * d.margin:.4g} pp at a rate of {percent(d.happens)}"
    yield f"chance to pass {limit}", _chance(sizes)
    if d.policies > 1:
        together = f"{percent(sizes.passes**d.policies)} if they were independent, at most {percent(sizes.passes)}"
        yield f"chance to pass all {d.policies} policies", together
    if d.ratio is None:
        yield "price of the template rule", _passing_bounds(sizes)
    impossible = f"more than the {percent(d.discordance)} of the items that differ can lose"
    yield (
        f"power to find a drop of {100 * d.margin:.4g} pp",
        impossible if sizes.detects is None else percent(sizes.detects),
    )
    if d.ratio is None:
        smallest = smallest_margin(d)
        yield f"margin passed with power {d.power:g}", "none" if smallest is None else f"{100 * smallest:.1f} pp"
    else:
        ratio = smallest_ratio(d)
        yield f"ratio passed with power {d.power:g}", "none" if ratio is None else f"{ratio:.2f} x"
    drop = f"{100 * sizes.detectable:.1f} pp"
    yield (
        f"drop found with power {d.power:g} (MDE)",
        f"{drop}, {impossible}" if sizes.detectable > d.discordance else drop,
    )
    yield "half-width of the 95 % interval", f"{100 * sizes.half_width:.1f} pp"
    yield "C_min", f"{sizes.required_clusters} templates for {limit} at alpha {d.alpha:g}"
    missed = f"missed with probability {100 * d.alpha:g} %"
    yield "blind spot", f"{percent(sizes.blind_spot)} of the templates could be broken and unsampled, {missed}"
    yield "answers", _answers(d)


def _seeds_text(d: Design) -> str:
    return f", {d.seeds} seeds" if d.seeds > 1 else ""


def _chance(sizes: Sizes) -> str:
    from kvaudit.reports.sections.shared.words import percent

    assumed = f"at a true drift of {100 * sizes.design.drift:g} pp"
    interval = f"the interval alone {percent(sizes.interval)}"
    if sizes.lowest_estimate is None:
        return f"0 %: fewer templates than C_min; {interval} {assumed}"
    return f"{percent(sizes.passes)} {assumed}; {interval}"


def _passing_bounds(sizes: Sizes) -> str:
    """Return a text with the lowest estimated drift that can pass, and the lowest true drift that likely passes.

    Likely means with the wanted probability of a PASS, the design's ``power``.
    """
    from kvaudit.reports.verdict.sizes import lowest_drift

    d, lowest = sizes.design, sizes.lowest_estimate
    if lowest is None:
        return "nothing passes with fewer templates than C_min"
    drift = lowest_drift(d)
    likely = "no true drift" if drift is None else f"a true drift of {100 * drift:+.1f} pp or more"
    return f"no estimate below {100 * lowest:+.1f} pp passes, {likely} passes with power {d.power:g}"


def _improvements(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Yield lines (heading, text) with the probability of a PASS: as planned, after each improvement, with more items.

    Improvements are more samples, seeds or templates. Each is added to those before it, the cheapest first: samples and
    seeds need no new texts. If there are too few templates for any PASS, yields the number needed instead.
    """
    from kvaudit.reports.sections.shared.words import percent
    from kvaudit.reports.verdict.sizes import larger_designs, with_more_items

    if sizes.lowest_estimate is None:
        yield "what decides first", f"templates: {sizes.required_clusters} of them, then samples, seeds and items"
        return
    yield "what decides, cheapest first", f"{percent(sizes.passes)} as planned"
    improvements = list(larger_designs(sizes.design))
    for number, step in enumerate(improvements):
        yield "", f"{percent(step.passes)} with {step.words}{' too' if number else ''}"
    if len(improvements) > 1:
        items = with_more_items(sizes.design)
        yield "", f"{percent(items.passes)} with {items.words} and nothing else"


def _answers(d: Design) -> str:
    """Return a text with the number of answers that a design takes, and the time if known."""
    from kvaudit.reports.verdict.sizes import SECONDS_PER_HOUR

    grid = f"{d.answers} ({d.arms} arms{_seeds_text(d)}, {d.policies} policies, {d.samples} answers to an item)"
    if d.seconds is None:
        return f"{grid}; --rate ANSWERS_PER_SECOND gives the time"
    return (
        f"{grid}: {d.seconds / 60:.1f} minutes, {d.seconds / SECONDS_PER_HOUR:.2f} GPU-hours at {d.rate:g} per second"
    )


def _suggestion(sizes: Sizes, clusters: int) -> Iterator[tuple[str, str]]:
    """Yield lines (heading, text) on the number of templates (``clusters``) that reaches the wanted power.

    All other sizes are as planned.
    """
    d = sizes.design
    larger = replace(d, clusters=clusters)
    verb = f"buy {clusters - d.clusters} more templates" if clusters > d.clusters else "enough"
    size = f"{larger.items} items in {clusters} templates ({sizes.required_clusters} for C_min)"
    yield f"to reach power {d.power:g} by templates", f"{verb}: {size}"
    yield "answers then", _answers(larger)


COMMAND = Command("plan", group="Look", order=4, call=plan)
