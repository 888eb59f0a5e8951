"""Any task of EleutherAI/lm-evaluation-harness as a suite: ``lm-eval:TASK`` (Gao et al. 2023).

The task gives documents, prompts, the texts that end an answer, and the metric. Sampler, seeds, cache, records and
resume are ours, and none of the harness's caches takes part. Options are scored token by token, never in one prefill.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from kvaudit.core.errors import AuditError, SpecError
from kvaudit.core.facets import unknown
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.base import Split, Suite, formless, graded
from kvaudit.suites.harness_task import FAMILY, TASKS_VARIABLE, HarnessTask, HarnessTaskName, harness_task
from kvaudit.suites.task_family import GRADING_SECONDS, TASK_ERRORS, PASS_THRESHOLD, TaskFamily, TaskRow, TaskTimeout, merge_clusters, time_limit


class LmEval(TaskFamily):
    """The family: a member is made for each task that is named. ``context_tokens`` is the most that a prompt may take.

    The first metric that is a number from 0 to 1 for each document is the score; a document is a cluster, or every
    value of a column is; documents that ask the same are one cluster.
    """

    name = FAMILY
    source = "lm-evaluation-harness: the task's documents, prompts and metric"
    row_word = "document"
    endpoints = ("solved",)
    _task: ClassVar[HarnessTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite of one task; raises AuditError where the package, the task or its documents are missing."""
        return _member(rest, os.environ.get(TASKS_VARIABLE, ""))

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002 - whatever the order
        return len(_documents(self._task, split))

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        return _rows(self._task, split)

    def stream(self, split: Split, seed: int) -> str:
        return f"{self.name}-{split}-{seed}"

    def options(self, item: Item) -> tuple[str, ...]:
        return tuple(item.payload["options"])

    def weigh(self, item: Item, logprobs: Sequence[float]) -> Sequence[float]:
        return self._task.weigh(self.options(item), logprobs)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer = self.until_stop(transcript[-1].content)
        options = self.options(item)
        if not answer.strip() or (options and answer not in options):
            return formless("no answer", ("solved",))
        try:
            with time_limit():
                score = self._task.score(self._document(item), answer)
        except AuditError:
            raise
        except TaskTimeout:
            note = f"the metric took over {GRADING_SECONDS:g} s"
            return Grade(Outcome.UNSCORED, None, note=note, facets=unknown(("solved",)))
        except TASK_ERRORS as error:  # the task's code, over whatever the model wrote
            note = f"the metric raised {type(error).__name__}"
            return Grade(Outcome.UNSCORED, None, note=note, facets=unknown(("solved",)))
        return replace(graded(score >= PASS_THRESHOLD, {"solved": score >= PASS_THRESHOLD}), score=score)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(self._document(item)),)

    def _document(self, item: Item) -> dict[str, Any]:
        number: int = item.payload["document"]
        return _documents(self._task, item.payload["split"])[number]


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - the same name means another task in another folder
    task = harness_task(HarnessTaskName.of(rest))
    return LmEval.of_task(
        {row.cluster_id for row in _rows(task, "eval")},
        name=FAMILY + rest,
        version=f"{task.task.VERSION}-{task.digest}",
        source=f"lm-evaluation-harness: {task.asked.task}, {task.metric}",
        until=task.until,
        max_new_tokens=task.longest_answer,
        _task=task,
    )


def _documents(task: HarnessTask, split: Split) -> list[dict[str, Any]]:
    return task.training_documents if split == "train" else task.documents


def _cluster(task: HarnessTask, split: Split, number: int) -> str:
    column = task.asked.column
    return f"{split}-{number}" if column is None else str(_documents(task, split)[number][column])


@cache
def _rows(task: HarnessTask, split: Split) -> list[TaskRow]:
    """Every document as it is asked; raises SpecError where the user does not speak last."""
    rows, documents, name = list[TaskRow](), _documents(task, split), task.asked.task
    openings, options = task.prompts(documents), [task.options(document) for document in documents]
    own = [_cluster(task, split, number) for number in range(len(documents))]
    clusters = merge_clusters(own, [_question(*pair) for pair in zip(openings, options, strict=True)])
    for number, (opening, cluster) in enumerate(zip(openings, clusters, strict=True)):
        if opening[-1].role is not Role.USER:
            raise SpecError(f"lm-eval task {name!r}: document {number} begins the answer for the model")
        payload = {"split": split, "document": number, "options": list(options[number])}
        rows.append(TaskRow(f"{name}-{split}-{number}", f"{name}-{cluster}", opening, payload, str(number)))
    return rows


def _question(opening: Sequence[Message], options: tuple[str, ...]) -> Hashable:
    """What a document asks, without the examples, which are drawn anew for each."""
    system = tuple(message.content for message in opening if message.role is Role.SYSTEM)
    return system, opening[-1].content, options
