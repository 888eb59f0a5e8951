"""card.md: the section of a model card that discloses KV-cache compression; ``kvaudit card`` inserts it.

It has at most 150 words besides its tables: the answers, the grid, how every arm was trained and served.
disclosure.json holds every other fact, as known, unknown or not applicable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvaudit.reports.page.disclosure import ArmRecipe, Disclosure, disclosure_of, findings_of_arm
from kvaudit.reports.page.formats.markdown import escape, markdown_table
from kvaudit.reports.page.page import Page, Screen, grid_table, screen_of
from kvaudit.reports.page.publish import mask_private
from kvaudit.reports.sections.shared.words import NOT_APPLICABLE, Fact, fact_of

FILE = "card.md"
MOST_CARD_WORDS = 150  # besides the tables
_ROWS = 24  # of the grid; contrasts.csv holds all
_FACTS = {  # header -> name in the disclosure's recipe
    "rollouts": "rollouts",
    "learner": "learner_view",
    "correction": "correction",
    "distillation": "distillation",
    "trained on": "trained_on",
    "seeds": "seeds",
    "source": "said_by",
}


def render(page: Page, arm: str | None = None) -> str:
    """Return the section, with its heading, of all arms or of one."""
    disclosure = disclosure_of(page, arm)
    screen = page.screen if arm is None else screen_of(findings_of_arm(page.findings, arm))
    assert screen is not None, "only a run has a card"
    arm_note = "" if arm is None else _fact_text(disclosure.verdict["says"])
    return mask_private(
        "\n\n".join(part for part in _parts(disclosure, screen, arm_note) if part) + "\n", page.findings
    )


def _parts(disclosure: Disclosure, screen: Screen, arm_note: str) -> Iterator[str]:
    """Yield the paragraphs of the section; ``arm_note`` describes the verdict of one arm."""
    yield "## KV-cache compression"
    if disclosure.verdict["alarm"].state == "known":
        yield f"> **{_fact_text(disclosure.verdict['alarm'])}**"
    yield f"**{_fact_text(disclosure.verdict['status'])}** · " + " · ".join(
        f"{escape(name)} **{escape(text)}**" for name, text in screen.facts
    )
    yield arm_note
    yield "\n".join(f"* {escape(a.asks)} **{escape(a.line)}**" for a in screen.answers if a.groups)
    yield "\n".join(f"* {escape(line)}" for line in screen.suggestions)
    if screen.grid.rows:
        yield markdown_table(grid_table(screen.grid, _ROWS))
        n_omitted = screen.grid.left_out + max(0, len(screen.grid.rows) - _ROWS)
        yield escape(f"{screen.grid.signs}." + (f" {n_omitted} more rows are in contrasts.csv." if n_omitted else ""))
    if recipes := [recipe for recipe in disclosure.recipes if recipe.role != "base"]:
        yield _recipe_table(recipes)
    yield _serving_table(disclosure)
    if len(disclosure.serving) > _ROWS:
        yield f"{len(disclosure.serving) - _ROWS} more settings were served; disclosure.json lists all."
    if stack := [(name, fact) for name, fact in disclosure.stack.items() if fact.state == "known"]:
        rows = [f"| {escape(name.replace('_', ' '))} | {_fact_text(fact)} |" for name, fact in stack]
        yield "\n".join(("| declared about the stack, not verified | |", "| --- | --- |", *rows))
    if screen.before_relying:
        yield f"Read first: {escape(screen.before_relying)}."
    yield (
        f"Other suites, lengths and settings: not evaluated. All facts: disclosure.json. kvaudit "
        f"{_fact_text(disclosure.run['kvaudit'])}, spec {_fact_text(disclosure.run['spec_sha256'])[:12]}."
    )


def _recipe_table(recipes: Iterable[ArmRecipe]) -> str:
    """Return a row per arm, without columns that are unknown for all."""
    rows = [
        (recipe, {head: recipe.facts[name] for head, name in _FACTS.items() if name in recipe.facts})
        for recipe in recipes
    ]
    heads = [head for head in _FACTS if any(head in facts and facts[head].state == "known" for _, facts in rows)]
    table = [["arm", *heads], ["---"] * (1 + len(heads))]
    table += [[escape(recipe.arm), *(_fact_text(facts.get(head)) for head in heads)] for recipe, facts in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _serving_table(disclosure: Disclosure) -> str:
    """Return a row per setting, up to _ROWS: its full name, and its share of the uncompressed cache."""
    rows = list(disclosure.serving[:_ROWS])
    heads = ["served under", "engine", "kv allocated of none", "kv live of none", "retention"]
    names = ["kv_allocated_of_none", "kv_live_of_none", "retention"]
    table = [heads, ["---"] * len(heads)]
    for row in rows:
        settings = row.get("settings", NOT_APPLICABLE)
        full = settings if settings.state == "known" else row["policy"]
        table.append(
            [
                _fact_text(full),
                _fact_text(row.get("engine", fact_of("kvaudit"))),
                *(_fact_text(row[name]) for name in names),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _fact_text(fact: Fact | None) -> str:
    """Return a fact's value as text, or its state if it is not known."""
    if fact is None:
        return "-"
    if fact.state != "known":
        return f"*{fact.state}*"
    return escape(_value_text(fact.value)) or "-"


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(inner) for inner in value)
    return str(value)
