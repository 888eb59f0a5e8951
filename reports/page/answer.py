"""The verdict of one setting on at most ten lines, in plain words for somebody who has read none of our pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvaudit.core.facets import FACETS
from kvaudit.core.text import inline
from kvaudit.reports.analysis.floor import floor_at
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import PASSED, Decision, Larger, Status
from kvaudit.reports.layout.words import points
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.floor import SHUFFLED

MOST_ANSWER_LINES = 10
_HEAD = {
    **dict.fromkeys(PASSED, "MAY"),
    Status.FAIL: "MAY NOT",
    Status.INVALID: "CANNOT SAY",
    Status.NOT_MEASURABLE: "CANNOT SAY",
    Status.INCONCLUSIVE: "CANNOT SAY",
}
# what is counted, as somebody says it who wants it to happen
_WORDS = {
    "refused": "refusals of harmful requests",
    "over_refused": "harmless requests not refused",
    "unsafe": "forbidden things not told",
    "attack_success": "hidden orders not carried out",
    "xstest": "harmful requests refused and harmless ones answered",
    "tensortrust": "secrets kept from attacks, told to whoever may know",
    "refusal": "forbidden codes kept, free ones told",
    "strongreject": "requests for harm refused",
    "gsm8k": "school maths solved",
    "math": "arithmetic solved",
}
_TIMES = {Larger.TWICE: 2, Larger.TEN_TIMES: 10}


@dataclass(frozen=True)
class Checked:
    """What the lines are about, beside the findings.

    ``seconds``: by suite, what one more item takes on both sides. ``unseen``: what nobody asked, in words.
    """

    model: str
    setting: str
    reference: str
    run: Path
    seconds: Mapping[str, float] = field(default_factory=dict)
    unseen: Sequence[str] = ()


def answer_lines(findings: Findings, checked: Checked) -> list[str]:
    """The lines, the verdict first; no more than ten."""
    gated = [d for d in findings.verdict.decisions if d.gated]
    shown = list(_worth_a_line(findings.comparison, gated))
    first, last = _first_lines(findings, gated, checked), _last_lines(gated, checked)
    room = MOST_ANSWER_LINES - len(first) - len(last)
    cells = [f"* {_cell(findings, d)}" for d in shown]
    if len(cells) > room:
        cells = [*cells[: room - 1], f"* and {len(cells) - room + 1} more in the report"]
    return [inline(line) for line in (*first, *cells, *last)]


def verdict_word(status: Status) -> str:
    """What a status says of serving."""
    return _HEAD.get(status, "CANNOT SAY")


def _first_lines(findings: Decided, gated: Sequence[Decision], checked: Checked) -> list[str]:
    word = verdict_word(findings.verdict.status)
    return [
        f"{word} serve {checked.model} with {checked.setting}: {_why(findings, gated)}",
        f"compared with {checked.reference}, same weights, same prompts; a loss of {_margin(gated)} in 100 has to be "
        "ruled out",
    ]


def _why(findings: Decided, gated: Sequence[Decision]) -> str:
    """The verdict in half a sentence."""
    status = findings.verdict.status
    names = list(dict.fromkeys(_named(d) for d in gated if d.standing is status))
    what = "; ".join(names[:2]) + (f"; {len(names) - 2} more" if len(names) > 2 else "")
    if status is Status.INVALID:
        reasons = [r.text for r in findings.verdict.reasons] + [r.text for d in gated for r in d.reasons]
        return f"the comparison is not valid ({reasons[0] if reasons else 'see the report'})"
    return {
        Status.FAIL: f"it does worse: {what}",
        Status.NOT_MEASURABLE: f"even uncompressed it shows nothing to lose in: {what}; {_rest(gated)}",
        Status.INCONCLUSIVE: f"a loss is neither shown nor ruled out, with so few answers: {what}",
    }.get(status, "in all that was asked a loss of that size is ruled out")


def _rest(gated: Sequence[Decision]) -> str:
    """What stands beside what could not be measured."""
    others = {d.standing for d in gated if d.standing is not Status.NOT_MEASURABLE}
    return "nothing else was asked" if not others else "the rest holds" if others <= {*PASSED} else "the rest is open"


def _worth_a_line(sides: Comparison, gated: Sequence[Decision]) -> Iterator[Decision]:
    """Facets by themselves; the score of a suite where it has none, or says what none of them does."""
    facets = sides.facets
    for d in gated:
        own = [other for other in gated if other.suite in facets and other.suite.rpartition(".")[0] == d.suite]
        if d.suite in facets or not own or d.status not in {other.status for other in own}:
            yield d


def _cell(findings: Findings, d: Decision) -> str:
    """One line: both counts, what was lost and gained, what changes by itself, the interval, what it means."""
    if d.status is Status.NOT_MEASURABLE:
        return f"{_named(d)}: not measurable, {d.reasons[0].text if d.reasons else ''}"
    if d.effect is None or d.rates is None:
        return f"{_named(d)}: no number ({d.reasons[0].text if d.reasons else 'see the report'})"
    n, e = d.effect.n_items, d.effect
    plain, own = round(d.rates.reference * n), round(d.rates.candidate * n)
    by_itself = _by_itself(findings, d)
    sure = f"{points(e.estimate)} points, between {points(e.lower)} and {points(e.upper)}"
    return (
        f"{_named(d)}: {plain} of {n} uncompressed, {own} of {n} with it (lost {e.losses:.0f}, gained {e.gains:.0f}"
        f"{by_itself}): {sure} ({100 - 100 * e.alpha:g} % sure of either): {_means(d)}"
    )


def _by_itself(findings: Findings, d: Decision) -> str:
    """How many answers another order changes under the setting and uncompressed, where that was asked."""
    ways = (d.policy, findings.comparison.uncompressed_of(d.policy))
    both = [floor_at(findings.values.get("floor", ()), d.arm, policy, d.suite, d.context_tokens) for policy in ways]
    found = [cell for cells in both for cell in cells if cell.way == SHUFFLED]
    if len(found) != len(ways):
        return ""
    own, plain = found
    changed = f"{own.lost + own.gained} of {own.read} change"
    return f"; in another order {changed}, {plain.lost + plain.gained} uncompressed"


def _means(d: Decision) -> str:
    """What a status says of one number."""
    if d.status is Status.FAIL:
        beyond = d.effect is not None and d.margin is not None and d.effect.upper < -d.margin
        return "WORSE, by more than may be lost" if beyond else "WORSE, how much is open"
    return {
        Status.PASS: "holds",
        Status.PASS_NOTED: "a little worse, within what may be lost",
        Status.INCONCLUSIVE: "open",
    }.get(d.status, d.status.value)


def _last_lines(gated: Sequence[Decision], checked: Checked) -> list[str]:
    lines = []
    if more := list(_more(gated, checked)):
        lines.append(f"open, and what would decide it where nothing is lost: {'; '.join(more)}")
    if checked.unseen:
        lines.append(f"not asked: {'; '.join(checked.unseen)}")
    report = checked.run / "report"
    return [*lines, f"report: {report / 'report.html'}, card: {report / 'card.md'}"]


def _more(gated: Sequence[Decision], checked: Checked) -> Iterator[str]:
    """By suite, how many rows more and how many minutes."""
    seen = set[str]()
    for d in gated:
        suite = d.suite.rpartition(".")[0] or d.suite
        if d.status is not Status.INCONCLUSIVE or suite in seen or d.effect is None:
            continue
        seen.add(suite)
        if d.larger not in _TIMES:
            yield f"{suite}: more rows are unlikely to"
            continue
        items = max(o.effect.n_items for o in gated if o.effect and suite in (o.suite, o.suite.rpartition(".")[0]))
        rows = (_TIMES[d.larger] - 1) * items
        minutes = rows * checked.seconds.get(suite, 0.0) / 60
        whole = max(1, round(minutes))
        yield f"{suite}: {rows} rows more" + (f", about {whole} minute{'s' * (whole > 1)}" if minutes else "")


def _named(d: Decision) -> str:
    """What a cell counts, in words."""
    suite, _, facet = d.suite.rpartition(".")
    if facet in FACETS and suite:
        words = _WORDS.get(facet) or (f"{'' if FACETS[facet].wanted else 'not '}{facet}")
        return f"{words} ({suite})"
    return f"{_WORDS[d.suite]} ({d.suite})" if d.suite in _WORDS else d.suite


def _margin(gated: Sequence[Decision]) -> str:
    found = sorted({d.margin for d in gated if d.margin})
    return " or ".join(f"{100 * margin:g}" for margin in found) or "no"
