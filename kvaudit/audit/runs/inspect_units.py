"""Units (a checkpoint, policy, suite and length) that the harness Inspect plays: kvaudit answers as its model.

Inspect's logs are turned into records.

    RUN/logs/inspect/<folder>/<unit>/<batch>/*.eval    a log of each attempt; samples in it are not asked again

Inspect's agents send the whole conversation with every request. kvaudit's own cache prefills it each time from the
start, like a server without prefix caching.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvaudit.audit.engines.base import GenerationRequest, Session, turn_seed
from kvaudit.audit.sampling.exchange import grade_degenerate
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import AuditError, DataError, RunError
from kvaudit.core.records import (
    READ_ANEW,
    SENT_WHOLE,
    CacheUse,
    Grade,
    Item,
    Message,
    Record,
    Role,
    Serving,
    UngradedAnswer,
)
from kvaudit.core.text import inline, one_line, reason
from kvaudit.suites.inspect_task import Inspect, messages_of
from kvaudit.suites.task_family import TASK_ERRORS

if TYPE_CHECKING:
    from kvaudit.audit.serving.batched import AnswerBatch, AskedPrompt, BatchedModel
    from kvaudit.audit.serving.wire import Choice

LOGS = "logs/inspect"
_IDENTITY = "kvaudit"  # key in the metadata of a log: the unit that it was written for
_FIRST_BATCH = 4  # samples, so that a fault of the task shows soon
SAMPLES_AT_ONCE = 64  # samples in flight, whose requests share batches
Rows = dict[tuple[str, int], Any]  # samples of logs by item id and epoch


class InspectUnit(NamedTuple):
    """A unit whose items Inspect runs: its suite, log folder, decoding settings, and the fields its records share."""

    suite: Inspect
    logs: Path
    serving: Serving
    samples: int  # epochs of every item
    decoding: Mapping[str, float]  # temperature, top_p, max_tokens
    seed_of: Callable[[Item, int], int]  # of an item and a sample index

    @property
    def identity(self) -> dict[str, Any]:
        """The metadata of this unit's logs; samples in a log with other metadata are not used."""
        return {**self.serving._asdict(), **self.decoding}


def inspect_batches(items: Sequence[Item]) -> list[list[Item]]:
    """Return items in batches: a small one first, then batches of as many items as Inspect runs samples at a time."""
    starts = [0, *range(_FIRST_BATCH, len(items), SAMPLES_AT_ONCE)]
    ends = [*starts[1:], len(items)]
    return [list(items[start:end]) for start, end in zip(starts, ends, strict=True) if start < end]


def play_unit(unit: InspectUnit, items: Sequence[Item], batched: BatchedModel) -> list[Record]:
    """Let Inspect run items and return a record for every sample; samples that earlier logs hold are not run again.

    Raises the error of the model's session if that fails, and RunError if Inspect fails.
    """
    epochs, batch = range(unit.samples), "\n".join(item.item_id for item in items)
    unit = unit._replace(logs=unit.logs / hashlib.sha256(batch.encode()).hexdigest()[:8])
    rows = kept_samples(unit)
    open_items = [item for item in items if any((item.item_id, epoch) not in rows for epoch in epochs)]
    if open_items:
        rows |= _play(unit, open_items, batched)
    return [_record(unit, item, epoch, rows[item.item_id, epoch]) for item in items for epoch in epochs]


def kept_samples(unit: InspectUnit) -> Rows:
    """Return the finished samples in the earlier logs of a batch, by item id and repetition.

    A log that a kill left unreadable is renamed to NAME.broken, and its samples are asked again with the same seeds.
    Raises DataError for a log of another unit.
    """
    from inspect_ai.log import read_eval_log

    rows: Rows = {}
    for path in sorted(unit.logs.glob("*.eval")):
        try:
            log = read_eval_log(str(path))
        except TASK_ERRORS:
            path.rename(path.with_suffix(".broken"))
            continue
        identity = (log.eval.metadata or {}).get(_IDENTITY)
        if identity != json.loads(json.dumps(unit.identity)):
            raise DataError(
                f"{str(path)!r} is a log of another condition, model or version of the task; remove it, or give "
                "another --out"
            )
        rows |= {key: sample for key, sample in _by_item(unit, log.samples or ()) if sample.error is None}
    return rows


