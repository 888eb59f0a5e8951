"""What a run's checkpoints are made of, gathered from where each part is known (``core.recipe``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvaudit.audit.runs.evaluate import Batches
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.batch import training_items
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.rewards import paying_of
from kvaudit.core.options import sha256_of
from kvaudit.core.recipe import sealed
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

_ELSEWHERE = ("arms", "seeds", "policy", "policies", "only", "suites", "weights", "context_tokens", "reward")


def recipe_of(spec: RunSpec, section: TrainSpec, model: LoadedModel, batches: Batches) -> dict[str, Any]:
    """The recipe of a run that trains; ``batches`` are the items of its evaluation."""
    paying = paying_of(section.reward, section.suites)
    text = paying.reward.constitution
    return sealed(
        {
            "model": {"name": spec.model, "sha256": model.sha256},
            "reward": {"written": section.reward, "sha256": paying.sha256, "graded_by": paying.judges},
            "constitution": None if text is None else {"sha256": paying.constitution_sha256, "text": text},
            "data": _data(section, model),
            "policy": {
                arm.name: TrainConfig.of(section, arm.name, section.seeds[0]).rollout_policy.canonical
                for arm in section.trained
            },
            "refusal_set": refusal_set(spec, batches),
            "training": {key: value for key, value in section.written().items() if key not in _ELSEWHERE},
        }
    )


def _data(section: TrainSpec, model: LoadedModel) -> dict[str, Any]:
    """The questions of every seed, which are the same in every arm."""
    first, items = section.trained[0].name, dict[str, str]()
    for seed in section.seeds:
        steps = training_items(TrainConfig.of(section, first, seed), model.chat.count_tokens)
        items[str(seed)] = _items_sha256(item for step in steps for _, item in step)
    return {
        "suites": {name: SUITES.get(name).version for name in section.suites},
        "weights": list(section.weights),
        "context_tokens": section.context_tokens,
        "items_sha256_by_seed": items,
    }


def refusal_set(spec: RunSpec, batches: Batches) -> dict[str, Any]:
    """The safety suites that the run is evaluated on, and their items at every length."""
    found: dict[str, Any] = {}
    for suite in spec.evaluate.suites:
        if SUITES.get(suite).kind == "safety":
            lengths = {n: [i for batch in batches[suite, n] for i in batch] for n in spec.evaluate.contexts_of(suite)}
            asked = {str(n): {"items": len(own), "sha256": _items_sha256(own)} for n, own in lengths.items()}
            found[suite] = {"version": SUITES.get(suite).version, "tokens": asked}
    return found


def _items_sha256(items: Iterable[Item]) -> str:
    rows = [[item.item_id, [[str(m.role), m.content] for m in item.messages], dict(item.payload)] for item in items]
    return sha256_of(sorted(rows, key=str))
