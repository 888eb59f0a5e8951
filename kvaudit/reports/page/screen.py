"""The first screen: whose model, compared with what, and the answers, in at most 120 words beside the grid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.text import inline, some
from kvaudit.reports.page.answers import Answer, answers, gravest
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.grid import Grid, grid_of
from kvaudit.reports.page.remarks import late, remarks
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.tables import Example
from kvaudit.reports.sections.shared.words import MOST_OF_NAME, shorten
from kvaudit.reports.verdict.verdict import Status

MOST_WORDS = 120
_FLIPS, _INSTEAD = 3, 2
_LISTED = 4  # suites or settings that a line spells out


@dataclass(frozen=True)
class Screen:
    """What somebody must read before a decision. ``facts`` are names and values; ``alarm`` is read before all else."""

    title: str
    status: Status
    facts: tuple[tuple[str, str], ...]
    answers: tuple[Answer, ...]
    grid: Grid
    alarm: str = ""
    flips: tuple[Example, ...] = ()  # the gravest answers that were lost, of different cells
    instead: tuple[str, ...] = ()  # what passes where something does not
    before_relying: str = ""  # the names of what must be read with the verdict, which stands below

    @property
    def words(self) -> int:
        """How many words it has, beside the grid with its signs and the flips."""
        said = [self.title, self.status.value, self.alarm, *(word for fact in self.facts for word in fact)]
        said += [*(f"{answer.asks} {answer.line}" for answer in self.answers), *self.instead]
        if self.before_relying:
            said.append(f"Read first: {self.before_relying}")
        return sum(len(text.split()) for text in said)


def screen_of(findings: Findings) -> Screen:
    """The first screen of a run."""
    instead = (line for section, value in sections_in(findings.values) for line in section.suggestions(value, findings))
    screen = Screen(
        title=f"May it ship? {inline(shorten(findings.drift.run))}",
        status=findings.verdict.status,
        facts=tuple((name, inline(text)) for name, text in _facts(findings) if text),
        answers=answers(findings),
        grid=grid_of(findings),
        alarm=inline(late(findings.rules)),
        flips=tuple(_flips(findings)),
        instead=tuple(instead)[:_INSTEAD],
        before_relying=inline(_before_relying(findings)),
    )
    return _within(screen)


def _within(screen: Screen) -> Screen:
    """The screen with its reasons in brief, then left out, until it keeps to ``MOST_WORDS``.

    The least grave go first, the first of every question last. What is left out stands in the grid.
    """
    found = [list(answer.groups) for answer in screen.answers]
    # every question's gravest, then every question's second; left out from the end
    places = [(n, i) for i in range(max(map(len, found), default=0)) for n in range(len(found)) if i < len(found[n])]

    def with_groups() -> Screen:
        told = (replace(a, groups=tuple(groups)) for a, groups in zip(screen.answers, found, strict=True))
        return replace(screen, answers=tuple(told))

    for brief in (True, False):
        for n, i in reversed(places):
            if with_groups().words <= MOST_WORDS:
                return with_groups()
            found[n][i] = replace(found[n][i], why=found[n][i].brief if brief else "")
    return with_groups()


def _flips(findings: Findings) -> Iterator[Example]:
    met = set[tuple[str, str, str]]()
    order = gravest(findings.comparison)
    cells = {(d.arm, d.policy, d.suite): order(d) for d in sorted(findings.verdict.gated, key=order, reverse=True)}
    least = max(cells.values(), default=(0, 0, 0.0))
    shown = findings.values.get("examples", ())
    # those of the gravest cell first, whatever its drift
    for example in sorted(shown, key=lambda one: cells.get((one.arm, one.policy, one.suite), least)):
        place = example.arm, example.policy, example.suite
        if place not in met and len(met) < _FLIPS:
            met.add(place)
            yield example


def _before_relying(findings: Findings) -> str:
    """The remarks of a verdict by their first words; the answers say themselves what cannot be measured."""
    known = {d.status.value for d in findings.verdict.decisions}
    names = [re.split(r"[:.;](?: |$)", line)[0] for line in remarks(findings)]
    return "; ".join(dict.fromkeys(name[:MOST_OF_NAME] for name in names if name not in known))


def _facts(findings: Findings) -> list[tuple[str, str]]:
    sides, provenance = findings.comparison, findings.provenance
    weights = str(provenance.get("base_sha256") or "")[:8]
    plain = sides.label(sides.uncompressed[0]) if sides.uncompressed else "none"
    who = "itself" if sides.reference == BASE_ARM else shorten(sides.reference)
    engines = [sides.label(policy) for policy in sides.uncompressed if sides.is_engine(policy)]
    if not engines or any(not sides.is_engine(policy) and policy != DENSE_POLICY for policy in sides.policies):
        engines.append("kvaudit's cache")
    # of each suite as its largest cell was asked
    items = Counter[str]()
    for cell in findings.drift.cells:
        items[cell.suite] = max(items[cell.suite], cell.n_items)
    asked = [f"{shorten(suite)} {items[suite]}" for suite in sides.suites]
    seeds = f", {len(sides.seeds)} seeds" if len(sides.seeds) > 1 else ""
    day = str(provenance.get("finished") or provenance.get("started") or "")[:10]
    return [
        ("model", f"{shorten(findings.model)}{f' ({weights})' if weights else ''}"),
        ("date", day),
        ("reference", f"{who} @ {shorten(plain)}"),
        ("engine", ", ".join(map(shorten, engines[:_LISTED]))),
        ("asked", some(asked, _LISTED) + seeds),
    ]
