"""What the records behind the flips say, as the pages read it: the prompt of every item once, and every answer once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import PurePath
from typing import Any, NamedTuple

from kvaudit.core.records import Message, Record, Role
from kvaudit.core.shading import AnswerKey
from kvaudit.core.text import inline, visible
from kvaudit.reports.records.rows import RecordPlace

CHUNK = 300_000  # characters of one file of texts
_DIGITS = 4  # of shares: more than a page shows

ItemKey = tuple[str, int, str]  # suite, length, name


class PageAnswer(NamedTuple):
    """An answer that the pages show: where it is recorded, its item, and whether its cache had lost anything."""

    unit: str
    answer: AnswerKey
    item: ItemKey
    evicted: bool


class Texts:
    """Prompts and answers by item; an answer is known by its number, which is its place in ``shown``."""

    def __init__(self, records: Iterable[tuple[RecordPlace, Record]]) -> None:
        self.prompts: dict[ItemKey, tuple[Message, ...]] = {}
        self.told: dict[ItemKey, tuple[str, str]] = {}  # template and placement
        self.numbers: dict[RecordPlace, int] = {}
        self.shown: list[PageAnswer] = []
        self._answers: dict[ItemKey, dict[int, dict[str, Any]]] = {}
        for place, record in records:
            self._add(place, record)

    @property
    def silent(self) -> bool:
        """Whether no record has a transcript."""
        answers = (answer for own in self._answers.values() for answer in own.values())
        return not any(self.prompts.values()) and not any(answer["turns"] for answer in answers)

    def chunks(self) -> Iterator[tuple[list[ItemKey], dict[int, Any]]]:
        """So many items in order that they fill a file, and what it holds of each, by their numbers."""
        items: list[ItemKey] = []
        table: dict[int, Any] = {}
        size = 0
        for number, (item, prompt) in enumerate(self.prompts.items()):
            items.append(item)
            table[number] = {"prompt": _turns(prompt), "answers": self._answers[item]}
            size += len(script(table[number]))
            if size >= CHUNK:
                yield items, table
                items, table, size = [], {}, 0
        if items:
            yield items, table

    def _add(self, place: RecordPlace, record: Record) -> None:
        item = (record.suite, record.context_tokens, record.item_id)
        asked = tuple(takewhile(lambda message: message.role is not Role.ASSISTANT, record.transcript))
        prompt = self.prompts.setdefault(item, asked)
        self.told.setdefault(item, (record.cluster_id, record.placement))
        # one that was asked something else is shown whole
        said = record.transcript[len(prompt) :] if asked == prompt else record.transcript
        number = self.numbers[place] = len(self.numbers)
        self._answers.setdefault(item, {})[number] = _answer(record, said)
        answer = AnswerKey(record.item_id, record.sample_index)
        self.shown.append(
            PageAnswer(PurePath(place[0]).stem, answer, item, record.retention is not None and record.retention < 1)
        )


def script(value: Any) -> str:
    """JSON that stays data in any script: no markup begins or ends in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _answer(record: Record, said: Sequence[Message]) -> dict[str, Any]:
    return {
        "arm": visible(record.arm),
        "seed": record.train_seed,
        "policy": visible(record.policy),
        "checkpoint": visible(record.checkpoint),
        "outcome": record.outcome.value,
        "score": record.score,
        "facets": dict(record.facets),
        "judge": visible(record.judge) + (", unsure" if record.unsure else ""),
        "draw": record.sample_index,
        "finish": visible(record.finish_reason),
        "unanswered": inline(record.unanswered),
        "tokens": [record.prompt_tokens, record.new_tokens],
        "retention": None if record.retention is None else round(record.retention, _DIGITS),
        "evicted": record.retention is not None and record.retention < 1,
        "survival": {visible(role): round(share, _DIGITS) for role, share in record.survival.items()},
        "bytes": [record.kv_bytes_peak, record.kv_bytes_live, record.kv_bytes_dense],
        "turns": _turns(said),
    }


def _turns(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message.role.value, visible(message.text)) for message in messages]
