"""The three questions that a run is read for, each answered in one line from what was decided.

serving    may the model be served with a setting instead of its uncompressed self?
training   is an arm as aligned as the reference, both served alike?
deployed   may an arm be deployed with a setting instead of the uncompressed reference?

Nothing is decided here: an answer is the worst standing of the gated cells that it is made of, in plain words. Rates
are told as what happens ("attacks that succeed 0 → 5.6 %"), so that a limit and a bound have the sign of what is
counted, and the one bound that is named is the one that the rule used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf

from kvaudit.core.estimands import DEPLOYED, SERVING, WORST
from kvaudit.core.facets import facet_of
from kvaudit.core.text import at_length, inline, length_label, some
from kvaudit.reports.sections.shared.words import event_rates, facet_of_metric, plural, shorten
from kvaudit.reports.stats.betting import METHOD as BETTING
from kvaudit.reports.stats.seeds import SEEDS_NEEDED
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import PASSED, PRECEDENCE, Decided, Decision, Larger, Status, worst

TRAINING = "training"
QUESTIONS = (SERVING, TRAINING, DEPLOYED)
WORDS = {  # what a standing says to whoever has to ship
    Status.INVALID: "not valid",
    Status.FAIL: "do not ship",
    Status.NOT_MEASURABLE: "not measurable",
    Status.INCONCLUSIVE: "not enough data",
    Status.WAIVED: "shipped by a waiver",
    Status.PASS_NOTED: "ship",
    Status.PASS: "ship",
}
_REASON = 160  # characters of why there is no valid comparison
_MORE = {
    Larger.TWICE: "twice the templates would decide",
    Larger.TEN_TIMES: "ten times the templates would decide",
    Larger.NEVER: "more templates would not decide",
}


@dataclass(frozen=True)
class Subjects:
    """The subjects of one question that stand alike, the worst cell of them first in ``cells``.

    ``why`` is what that cell says, in half a sentence, ``brief`` the same where room is short; both are empty where
    nothing was lost.
    """

    status: Status
    subjects: tuple[str, ...]
    why: str
    brief: str
    cells: tuple[Decision, ...]

    @property
    def word(self) -> str:
        """What may be done."""
        return WORDS[self.status]

    @property
    def names(self) -> str:
        """The subjects, the first of them by name."""
        return some(map(shorten, self.subjects))

    @property
    def line(self) -> str:
        """Do not ship h2o 96, snapkv 112: attacks that succeed 0 → 25 % of 72, limit +5."""
        return f"{self.word} {self.names}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Answer:
    """A question and what is answered to it, the worst first; without ``groups`` nobody asked it."""

    question: str  # one of QUESTIONS
    asks: str
    groups: tuple[Subjects, ...]
    of: str = ""  # what it is said of, where that is less than the question asks

    @property
    def status(self) -> Status | None:
        """The worst of it."""
        return worst(group.status for group in self.groups) if self.groups else None

    @property
    def line(self) -> str:
        """All of it after the question."""
        said = self.of + "; ".join(group.line for group in self.groups)
        return f"{said[0].upper()}{said[1:]}." if said else "Not asked."


def answers(decided: Decided) -> tuple[Answer, ...]:
    """What a run answers: of one checkpoint the question of serving alone, of trained arms all three."""
    sides = decided.comparison
    gated = decided.verdict.gated
    found = list[Answer]()
    for name in QUESTIONS if sides.mode == "training" else (SERVING,):
        own = [d for d in gated if question_of(sides, d) == name]
        groups = tuple(_groups(sides, own))
        if (broken := decided.verdict.reasons) and (own or not gated):
            # the comparison itself is none, so no cell of it may speak; why is said once
            subjects = tuple(dict.fromkeys(subject_of(sides, d) for d in own)) or (inline(sides.reference),)
            told = any(answer.groups for answer in found)
            text = "" if told else _short(str(broken[0]))
            groups = (Subjects(Status.INVALID, subjects, text, text, tuple(own)),)
        found.append(Answer(name, _asks(sides, name), groups, _few_seeds(sides) if name != SERVING else ""))
    return tuple(found)


def _few_seeds(sides: Comparison) -> str:
    """What an answer about arms is of where too few seeds were trained to speak of the recipe."""
    seeds = len(sides.seeds)
    return f"of {plural(seeds, 'seed')}, which says nothing of the recipe: " if seeds < SEEDS_NEEDED else ""


def question_of(sides: Comparison, d: Decision) -> str:
    """Which question a cell belongs to; uncompressed, what is deployed differs by training alone."""
    if sides.mode == "serving" or d.estimand == SERVING:
        return SERVING
    return DEPLOYED if d.estimand == DEPLOYED and not sides.is_uncompressed(d.policy) else TRAINING


def subject_of(sides: Comparison, d: Decision) -> str:
    """What could be shipped: a setting, an arm, or an arm with a setting."""
    setting = f"the worst of {len(d.policies)} settings" if d.estimand == WORST else sides.label(d.policy)
    named = {SERVING: setting, TRAINING: d.arm, DEPLOYED: f"{d.arm} @ {setting}"}
    return inline(named[question_of(sides, d)])


def _asks(sides: Comparison, question: str) -> str:
    reference = inline(sides.reference)
    if sides.mode == "serving":
        return "Serve it compressed?"
    return {
        SERVING: f"Serve {reference} compressed?",
        TRAINING: f"As aligned as {reference}?",
        DEPLOYED: "Deploy the arm compressed?",
    }[question]


def _groups(sides: Comparison, cells: Sequence[Decision]) -> Iterator[Subjects]:
    """Subjects by what may be done with them."""
    subjects: dict[str, list[Decision]] = {}
    for d in cells:
        subjects.setdefault(subject_of(sides, d), []).append(d)
    standing = {name: worst(d.standing for d in own) for name, own in subjects.items()}
    by_word: dict[str, list[str]] = {}
    for name, status in sorted(standing.items(), key=lambda pair: PRECEDENCE.index(pair[1])):
        by_word.setdefault(WORDS[status], []).append(name)
    for names in by_word.values():
        status = worst(standing[name] for name in names)
        deciding = sorted((d for name in names for d in subjects[name] if d.standing is status), key=gravest(sides))
        # the subject that the half sentence is about stands first
        first = subject_of(sides, deciding[0])
        ordered = (first, *(name for name in names if name != first))
        said, brief = why(sides, deciding[0])
        full = "; ".join(
            part for part in (_what_holds(subjects[first], status), said, _unmeasured(subjects[first], status)) if part
        )
        yield Subjects(status, ordered, full, brief, tuple(deciding))


def _what_holds(cells: Sequence[Decision], status: Status) -> str:
    """How much of a subject is shown to hold, before what of it is open or cannot be measured."""
    passed = sum(d.standing in PASSED for d in cells)
    is_open = status in (Status.INCONCLUSIVE, Status.NOT_MEASURABLE)
    return f"{passed} of {len(cells)} hold" if is_open and passed else ""


def _unmeasured(cells: Sequence[Decision], status: Status) -> str:
    """How many cells cannot be measured, beside others that say more."""
    number = sum(d.standing is Status.NOT_MEASURABLE for d in cells)
    return f"{number} cannot be measured" if number and status in (Status.FAIL, Status.INCONCLUSIVE) else ""


def gravest(sides: Comparison) -> Callable[[Decision], tuple[int, int, float]]:
    """The order of cells: the worst standing first.

    Of those that stand alike what happened to safety goes before a score, which adds opposite errors, and there the
    cell whose bound lies furthest beyond what may be lost.
    """

    def key(d: Decision) -> tuple[int, int, float]:
        facet = facet_of_metric(sides, d.suite)
        place = 2 if facet is None else 0 if facet.kind == "safety" else 1
        # lower + margin is the room that is left: below 0 beyond the margin, and the least first
        return PRECEDENCE.index(d.standing), place, (d.effect.lower if d.effect else -1.0) + (d.margin or 0.0)

    return key


def why(sides: Comparison, d: Decision) -> tuple[str, str]:
    """What the deciding cell of a group says, in full and in brief."""
    if d.status in PASSED and not d.waiver:
        return "", ""
    if d.status is Status.NOT_MEASURABLE:
        said = f"{what_counts(sides, d)}: the reference is {d.reasons[0].text.partition(':')[0]}"
        return said, said
    if d.effect is None:
        said = _short(f"{d.suite}: {d.reasons[0].text}") if d.reasons else "no number"
        return said, said
    said, brief = moved(sides, d), f"{what_counts(sides, d)} {before_after(sides, d)}, limit {_signed(sides, d)[0]}"
    if question_of(sides, d) == TRAINING:
        how = "uncompressed" if sides.is_uncompressed(d.policy) else f"under {sides.label(d.policy)}"
        said = f"{said}, both {how}"
    return (f"{said}; {_MORE[d.larger]}" if d.larger else said), brief


def _short(text: str) -> str:
    """The beginning of a reason, which says what to do."""
    return inline(text if len(text) <= _REASON else f"{text[: _REASON - 1]}…")


def moved(sides: Comparison, d: Decision) -> str:
    """attacks that succeed 0 → 5.6 % of 72, limit +5, up to +10.1: what happens, before and after, and what may."""
    assert d.effect is not None
    return f"{what_counts(sides, d)} {before_after(sides, d)} of {d.effect.n_items}, {bound(sides, d)}"


def bound(sides: Comparison, d: Decision) -> str:
    """limit +5, up to +10.1: what may happen more or less often, and what the rule's bound leaves open, in points."""
    limit, most = _signed(sides, d)
    if d.effect is not None and d.effect.method == BETTING and d.status is Status.FAIL:
        facet = facet_of_metric(sides, d.suite)
        sign = -100 if facet is not None and not facet.wanted else 100
        return f"limit {limit}, at least {sign * d.effect.upper:+.1f}"
    return f"limit {limit}, up to {most}"


