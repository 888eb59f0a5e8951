"""What a run's checkpoints were made of, as a file that holds itself to its hashes, and what changed between two."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from reports_synthetic import Design, build
from test_cli import kvaudit, refused

from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.recipe import recipe_of
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import DataError
from kvaudit.core.provenance import (
    RECIPE,
    RECIPE_FORMAT,
    RECIPE_SECTIONS,
    RecipeChange,
    read_recipe,
    recipe_changes,
    recipe_digests,
    seal_recipe,
)
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.reports.page.formats.disclosure import render_disclosure
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import disclosure_page
from kvaudit.suites.base import SUITES

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "recipe.schema.json").read_text())
HELD: dict[str, Any] = {
    "model": {"name": "embedded", "sha256": "0" * 64},
    "reward": {"written": "grade", "sha256": "1" * 64, "graded_by": {"refusal": "programmatic"}},
    "constitution": {"sha256": "2" * 64, "text": "Be kind.\nBe brief."},
    "data": {"suites": {"refusal": "3"}, "weights": [], "context_tokens": 192, "items_sha256_by_seed": {"1": "3" * 64}},
    "policy": {"dense": "none"},
    "refusal_set": {"refusal": {"version": "3", "tokens": {"192": {"items": 12, "sha256": "4" * 64}}}},
    "training": {"loss": "grpo", "critic": {"clip": 0.2}},
}


def held(**other: Any) -> dict[str, Any]:
    return seal_recipe({**HELD, **other})


def test_a_recipe_is_of_its_schema_and_reads_back(tmp_path: Path) -> None:
    jsonschema.validate(held(), SCHEMA)
    (tmp_path / RECIPE).write_text(json.dumps(held()))
    assert read_recipe(tmp_path) == read_recipe(tmp_path / RECIPE) == held()


def test_the_recipe_of_a_run_is_of_the_schema_and_follows_the_reward(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "constitution.md").write_text("Be kind.")
    model, written = load_model(str(tiny_folder)), {"judge": "rubric-endpoint", "base_url": "http://h", "model": "m"}
    judged = {**written, "constitution": str(tmp_path / "constitution.md"), "suites": ["refusal"]}
    found = [_made(model, reward) for reward in ("grade", judged)]
    for recipe in found:
        jsonschema.validate(recipe, SCHEMA)
    assert {change.section for change in recipe_changes(*found)} == {"reward", "constitution"}
    assert found[1]["sections"]["constitution"]["holds"]["text"] == "Be kind."
    assert found[0]["sections"]["policy"]["holds"] == {"dense": "none"}
    assert list(found[0]["sections"]["refusal_set"]["holds"]) == ["refusal"]


def _made(model: Any, reward: Any) -> dict[str, Any]:
    train = {
        "arms": ["dense"],
        "seeds": [1, 2],
        "policy": "streaming:budget=96,window=8",
        "suites": ["refusal", "math"],
    }
    table = {
        "name": "made",
        "train": {**train, "steps": 1, "prompts_per_step": 2, "context_tokens": 500, "reward": reward},
        "evaluate": {
            "policies": ["none"],
            "suites": {"refusal": {"items": 2}, "math": {"items": 2}},
            "context_tokens": [500],
        },
    }
    spec = RunSpec.model_validate(table, context=NAMES)
    assert isinstance(spec.train, TrainSpec)
    items = SUITES.get("refusal")().items("eval", 2, 1, 500, model.chat.count_tokens)
    return recipe_of(spec, spec.train, model, {("refusal", 500): [items]})


@pytest.mark.parametrize("section", RECIPE_SECTIONS)
def test_a_recipe_that_was_edited_is_refused(section: str, tmp_path: Path) -> None:
    edited = copy.deepcopy(held())
    edited["sections"][section]["holds"] = {"other": 1}
    (tmp_path / RECIPE).write_text(json.dumps(edited))
    with pytest.raises(DataError, match="does not match its sha256"):
        read_recipe(tmp_path)


NAMES_ALONE = json.dumps({"format": RECIPE_FORMAT, "version": 1, "sections": RECIPE_SECTIONS})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "kvaudit.scan", "sections": {}}', "[" * 5000, NAMES_ALONE]
)
def test_what_is_no_recipe_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RECIPE).write_text(text)
    assert "is not of format kvaudit.recipe version 1" in refused("card", "--recipe", tmp_path)


def test_a_run_that_trained_nothing_has_no_recipe(tmp_path: Path) -> None:
    assert "holds no recipe.json; give the folder of a run that trained" in refused("card", "--recipe", tmp_path)


def test_what_changed_is_said_entry_by_entry() -> None:
    other = held(policy={"dense": "none", "naive": "int8"}, training={"loss": "ppo", "critic": {"clip": 0.2}})
    assert list(recipe_changes(held(), other)) == [
        RecipeChange("policy", "naive", None, "int8"),
        RecipeChange("training", "loss", "grpo", "ppo"),
    ]
    assert list(recipe_changes(held(), held())) == []


def test_the_command_prints_a_recipe_and_the_lines_of_a_constitution_that_changed(tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    other = held(constitution={"sha256": "5" * 64, "text": "Be kind.\nBe \x1b[31mlong."})
    for path, recipe in zip(paths, (held(), other), strict=True):
        path.write_text(json.dumps(recipe))
    code, out, _ = kvaudit("card", "--recipe", paths[0])
    assert code == 0
    assert all(f"{name} {digest[:12]}: " in out for name, digest in recipe_digests(held()).items())
    code, out, _ = kvaudit("card", "--recipe", *paths)
    assert code == 0
    assert "constitution.text: - Be brief." in out
    assert "Be kind." not in out
    assert "\x1b" not in out
    assert out.splitlines()[-1] == "changed: constitution"


def test_the_disclosure_cites_the_recipe_of_a_run(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run",
        Design(arms=("dense", "naive"), seeds=(1,), policies=("none",), suites=("refusal",), items=12, clusters=6),
    )
    (run / RECIPE).write_text(json.dumps(held()))
    page = disclosure_page(load_run(run))
    told = json.loads(render_disclosure(page))["change_record"]
    assert told["recipe"] == {"state": "known", "value": held()["sha256"]}
    assert told["refusal_set"]["value"] == recipe_digests(held())["refusal_set"]
    assert told["reward"]["value"] == recipe_digests(held())["reward"]
