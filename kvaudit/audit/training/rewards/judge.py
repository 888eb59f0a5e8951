"""A judge of ``kvaudit.audit.judges`` as the reward (RLAIF): for refusals, or for following a written constitution."""

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
from kvaudit.audit.training.rewards.base import PROGRAMMATIC, GradedRows, Reward, RewardFn, Scores, asks_a_judge
from kvaudit.core.completions import without_thoughts
from kvaudit.core.errors import RunError, SpecError, UnknownName
from kvaudit.core.judge_answers import AnswerCache, Question
from kvaudit.core.plugins import IDENTITY_DIGITS, plugin_from_mapping
from kvaudit.core.records import Role
from kvaudit.core.spec import expand
from kvaudit.suites.base import SUITES, Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.conversations import GradedRow

_MAX_UNCHECKED = 7  # if a step has at most so many questions, all of them may fail
Ruling = bool | float | None  # whether an answer refuses, or how well it follows the constitution; None: failed
AskJudge = Callable[[Sequence[Question]], Sequence[Ruling]]


@dataclass(frozen=True)
class Judged(Reward):
    """The reward that a judge gives to answers that a suite leaves to a judge; other answers get the suite's grade.

    With a constitution (a file), the judge scores from 0 to 1 how well any answer follows it. Degenerate answers always
    get their suite's grade. Answers on which the judge fails are ungraded, also in a resumed run; if it fails on most
    answers of a step, training stops.
    """

    name = "judge"
    says = "a judge: whether an answer refuses, or how well it keeps to a written constitution"
    takes = ("judge", "constitution=", "the judge's options")

    judge: Judge
    constitution_file: str = ""

    @classmethod
    def of(cls, value: Any, options: Mapping[str, Any]) -> Self:
        judge_options = dict(options)
        file = judge_options.pop("constitution", "")
        if not isinstance(value, str) or value not in JUDGES.all():
            raise UnknownName("judge in train.reward", str(value), JUDGES.all())
        judge = plugin_from_mapping(JUDGES.get(value), f"judge {value}", judge_options)
        if not isinstance(file, str) or ("constitution" in options and not file):
            raise SpecError("train.reward.constitution must be the path of a text file")
        if file and not isinstance(judge, RubricJudge):
            names = [name for name, judge in JUDGES.all().items() if issubclass(judge, RubricJudge)]
            raise SpecError(f"judge {value} cannot use a constitution; judges that can: {', '.join(names)}")
        return cls(judge, file)

    @cached_property
    def constitution(self) -> str | None:
        """The text of the constitution, read once, so that later changes of the file have no effect."""
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
        hashes = {f"judge {self.judge.name}": self.judge.identity}
        if self.constitution is not None:
            hashes["constitution"] = hashlib.sha256(self.constitution.encode()).hexdigest()
        return hashes

    def check(self, suites: Sequence[Suite]) -> None:
        _ = self.constitution  # raises for an unreadable file before a model is loaded
        self.judge.check()
        if not self.constitution_file and not any(map(asks_a_judge, suites)):
            raise SpecError(
                f"reward judge {self.judge.name}: no suite of {', '.join(s.name for s in suites)} leaves answers to a "
                "judge; add a constitution, or train with reward: grade"
            )
        super().check(suites)

    def grader_label(self, suite: Suite) -> str:
        return self.label if self.constitution_file or asks_a_judge(suite) else PROGRAMMATIC

    def rewards(self, rows: GradedRows) -> Scores:
        return self._score_rows(self._ask, rows)

    def kept_in(self, folder: Path) -> RewardFn:
        """Return the method ``rewards`` with a store, so that a resumed run reuses every answer of the judge.

        The store is ``rewards-NAME-12hex.jsonl`` in ``folder``.
        """
        path = folder / f"rewards-{self.judge.name}-{self.identity[:IDENTITY_DIGITS]}.jsonl"
        field = "score" if self.constitution_file else "refused"
        kinds = (float if self.constitution_file else bool, NoneType)
        return partial(self._score_rows, AnswerCache(path, Judge.key_of, self._ask, field, kinds).answers)

    def _score_rows(self, ask: AskJudge, rows: GradedRows) -> Scores:
        questions = [self._question(row) for row in rows]
        rulings = iter(ask([question for question in questions if question is not None]))
        return [
            row.grade.score if question is None else self._score(row, next(rulings))
            for row, question in zip(rows, questions, strict=True)
        ]

    def _question(self, row: GradedRow) -> Question | None:
        """Return the question to the judge about a rollout; None if the suite's grade is the reward."""
        from kvaudit.audit.sampling.exchange import grade_degenerate, judge_question

        suite = SUITES.get(row.item.suite)()
        answer = (suite, row.item, row.transcript, row.finish_reason)
        question = judge_question(*answer)
        if question is not None or not self.constitution_file or grade_degenerate(*answer):
            return question
        request = next((m.content for m in reversed(row.item.messages) if m.role is Role.USER), "")
        messages = without_thoughts(row.transcript)[len(row.item.messages) :]
        return Question(request, "\n".join(m.content for m in messages if m.role is Role.ASSISTANT))

    def _score(self, row: GradedRow, ruling: Ruling) -> float | None:
        from kvaudit.audit.sampling.exchange import grade_by_judge

        if self.constitution_file or ruling is None:
            return ruling
        suite = SUITES.get(row.item.suite)()
        return grade_by_judge(suite, row.item, row.transcript, refused=bool(ruling), judge=self.label).score

    def _ask(self, questions: Sequence[Question]) -> Sequence[Ruling]:
        rulings: Sequence[Ruling]
        if self.constitution is None:
            rulings = self.judge.refused(questions)
        else:
            assert isinstance(self.judge, RubricJudge)
            replies = self.judge.replies(constitution_rubric(self.constitution), questions)
            rulings = [None if reply is None else parse_score(reply) for reply in replies]
        failed = sum(ruling is None for ruling in rulings)
        if len(rulings) > _MAX_UNCHECKED and failed > len(rulings) / 2:
            raise RunError(
                f"reward judge {self.label} failed on {failed} of {len(rulings)} answers, too many to learn from; "
                "saved work is kept: check that it replies with the requested word and resume, or use another judge"
            )
        return rulings
