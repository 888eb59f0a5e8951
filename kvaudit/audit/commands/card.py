"""``kvaudit card``: write the disclosure section of a model card from a run, or check a card against its run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import (
    Command,
    Run,
    argument,
    check_run,
    expand_options,
    option,
    print_line,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.audit.commands.report import GateOptions
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import clip, inline
from kvaudit.reports.page.publish import extract_section, insert_section, read_card

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.page import Page
    from kvaudit.reports.verdict.rules import GateOverrides

_DIFFERS = 3  # exit code
_LONGEST_ENTRY = 300  # characters of a recipe's entry that are printed
Other = Annotated[Path | None, argument(help="With --recipe: another run; print what changed.")]
Into = Annotated[Path | None, option(help="Model card file to put the disclosure into.")]
CardToCheck = Annotated[Path | None, option(help="Model card file to check against the run.")]
Hub = Annotated[Path | None, option(help="A model repository: write .eval_results files for the hub into it.")]
Benchmark = Annotated[str | None, typer.Option(help="With --hub: the benchmark of the results, ORGANISATION/DATASET.")]
OneArm = Annotated[
    str | None,
    typer.Option(
        help="Disclose this arm only, as in the card of its checkpoints. With --hub: required if "
        "there are several arms."
    ),
]
RecipeFlag = Annotated[
    bool,
    typer.Option(
        "--recipe",
        help="Instead of a disclosure: print what the checkpoints were made of (reward, constitution, data, policy, "
        "refusal set). RUN may be the run's recipe.json.",
    ),
]


@expand_options
def card(
    run: Run,
    other: Other = None,
    *,
    into: Into = None,
    check: CardToCheck = None,
    hub: Hub = None,
    benchmark: Benchmark = None,
    arm: OneArm = None,
    options: GateOptions,
    recipe: RecipeFlag = False,
) -> None:
    """Write a run's disclosure for a model card, or check one.

    Without an option the disclosure is printed. Exits with 3 if a checked card differs from its run.
    """
    with user_errors(*typed_command()):
        if recipe or other is not None:
            if not recipe or any((into, check, hub, benchmark, arm)) or options != GateOptions():
                raise SpecError("a second run needs --recipe, and --recipe goes with no other option; leave them out")
            _print_recipe(run, other)
            return
        if benchmark is not None and hub is None:
            raise SpecError("--benchmark names the benchmark of --hub; give --hub too")
        from kvaudit.reports.page.formats.disclosure import render_card

        page, console = _load_page(run, options.read()), wide_console()
        arms = page.findings.comparison.arms
        if arm is not None and arm not in arms:
            raise SpecError(f"--arm is {arm!r}, but the run has no such arm; known: {', '.join(arms)}")
        section = render_card(page, arm)
        # both texts are made, and so all errors raised, before either is written
        results = {} if hub is None else _hub_files(page, hub, benchmark, arm)
        text = None if into is None else insert_section(read_card(into) if into.exists() else "", section, str(into))
        for path, content in results.items():
            write_output(path, content)
            print_line(console, f"results: {path}")
        if into is not None and text is not None:
            write_output(into, text)
            print_line(console, f"card: {into}")
        if check is not None and not _matches_run(check, section, console):
            raise typer.Exit(_DIFFERS)
        if into is None and check is None and hub is None:
            typer.echo(section, nl=False)


def _load_page(run: Path, overrides: GateOverrides) -> Page:
    """Return all that a run's report shows (a ``Page``), after checking the checkpoints against their hashes.

    Raises SpecError for a gate file that was not declared when the run began.
    """
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import disclosure_page
    from kvaudit.reports.verdict.rules import refuse_late_rules

    check_run(run)
    page = disclosure_page(load_run(run), overrides)
    refuse_late_rules(page.findings.rules)
    return page


def _hub_files(page: Page, hub: Path, benchmark: str | None, arm: str | None) -> dict[Path, str]:
    """Return the files with an arm's results for the Hugging Face hub as {path: text}; paths begin with ``hub``.

    ``benchmark`` is ORGANISATION/DATASET on the hub. Raises SpecError if it is missing, or if there are several arms
    and ``arm`` is None.
    """
    from kvaudit.reports.page.publish import HUB_FOLDER, hub_results

    candidates = page.findings.comparison.candidates or (page.findings.comparison.reference,)
    if benchmark is None or (arm is None and len(candidates) > 1):
        raise SpecError("--hub needs --benchmark ORGANISATION/DATASET and, if there are several arms, --arm NAME")
    results = hub_results(page, arm or candidates[0], benchmark)
    return {hub / HUB_FOLDER / name: text for name, text in results.items()}


def _matches_run(path: Path, section: str, console: Console) -> bool:
    """Return whether a model card holds ``section``, the run's disclosure, and print the result.

    If it does not, the first line that differs is printed as the card and as the run has it.
    """
    # not splitlines: to Markdown a form feed or U+2028 is no line break
    card_lines, run_lines = extract_section(read_card(path), str(path)).split("\n"), section.split("\n")
    if card_lines == run_lines:
        print_line(console, f"card: {path} matches its run")
        return True
    pairs = zip_longest(card_lines, run_lines, fillvalue="(nothing)")
    number, card_line, run_line = next((n, *pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    for source, line in (("the card", card_line), ("the run", run_line)):
        print_line(console, inline(f"line {number} of the disclosure, {source}: {clip(line, 300)}"))
    print_line(console, f"card: {path} differs from its run; write it again with --into")
    return False


def _print_recipe(run: Path, other: Path | None) -> None:
    """Print a run's recipe (what its checkpoints were made of) by section, with hashes; for two runs, the changes."""
    from kvaudit.core.provenance import read_recipe, recipe_changes, recipe_digests

    console, first = wide_console(), read_recipe(run)
    if other is None:
        for name, digest in recipe_digests(first).items():
            print_line(console, f"{name} {digest[:12]}: {_entry_text(first['sections'][name]['holds'])}")
        print_line(console, f"recipe: {str(first['sha256'])[:12]}")
        return
    differences = list(recipe_changes(first, read_recipe(other)))
    for change in differences:
        name = ".".join(filter(None, (change.section, change.entry)))
        for line in _change_lines(change.before, change.after):
            print_line(console, f"{inline(clip(name, _LONGEST_ENTRY))}: {line}")
    print_line(console, f"changed: {', '.join(dict.fromkeys(c.section for c in differences)) or 'nothing'}")


def _change_lines(before: Any, after: Any) -> Iterator[str]:
    """Yield how an entry of a recipe differs between two runs: "before -> after", or a text's lines that differ."""
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        import difflib

        lines = difflib.ndiff(before.splitlines(), after.splitlines())
        yield from (inline(clip(line, _LONGEST_ENTRY)) for line in lines if line[:2] in ("- ", "+ "))
        return
    yield f"{_entry_text(before)} -> {_entry_text(after)}"


def _entry_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return inline(clip(text, _LONGEST_ENTRY))


COMMAND = Command("card", group="Disclose", order=1, call=card, former_names={"recipe": "card --recipe"})
