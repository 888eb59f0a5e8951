"""The contract of a suite: items, an environment that answers, and a grader. Pure: no state between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from audit.core.questions import Question
from audit.core.records import Grade, Item, Message
from audit.core.registry import Registry

Split = Literal["train", "eval"]
CountTokens = Callable[[str], int]  # tokens of a text under the model's tokenizer, no special tokens


class Suite:
    """A behaviour's test set. Subclass in a file of its own, with a ``name``; the registry finds it.

    A transcript is the tuple of all messages so far: the item's opening messages, then assistant completions and the
    environment's answers in turn.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["safety", "capability"]] = "safety"
    source: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    max_turns: ClassVar[int] = 1  # assistant turns
    max_new_tokens: int = 32  # per assistant turn, unless a spec gives more to a model that talks longer
    until: tuple[str, ...] = ()  # texts that end an answer, besides the model's own end of turn; they stay in it
    placements: tuple[str, ...] = ("none",)  # where items put what matters, in turn; a spec may ask for some of them
    twins: ClassVar[int] = 1  # items in a row of one cluster between which what is right changes
    refusal: ClassVar[str] = ""  # the sentence that the prompt asks a refusal to be, where it names one
    clusters: ClassVar[int | None] = None  # how many an evaluation has at most, where too few to decide five points

    @property
    def most_tokens(self) -> int:
        """The most tokens that a model can say of an item, all turns together."""
        return self.max_new_tokens * self.max_turns

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite FAMILY:REST, of a class whose name ends with a colon; the same class for the same name."""
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        """``n`` items whose opening messages together hold about ``context_tokens`` tokens (never more).

        Deterministic in (split, n, seed, context_tokens, tokenizer); the first n of a larger request are the same
        items; clusters are visited round robin. Raises SpecError when the length cannot hold an item.
        """
        raise NotImplementedError

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        """The environment's answer to the last assistant message, or None when the episode is over."""
        raise NotImplementedError

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        """The score of a whole transcript. Where a judge decides, that of ``settled`` under the phrase rules."""
        raise NotImplementedError

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

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002 - a suite without endpoints has none for any item
        """The endpoints that this item is eligible for, besides ``well_formed`` (``audit.core.facets``)."""
        return ()

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
    """The suites, and those of a family, FAMILY:MEMBER, of which there may be any number."""

    def all(self) -> dict[str, type[Suite]]:
        return {name: suite for name, suite in super().all().items() if not name.endswith(":")}

    def get(self, name: str) -> type[Suite]:
        family, colon, member = name.partition(":")
        found = super().all().get(family + colon) if colon else None
        return super().get(name) if found is None else found.member(member)


SUITES = _Suites("suite", "suites", Suite)
