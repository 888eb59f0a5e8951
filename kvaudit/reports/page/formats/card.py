"""card.md: the section of a model card that discloses KV-cache compression; ``kvaudit card`` puts it into one.

At most 150 words and two tables, since a card is read by whoever is about to use the model: the answers, the grid, how
every arm came about. Each fact that is owed besides stands in disclosure.json, as known, unknown or not applicable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvaudit.reports.page.disclosure import ArmRecipe, Disclosure, disclosure_of, findings_of_arm
from kvaudit.reports.page.formats.markdown import as_table, escape
from kvaudit.reports.page.grid import grid_table
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.screen import Screen, screen_of
from kvaudit.reports.page.servers import without_servers
from kvaudit.reports.sections.shared.facts import NOT_APPLICABLE, Fact, fact_of

FILE = "card.md"
MOST_CARD_WORDS = 150  # beside the tables
_ROWS = 24  # of the grid; all of them stand in contrasts.csv
_FACTS = {  # of how an arm came about: name here -> name in the disclosure
    "rollouts": "rollouts",
    "learner": "learner_view",
    "correction": "correction",
    "distillation": "distillation",
    "trained on": "trained_on",
    "seeds": "seeds",
    "said by": "said_by",
}


def render(page: Page, arm: str | None = None) -> str:
    """The section, from its heading on, of all arms or of one."""
    told = disclosure_of(page, arm)
    screen = page.screen if arm is None else screen_of(findings_of_arm(page.findings, arm))
    assert screen is not None, "a card is of a run"
    own = "" if arm is None else _word(told.verdict["says"])
    return without_servers("\n\n".join(part for part in _parts(told, screen, own) if part) + "\n", page.findings)


def _parts(told: Disclosure, screen: Screen, own: str) -> Iterator[str]:
    """The section; ``own`` says what the verdict of one arm is about."""
    yield "## KV-cache compression"
    if told.verdict["alarm"].state == "known":
        yield f"> **{_word(told.verdict['alarm'])}**"
    yield f"**{_word(told.verdict['status'])}** · " + " · ".join(
        f"{escape(name)} **{escape(text)}**" for name, text in screen.facts
    )
    yield own
    yield "\n".join(f"* {escape(a.asks)} **{escape(a.line)}**" for a in screen.answers if a.groups)
    yield "\n".join(f"* {escape(line)}" for line in screen.instead)
    if screen.grid.rows:
        yield as_table(grid_table(screen.grid, _ROWS))
        left = screen.grid.left_out + max(0, len(screen.grid.rows) - _ROWS)
        yield escape(f"{screen.grid.signs}." + (f" {left} more rows stand in contrasts.csv." if left else ""))
    if recipes := [recipe for recipe in told.recipes if recipe.role != "base"]:
        yield _recipes(recipes)
    yield _served(told)
    if len(told.serving) > _ROWS:
        yield f"{len(told.serving) - _ROWS} more settings were served; all of them stand in disclosure.json."
    if stack := [(name, fact) for name, fact in told.stack.items() if fact.state == "known"]:
        rows = [f"| {escape(name.replace('_', ' '))} | {_word(fact)} |" for name, fact in stack]
        yield "\n".join(("| declared of the stack, not verified | |", "| --- | --- |", *rows))
    if screen.before_relying:
        yield f"Read first: {escape(screen.before_relying)}."
    yield (
        f"Other suites, lengths and settings: not evaluated. Every fact: disclosure.json. kvaudit "
        f"{_word(told.run['kvaudit'])}, spec {_word(told.run['spec_sha256'])[:12]}."
    )


def _recipes(recipes: Iterable[ArmRecipe]) -> str:
    """A row for each arm; what is known of none is left out."""
    rows = [
        (recipe, {head: recipe.facts[name] for head, name in _FACTS.items() if name in recipe.facts})
        for recipe in recipes
    ]
    heads = [head for head in _FACTS if any(head in facts and facts[head].state == "known" for _, facts in rows)]
    table = [["arm", *heads], ["---"] * (1 + len(heads))]
    table += [[escape(recipe.arm), *(_word(facts.get(head)) for head in heads)] for recipe, facts in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _served(told: Disclosure) -> str:
    """A row for each setting, as many as there is room for: its full name, and what it leaves of the cache."""
    rows = list(told.serving[:_ROWS])
    heads = ["served under", "engine", "kv allocated of none", "kv live of none", "retention"]
    names = ["kv_allocated_of_none", "kv_live_of_none", "retention"]
    table = [heads, ["---"] * len(heads)]
    for row in rows:
        settings = row.get("settings", NOT_APPLICABLE)
        full = settings if settings.state == "known" else row["policy"]
        table.append([_word(full), _word(row.get("engine", fact_of("kvaudit"))), *(_word(row[name]) for name in names)])
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _word(fact: Fact | None) -> str:
    """A fact as a word or two; what is not known says so."""
    if fact is None:
        return "-"
    if fact.state != "known":
        return f"*{fact.state}*"
    return escape(_plain(fact.value)) or "-"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(inner) for inner in value)
    return str(value)
