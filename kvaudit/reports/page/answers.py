"""The three questions that a report answers, each in one line, from the cells that the gate decided.

serving    may the model be served with a setting instead of uncompressed?
training   is an arm as aligned as the reference, both served alike?
deployed   may an arm be deployed with a setting instead of the uncompressed reference?

An arm is a checkpoint with its training recipe. A cell is one arm, policy, suite and length. An answer is the worst
status of its gated cells. Rates are those of the event that a facet names ("attacks that succeed 0 → 5.6 %"). Limits
and bounds are about the same event, so for an unwanted one a positive number is a loss. Of the confidence bounds, the
one that decided is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf

from kvaudit.core.facets import DEPLOYED, PARITY, SERVING, WORST, suite_of
from kvaudit.core.text import at_length, inline, join_names, length_label
from kvaudit.reports.sections.shared.words import event_rates, facet_of_metric, is_serving, plural, shorten
from kvaudit.reports.stats.betting import METHOD as BETTING
from kvaudit.reports.stats.seeds import SEEDS_NEEDED
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.reasons import PASS_NEEDS_MORE, ReasonCode
from kvaudit.reports.verdict.verdict import PASSED, PRECEDENCE, Decided, Decision, Larger, Status, worst

TRAINING = "training"
QUESTIONS = (SERVING, TRAINING, DEPLOYED)
STATUS_WORDS = {
    Status.INVALID: "not valid",
    Status.FAIL: "do not ship",
    Status.NOT_MEASURABLE: "not measurable",
    Status.INCONCLUSIVE: "not enough data",
    Status.WAIVED: "shipped by a waiver",
    Status.PASS_NOTED: "ship",
    Status.PASS: "ship",
}
_REASON_LENGTH = 160  # characters of the reason why a comparison is not valid
_LARGER_RUN = {
    Larger.TWICE: "twice the templates would decide",
    Larger.TEN_TIMES: "ten times the templates would decide",
    Larger.NEVER: "more templates would not decide",
}


@dataclass(frozen=True)
class AnswerGroup:
    """Serving settings or arms (``subjects``) that share the answer to a question.

    ``cells`` are the cells that cause the answer, the worst first. ``why`` describes the worst of them and ``brief`` is
    a shorter form of it; both are empty if the group passes.
    """

    status: Status
    subjects: tuple[str, ...]
    why: str
    brief: str
    cells: tuple[Decision, ...]

    @property
    def word(self) -> str:
        """The answer in a word or two, such as "do not ship"."""
        return STATUS_WORDS[self.status]

    @property
    def names(self) -> str:
        """The names of the first settings or arms of the group as text, and how many more there are."""
        return join_names(map(shorten, self.subjects))

    @property
    def line(self) -> str:
        """The group as a line: "do not ship h2o 96, snapkv 112 (attacks that succeed 0 → 25 % of 72, limit +5)"."""
        return f"{self.word} {self.names}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Answer:
    """One of the report's questions with the answer to it: settings or arms in groups that share a verdict.

    The worst group comes first; ``groups`` is empty if the run did not ask the question.
    """

    question: str  # one of QUESTIONS
    asks: str
    groups: tuple[AnswerGroup, ...]
    scope: str = ""  # restricts the answer to less than the question asks

    @property
    def status(self) -> Status | None:
        """The worst status of the groups; None if there are no groups."""
        return worst(group.status for group in self.groups) if self.groups else None

    @property
    def line(self) -> str:
        """The whole answer as one sentence."""
        if not self.groups:
            return "Not asked."
        text = self.scope + "; ".join(group.line for group in self.groups)
        return f"{text[0].upper()}{text[1:]}."


def answers(decided: Decided) -> tuple[Answer, ...]:
    """Return an ``Answer`` to each question of the report: to all three for trained arms, else to "serving" alone."""
    sides, gated, reasons = decided.comparison, decided.verdict.gated, decided.verdict.reasons
    result, seeds = list[Answer](), len(sides.seeds)
    few = seeds < SEEDS_NEEDED or any(map(sides.alike, sides.arms))
    scope = f"for {plural(seeds, 'seed')}, no claim about the recipe: " if few else ""
    for name in QUESTIONS if sides.mode == "training" else (SERVING,):
        cells = [d for d in gated if question_of(sides, d) == name]
        groups = tuple(_groups(sides, cells))
        if reasons and (cells or not gated):
            # the whole comparison is invalid, so no cell is quoted; only the first answer states the reason
            subjects = tuple(dict.fromkeys(subject_of(sides, d) for d in cells)) or (inline(sides.reference),)
            text = "" if any(answer.groups for answer in result) else _clip_reason(str(reasons[0]))
            groups = (AnswerGroup(Status.INVALID, subjects, text, text, tuple(cells)),)
        result.append(Answer(name, _question_text(sides, name), groups, scope if name != SERVING else ""))
    return tuple(result)


def question_of(sides: Comparison, d: Decision) -> str:
    """Return which question of the report a cell helps to answer: "serving", "training" or "deployed".

    An arm deployed uncompressed belongs to "training".
    """
    if is_serving(sides, d):
        return SERVING
    return DEPLOYED if d.estimand == DEPLOYED and not sides.is_uncompressed(d.policy) else TRAINING


def subject_of(sides: Comparison, d: Decision) -> str:
    """Return what would be shipped if the cell passes: a serving setting, an arm, or an arm with a setting."""
    setting = f"the worst of {len(d.policies)} settings" if d.estimand == WORST else sides.label(d.policy)
    subjects = {SERVING: setting, TRAINING: d.arm, DEPLOYED: f"{d.arm} @ {setting}"}
    return inline(subjects[question_of(sides, d)])


def _question_text(sides: Comparison, question: str) -> str:
    reference = inline(sides.reference)
    if sides.mode == "serving":
        return "Serve it compressed?"
    return {
        SERVING: f"Serve {reference} compressed?",
        TRAINING: f"As aligned as {reference}?",
        DEPLOYED: "Deploy the arm compressed?",
    }[question]


def _groups(sides: Comparison, cells: Sequence[Decision]) -> Iterator[AnswerGroup]:
    """Yield the subjects of one question (serving settings or arms) in groups, the worst group first.

    ``cells`` are the gated cells that answer the question. The verdict of a subject is that of its worst cell. All
    members of a group have the same verdict in words, such as "do not ship".
    """
    subjects: dict[str, list[Decision]] = {}
    for d in cells:
        subjects.setdefault(subject_of(sides, d), []).append(d)
    statuses = {name: worst(d.standing for d in subject_cells) for name, subject_cells in subjects.items()}
    by_word: dict[str, list[str]] = {}
    for name, status in sorted(statuses.items(), key=lambda pair: PRECEDENCE.index(pair[1])):
        by_word.setdefault(STATUS_WORDS[status], []).append(name)
    order = severity_order(sides)
    for names in by_word.values():
        status = worst(statuses[name] for name in names)
        deciding = sorted((d for name in names for d in subjects[name] if d.standing is status), key=order)
        # the reason describes the first subject
        first = subject_of(sides, deciding[0])
        ordered = (first, *(name for name in names if name != first))
        reason, brief = _reason_texts(sides, deciding[0])
        parts = (_share_that_holds(subjects[first], status), reason, _not_measurable_count(subjects[first], status))
        yield AnswerGroup(status, ordered, "; ".join(filter(None, parts)), brief, tuple(deciding))


def _share_that_holds(cells: Sequence[Decision], status: Status) -> str:
    passed = sum(d.standing in PASSED for d in cells)
    is_open = status in (Status.INCONCLUSIVE, Status.NOT_MEASURABLE)
    return f"{passed} of {len(cells)} hold" if is_open and passed else ""


def _not_measurable_count(cells: Sequence[Decision], status: Status) -> str:
    count = sum(d.standing is Status.NOT_MEASURABLE for d in cells)
    return f"{count} cannot be measured" if count and status in (Status.FAIL, Status.INCONCLUSIVE) else ""


def severity_order(sides: Comparison) -> Callable[[Decision], tuple[int, int, float]]:
    """Return a sort key that puts the worst cell first.

    Cells are sorted by status. Among cells of one status, safety facets come first, then other facets. Scores come
    last, because errors in opposite directions cancel in them. Within each of these three kinds, the cell whose bound
    lies furthest beyond its margin comes first.
    """

    def key(d: Decision) -> tuple[int, int, float]:
        facet = facet_of_metric(sides, d.suite)
        place = 2 if facet is None else 0 if facet.kind == "safety" else 1
        return PRECEDENCE.index(d.standing), place, d.room

    return key


def _reason_texts(sides: Comparison, d: Decision) -> tuple[str, str]:
    """Return why the worst cell of a group does not pass, in full and in brief; both empty if it passes."""
    if d.status in PASSED and not d.waiver:
        return "", ""
    if d.status is Status.NOT_MEASURABLE:
        text = f"{metric_text(sides, d)}: the reference is {d.reasons[0].text.partition(':')[0]}"
        return text, text
    if d.effect is None:
        text = _clip_reason(f"{d.suite}: {d.reasons[0].text}") if d.reasons else "no number"
        return text, text
    text = change_text(sides, d)
    if d.status is Status.INCONCLUSIVE and d.reasons and d.reasons[0].code in PASS_NEEDS_MORE:
        # the rates are of readable answers alone, so only its own figures show what happened to the form
        reason = d.reasons[0].text if d.reasons[0].code is ReasonCode.FORM else d.reasons[0].code.meaning.rstrip(".")
        text = f"{text}; {reason[0].lower()}{reason[1:]}"
    brief = f"{metric_text(sides, d)} {before_and_after(sides, d)}, limit {_limit_and_bound(sides, d)[0]}"
    if question_of(sides, d) == TRAINING:
        serving = "uncompressed" if sides.is_uncompressed(d.policy) else f"under {sides.label(d.policy)}"
        text = f"{text}, both {serving}"
    return (f"{text}; {_LARGER_RUN[d.larger]}" if d.larger else text), brief


def _clip_reason(text: str) -> str:
    return inline(text if len(text) <= _REASON_LENGTH else f"{text[: _REASON_LENGTH - 1]}…")


def change_text(sides: Comparison, d: Decision) -> str:
    """Return a cell's change as text, such as "attacks that succeed 0 → 5.6 % of 72, limit +5, up to +10.1".

    The parts are the metric, the rates, the number of items, the limit and the bound compared with it.
    """
    assert d.effect is not None
    return f"{metric_text(sides, d)} {before_and_after(sides, d)} of {d.effect.n_items}, {limit_text(sides, d)}"


def limit_text(sides: Comparison, d: Decision) -> str:
    """Return the limit and the confidence bound compared with it, in percentage points: "limit +5, up to +10.1"."""
    limit, bound = _limit_and_bound(sides, d)
    if d.effect is not None and d.effect.method == BETTING and d.status is Status.FAIL:
        return f"limit {limit}, at least {_sign(sides, d) * d.effect.upper:+.1f}"
    return f"limit {limit}, up to {bound}"


def cell_title(sides: Comparison, d: Decision) -> str:
    """Return the title of a cell, unique in the run: the kind of difference, arm, policy, metric and length."""
    return f"{d.estimand} {sides.who(d.arm, d.policy)}, {d.suite} {at_length(d.context_tokens)}"


def cell_message(sides: Comparison, d: Decision) -> str:
    """Return as text how a cell changed and why it does not pass, for JUnit and SARIF."""
    change = change_text(sides, d) if d.effect else f"{metric_text(sides, d)}: no number"
    reasons = "; ".join(map(str, d.reasons))
    return inline(f"{change}. {reasons}".rstrip(". ") + ".")


def before_and_after(sides: Comparison, d: Decision) -> str:
    """Return the rates of both sides, such as "0 → 5.6 %"; where there are none, the drift in percentage points.

    A difference of differences has no such rates. A cell decided by human labels gets the drift too: human labels do
    not give the rate of each side, and the judge's rates would not fit the bounds by human labels.
    """
    if d.judged and d.effect:
        return f"{_sign(sides, d) * d.effect.estimate:+.1f} points by human labels"
    if rates := event_rates(sides, d):
        before, after = (f"{100 * rate:.1f}".removesuffix(".0") for rate in rates)
        return f"{before} → {after} %"
    return f"{100 * d.effect.estimate:+.1f} points" if d.effect else "no number"


def _limit_and_bound(sides: Comparison, d: Decision) -> tuple[str, str]:
    """Return two texts, the limit and the confidence bound compared with it, both in percentage points: "+5", "+10.1".

    Positive means more of the event that the cell counts, wanted or not. For a cell decided by a ratio of rates the
    texts are multiples, such as "1.1 x".
    """
    assert d.effect is not None
    sign = _sign(sides, d)
    if d.ratio:
        counted_as = "" if sign < 0 else " the misses"  # a ratio always counts the unwanted outcome
        upper = "any multiple" if isinf(d.ratio.times.upper) else f"{d.ratio.times.upper:.2f} x"
        return f"{d.ratio.limit:g} x{counted_as}", upper
    if d.estimand == PARITY and -d.effect.upper < d.effect.lower:  # nearer to the limit on a gain
        return f"{sign * (d.margin or 0.0):+g}", f"{sign * d.effect.upper:+.1f}"
    return f"{-sign * (d.margin or 0.0):+g}", f"{sign * d.effect.lower:+.1f}"


def _sign(sides: Comparison, d: Decision) -> int:
    """Return the factor from a cell's drift to percentage points of the event: 100, or -100 for an unwanted event.

    A drift counts the wanted outcome, so more of an unwanted event is a negative drift.
    """
    facet = facet_of_metric(sides, d.suite)
    return 100 if facet is None or facet.wanted else -100


def metric_text(sides: Comparison, d: Decision) -> str:
    """Return in words what a cell measures, such as "attacks that succeed (agent)" for the suite ``agent``.

    The context length is added if the run has several.
    """
    facet = facet_of_metric(sides, d.suite)
    suite = suite_of(d.suite) if facet else d.suite
    text = f"{facet.counts} ({suite})" if facet else f"{suite} score"
    text += {"selectivity": " beyond capability", "parity": ", either way"}.get(d.estimand, "")
    return inline(text if len(sides.contexts) == 1 else f"{text} at {length_label(d.context_tokens)}")
