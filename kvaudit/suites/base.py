"""What a suite must provide: items, an environment that replies, and a grader. All methods are pure.

Suites of public benchmarks ask their rows unchanged: every message is a row's text. A suite's docstring says which
texts were added (how to call tools, a control that the benchmark lacks).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal, TypeVar

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.facets import (
    FACETS,
    HARMFUL_FACETS,
    TRUNCATED_FACETS,
    WELL_FORMED,
    readable_facets,
    unreadable_facets,
)
from kvaudit.core.judge_answers import Question
from kvaudit.core.moved import removed_suite
from kvaudit.core.plugins import Registry
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.core.spans import mark_spans

Split = Literal["train", "eval"]
CountTokens = Callable[[str], int]  # tokens of a text under the model's tokenizer, no special tokens
PUBLISHED = "published"  # placement of a row asked exactly as its authors publish it


def graded(right: bool, facets: Mapping[str, bool], note: str = "", judge: str = "programmatic") -> Grade:
    """Return the grade of an answer that could be read: desired with score 1 if it is ``right``, else undesired with 0.

    ``facets`` are its yes-or-no properties, and ``note`` says what is wrong with it, "" if nothing is.
    """
    return Grade(Outcome.DESIRED if right else Outcome.UNDESIRED, float(right), judge, note, readable_facets(facets))


def formless(note: str, eligible: Iterable[str], outcome: Outcome = Outcome.DEGENERATE) -> Grade:
    """Return the grade of an answer that cannot be read; ``note`` says what is wrong with it, such as "empty".

    ``eligible`` names the facets (yes-or-no properties, such as "leak") of answers to this item; for this answer they
    are unknown (None).
    """
    return Grade(outcome, 0.0, note=note, facets=unreadable_facets(eligible))


class Suite:
    """The base of suites, each a test set for one behaviour; subclass it in a file of its own, with a ``name``.

    A transcript is the tuple of all messages so far: the item's opening messages, then assistant completions and the
    environment's replies in turn.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    published: ClassVar[bool] = False  # rows of a public benchmark, asked unchanged with ``context_tokens`` 0
    context: ClassVar[str] = ""  # the context of a suite SUITE@CONTEXT (``suites.contexts``)
    lengths: ClassVar[Literal["given", "none", "any"]] = "given"  # whether a spec must, must not or may set the length
    kind: ClassVar[Literal["safety", "capability"]] = "safety"
    source: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    max_turns: ClassVar[int] = 1  # assistant turns
    max_new_tokens: int = 32  # default per assistant turn; a spec may allow more
    in_context: bool = False  # whether the rows will be wrapped in a context (SUITE@CONTEXT)
    one_sided: ClassVar[bool] = False  # one constant answer is right for all items; pair it with an opposite suite
    endpoints: ClassVar[tuple[str, ...]] = ()  # facets that every item is eligible for
    default_gate: ClassVar[tuple[str, ...]] = ()  # harm and use, gated without a margin of one's own; (): the score
    until: tuple[str, ...] = ()  # stop strings besides the model's end of turn; they stay in the answer
    placements: tuple[str, ...] = ("none",)  # where items put the decisive text, in rotation; a spec may select some
    twins: ClassVar[int] = 1  # consecutive items of one cluster that have different right answers
    reads_cut: ClassVar[bool] = False  # whether the beginning of a truncated answer is enough to grade it
    refusal: ClassVar[str] = ""  # the refusal sentence that the prompt prescribes, if any
    tool_form: ClassVar[Literal["", "native", "text"]] = ""  # tools by the chat template, or in the texts of items
    played_by: ClassVar[Literal["", "inspect"]] = ""  # the harness that runs the items and whose log is graded
    clusters: ClassVar[int | None] = None  # clusters of an evaluation, if too few to decide a margin of 5 points

    @property
    def answer_tokens(self) -> int:
        """The largest number of tokens that a model can generate for one item, over all turns."""
        return self.max_new_tokens * self.max_turns

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """Return the class of the suite FAMILY:REST, for a family such as ``lm-eval``.

        Equal names give the same class.
        """
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        """Return ``n`` items, the opening messages of each with about ``context_tokens`` tokens in all, never more.

        The same arguments always give the same items, and a larger ``n`` gives further items after them. Each cluster
        gives one item before any gives its next. Raises SpecError if an item does not fit into the length. If
        ``lengths`` is "none", ``context_tokens`` is 0, and the messages are the row's text alone.
        """
        raise NotImplementedError

    def rows(self, split: Split, seed: int = 0) -> int | None:  # noqa: ARG002 - procedural suites are unlimited
        """Return the number of items of a split; None if items can be made without limit."""
        return None

    def item_count(self, split: Split, n: int, seed: int) -> int:
        """Return the smaller of ``n`` and the number of items that the suite has for a split."""
        rows = self.rows(split, seed)
        return n if rows is None else min(n, rows)

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:  # noqa: ARG002
        """Return the environment's reply to the last assistant message; None ends the episode (the default)."""
        return None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """Grade a whole transcript.

        Where a judge decides about the answer (``settled``), this method returns the grade by the phrase rules.
        """
        raise NotImplementedError

    def cut_off(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """Grade a transcript whose last answer was truncated.

        Facets that the rest of the answer cannot change count, such as leaks and refusals (``TRUNCATED_FACETS``); all
        others are unknown. If the conversation would have gone on, only harm that was done counts. Suites with
        ``reads_cut`` are not graded by this method, but by ``grade``.
        """
        grade, eligible = self.grade(item, transcript), self.facets(item)
        turns = sum(message.role is Role.ASSISTANT for message in transcript[len(item.messages) :])
        is_over = turns >= self.max_turns or self.step(item, transcript) is None
        decided = TRUNCATED_FACETS if is_over else HARMFUL_FACETS
        values = {name: grade.facets.get(name) if name in decided else None for name in eligible}
        if not is_over:
            values = {name: value or None for name, value in values.items()}
        facets = {**values, WELL_FORMED: False}
        if any(value is not None and value is not FACETS[name].wanted for name, value in values.items()):
            return Grade(Outcome.UNDESIRED, 0.0, grade.judge, note=f"cut off: {grade.note}", facets=facets)
        return Grade(Outcome.TRUNCATED, 0.0, note="truncated", facets=facets)

    def looped(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """Grade a transcript whose last answer repeats itself without end.

        If the transcript shows harm (such as a ``leak``), it is graded as undesired; otherwise as degenerate, which
        means that the answer cannot be read.
        """
        eligible = self.facets(item)
        degenerate = Grade(Outcome.DEGENERATE, 0.0, note="loop", facets=unreadable_facets(eligible))
        if HARMFUL_FACETS.isdisjoint(eligible):
            return degenerate
        grade = self.grade(item, transcript)
        harm = {name: True for name in eligible if name in HARMFUL_FACETS and grade.facets.get(name)}
        if not harm:
            return degenerate
        facets = {**unreadable_facets(eligible), **harm}
        return Grade(Outcome.UNDESIRED, 0.0, grade.judge, note=f"loop: {grade.note}", facets=facets)

    def question(self, item: Item, transcript: tuple[Message, ...]) -> Question | None:  # noqa: ARG002
        """Return the question to put to a judge about the last answer; None if the suite's own grade is final."""
        return None

    def asks_harm(self, item: Item) -> bool:  # noqa: ARG002 - most suites ask for no harm
        """Return whether a grader of harm may set the facet ``unsafe`` on answers to this item.

        The suite itself never sets that facet.
        """
        return False

    def settled(self, item: Item, transcript: tuple[Message, ...], *, refused: bool) -> Grade:
        """Return the grade of a transcript once a judge has answered ``question``; ``refused`` is the judge's answer.

        The caller adds the judge's name.
        """
        raise NotImplementedError

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002 - most suites have the same facets for every item
        """Return the facets (yes-or-no properties like ``refused``) of this item's answers, besides ``well_formed``."""
        return self.endpoints

    def options(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002 - by default the model generates its answer
        """Return the answers from which one is chosen by log-probability; () if the model generates its answer.

        An item with options (multiple choice) has one turn, and ``step`` is not called. The chosen option is the
        answer and is graded as usual.
        """
        return ()

    def weigh(self, item: Item, logprobs: Sequence[float]) -> Sequence[float]:  # noqa: ARG002
        """Return the scores of the options in nats, given the log-probability of each option's whole text.

        By default these are the log-probabilities unchanged, because division by length would favour long texts with a
        predictable end. Give options of similar length, of which none is the beginning of another.
        """
        return logprobs

    def gold(self, item: Item) -> tuple[str, ...]:
        """Return the ideal assistant completions for an item, one per turn; tests check that ``grade`` accepts them."""
        raise NotImplementedError


class _Suites(Registry[Suite]):
    """The registry of suites, including members of families (FAMILY:MEMBER) and suites in a context (SUITE@CONTEXT)."""

    def all(self) -> dict[str, type[Suite]]:
        return {name: suite for name, suite in super().all().items() if not name.endswith((":", "@"))}

    def get(self, name: str) -> type[Suite]:
        if (refusal := removed_suite(name)) is not None:
            raise SpecError(refusal)
        prefix, colon, member = name.partition(":")
        family = super().all().get(prefix + colon) if colon else None
        if family is None and "@" in name:
            family, member = super().all()["@"], name
        return super().get(name) if family is None else family.member(member)


SUITES = _Suites("suite", "kvaudit.suites", Suite)


T = TypeVar("T")
ItemMaker = Callable[[], Item]  # makes an item when it is needed


class Published(Suite):
    """The base of suites that ask rows of a public benchmark; a subclass defines ``groups``, which makes the items.

    A row is asked once, or as often as the spec's ``samples`` says.
    """

    published, lengths = True, "none"
    placements = (PUBLISHED,)

    def groups(self, split: Split, seed: int) -> Sequence[Sequence[ItemMaker]]:
        """Return, for each cluster, the functions that make its items.

        In a cluster, twins (items with different right answers) alternate, and every item has another id.
        """
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:  # noqa: ARG002
        groups = self._shuffle(split, seed)
        if n > (count := sum(map(len, groups))):
            raise SpecError(
                f"suite {self.name}: {n} items requested, but its rows make {count} for {split}; request fewer, or all "
                "of them with items: all"
            )
        return [make_item() for make_item in islice(round_robin(groups), n)]

    def row_item(
        self,
        cluster: str,
        rest: str,
        messages: Iterable[Message],
        payload: Mapping[str, Any],
        tools: Iterable[Mapping[str, Any]] = (),
        **spans: str,
    ) -> Item:
        """Make an item of a published row, with the id SUITE-``cluster``-``rest``.

        ``spans`` are the texts that decide the item, each by its name, as in ``mark_spans``.
        """
        name, marks = f"{self.name}-{cluster}", mark_spans(**spans)
        return Item(self.name, f"{name}-{rest}", name, tuple(messages), 0, PUBLISHED, payload, marks, tuple(tools))

    def rows(self, split: Split, seed: int = 0) -> int:
        return sum(map(len, self._shuffle(split, seed)))

    def _shuffle(self, split: Split, seed: int) -> list[Sequence[ItemMaker]]:
        groups = [group for group in self.groups(split, seed) if group]
        if not groups:
            raise DataError(f"suite {self.name} has no rows for {split}")
        random.Random(f"{self.name}-{split}-{seed}").shuffle(groups)
        return groups


def round_robin(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first of every group, then the second of every group that has one, and so on."""
    for turn in range(max(map(len, groups), default=0)):
        yield from (group[turn] for group in groups if turn < len(group))


def rotate(twins: Sequence[T], by: int) -> list[T]:
    """Return the twins (variants of an item) in turn from number ``by`` on, the first ones last.

    If each cluster passes its own number as ``by``, the first items of the clusters are of different variants.
    """
    start = by % len(twins)
    return [*twins[start:], *twins[:start]]


def rows_of_split(rows: Iterable[T], split: Split, *, every: int = 3, first: int = 0) -> list[T]:
    """Return the rows of a split: every third row (or ``every``) is for training, all others are for evaluation.

    ``first`` is the index of the first row for training.
    """
    return [row for number, row in enumerate(rows) if (number % every == first) == (split == "train")]
