"""``kvaudit card``: the disclosure section of a model card, written from a run or held against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import (
    GateFile,
    OnInconclusive,
    Run,
    Waivers,
    say,
    say_unfinished,
    user_errors,
    wide_console,
)
from kvaudit.audit.commands.report import asked_of
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.provenance import check_checkpoints
from kvaudit.core.text import clip, inline
from kvaudit.reports.page.model_card import placed, read_card, section_of

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.page import Page
    from kvaudit.reports.verdict.rules import GateOverrides

_DIFFERS = 3
_LONGEST_ENTRY = 300  # characters of a recipe's entry; the files hold all of it
Into = Annotated[Path | None, option(help="The model card to put the section into.")]
Hub = Annotated[Path | None, option(help="A model repository: write its .eval_results, as the hub reads them.")]
Benchmark = Annotated[str | None, typer.Option(help="The benchmark on the hub that --hub writes results of.")]
OneArm = Annotated[
    str | None, typer.Option(help="Tell of this arm, as the cards of its checkpoints do; --hub wants one of several.")
]
CardToCheck = Annotated[Path | None, option(help="The model card to hold against the run.")]


Other = Annotated[Path | None, argument(help="With --recipe: another run, to print what changed.")]
RecipeFlag = Annotated[
    bool,
    typer.Option(
        "--recipe",
        help="Instead: print what the run's checkpoints were made of: reward, constitution, data, policy, refusal set. "
        "RUN may be its recipe.json.",
    ),
]


def card(
    run: Run,
    other: Other = None,
    *,
    into: Into = None,
    check: CardToCheck = None,
    hub: Hub = None,
    benchmark: Benchmark = None,
    arm: OneArm = None,
    gate_file: GateFile = None,
    waivers: Waivers = None,
    on_inconclusive: OnInconclusive = None,
    recipe: RecipeFlag = False,
) -> None:
    """Write a run's disclosure for a model card, or check one.

    Without an option the disclosure is printed. Exits with 3 where a card says other than its run.
    """
    with user_errors("kvaudit", "card", run):
        if recipe or other is not None:
            if not recipe or any((into, check, hub, benchmark, arm, gate_file, waivers, on_inconclusive)):
                raise SpecError("two runs are compared by --recipe, which stands alone; leave out the other options")
            print_recipe(run, other)
            return
        if benchmark is not None and hub is None:
            raise SpecError("--benchmark names what --hub writes results of; give --hub, too")
        from kvaudit.reports.page.formats.card import render

        page, console = _page(run, asked_of(gate_file, waivers, on_inconclusive)), wide_console()
        arms = page.findings.comparison.arms
        if arm is not None and arm not in arms:
            raise SpecError(f"the run has no arm {arm!r}; known: {', '.join(arms)}")
        section = render(page, arm)
        # whatever is wrong with one of them comes up before any is written
        results = {} if hub is None else _results(page, hub, benchmark, arm)
        whole = None if into is None else placed(read_card(into) if into.exists() else "", section, str(into))
        for path, text in results.items():
            write_output(path, text)
            say(console, f"results: {path}")
        if into is not None and whole is not None:
            write_output(into, whole)
            say(console, f"card: {into}")
        if check is not None and not _agrees(check, section, console):
            raise typer.Exit(_DIFFERS)
        if into is None and check is None and hub is None:
            typer.echo(section, nl=False)


def _page(run: Path, asked: GateOverrides) -> Page:
    """What a run discloses whose files are as they were finished; a gate file that came after the run is refused."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import disclosed
    from kvaudit.reports.verdict.rules import refuse_late_rules

    check_checkpoints(run)
    say_unfinished(run)
    page = disclosed(load_run(run), asked)
    refuse_late_rules(page.findings.rules)
    return page


def _results(page: Page, hub: Path, benchmark: str | None, arm: str | None) -> dict[Path, str]:
    """The files of results that the hub reads, and their texts."""
    from kvaudit.reports.page.hub_results import HUB_FOLDER, hub_results

    candidates = page.findings.comparison.candidates or (page.findings.comparison.reference,)
    if benchmark is None or (arm is None and len(candidates) > 1):
        raise SpecError("--hub wants --benchmark ORGANISATION/DATASET and, of several arms, --arm NAME")
    results = hub_results(page, arm or candidates[0], benchmark)
    return {hub / HUB_FOLDER / name: text for name, text in results.items()}


def _agrees(path: Path, section: str, console: Console) -> bool:
    """Whether a card says what its run says; prints the first line in which it does not."""
    # by line feeds alone: to Markdown a form feed or a U+2028 in the place of one is no line break
    theirs, ours = section_of(read_card(path), str(path)).split("\n"), section.split("\n")
    if theirs == ours:
        say(console, f"card: {path} says what its run says")
        return True
    pairs = zip_longest(theirs, ours, fillvalue="(nothing)")
    number, of_card, of_run = next((n, *pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    for whose, line in (("the card", of_card), ("the run", of_run)):
        say(console, inline(f"line {number} of the disclosure, {whose}: {clip(line, 300)}"))
    say(console, f"card: {path} says other than its run; write it again with --into")
    return False


def print_recipe(run: Path, other: Path | None) -> None:
    """Print the parts of a recipe by their hashes; of two, what changed."""
    from kvaudit.core.recipe import changes, digests, read_recipe

    console, first = wide_console(), read_recipe(run)
    if other is None:
        for name, digest in digests(first).items():
            say(console, f"{name} {digest[:12]}: {_short(first['sections'][name]['holds'])}")
        say(console, f"recipe: {str(first['sha256'])[:12]}")
        return
    found = list(changes(first, read_recipe(other)))
    for change in found:
        name = ".".join(filter(None, (change.section, change.entry)))
        for line in _changed_lines(change.before, change.after):
            say(console, f"{inline(clip(name, _LONGEST_ENTRY))}: {line}")
    say(console, f"changed: {', '.join(dict.fromkeys(c.section for c in found)) or 'nothing'}")


def _changed_lines(before: Any, after: Any) -> Iterator[str]:
    """A change in a line; of two texts of several lines, those that differ."""
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        import difflib

        lines = difflib.ndiff(before.splitlines(), after.splitlines())
        yield from (inline(clip(line, _LONGEST_ENTRY)) for line in lines if line[:2] in ("- ", "+ "))
        return
    yield f"{_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return inline(clip(text, _LONGEST_ENTRY))


COMMAND = Command("card", group="Disclose", order=1, call=card, old={"recipe": "card --recipe"})
