"""The recipe of a run's checkpoints (a record of how they were trained), made here or taken from their folders.

A checkpoint folder that kvaudit wrote, in another run or in a training with TRL, has its provenance and telemetry. Any
other folder has neither, and its recipe (``core.provenance``) is what the spec declares. Copied provenance goes into a
file of another name, ``ORIGIN``, because the weights are not copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.evaluate import Batches
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import LoadedModel, locate
from kvaudit.audit.training.batch import training_items
from kvaudit.audit.training.checkpoint import TELEMETRY
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.rewards.base import parse_reward
from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.plugins import sha256_of
from kvaudit.core.provenance import ORIGIN, PROVENANCE, RECIPE, read_recipe, seal_recipe
from kvaudit.core.records import Item, fingerprint_rows
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

_ITEMS = "items_sha256_by_seed"  # key of the section "data"
_SHARED = ("model", "reward", "constitution", "training")  # sections that all recipes of one comparison share
# keys of the spec's training section that the section "training" of a recipe leaves out, since others have them
_ELSEWHERE = ("arms", "seeds", "policy", "policies", "only", "suites", "weights", "context_tokens", "reward")


def recipe_of(spec: RunSpec, section: TrainSpec, model: LoadedModel, batches: Batches) -> dict[str, Any]:
    """Return the recipe of a run that trains, as recipe.json holds it.

    ``batches`` are the items of the run's evaluation; the recipe describes those of the safety suites.
    """
    reward = parse_reward(section.reward, section.suites)
    text = reward.reward.constitution
    return seal_recipe(
        {
            "model": {"name": spec.model, "sha256": model.sha256},
            "reward": {"written": section.reward, "sha256": reward.sha256, "graded_by": reward.judges},
            "constitution": None if text is None else {"sha256": reward.constitution_sha256, "text": text},
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
    # every arm has the same questions
    first, items = section.trained[0].name, dict[str, str]()
    for seed in section.seeds:
        steps = training_items(TrainConfig.of(section, first, seed), model.chat.count_tokens)
        items[str(seed)] = _items_sha256(item for step in steps for _, item in step)
    return {
        "suites": {name: SUITES.get(name).version for name in section.suites},
        "weights": list(section.weights),
        "context_tokens": section.context_tokens,
        _ITEMS: items,
    }


def refusal_set(spec: RunSpec, batches: Batches) -> dict[str, Any]:
    """Return, for each safety suite of the evaluation: its version, and number and hash of its items at each length."""
    sets: dict[str, Any] = {}
    for suite in spec.evaluate.suites:
        if SUITES.get(suite).kind == "safety":
            lengths = {n: [i for batch in batches[suite, n] for i in batch] for n in spec.evaluate.contexts_of(suite)}
            tokens = {str(n): {"items": len(items), "sha256": _items_sha256(items)} for n, items in lengths.items()}
            sets[suite] = {"version": SUITES.get(suite).version, "tokens": tokens}
    return sets


def _items_sha256(items: Iterable[Item]) -> str:
    rows = [[item.item_id, fingerprint_rows(item.messages, item.tools), dict(item.payload)] for item in items]
    return sha256_of(sorted(rows, key=str))


def copy_provenance(source: Path, target: Path) -> None:
    """Copy a checkpoint's provenance and training log to the run's folder; loading has checked them already."""
    if not (source / PROVENANCE).is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    if (source / TELEMETRY).is_file():
        shutil.copyfile(source / TELEMETRY, target / TELEMETRY)
    write_json(target / ORIGIN, read_json(source / PROVENANCE))


def joined_recipe(run: RunFolder, refusal_set: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return one recipe for all arms of a run whose checkpoints were trained elsewhere.

    ``refusal_set`` describes the safety suites of this run and becomes a section of the recipe. Returns None if a
    checkpoint has no recipe, or if the recipes differ in more than arm, the arm's policy and seed. Raises DataError for
    a damaged recipe.
    """
    pairs = [(arm, seed) for arm, checkpoints in run.spec.checkpoints.items() for seed in checkpoints.seeds]
    folders = {pair: locate(str(run.spec.external_source(*pair))) for pair in pairs}
    if not all((folder / RECIPE).is_file() for folder in folders.values()):
        return None
    recipes = {pair: _sections(folder) for pair, folder in folders.items()}
    first, items, policies = next(iter(recipes.values())), dict[str, Any](), dict[str, Any]()
    for (arm, _), recipe in recipes.items():
        is_alike = all(_without_seed(recipe[name]) == _without_seed(first[name]) for name in _SHARED)
        if not is_alike or {**recipe["data"], _ITEMS: None} != {**first["data"], _ITEMS: None}:
            return None
        policy = next(iter(recipe["policy"].values()))
        if policies.setdefault(arm, policy) != policy:  # seeds of one arm
            return None
        # arms with a seed in common have the same items
        if any(items.setdefault(seed, digest) != digest for seed, digest in recipe["data"][_ITEMS].items()):
            return None
    joined = {**first, "data": {**first["data"], _ITEMS: items}, "policy": policies}
    return seal_recipe({**joined, "training": _without_seed(first["training"]), "refusal_set": refusal_set})


def _sections(folder: Path) -> dict[str, Any]:
    """Return the sections of a checkpoint's recipe by name; raise DataError if it names no items or no policy."""
    sections = {name: section["holds"] for name, section in read_recipe(folder)["sections"].items()}
    data, policy = sections["data"], sections["policy"]
    if not (isinstance(data, dict) and isinstance(data.get(_ITEMS), dict) and isinstance(policy, dict) and policy):
        raise DataError(f"{str(folder / RECIPE)!r} names no items or no policy of its checkpoint; restore or remove it")
    return sections


def _without_seed(section: Any) -> Any:
    return {key: value for key, value in section.items() if key != "seed"} if isinstance(section, dict) else section
