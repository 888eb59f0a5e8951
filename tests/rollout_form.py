"""Rollouts in the JSON form, as an engine writes them from the sets that it kept."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.selection import Selection
from kvaudit.audit.replay.rollout_checks import RecordedRollouts


def write_rollouts(path: Path, recorded: RecordedRollouts) -> None:
    """Write the rollouts of one file."""
    layers, heads, _ = recorded.rollouts[0].evicted_at.shape
    header = {"format": "kvaudit.rollouts", "version": 1, "layers": layers, "kv_heads": heads}
    header |= {"policy": recorded.policy.canonical if recorded.policy else None, "temperature": recorded.temperature}
    rows = [rollout_row(rollout) for rollout in recorded.rollouts]
    path.write_text(json.dumps(header | {"rollouts": rows}, allow_nan=False) + "\n", encoding="utf-8")


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    runs = [[n for n, _ in run] for drawn, run in groupby(enumerate(rollout.sampled.tolist()), lambda t: t[1]) if drawn]
    row = {
        "ids": rollout.ids.tolist(),
        "prompt_length": rollout.prompt_length,
        "sampled": [[run[0], run[-1] + 1] for run in runs],
        "logprobs": rollout.sampler_logprobs[rollout.sampled].tolist(),
        "events": events(rollout.evicted_at),
    }
    if rollout.experts is not None:
        row["experts"] = rollout.experts[:-1].tolist()
    if rollout.selection is not None:
        row["selection"] = chosen(rollout.selection)
    return row


def events(evicted_at: Tensor) -> list[dict[str, Any]]:
    """The kept sets of a ledger [L, H, T], one event per query at which anything left."""
    ledger, tokens = evicted_at.tolist(), evicted_at.shape[2]
    times = sorted({time for layer in ledger for head in layer for time in head if time <= tokens})
    return [
        {"query": at, "kept": [[[j for j in range(at) if head[j] > at] for head in layer] for layer in ledger]}
        for at in times
    ]


def chosen(selection: Selection) -> dict[str, Any]:
    lists = selection.chosen.permute(2, 0, 1, 3).tolist()
    named = [[[[n for n in units if n >= 0] for units in heads] for heads in layers] for layers in lists]
    rows = [{"query": query, "chosen": own} for query, own in zip(selection.queries.tolist(), named, strict=True)]
    return {"unit": selection.unit, "layers": list(selection.layers), "queries": rows}
