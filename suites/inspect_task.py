"""Any task of Inspect as a suite: ``inspect:PACKAGE/TASK`` or ``inspect:FILE.py@TASK`` (UK AI Security Institute 2024).

The task gives samples, the plan that asks them, the texts that end an answer, its length, and the scorer. Sampler,
seeds, cache, records and resume are ours, and what the task calls epochs are a spec's samples.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import ClassVar

from kvaudit.core.errors import SpecError
from kvaudit.core.facets import FACETS, readable, unknown, unreadable
from kvaudit.core.records import Grade, Item, Message, Outcome
from kvaudit.suites.base import CountTokens, Split, Suite
from kvaudit.suites.inspect_plan import INSPECT, InspectName, InspectTask, inspect_task
from kvaudit.suites.templates import in_turn

_RIGHT = 0.5  # of a scorer that gives parts of a point
_FEWEST_CLUSTERS = 59  # that can decide a margin of five points


class Inspect(Suite):
    """The family: a member is made for each task that is named. ``context_tokens`` is the most that a prompt may take.

    One scorer, the first or the one that is named, gives the score and one facet, ``solved`` or the one that is named;
    a facet that nobody wants turns the score around. A sample is a cluster, or every value of a column is.
    """

    name = INSPECT
    kind = "capability"
    source = "Inspect: the task's samples, prompts and scorer"
    licence = "that of the task's data"
    published, lengths = True, "any"
    _task: ClassVar[InspectTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite of one task; raises AuditError where the package, the task or its data are missing."""
        return _member(rest, os.getcwd())

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        samples = len(self._task.samples) if split == "eval" else 0
        if n > samples:
            raise SpecError(
                f"suite {self.name}: {n} items are asked for, the task has {samples} samples to "
                f"{'train on' if split == 'train' else 'evaluate'}; ask for no more"
            )
        order = list(range(samples))
        random.Random(f"{self._task.task.name}-{seed}").shuffle(order)  # wherever the file lies
        chosen = in_turn(order, self._task.clusters)[:n]
        for number in chosen if context_tokens else ():
            length = sum(count_tokens(message.content) for message in self._task.prompts[number].messages)
            if length > context_tokens:
                raise SpecError(
                    f"suite {self.name}: context_tokens {context_tokens} is too short, sample "
                    f"{self._task.ids[number]!r} takes {length}"
                )
        return [self._item(number, context_tokens) for number in chosen]

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002 - whatever the order
        return len(self._task.samples) if split == "eval" else 0

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:  # noqa: ARG002
        return None

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return (self._task.asked.facet,)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer, facet = self._until_stop(transcript[-1].content), FACETS[self._task.asked.facet]
        if not answer.strip():
            return Grade(Outcome.DEGENERATE, 0.0, note="no answer", facets=unreadable((facet.name,)))
        scored = self._task.score(item.payload["sample"], item.messages, answer)
        if scored.value is None:
            return Grade(Outcome.UNSCORED, None, note=scored.why, facets=unknown((facet.name,)))
        found = scored.value >= _RIGHT
        score = scored.value if facet.wanted else 1.0 - scored.value
        outcome = Outcome.DESIRED if found == facet.wanted else Outcome.UNDESIRED
        return Grade(outcome, score, facets=readable({facet.name: found}))

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(item.payload["sample"]),)

    def _until_stop(self, text: str) -> str:
        """An answer up to the first text that ends it."""
        return text[: min((at for stop in self.until if (at := text.find(stop)) >= 0), default=len(text))]

    def _item(self, number: int, context_tokens: int) -> Item:
        task = self._task.task.name
        return Item(
            suite=self.name,
            item_id=f"{task}-{self._task.ids[number]}",
            cluster_id=f"{task}-{self._task.clusters[number]}",
            messages=self._task.prompts[number].messages,
            context_tokens=context_tokens,
            placement="none" if context_tokens else "published",
            payload={"sample": number},
        )


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - the same path means another file in another folder
    task = inspect_task(InspectName.of(rest))
    clusters = len(set(task.clusters))
    return type(
        "InspectSuite",
        (Inspect,),
        {
            "__doc__": Inspect.__doc__,
            "name": INSPECT + rest,
            "version": f"{task.task.version}-{task.digest}",
            "kind": "safety" if FACETS[task.asked.facet].kind == "safety" else "capability",
            "source": f"Inspect: {task.asked.task}, {task.scorer_name}",
            "until": task.until,
            "max_new_tokens": task.longest_answer,
            "clusters": clusters if clusters < _FEWEST_CLUSTERS else None,
            "_task": task,
        },
    )