def _by_item(unit: InspectUnit, samples: Sequence[Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield ((item id, repetition counted from 0), sample) for each sample of an Inspect log."""
    name = unit.suite.inspect_task.task.name
    for sample in samples:
        yield (f"{name}-{sample.id}", sample.epoch - 1), sample


def _play(unit: InspectUnit, items: Sequence[Item], batched: BatchedModel) -> Rows:
    """Run Inspect on the items and return their samples, by item id and repetition.

    Raises the error of the model's session if that fails, and RunError if Inspect fails.
    """
    import copy

    import inspect_ai
    from inspect_ai.dataset import MemoryDataset

    from kvaudit.audit.serving.harness.inspect_model import condition_model, note_sample

    task, by_sample = unit.suite.inspect_task, {str(item.payload["sample"]): item for item in items}

    def seed_of(sample: str, epoch: int, turn: int) -> int:
        return turn_seed(unit.seed_of(by_sample[sample], epoch - 1), turn)

    model = condition_model(unit.serving.policy.replace(",", ";"), batched, seed_of)
    data = MemoryDataset([task.samples[sample] for sample in by_sample], name=task.task.dataset.name)
    setup = task.task.setup
    steps = [note_sample(), *([] if setup is None else setup if isinstance(setup, list) else [setup])]
    task_with_items = inspect_ai.task_with(copy.copy(task.task), dataset=data, setup=steps)
    try:
        with task.at_home():
            logs = inspect_ai.eval(
                task_with_items,
                model=model,
                display="none",
                log_dir=str(unit.logs.absolute()),
                log_format="eval",
                log_buffer=1,  # a sample is on disk as soon as it is finished
                metadata={_IDENTITY: unit.identity},
                epochs=unit.samples,
                fail_on_error=False,  # a sample that fails is unscored
                message_limit=task.name.limit,
                max_samples=SAMPLES_AT_ONCE,
                max_connections=SAMPLES_AT_ONCE,
                **unit.decoding,
                score_display=False,
            )
    except AuditError:
        raise
    except TASK_ERRORS as error:
        raise RunError(f"{task.name.label}: Inspect cannot run it ({reason(error)})") from error
    for fault in (batched.failure, model.api.fault):
        if fault is not None:
            raise fault
    if not logs or logs[0].status == "cancelled":  # Inspect catches Ctrl-C
        raise KeyboardInterrupt
    log = logs[0]
    if log.status != "success" or log.samples is None:
        cause = "no reason" if log.error is None else one_line(log.error.message)
        raise RunError(f"{task.name.label}: Inspect ended with {cause}; finished work is kept: go on with --resume")
    rows = dict(_by_item(unit, log.samples))
    missing = [key for item in items for n in range(unit.samples) if (key := (item.item_id, n)) not in rows]
    if missing:
        raise RunError(f"{task.name.label}: Inspect's log lacks sample {missing[0][0]!r}; go on with --resume")
    return rows


# --- records ----------------------------------------------------------------------------------------------------------


def _record(unit: InspectUnit, item: Item, epoch: int, sample: Any) -> Record:
    from kvaudit.audit.serving.harness.inspect_model import CONDITION, output_facts

    transcript = messages_of(sample.messages)
    if not any(message.role is Role.ASSISTANT for message in transcript):
        transcript += (Message(Role.ASSISTANT, ""),)  # a transcript always holds an answer, even an empty one
    failed = None if sample.error is None else inline(one_line(sample.error.message)) or "the sample failed"
    finish = "error" if failed else _finish_reason(sample)
    grade = unit.suite.grade_sample(sample, _grade_if_degenerate(unit.suite, item, transcript, finish))
    # without the tokens of judges and other models that the task calls
    usages = [usage for model, usage in (sample.model_usage or {}).items() if model.startswith(f"{CONDITION}/")]
    use, form = output_facts(sample.output)
    answer = UngradedAnswer(
        sample_index=epoch,
        finish_reason=finish,
        prompt_tokens=sample.output.usage.input_tokens if sample.output and sample.output.usage else 0,
        new_tokens=sum(usage.output_tokens for usage in usages),
        seconds=sample.total_time or 0.0,
        transcript=transcript,
        unanswered=failed or "",
        tool_form=form,
        turns_read=READ_ANEW if use else SENT_WHOLE,
    )
    return Record.of(unit.serving, item, grade, answer, CacheUse(**use))


def _finish_reason(sample: Any) -> str:
    if sample.limit is not None:
        return "turns"
    reason = str(sample.output.stop_reason) if sample.output and sample.output.choices else "stop"
    return "length" if reason in ("max_tokens", "model_length") else "stop"


def _grade_if_degenerate(suite: Inspect, item: Item, transcript: Sequence[Message], finish: str) -> Grade | None:
    """Return the grade of a degenerate last answer (empty, cut off or a loop), None for any other."""
    last_answer = next(message for message in reversed(transcript) if message.role is Role.ASSISTANT)
    if finish == "error" or last_answer.tool_calls:
        return None
    return grade_degenerate(suite, replace(item, messages=()), (last_answer,), finish)


def session_answers(session: Session, model: LoadedModel) -> AnswerBatch:
    """Return a function that answers requests by the engine of ``session``, a refused one with a RunError object."""
    from kvaudit.audit.serving.batched import cut_choice

    chat = model.chat

    def request_of(asked: AskedPrompt) -> GenerationRequest:
        messages, tools = chat.request_of(asked.request.messages, asked.request.tools)
        stops = tuple(sorted(chat.stop_ids))
        sampling = (asked.request.temperature, asked.request.top_p, asked.request.seed or 0)
        return GenerationRequest(asked.prompt.ids, asked.limit, stops, *sampling, messages, tools)

    def answer(asked: Sequence[AskedPrompt]) -> list[Choice | AuditError]:
        replies = session.answer([request_of(entry) for entry in asked])
        answers: list[Choice | AuditError] = []
        for entry, reply in zip(asked, replies, strict=True):
            if reply.refused is not None:
                answers.append(RunError(reply.refused))
            elif reply.text is not None:
                text = f"{reply.thought or ''}{reply.text}"
                answers.append(cut_choice(chat, entry, text, reply.finish, chat.encode(text), None))
            else:
                answers.append(cut_choice(chat, entry, chat.text(reply.ids), reply.finish, reply.ids, None))
        return answers

    return answer
