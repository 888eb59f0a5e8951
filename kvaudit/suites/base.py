"""The contract of a suite: items, an environment that answers, and a grader. Pure: no state between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal

from kvaudit.core.facets import DEEDS, FACETS, ONCE_SAID, WELL_FORMED, readable, unreadable
from kvaudit.core.questions import Question
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.core.registry import Registry

Split = Literal["train", "eval"]
CountTokens = Callable[[str], int]  # tokens of a text under the model's tokenizer, no special tokens
Lengths = Literal["given", "none", "any"]  # whether a spec gives one, may not, or may
PUBLISHED = "published"  # a row as its authors ask it: no context, no length, no word of ours


def graded(right: bool, facets: Mapping[str, bool], note: str = "", judge: str = "programmatic") -> Grade:
    """The grade of an answer that could be read; ``note`` says what is wrong with it."""
    return Grade(Outcome.DESIRED if right else Outcome.UNDESIRED, float(right), judge, note, readable(facets))


def formless(note: str, eligible: Iterable[str], outcome: Outcome = Outcome.DEGENERATE) -> Grade:
    """The grade of an answer that has no form it could be read in; ``note`` says what it lacks."""
    return Grade(outcome, 0.0, note=note, facets=unreadable(eligible))


class Suite:
    """A behaviour's test set. Subclass in a file of its own, with a ``name``; the registry finds it.

    A transcript is the tuple of all messages so far: the item's opening messages, then assistant completions and the
    environment's answers in turn.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    published: ClassVar[bool] = False  # rows of a public benchmark, asked as its authors ask them: ``context_tokens`` 0
    context: ClassVar[str] = ""  # what a suite SUITE@CONTEXT puts its rows into (``suites.contexts``)
    lengths: ClassVar[Lengths] = "given"  # whether items are made to a length
    kind: ClassVar[Literal["safety", "capability"]] = "safety"
    source: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    max_turns: ClassVar[int] = 1  # assistant turns
    max_new_tokens: int = 32  # per assistant turn, unless a spec gives more to a model that talks longer
    in_context: bool = False  # whether its rows are to stand in a context (SUITE@CONTEXT)
    one_sided: ClassVar[bool] = False  # a constant answer is right for all: to be read beside a suite of the other side
    endpoints: ClassVar[tuple[str, ...]] = ()  # facets that every item is eligible for
    until: tuple[str, ...] = ()  # texts that end an answer, besides the model's own end of turn; they stay in it
    placements: tuple[str, ...] = ("none",)  # where items put what matters, in turn; a spec may ask for some of them
    twins: ClassVar[int] = 1  # items in a row of one cluster between which what is right changes
    reads_cut: ClassVar[bool] = False  # whether the beginning of an answer says all that is asked of it
    refusal: ClassVar[str] = ""  # the sentence that the prompt asks a refusal to be, where it names one
    clusters: ClassVar[int | None] = None  # how many an evaluation has at most, where too few to decide five points

    @property
    def answer_tokens(self) -> int:
        """The most tokens that a model can say of an item, all turns together."""
        return self.max_new_tokens * self.max_turns

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite FAMILY:REST, of a class whose name ends with a colon; the same class for the same name."""
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        """``n`` items whose opening messages together hold about ``context_tokens`` tokens (never more).

        Deterministic in (split, n, seed, context_tokens, tokenizer); the first n of a larger request are the same
        items; clusters are visited round robin. Raises SpecError when the length cannot hold an item. A suite of
        ``lengths`` "none" is asked with 0, and every message is then text of the row, or of a tool's listing.
        """
        raise NotImplementedError

    def rows(self, split: Split, seed: int = 0) -> int | None:  # noqa: ARG002 - procedural ones have no end
        """How many items there are; None where there is no end of them."""
        return None

    def held(self, split: Split, n: int, seed: int) -> int:
        """``n``, or how many items there are where those are fewer."""
        rows = self.rows(split, seed)
        return n if rows is None else min(n, rows)

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:  # noqa: ARG002
        """The environment's answer to the last assistant message, or None when the episode is over, as after one."""
        return None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """The score of a whole transcript. Where a judge decides, that of ``settled`` under the phrase rules."""
        raise NotImplementedError

    def cut_off(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """The grade of a transcript whose last answer was cut before its end.

        What was said before the cut counts: a secret was told by then or it was not, and a refusal is one (ONCE_SAID,
        within the tokens that every side of a comparison has). Of the rest nothing is known, nor is it known that
        nothing would have happened where the conversation was not over: nobody had asked for the secret yet. A suite of
        ``reads_cut`` grades such an answer like any other instead.
        """
        whole, eligible = self.grade(item, transcript), self.facets(item)
        turns = sum(message.role is Role.ASSISTANT for message in transcript[len(item.messages) :])
        is_over = turns >= self.max_turns or self.step(item, transcript) is None
        read = ONCE_SAID if is_over else DEEDS
        said = {name: whole.facets.get(name) if name in read else None for name in eligible}
        if not is_over:
            said = {name: value or None for name, value in said.items()}
        facets = {**said, WELL_FORMED: False}
        if any(value is not None and value is not FACETS[name].wanted for name, value in said.items()):
            return Grade(Outcome.UNDESIRED, 0.0, whole.judge, note=f"cut off: {whole.note}", facets=facets)
        return Grade(Outcome.TRUNCATED, 0.0, note="truncated", facets=facets)

    def looped(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """The grade of a transcript that ends in a loop: of what says nothing only the harm that it did is read."""
        eligible = self.facets(item)
        nothing = Grade(Outcome.DEGENERATE, 0.0, note="loop", facets=unreadable(eligible))
        if DEEDS.isdisjoint(eligible):
            return nothing
        whole = self.grade(item, transcript)
        done = {name: True for name in eligible if name in DEEDS and whole.facets.get(name)}
        if not done:
            return nothing
        facets = {**unreadable(eligible), **done}
        return Grade(Outcome.UNDESIRED, 0.0, whole.judge, note=f"loop: {whole.note}", facets=facets)

    def question(self, item: Item, transcript: tuple[Message, ...]) -> Question | None:  # noqa: ARG002
        """What a judge has to decide about the last answer; None where the answer is graded by construction."""
        return None

    def asks_harm(self, item: Item) -> bool:  # noqa: ARG002 - most suites ask for none
        """Whether a grader of harm may say of an answer to this item whether it is ``unsafe``.

        The facet is none of the suite's own: it is there only where such a grader spoke.
        """
        return False

    def settled(self, item: Item, transcript: tuple[Message, ...], *, refused: bool) -> Grade:
        """The grade once a judge has answered ``question``; the caller names the judge in it."""
        raise NotImplementedError

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002 - most suites ask the same of every item
        """The endpoints that this item is eligible for, besides ``well_formed`` (``kvaudit.core.facets``)."""
        return self.endpoints

    def options(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002 - by itself the model speaks
        """The answers of which one is taken, by what each is worth under the served cache; () lets the model speak.

        Such an item is one turn whose answer is the chosen option: no ``step``, and ``grade`` as for any answer.
        """
        return ()

    def weigh(self, item: Item, logprobs: Sequence[float]) -> Sequence[float]:  # noqa: ARG002
        """What the options of an item are worth, in nats, from the log-probability of each whole text.

        Not divided by length, or a long text with a foreseeable end would win: let options be of like length, and none
        the beginning of another.
        """
        return logprobs

    def gold(self, item: Item) -> tuple[str, ...]:
        """The assistant's ideal completions, one per turn: proof that the grader accepts what it asks for."""
        raise NotImplementedError


class _Suites(Registry[Suite]):
    """The suites, those of a family, FAMILY:MEMBER, and those that stand in a context, SUITE@CONTEXT."""

    def all(self) -> dict[str, type[Suite]]:
        return {name: suite for name, suite in super().all().items() if not name.endswith((":", "@"))}

    def get(self, name: str) -> type[Suite]:
        family, colon, member = name.partition(":")
        found = super().all().get(family + colon) if colon else None
        if found is None and "@" in name:
            found, member = super().all()["@"], name
        return super().get(name) if found is None else found.member(member)


SUITES = _Suites("suite", "kvaudit.suites", Suite)
