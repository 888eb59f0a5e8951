"""card.md: the section of a model card that discloses KV-cache compression; ``kvaudit card`` puts it into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvaudit.reports.layout.facts import Fact, Facts, Owed
from kvaudit.reports.layout.words import points
from kvaudit.reports.page.disclosure import ArmRecipe, Disclosure, Measured, disclosure_of
from kvaudit.reports.page.formats.markdown import escape
from kvaudit.reports.page.page import Page

FILE = "card.md"
_SHOWN = 40  # differences in the table; all of them stand in disclosure.json


def render(page: Page, arm: str | None = None) -> str:
    """The section, from its heading on, of all arms or of one."""
    return "\n\n".join(part for part in _parts(disclosure_of(page, arm)) if part) + "\n"


def _parts(told: Disclosure) -> Iterator[str]:
    status, number = _word(told.verdict["status"]), told.verdict["number"]
    yield "## KV-cache compression disclosure"
    yield f"**{status}**: {_word(told.verdict['says'])}"
    for name in ("alarm", "remarks"):
        if told.verdict[name].state == "known":
            yield "\n".join(f"* **{line}**" for line in _lines(told.verdict[name]))
    if number.state == "known":
        yield f"{_word(number)}. {_word(told.verdict['about'])}"
    yield "### How rollouts were compressed"
    yield _recipes(told.recipes)
    yield "### How it was served in the audit"
    yield _facts_table(told.serving)
    yield _bullets("Not evaluated", told.not_evaluated)
    yield "### What moved"
    if told.worst:
        yield f"At worst, {escape(told.worst.slice)}: {escape(told.worst.number)}, {escape(told.worst.verdict)}."
    yield _drift(told.drift)
    yield "### What was asked, and how it was judged"
    yield _facts_table(told.suites)
    yield _bullets("Judging", told.judging)
    if any(fact.state == "known" for fact in told.stack.values()):
        yield "### What others say of the stack (declared, not verified)"
        for name, fact in told.stack.items():
            rows = _lines(fact) if isinstance(fact.value, list) else [_word(fact)]
            yield "\n".join((f"{name.replace('_', ' ')}:", *(f"* {row}" for row in rows or ["nothing"])))
    if any(fact.state == "known" for fact in told.change_record.values()):
        yield "### What the checkpoints were made of (sha256; recipe.json)"
        yield "\n".join(f"* {name.replace('_', ' ')}: {_word(fact)}" for name, fact in told.change_record.items())
    for owed in told.owed:
        if owed.rows:
            yield f"### {owed.title}"
            yield _facts_table(owed.heads)
            yield _details(owed)
    yield "### Limits"
    yield "\n".join(f"* {escape(line)}" for line in told.limits)
    yield "### Where the numbers come from"
    yield "\n".join((_bullets("Run", told.run), _bullets("Model", told.model), _bullets("Reference", told.reference)))


def _recipes(recipes: Iterable[ArmRecipe]) -> str:
    rows = [
        {
            "arm": Fact("known", recipe.arm),
            "role": Fact("known", recipe.role),
            **{name: fact for name, fact in recipe.facts.items() if name != "weights_sha256"},
            **{name: fact for name, fact in recipe.mask_schedule.items() if name != "ledgers_sha256"},
            **{f"mismatch {name}": fact for name, fact in recipe.mismatch.items()},
        }
        for recipe in recipes
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = ["", *(_word(row["arm"]) for row in rows)]
    lines = [[name.replace("_", " "), *(_word(row.get(name)) for row in rows)] for name in names if name != "arm"]
    return _table([head, *lines])


def _drift(drift: Iterable[Measured]) -> str:
    shown = [m for m in drift if m.verdict != "not gated"] or list(drift)
    head = ["contrast", "arm", "served under", "counts", "tokens", "drift, 95 % interval", "margin", "verdict"]
    rows = [
        [
            escape(m.estimand),
            escape(m.arm),
            f"{escape(m.label)} ({_word(m.policy_hash)})",
            escape(m.says),
            str(m.context_tokens),
            escape(m.number),
            "-" if m.margin is None else f"{100 * m.margin:g} pp",
            escape(m.verdict),
        ]
        for m in shown[:_SHOWN]
    ]
    more = f"\n\n{len(shown) - _SHOWN} more in disclosure.json." if len(shown) > _SHOWN else ""
    return _table([head, *rows]) + more


def _details(owed: Owed) -> str:
    rows = [
        [_detail({**row, owed.one: one[owed.one].value}[name]) for name in owed.columns.values()]
        for one in owed.rows
        for row in one[owed.details].value
    ]
    more = f"\n\n{len(rows) - _SHOWN} more in disclosure.json." if len(rows) > _SHOWN else ""
    return _table([list(owed.columns), *rows[:_SHOWN]]) + more


def _detail(value: object) -> str:
    """An interval in percentage points, anything else as a word."""
    return _pp(value) if value is None or isinstance(value, list) else escape(str(value))


def _pp(interval: list[float] | None) -> str:
    if interval is None:
        return "no number"
    estimate, low, high = map(points, interval)
    return f"{estimate} pp [{low}, {high}]"


def _facts_table(rows: Iterable[Mapping[str, Fact]]) -> str:
    found = list(rows)
    names = list(dict.fromkeys(name for row in found for name in row))
    return _table([[name.replace("_", " ") for name in names], *([_word(row.get(n)) for n in names] for row in found)])


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]) if len(rows[0]) else ""


def _bullets(what: str, facts: Facts) -> str:
    return "\n".join(f"* {what}, {name.replace('_', ' ')}: {_word(fact)}" for name, fact in facts.items())


def _lines(fact: Fact) -> list[str]:
    return [escape(str(line)) for line in (fact.value if isinstance(fact.value, list) else [fact.value])]


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
