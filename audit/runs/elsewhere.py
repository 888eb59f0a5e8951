"""What checkpoints that were trained elsewhere say of themselves, taken over into the run that compares them.

A folder that this project finished, in another run or under TRL, has its provenance and telemetry; any other folder has
neither, and stays as its spec declares it. Provenance goes under the name of an origin: the weights are not here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import locate
from kvaudit.audit.training.files import TELEMETRY
from kvaudit.core.files import read_json, write_json
from kvaudit.core.provenance import ORIGIN, PROVENANCE
from kvaudit.core.recipe import RECIPE, read_recipe, sealed

_SHARED = ("model", "reward", "constitution", "training")  # what recipes of one comparison have in common


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
    seedless = [{name: _without_seed(own[name]) for name in _SHARED} for own in recipes.values()]
    data = [{**own["data"], "items_sha256_by_seed": None} for own in recipes.values()]
    if any(one != seedless[0] for one in seedless) or any(one != data[0] for one in data):
        return None
    policies = {arm: next(iter(own["policy"].values())) for (arm, _), own in recipes.items()}
    whole = {**first, "data": {**first["data"], "items_sha256_by_seed": items}, "policy": policies}
    return sealed({**whole, "training": _without_seed(first["training"]), "refusal_set": refusal_set})


def _without_seed(section: Any) -> Any:
    return {key: value for key, value in section.items() if key != "seed"} if isinstance(section, dict) else section
