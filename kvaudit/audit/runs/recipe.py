"""What a run's checkpoints are made of (``core.recipe``): gathered here, or taken over from where they were trained.

A folder that this project finished, in another run or under TRL, has its provenance and telemetry; any other folder has
neither, and stays as its spec declares it. Provenance goes under the name of an origin: the weights are not here.
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
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.files import TELEMETRY
from kvaudit.audit.training.rewards.base import parse_reward
from kvaudit.core.files import read_json, write_json
from kvaudit.core.options import sha256_of
from kvaudit.core.provenance import ORIGIN, PROVENANCE
from kvaudit.core.recipe import RECIPE, read_recipe, sealed
from kvaudit.core.records import Item, fingerprint_rows
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

_SHARED = ("model", "reward", "constitution", "training")  # what recipes of one comparison have in common
_ELSEWHERE = ("arms", "seeds", "policy", "policies", "only", "suites", "weights", "context_tokens", "reward")


def recipe_of(spec: RunSpec, section: TrainSpec, model: LoadedModel, batches: Batches) -> dict[str, Any]:
    """The recipe of a run that trains; ``batches`` are the items of its evaluation."""
    paying = parse_reward(section.reward, section.suites)
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
    rows = [[item.item_id, fingerprint_rows(item.messages, item.tools), dict(item.payload)] for item in items]
    return sha256_of(sorted(rows, key=str))


def take_over(source: Path, target: Path) -> None:
    """Copy provenance and telemetry of a finished checkpoint, whose files were held to them as it loaded."""
    if not (source / PROVENANCE).is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    if (source / TELEMETRY).is_file():
        shutil.copyfile(source / TELEMETRY, target / TELEMETRY)
    write_json(target / ORIGIN, read_json(source / PROVENANCE))


def joined_recipe(run: RunFolder, refusal_set: Mapping[str, Any]) -> dict[str, Any] | None:
    """One recipe of all arms, with the safety suites of this run; None where one has none, or they differ in more than
    arm and seed. Raises DataError for a recipe that is none.
    """
    pairs = [(arm, seed) for arm, part in run.spec.checkpoints.items() for seed in part.seeds]
    folders = {pair: locate(str(run.spec.external(*pair))) for pair in pairs}
    if not all((folder / RECIPE).is_file() for folder in folders.values()):
        return None
    recipes = dict[tuple[str, int], dict[str, Any]]()
    items: dict[str, Any] = {}
    for pair, folder in folders.items():
        recipes[pair] = {name: section["holds"] for name, section in read_recipe(folder)["sections"].items()}
        items |= recipes[pair]["data"]["items_sha256_by_seed"]
    first = next(iter(recipes.values()))
    # what has to be one and the same, without what each seed has of its own
    seedless = [{name: _without_seed(own[name]) for name in _SHARED} for own in recipes.values()]
    data = [{**own["data"], "items_sha256_by_seed": None} for own in recipes.values()]
    if any(one != seedless[0] for one in seedless) or any(one != data[0] for one in data):
        return None
    policies = {arm: next(iter(own["policy"].values())) for (arm, _), own in recipes.items()}
    whole = {**first, "data": {**first["data"], "items_sha256_by_seed": items}, "policy": policies}
    return sealed({**whole, "training": _without_seed(first["training"]), "refusal_set": refusal_set})


def _without_seed(section: Any) -> Any:
    return {key: value for key, value in section.items() if key != "seed"} if isinstance(section, dict) else section
