"""Any task of EleutherAI/lm-evaluation-harness as a suite: ``lm-eval:TASK`` (Gao et al. 2023).

The task gives documents, prompts, the texts that end an answer, and the metric. Sampler, seeds, cache, records and
resume are ours, and none of the harness's caches takes part. Options are scored token by token, never in one prefill.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from kvaudit.core.errors import AuditError, SpecError
from kvaudit.core.facets import readable, unknown, unreadable
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.base import PUBLISHED, CountTokens, Split, Suite
from kvaudit.suites.harness_task import FAMILY, TASKS_VARIABLE, HarnessTask, HarnessTaskName, harness_task
from kvaudit.suites.templates import in_turn

_RIGHT = 0.5  # of a metric that gives parts of a point
_FEWEST_CLUSTERS = 59  # that can decide a margin of five points


class LmEval(Suite):
    """The family: a member is made for each task that is named. ``context_tokens`` is the most that a prompt may take.

    The first metric that is a number from 0 to 1 for each document is the score; a document is a cluster, or every
    value of a column is.
    """

    name = FAMILY
    kind = "capability"
    source = "lm-evaluation-harness: the task's documents, prompts and metric"
    licence = "that of the task's data"
    published, lengths = True, "any"
    _task: ClassVar[HarnessTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """The suite of one task; raises AuditError where the package, the task or its documents are missing."""
        return _member(rest, os.environ.get(TASKS_VARIABLE, ""))

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        openings = _openings(self._task, split)
        if n > len(openings):
            raise SpecError(
                f"suite {self.name}: {n} items are asked for, the task has {len(openings)} documents to "
                f"{'train on' if split == 'train' else 'evaluate'}; ask for no more"
            )
        chosen = self._order(split, seed)[:n]
        for number in chosen:
            length = sum(count_tokens(message.content) for message in openings[number])
            if context_tokens and length > context_tokens:
                raise SpecError(
                    f"suite {self.name}: context_tokens {context_tokens} is too short, document {number} takes {length}"
                )
        return [self._item(split, number, openings[number], context_tokens) for number in chosen]

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002 - whatever the order
        return len(_documents(self._task, split))

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:  # noqa: ARG002
        return None

    def options(self, item: Item) -> tuple[str, ...]:
        return tuple(item.payload["options"])

    def weigh(self, item: Item, logprobs: Sequence[float]) -> Sequence[float]:
        return self._task.weigh(self.options(item), logprobs)

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return ("solved",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer = self._until_stop(transcript[-1].content)
        options = self.options(item)
        if not answer.strip() or (options and answer not in options):
            return Grade(Outcome.DEGENERATE, 0.0, note="no answer", facets=unreadable(("solved",)))
        try:
            score = self._task.score(self._document(item), answer)
        except AuditError:
            raise
        except Exception as error:  # the task's code, over whatever the model wrote
            note = f"the metric raised {type(error).__name__}"
            return Grade(Outcome.UNSCORED, None, note=note, facets=unknown(("solved",)))
        solved = score >= _RIGHT
        return Grade(Outcome.DESIRED if solved else Outcome.UNDESIRED, score, facets=readable({"solved": solved}))

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self._task.target(self._document(item)),)

    def _until_stop(self, text: str) -> str:
        """An answer up to the first text that ends it."""
        return text[: min((at for stop in self.until if (at := text.find(stop)) >= 0), default=len(text))]

    def _document(self, item: Item) -> dict[str, Any]:
        split: Split = item.payload["split"]
        number: int = item.payload["document"]
        return _documents(self._task, split)[number]

    def _order(self, split: Split, seed: int) -> list[int]:
        """The documents in the order they are asked in: shuffled, and every cluster once before any comes again."""
        order = list(range(len(_documents(self._task, split))))
        random.Random(f"{self.name}-{split}-{seed}").shuffle(order)
        return in_turn(order, [self._cluster(split, number) for number in range(len(order))])

    def _cluster(self, split: Split, number: int) -> str:
        column = self._task.asked.column
        return f"{split}-{number}" if column is None else str(_documents(self._task, split)[number][column])

    def _item(self, split: Split, number: int, opening: tuple[Message, ...], context_tokens: int) -> Item:
        options = self._task.options(_documents(self._task, split)[number])
        return Item(
            suite=self.name,
            item_id=f"{self._task.asked.task}-{split}-{number}",
            cluster_id=f"{self._task.asked.task}-{self._cluster(split, number)}",
            messages=opening,
            context_tokens=context_tokens,
            placement="none" if context_tokens else PUBLISHED,
            payload={"split": split, "document": number, "options": list(options)},
        )


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - the same name means another task in another folder
    task = harness_task(HarnessTaskName.of(rest))
    column = task.asked.column
    clusters = len(task.documents if column is None else {str(document[column]) for document in task.documents})
    return type(
        "LmEvalTask",
        (LmEval,),
        {
            "__doc__": LmEval.__doc__,
            "name": FAMILY + rest,
            "version": f"{task.task.VERSION}-{task.digest}",
            "source": f"lm-evaluation-harness: {task.asked.task}, {task.metric}",
            "until": task.until,
            "max_new_tokens": task.longest_answer,
            "clusters": clusters if clusters < _FEWEST_CLUSTERS else None,
            "_task": task,
        },
    )


def _documents(task: HarnessTask, split: Split) -> list[dict[str, Any]]:
    return task.training_documents if split == "train" else task.documents


@cache
def _openings(task: HarnessTask, split: Split) -> list[tuple[Message, ...]]:
    """The prompt of every document, in document order; raises SpecError where the user does not speak last."""
    openings = task.prompts(_documents(task, split))
    for number, opening in enumerate(openings):
        if opening[-1].role is not Role.USER:
            raise SpecError(f"lm-eval task {task.asked.task!r}: document {number} begins the answer for the model")
    return openings
