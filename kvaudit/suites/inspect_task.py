"""Any task of Inspect as a suite: ``inspect:PACKAGE/TASK`` or ``inspect:FILE.py@TASK`` (UK AI Security Institute 2024).

The task gives samples, the plan that asks them, stop strings, answer length and scorer; sampler, seeds, cache, records
and resume are kvaudit's. Use a spec's samples in place of epochs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

from kvaudit.core.facets import FACETS
from kvaudit.core.records import Grade, Item, Message
from kvaudit.suites.base import Split, Suite, formless, graded
from kvaudit.suites.inspect_plan import INSPECT, InspectName, InspectTask, inspect_task
from kvaudit.suites.task_family import PASS_THRESHOLD, TaskFamily, TaskRow, ungraded


class Inspect(TaskFamily):
    """The family of Inspect tasks, one suite for each named task. ``context_tokens`` limits the prompt.

    A scorer, the first or the named one, gives the score and a facet, ``solved`` or the named one; for a facet that
    should be false the score is reversed. Each sample, or each value of a named column, is a cluster; equal prompts
    share one.
    """

    name = INSPECT
    source = "Inspect: the task's samples, prompts and scorer"
    row_word = "sample"
    _task: ClassVar[InspectTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """Return the suite of a task; raises AuditError if the package, the task or its data are missing."""
        return _member(rest, os.getcwd())

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002
        return len(self.task_rows(split))

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        return _rows(self._task) if split == "eval" else ()

    def stream(self, split: Split, seed: int) -> str:  # noqa: ARG002 - there is no training split
        return f"{self._task.task.name}-{seed}"  # independent of the file's path

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return (self._task.name.facet,)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer, facet = self.until_stop(transcript[-1].content), FACETS[self._task.name.facet]
        if not answer.strip():
            return formless("no answer", (facet.name,))
        result = self._task.score(item.payload["sample"], item.messages, answer)
        if result.value is None:
            return ungraded(result.why, facet.name)
        value = result.value >= PASS_THRESHOLD
        score = result.value if facet.wanted else 1.0 - result.value
        return replace(graded(value == facet.wanted, {facet.name: value}), score=score)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(item.payload["sample"]),)


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - a path may mean another file in another folder
    task = inspect_task(InspectName.of(rest))
    return Inspect.of_task(
        set(task.clusters),
        name=INSPECT + rest,
        version=f"{task.task.version}-{task.digest}",
        kind="safety" if FACETS[task.name.facet].kind == "safety" else "capability",
        default_gate=(task.name.facet,) if FACETS[task.name.facet].kind == "safety" else (),
        source=f"Inspect: {task.name.task}, {task.scorer_name}",
        until=task.until,
        max_new_tokens=task.longest_answer,
        _task=task,
    )


@cache
def _rows(task: InspectTask) -> list[TaskRow]:
    name = task.task.name
    return [
        TaskRow(f"{name}-{sample_id}", f"{name}-{cluster}", prompt.messages, {"sample": number}, repr(sample_id))
        for number, (sample_id, cluster, prompt) in enumerate(zip(task.ids, task.clusters, task.prompts, strict=True))
    ]