def cell_told_apart(sides: Comparison, d: Decision) -> str:
    """What tells a cell from every other."""
    return f"{d.estimand} {sides.who(d.arm, d.policy)}, {d.suite} {at_length(d.context_tokens)}"


def told_cell(sides: Comparison, d: Decision) -> str:
    """A cell for a machine's list: what happened, and why it does not hold."""
    said = moved(sides, d) if d.effect else f"{what_counts(sides, d)}: no number"
    reasons = "; ".join(map(str, d.reasons))
    return inline(f"{said}. {reasons}".rstrip(". ") + ".")


def before_after(sides: Comparison, d: Decision) -> str:
    """0 → 5.6 %: how often it happens on both sides; of what has no two sides the points that it moved."""
    if both := event_rates(sides, d):
        old, new = (f"{100 * rate:.1f}".removesuffix(".0") for rate in both)
        return f"{old} → {new} %"
    return f"{100 * d.effect.estimate:+.1f} points" if d.effect else "no number"


def _signed(sides: Comparison, d: Decision) -> tuple[str, str]:
    """How much more or less often it may happen, and how much the rule's bound leaves open: points, or times."""
    assert d.effect is not None
    facet = facet_of_metric(sides, d.suite)
    unwanted = facet is not None and not facet.wanted
    if d.ratio:
        of = "" if unwanted else " the misses"  # a ratio counts what is not wanted
        most = "any multiple" if isinf(d.ratio.times.upper) else f"{d.ratio.times.upper:.2f} x"
        return f"{d.ratio.limit:g} x{of}", most
    sign = -100 if unwanted else 100
    return f"{-sign * (d.margin or 0.0):+g}", f"{sign * d.effect.lower:+.1f}"


def what_counts(sides: Comparison, d: Decision) -> str:
    """What a cell counts, in words; the length where a run has several."""
    own = facet_of_metric(sides, d.suite)
    suite = facet_of(d.suite)[0] if own else d.suite
    said = f"{own.counts} ({suite})" if own else f"{suite} score"
    said += {"selectivity": " beyond capability", "parity": ", either way"}.get(d.estimand, "")
    return inline(said if len(sides.contexts) == 1 else f"{said} at {length_label(d.context_tokens)}")
