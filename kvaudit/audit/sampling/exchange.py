"""A conversation as messages, whoever speaks for the model: the environment's replies, how it ends, its grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvaudit.audit.sampling.exchange import Fault, degenerate
from kvaudit.core.facets import UNSAFE, WELL_FORMED, unknown, unreadable
from kvaudit.core.questions import Question
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.core.text import inline, one_line
from kvaudit.core.thoughts import THOUGHT_CLOSING, as_thought, heard, parted, with_thoughts
from kvaudit.suites.base import Suite

NOT_ANSWERED = "the conversation outgrew the model's positions, or its server would not go on"


class Exchange:
    """One conversation under way. ``finish`` is how it ended: stop | length | turns | error, and ``unanswered`` why.

    ``thinks``: an answer may begin with a thought, which stays in the transcript and is heard by neither environment
    nor grader. ``opens_thought``: the prompt begins it; None: nobody knows (see ``parted``).
    """

    def __init__(self, suite: Suite, item: Item, *, thinks: bool, opens_thought: bool | None = False) -> None:
        self.suite, self.item = suite, item
        self.transcript = item.messages
        self.open, self.finish, self.unanswered = True, "", ""
        self._thinks, self._opens_thought = thinks, opens_thought
        self._turns = 0

    def said(self, text: str, finish_reason: str = "stop", thought: str | None = None) -> tuple[Message, ...]:
        """An answer as messages; a ``thought`` that came in a field of its own is never heard as said."""
        if thought is not None:
            closed = bool(text.strip()) or finish_reason != "length"
            return as_thought(thought, closed=closed), Message(Role.ASSISTANT, text)
        if self._thinks:
            return parted(text, opened=self._opens_thought)
        return (Message(Role.ASSISTANT, text),)

    def hear(self, text: str, finish_reason: str, thought: str | None = None) -> tuple[Message, ...]:
        """Take an answer and return the environment's reply, for ``go_on``; none once the conversation is over."""
        said = self.said(text, finish_reason, thought)
        self.transcript += said
        self._turns += 1
        self.finish = finish_reason
        # what an environment would make of half a call is not behaviour
        messages = None if _fault(said, finish_reason) else self.suite.step(self.item, heard(self.transcript))
        if messages is not None and self._turns >= self.suite.max_turns:  # ``step`` knows whether it was over anyway
            self.finish, messages = "turns", None
        self.open = messages is not None
        return messages or ()

    def go_on(self, messages: tuple[Message, ...]) -> None:
        """Put the environment's reply before the model."""
        self.transcript += messages

    def abort(self, why: str) -> None:
        """End where nothing more can be asked; what is not known is no behaviour."""
        self.open, self.finish, self.unanswered = False, "error", inline(one_line(why))

    def grade(self) -> Grade:
        """The grade of the finished conversation."""
        return grade_transcript(self.suite, self.item, self.transcript, self.finish)


def grade_transcript(suite: Suite, item: Item, transcript: Sequence[Message], finish_reason: str) -> Grade:
    """The grade of a finished conversation, from what was said alone: no arm, no policy, no model.

    ``finish_reason`` is that of the conversation (``GradedRow``). What says nothing never reaches the suite's
    grader; of an answer that was cut, what was said before the cut does, and of a loop the harm that it did.
    """
    broken = grade_degenerate(suite, item, transcript, finish_reason)
    if broken is None:
        return suite.grade(item, heard(transcript))
    if broken.note == "loop":
        return suite.looped(item, heard(transcript))
    return (
        suite.cut_off(item, heard(transcript)) if broken.outcome is Outcome.TRUNCATED and _spoke(transcript) else broken
    )


def judge_question(suite: Suite, item: Item, transcript: Sequence[Message], finish_reason: str) -> Question | None:
    """What a judge has to decide of a finished conversation; None where ``grade_transcript`` needs none."""
    broken = grade_degenerate(suite, item, transcript, finish_reason)
    return None if broken else suite.question(item, heard(transcript))


def grade_by_judge(suite: Suite, item: Item, transcript: Sequence[Message], *, refused: bool | None, judge: str) -> Grade:
    """The grade once a judge has answered ``judge_question``, by its best guess; unscored where it failed: None."""
    if refused is None:
        return Grade(Outcome.UNSCORED, None, judge, note="the judge failed", facets=unknown(suite.facets(item)))
    return replace(suite.settled(item, heard(transcript), refused=refused), judge=judge)


def with_harm(grade: Grade, suite: Suite, item: Item, unsafe: bool | None) -> Grade:
    """A grade with what a grader of harm said: no harm in what is no answer, None where nothing could be read or said.

    Every answer to an item that asks for harm gets the facet, and no other.
    """
    if not suite.asks_harm(item):
        return grade
    # what could not be read says nothing of harm, and what is incoherent does none
    known = None if not grade.facets.get(WELL_FORMED) else bool(unsafe) and grade.facets.get("coherent") is not False
    return replace(grade, facets={**grade.facets, UNSAFE: known})


def grade_degenerate(suite: Suite, item: Item, transcript: Sequence[Message], finish_reason: str) -> Grade | None:
    """The grade of a conversation in which nothing was said that anybody could grade whole; None of any other."""
    facets = suite.facets(item)
    if finish_reason == "error":
        return Grade(Outcome.UNSCORED, None, note=NOT_ANSWERED, facets=unknown(facets))
    # what was said behind the item's own messages, which may hold answers that are not the model's
    fault = _fault(transcript[len(item.messages) :], finish_reason)
    if fault and not (fault == "truncated" and suite.reads_cut and _spoke(transcript)):
        outcome = Outcome.TRUNCATED if fault == "truncated" else Outcome.DEGENERATE
        return Grade(outcome, 0.0, note=fault, facets=unreadable(facets))
    return None


def _spoke(transcript: Sequence[Message]) -> bool:
    """Whether the last answer was reached: a thought that never ended has none."""
    return transcript[-1].role is Role.ASSISTANT and bool(transcript[-1].content.strip())


def _fault(said: Sequence[Message], finish_reason: str) -> Fault | None:
    """What is wrong with the first answer that says nothing; only the last one can have been cut."""
    found = list(with_thoughts(said))
    ends = ["stop"] * (len(found) - 1) + ["length" if finish_reason == "length" else "stop"]
    return next(filter(None, map(_fault_of, found, ends)), None)


def _fault_of(answer: tuple[str | None, str], finish_reason: str) -> Fault | None:
    thought, text = answer
    closed = thought is None or thought.endswith(THOUGHT_CLOSING)
    if not closed or (thought is not None and finish_reason == "length" and not text.strip()):
        return "truncated"  # the answer was never reached
    return degenerate(text, finish_reason)
