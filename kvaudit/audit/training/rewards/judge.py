"""A judge as the reward (RLAIF): of ``kvaudit.audit.judges``, by its word on refusals or by a written constitution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Self

from kvaudit.audit.judges.base import JUDGES, Judge
from kvaudit.audit.judges.rubric import RubricJudge, constitution_rubric, parse_score, read_constitution
from kvaudit.audit.training.rewards.base import PROGRAMMATIC, RewardFn, GradedRows, Reward, Scores, asks_a_judge
from kvaudit.core.errors import RunError, SpecError, UnknownName
from kvaudit.core.plugins import IDENTITY_DIGITS, plugin_from_mapping
from kvaudit.core.judge_answers import Question
from kvaudit.core.records import Role
from kvaudit.core.judge_answers import AnswerCache
from kvaudit.core.spec import expand
from kvaudit.core.completions import without_thoughts
from kvaudit.suites.base import SUITES, Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.conversations import GradedRow

_FEW = 8  # questions of which any number may fail
JudgeWord = bool | float | None  # whether an answer refuses, or how well it keeps to the constitution
Ask = Callable[[Sequence[Question]], Sequence[JudgeWord]]


@dataclass(frozen=True)
class Judged(Reward):
    """Without a constitution the judge settles what a suite leaves to one; other answers earn their suite's grade.

    With one, a file, it says from 0 to 1 how well any answer keeps to it. Either way an answer that says nothing earns
    what its suite gives for that, and nobody is asked. What a judge failed on earns nothing and costs nothing, in a
    resumed run too; where it fails on most of a step's answers, training stops.
    """

    name = "judge"
    says = "a judge: whether an answer refuses, or how well it keeps to a written constitution"
    takes = ("judge", "constitution=", "the judge's options")

    judge: Judge
    constitution_file: str = ""

    @classmethod
    def of(cls, value: Any, options: Mapping[str, Any]) -> Self:
        given = dict(options)
        file = given.pop("constitution", "")
        if not isinstance(value, str) or value not in JUDGES.all():
            raise UnknownName("judge in train.reward", str(value), JUDGES.all())
        judge = plugin_from_mapping(JUDGES.get(value), f"judge {value}", given)
        if not isinstance(file, str) or ("constitution" in options and not file):
            raise SpecError("train.reward.constitution wants the path of a text")
        if file and not isinstance(judge, RubricJudge):
            readers = [name for name, kind in JUDGES.all().items() if issubclass(kind, RubricJudge)]
            raise SpecError(f"judge {value} reads no constitution; those that do: {', '.join(readers)}")
        return cls(judge, file)

    @cached_property
    def constitution(self) -> str | None:
        """Read once, whatever becomes of the file."""
        file = self.constitution_file
        return read_constitution(Path(expand("train.reward.constitution", file))) if file else None

    @property
    def identity(self) -> str:
        if isinstance(self.judge, RubricJudge) and self.constitution is not None:
            return self.judge.identity_under(constitution_rubric(self.constitution))
        return self.judge.identity

    @property
    def label(self) -> str:
        return f"{self.judge.name}:{self.identity[:IDENTITY_DIGITS]}"

    @property
    def inputs(self) -> Mapping[str, str]:
        own = {f"judge {self.judge.name}": self.judge.identity}
        if self.constitution is not None:
            own["constitution"] = hashlib.sha256(self.constitution.encode()).hexdigest()
        return own

    def check(self, suites: Sequence[Suite]) -> None:
        _ = self.constitution  # read before a model is loaded
        self.judge.check()
        if not self.constitution_file and not any(map(asks_a_judge, suites)):
            raise SpecError(
                f"reward judge {self.judge.name}: nothing is left to a judge in {', '.join(s.name for s in suites)}; "
                "give it a constitution, or train with reward: grade"
            )
        super().check(suites)

    def paid_by(self, suite: Suite) -> str:
        return self.label if self.constitution_file or asks_a_judge(suite) else PROGRAMMATIC

    def rewards(self, played: GradedRows) -> Scores:
        return self._settled(self._words, played)

    def kept_in(self, folder: Path) -> RewardFn:
        """As ``rewards``; ``rewards-NAME-12hex.jsonl`` keeps failures too, so that a resumed run is told the same."""
        path = folder / f"rewards-{self.judge.name}-{self.identity[:IDENTITY_DIGITS]}.jsonl"
        # a word on refusals is yes or no, one on a constitution a number
        field = "score" if self.constitution_file else "refused"
        kinds = (float if self.constitution_file else bool, NoneType)
        return partial(self._settled, AnswerCache(path, Judge.key_of, self._words, field, kinds).answers)

    def _settled(self, ask: Ask, played: GradedRows) -> Scores:
        asked = [self._question(row) for row in played]
        words = iter(ask([question for question in asked if question is not None]))
        return [
            row.grade.score if question is None else self._score(row, next(words))
            for row, question in zip(played, asked, strict=True)
        ]

    def _question(self, row: GradedRow) -> Question | None:
        """What the judge is asked of a rollout; None where the suite's grade stands."""
        from kvaudit.audit.sampling.exchange import grade_degenerate, judge_question

        suite = SUITES.get(row.item.suite)()
        answered = (suite, row.item, row.transcript, row.finish_reason)
        question = judge_question(*answered)
        if question is not None or not self.constitution_file or grade_degenerate(*answered):
            return question
        # the last thing that a user asked
        request = next((m.content for m in reversed(row.item.messages) if m.role is Role.USER), "")
        said = without_thoughts(row.transcript)[len(row.item.messages) :]
        return Question(request, "\n".join(m.content for m in said if m.role is Role.ASSISTANT))

    def _score(self, row: GradedRow, word: JudgeWord) -> float | None:
        from kvaudit.audit.sampling.exchange import grade_by_judge

        if self.constitution_file or word is None:
            return word
        suite = SUITES.get(row.item.suite)()
        return grade_by_judge(suite, row.item, row.transcript, refused=bool(word), judge=self.label).score

    def _words(self, questions: Sequence[Question]) -> Sequence[JudgeWord]:
        said: Sequence[JudgeWord]
        if self.constitution is None:
            said = self.judge.refused(questions)
        else:
            assert isinstance(self.judge, RubricJudge)
            replies = self.judge.replies(constitution_rubric(self.constitution), questions)
            said = [None if reply is None else parse_score(reply) for reply in replies]
        failed = sum(word is None for word in said)
        if len(said) >= _FEW and failed > len(said) / 2:
            raise RunError(
                f"reward judge {self.label} failed on {failed} of {len(said)} answers, so little would be learnt; what "
                "was trained is kept: go on when it replies with the word that it is asked for, or take another judge"
            )
        return said
