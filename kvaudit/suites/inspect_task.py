"""Any task of Inspect as a suite: ``inspect:PACKAGE/TASK`` or ``inspect:FILE.py@TASK`` (UK AI Security Institute 2024).

The task gives samples, the plan that asks them, the texts that end an answer, its length, and the scorer. Sampler,
seeds, cache, records and resume are ours, and what the task calls epochs are a spec's samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

from kvaudit.core.facets import FACETS, unknown
from kvaudit.core.records import Grade, Item, Message, Outcome
from kvaudit.suites.base import Split, Suite, formless, graded
from kvaudit.suites.inspect_plan import INSPECT, InspectName, InspectTask, inspect_task
from kvaudit.suites.task_family import PASS_THRESHOLD, TaskFamily, TaskRow


class Inspect(TaskFamily):
    """The family: a member is made for each task that is named. ``context_tokens`` is the most that a prompt may take.

    One scorer, the first or the one that is named, gives the score and one facet, ``solved`` or the one that is named;
    a facet that nobody wants turns the score around. A sample is a cluster, or every value of a column is;
    samples that ask the same are one cluster.
    """

    name = INSPECT
    source = "Inspect: the task's samples, prompts and scorer"
    row_word = "sample"
    _task: ClassVar[InspectTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite of one task; raises AuditError where the package, the task or its data are missing."""
        return _member(rest, os.getcwd())

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002 - whatever the order
        return len(self.task_rows(split))

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        return _rows(self._task) if split == "eval" else ()

    def stream(self, split: Split, seed: int) -> str:  # noqa: ARG002 - nothing is for training
        return f"{self._task.task.name}-{seed}"  # wherever the file lies

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return (self._task.asked.facet,)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer, facet = self.until_stop(transcript[-1].content), FACETS[self._task.asked.facet]
        if not answer.strip():
            return formless("no answer", (facet.name,))
        scored = self._task.score(item.payload["sample"], item.messages, answer)
        if scored.value is None:
            return Grade(Outcome.UNSCORED, None, note=scored.why, facets=unknown((facet.name,)))
        found = scored.value >= PASS_THRESHOLD
        score = scored.value if facet.wanted else 1.0 - scored.value
        return replace(graded(found == facet.wanted, {facet.name: found}), score=score)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(item.payload["sample"]),)


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - the same path means another file in another folder
    task = inspect_task(InspectName.of(rest))
    return Inspect.of_task(
        set(task.clusters),
        name=INSPECT + rest,
        version=f"{task.task.version}-{task.digest}",
        kind="safety" if FACETS[task.asked.facet].kind == "safety" else "capability",
        source=f"Inspect: {task.asked.task}, {task.scorer_name}",
        until=task.until,
        max_new_tokens=task.longest_answer,
        _task=task,
    )


@cache
def _rows(task: InspectTask) -> list[TaskRow]:
    """Every sample as it is asked."""
    name = task.task.name
    return [
        TaskRow(f"{name}-{own}", f"{name}-{cluster}", prompt.messages, {"sample": number}, repr(own))
        for number, (own, cluster, prompt) in enumerate(zip(task.ids, task.clusters, task.prompts, strict=True))
    ]
