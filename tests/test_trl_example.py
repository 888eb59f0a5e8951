"""The example for TRL, run as its header says, and what a run makes of the two folders that it leaves."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from rerun_world import measure
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.rerun.mismatch import survey
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.files import read_json
from kvaudit.core.provenance import read_recipe

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which both arms of the example were trained."""
    pytest.importorskip("trl", reason='the extra is not installed: pip install "kvaudit[trl]"')
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for arm in ("dense", "smd"):
            patch.setattr(sys, "argv", ["trl_grpo.py", arm])
            runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    return folder


# of TRL and transformers, about names that either has given up
pytestmark = pytest.mark.filterwarnings("ignore")


def test_its_learner_sees_what_the_sampler_saw_and_its_rollouts_are_explained(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    told = [json.loads(line) for line in Path("runs/trl-smd/telemetry.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told] == [1, 2, 3, 4]
    assert max(row["mismatch/max_abs_gap"] for row in told) < 2e-5
    result = CliRunner().invoke(app, ["replay", "verify", "runs/trl-smd"])
    assert result.exit_code == 0, result.output
    assert "explained: no token" in " ".join(result.output.split())
    # densely, the same tokens of the same weights are nats apart
    found = measure(load_model("runs/trl-smd"), survey(Path("runs/trl-smd/ledgers/final.safetensors")))
    assert found.panel["max_abs_gap"] > 1.0


def test_a_run_takes_the_folders_over_with_all_that_they_say(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    body = yaml.safe_load((ROOT / "examples" / "trl.yaml").read_text())
    body["evaluate"] |= {"suites": {"refusal": {"items": 8}}, "context_tokens": [128]}
    Path("spec.yaml").write_text(yaml.safe_dump(body))
    for words in (["run", "spec.yaml", "--out", "runs/trl", "--only", "evaluate"], ["report", "runs/trl"]):
        result = CliRunner().invoke(app, [*words, *(["--anyway", "--threads", "1"] if words[0] == "run" else [])])
        assert result.exit_code in (0, 4, 6), result.output  # eight items show little
    disclosed = read_json(Path("runs/trl/report/disclosure.json"))
    dense, smd = disclosed["recipes"]
    assert (dense["arm"], dense["role"], smd["arm"]) == ("dense", "reference", "smd")
    assert smd["facts"]["rollouts"]["value"].startswith("snapkv:budget=24,")
    assert smd["facts"]["learner_view"] == {"state": "known", "value": "shadow"}
    assert smd["facts"]["said_by"] == {"state": "known", "value": "its own provenance"}
    assert smd["facts"]["weights_sha256"]["value"]["1"] == load_model("runs/trl-smd").sha256
    assert smd["mask_schedule"]["max_abs_gap"]["value"] < 2e-5
    assert smd["mismatch"]["kv_tokens_saved"]["value"] > 0.4
    assert dense["mismatch"]["kv_tokens_saved"]["value"] == 0
    assert "**Training**: 2 arms; largest sampler-learner gap in smd" in Path("runs/trl/report/report.md").read_text()
    whole = read_recipe(Path("runs/trl"))["sections"]
    assert sorted(whole["policy"]["holds"]) == ["dense", "smd"]
    assert whole["refusal_set"]["holds"]["refusal"]["tokens"]["128"]["items"] == 8
    assert whole["model"]["holds"]["sha256"] == load_model().sha256
    assert disclosed["change_record"]["recipe"]["value"] == read_recipe(Path("runs/trl"))["sha256"]


def test_its_recipe_is_one_by_the_schema(trained: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    recipe = read_json(trained / "runs" / "trl-smd" / "recipe.json")
    jsonschema.validate(recipe, read_json(ROOT / "docs" / "recipe.schema.json"))
    assert recipe["sections"]["training"]["holds"]["num_generations"] == 4
    assert "output_dir" not in recipe["sections"]["training"]["holds"]
