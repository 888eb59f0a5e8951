"""Any task of EleutherAI/lm-evaluation-harness as a suite: ``lm-eval:TASK`` (Gao et al. 2023).

The task gives documents, prompts, stop strings and the metric. The sampler, seeds, cache, records and resuming are
kvaudit's; no cache of the harness is used. The options of multiple choice are scored token by token, never in one
prefill.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from kvaudit.core.errors import AuditError, SpecError
from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.suites import task_family
from kvaudit.suites.base import Split, Suite, formless, graded
from kvaudit.suites.harness_task import FAMILY, TASKS_VARIABLE, HarnessTask, HarnessTaskName, harness_task
from kvaudit.suites.task_family import TaskFamily, TaskRow


class LmEval(TaskFamily):
    """The family of lm-eval tasks, one suite for each named task. ``context_tokens`` limits the prompt.

    The score is the metric in the suite's name, or else the task's first that gives a number from 0 to 1. Each document
    is a cluster. If the suite's name gives a column, documents with equal values in it form a cluster. Documents with
    equal questions are always in the same cluster.
    """

    name = FAMILY
    source = "lm-evaluation-harness: the task's documents, prompts and metric"
    row_word = "document"
    endpoints = ("solved",)
    _task: ClassVar[HarnessTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """Return the suite of a task; raises AuditError if the package, the task or its documents are missing."""
        return _member(rest, os.environ.get(TASKS_VARIABLE, ""))

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002
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
        text, options = transcript[-1].content, self.options(item)
        answer = text[: min((at for stop in self.until if (at := text.find(stop)) >= 0), default=len(text))]
        if not answer.strip() or (options and answer not in options):
            return formless("no answer", ("solved",))
        try:
            with task_family.time_limit():
                score = self._task.score(self._document(item), answer)
        except AuditError:
            raise
        except task_family.TaskTimeout:
            return task_family.ungraded(f"the metric took over {task_family.GRADING_SECONDS:g} s", "solved")
        except task_family.TASK_ERRORS as error:  # from the task's code
            return task_family.ungraded(f"the metric raised {type(error).__name__}", "solved")
        solved = score >= task_family.PASS_THRESHOLD
        return replace(graded(solved, {"solved": solved}), score=score)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(self._document(item)),)

    def _document(self, item: Item) -> dict[str, Any]:
        number: int = item.payload["document"]
        return _documents(self._task, item.payload["split"])[number]


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - a name may mean another task in another folder
    task = harness_task(HarnessTaskName.of(rest))
    return LmEval.of_task(
        {row.cluster_id for row in _rows(task, "eval")},
        name=FAMILY + rest,
        version=f"{task.task.VERSION}-{task.digest}",
        source=f"lm-evaluation-harness: {task.name.task}, {task.metric}",
        until=task.until,
        max_new_tokens=task.longest_answer,
        _task=task,
    )


def _documents(task: HarnessTask, split: Split) -> list[dict[str, Any]]:
    return task.training_documents if split == "train" else task.documents


@cache
def _rows(task: HarnessTask, split: Split) -> list[TaskRow]:
    """Return every document as a row; raises SpecError if a prompt does not end with the user."""
    rows, documents, name, column = list[TaskRow](), _documents(task, split), task.name.task, task.name.column
    openings, options = task.prompts(documents), [task.options(document) for document in documents]
    clusters = [f"{split}-{n}" if column is None else str(document[column]) for n, document in enumerate(documents)]
    clusters = task_family.merge_clusters(clusters, [_question(*pair) for pair in zip(openings, options, strict=True)])
    for number, (opening, cluster) in enumerate(zip(openings, clusters, strict=True)):
        if opening[-1].role is not Role.USER:
            raise SpecError(f"lm-eval task {name!r}: document {number} begins the answer for the model")
        payload = {"split": split, "document": number, "options": list(options[number])}
        rows.append(TaskRow(f"{name}-{split}-{number}", f"{name}-{cluster}", opening, payload, str(number)))
    return rows


def _question(opening: Sequence[Message], options: tuple[str, ...]) -> list[str]:
    """Return the texts of a document's question: system messages, last message and options, no few-shot examples."""
    system = [message.content for message in opening if message.role is Role.SYSTEM]
    return [*system, opening[-1].content, *options]
