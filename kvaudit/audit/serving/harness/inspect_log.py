"""Export a run's graded answers as Inspect's ``.eval`` logs: one log per checkpoint, policy, suite and length.

An item becomes a sample of Inspect, and the answers to it become epochs. The score becomes a score of Inspect, and so
does every facet (a yes-or-no property such as refused), with 1 for the wanted value. Answers that could not be graded
get NaN, which Inspect treats as unscored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    ModelOutput,
)
from inspect_ai.scorer import Score

from kvaudit.core.errors import DataError
from kvaudit.core.facets import FACETS
from kvaudit.core.files import plain_files, read_json
from kvaudit.core.provenance import check_sealed, seal_path
from kvaudit.core.records import Message, Record, Role

_METADATA = ("arm", "train_seed", "policy", "policy_hash", "cluster_id", "placement", "context_tokens", "judge")
_MESSAGES: Mapping[Role, Any] = {Role.SYSTEM: ChatMessageSystem, Role.USER: ChatMessageUser, Role.TOOL: ChatMessageTool}


def write_logs(run: Path, out: Path, created: str) -> Iterator[Path]:
    """Write ``out/<unit>.eval`` for every finished file of records in a run, and yield the paths.

    A unit is one checkpoint under one policy, asked one suite at one length. Raises DataError if a file was changed
    after it was finished, or if there is none.
    """
    units = [path for path in plain_files(run / "records", "*.jsonl") if seal_path(path).exists()]
    if not units:
        raise DataError(f"no finished units in {str(run / 'records')!r}, so there is nothing to export")
    out.mkdir(parents=True, exist_ok=True)
    for unit in units:
        raw = unit.read_bytes()
        check_sealed(unit, hashlib.sha256(raw).hexdigest(), read_json(seal_path(unit)))
        path = out / f"{unit.stem}.eval"
        log = unit_log([Record.from_json(line.decode()) for line in raw.splitlines()], created)
        write_eval_log(log, str(path), format="eval")
        yield path


def unit_log(records: Sequence[Record], created: str) -> EvalLog:
    """Return the log of one unit's records: one checkpoint under one policy, asked one suite at one length."""
    first = records[0]
    ids = list(dict.fromkeys(record.item_id for record in records))
    draws = max(record.sample_index for record in records) + 1
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=created,
            task=f"{first.suite}-{first.context_tokens}",
            task_version=first.suite_version,
            dataset=EvalDataset(name=first.suite, samples=len(ids), sample_ids=ids),
            model=f"kvaudit/{first.arm}-seed{first.train_seed}@{first.policy}",
            config=EvalConfig(epochs=draws),
            metadata={"run": first.run, "checkpoint": first.checkpoint, "policy_hash": first.policy_hash},
        ),
        samples=[_sample(record) for record in records],
    )


def _sample(record: Record) -> EvalSample:
    # the prompt ends at the model's first message
    opening = next((n for n, m in enumerate(record.transcript) if m.role in (Role.THOUGHT, Role.ASSISTANT)), 0)
    answer = next((m.content for m in reversed(record.transcript) if m.role is Role.ASSISTANT), "")
    reason = {"stop": "stop", "length": "max_tokens"}.get(record.finish_reason, "unknown")
    return EvalSample(
        id=record.item_id,
        epoch=record.sample_index + 1,
        input=list(_messages(record.transcript[:opening])),
        target="",
        messages=list(_messages(record.transcript)),
        output=ModelOutput.from_content("kvaudit", answer, reason),
        scores=dict(_scores(record)),
        metadata={**{name: getattr(record, name) for name in _METADATA}, "outcome": str(record.outcome)},
    )


def _scores(record: Record) -> Iterator[tuple[str, Score]]:
    yield "score", Score(value=math.nan if record.score is None else record.score)
    for name, value in record.facets.items():
        yield name, Score(value=math.nan if value is None else float(value == FACETS[name].wanted))


def _messages(transcript: Sequence[Message]) -> Iterator[Any]:
    """Yield a transcript as Inspect's messages; a thought (reasoning) becomes a part of the answer that follows it."""
    thought: str | None = None
    for message in transcript:
        if message.role is Role.THOUGHT:
            thought = message.content
        elif message.role is Role.ASSISTANT and thought is not None:
            content = [ContentReasoning(reasoning=thought), ContentText(text=message.content)]
            thought = None
            yield ChatMessageAssistant(content=content)
        elif message.role is Role.ASSISTANT:
            yield ChatMessageAssistant(content=message.content)
        else:
            yield _MESSAGES[message.role](content=message.content)
