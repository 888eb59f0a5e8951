"""Checkpoints that were trained elsewhere: named in a spec, loaded, held to the run's model, compared and disclosed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.recipe import joined_recipe
from kvaudit.audit.sampling.checkpoints import check_comparable, load_base_chat, load_comparable, load_model_or_adapter
from kvaudit.audit.sampling.model import EMBEDDED as NAME
from kvaudit.audit.sampling.model import load_model, locate
from kvaudit.audit.sampling.weights import weights_sha256
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.provenance import read_recipe, seal_recipe
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.reports.records.rows import CellKey
from kvaudit.reports.verdict.comparison import comparison_of
from kvaudit.reports.verdict.drift import seed_pairs
from kvaudit.reports.verdict.pin import load_pin

EMBEDDED = locate(NAME)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its weights moved a little, as a folder of its own."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "manifest.json"))
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    moved = {name: t + 0.01 * t.std() * torch.randn(t.shape, generator=noise) for name, t in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# peft asks transformers by a name that transformers has given up
PEFT_ASKS_BY_AN_OLD_NAME = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def spec(folder: Path | str, **changes: object) -> dict:
    body = {
        "format": 1,
        "name": "theirs",
        "model": "embedded",
        "checkpoints": {
            "dense": {"seeds": {1: str(EMBEDDED)}, "role": "reference", "recipe": {"rollouts": "none"}},
            "fast": {"seeds": {1: str(folder)}, "recipe": {"rollouts": "fp8 in the engine", "reward": "a classifier"}},
        },
        "evaluate": {
            "policies": ["none", "streaming:budget=64,sink=8"],
            "suites": {"refusal": {"items": 4}},
            "context_tokens": [128],
        },
    }
    return {**body, **changes}


def run(tmp_path: Path, body: dict) -> tuple[int, str, Path]:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(body))
    words = ["run", tmp_path / "spec.yaml", "--out", tmp_path / "run", "--resume", "--threads", 1, "--anyway"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split()), tmp_path / "run"


def of_folders() -> dict:
    """The spec of the checkpoints in the folders ``reference``, which is pinned, and ``fast``."""
    body = spec("fast", gate={"pin": "reference.json", "on_inconclusive": "warn"})
    body["checkpoints"]["dense"]["seeds"] = {1: "reference"}
    body["evaluate"] |= {"suites": {"refusal": {"items": 24}}}  # enough templates for an interval
    return body


class Finished(NamedTuple):
    """A folder with two checkpoints and the finished run that compared them, and what the run printed."""

    home: Path
    output: str


@pytest.fixture(scope="module")
def finished(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("finished")
    shutil.copytree(trained, home / "fast")
    shutil.copytree(EMBEDDED, home / "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        pinned(Path("reference"), home)
        code, output, _ = run(home, of_folders())
    assert code == 0, output
    return Finished(home, output)


@pytest.fixture
def resumable(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run, which a test may change together with its checkpoint."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(finished.home, tmp_path, dirs_exist_ok=True)


def test_two_checkpoints_of_ones_own_are_compared_and_disclosed(trained: Path, finished: Finished) -> None:
    defaults = "refusal.unsafe, refusal.helpful, refusal.well_formed 5 pp, the default of safety suites"
    assert f"MARGINS not declared: {defaults}. Declare your own in gate.margins." in finished.output
    assert "EQUAL WEIGHTS" not in finished.output
    told = json.loads((finished.home / "run" / "report" / "disclosure.json").read_text())
    fast = next(recipe for recipe in told["recipes"] if recipe["arm"] == "fast")
    assert fast["role"] == "candidate"
    assert fast["facts"]["rollouts"] == {"state": "known", "value": "fp8 in the engine"}
    assert fast["facts"]["correction"] == {"state": "unknown"}
    assert fast["facts"]["weights_sha256"]["value"] == {"1": load_model(str(trained)).sha256}
    pairs = {(row["arm"], row["verdict"] != "not gated") for row in told["drift"] if row["estimand"] == "alike"}
    assert ("fast", True) in pairs


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("", ""),
        ("weights", "pins other weights, or none, for dense seed 1"),
        ("config.json", "pins the weights, but other files, of dense seed 1 (config.json)"),
    ],
)
def test_a_run_is_held_to_the_pin_of_its_given_reference(change: str, told: str, resumable: Path) -> None:
    """By its files: pinned as a folder it has no name, and the run calls it dense, seed 1."""
    made = resumable / "run"
    story = json.loads((made / "provenance.json").read_text())
    if change:
        other = resumable / ("fast" if change == "weights" else "reference")
        edit_config(other)
        pinned(other, made)
        story["gate_pin"] = json.loads(load_pin(made / f"{other.name}.json").to_json())
        (made / "provenance.json").write_text(json.dumps(story))
    check_gate_output(made, told)
    if change == "config.json":
        del story["checkpoint_files"]["dense/1"]
        (made / "provenance.json").write_text(json.dumps(story))
        unknown = "the run does not list the files of dense seed 1 that gate_pin in provenance.json pins, so it"
        check_gate_output(made, unknown)


def check_gate_output(made: Path, told: str) -> None:
    """Hold the gate to what it must say of the reference's pin, nothing for ""."""
    verdict = CliRunner().invoke(app, ["gate", str(made)])
    assert (verdict.exit_code == 5) is bool(told), verdict.output
    assert ("REFHASH" in verdict.output) is bool(told)
    assert told in " ".join(verdict.output.split())


def edit_config(folder: Path) -> None:
    """Change how the model of a folder computes, and none of its weights."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 10 * config["rms_norm_eps"]}))


def test_a_checkpoint_whose_config_changed_does_not_go_on(resumable: Path) -> None:
    for file in (resumable / "run" / "records").glob("fast*"):  # as if it had stopped before these units
        file.unlink()
    edit_config(resumable / "fast")
    code, output, folder = run(resumable, of_folders())
    assert code == 2
    assert "the run was started with other files of fast/1: config.json had sha256" in output
    assert not list((folder / "records").glob("fast*"))


def made_of(**changes: Any) -> dict[str, Any]:
    reward = {"written": "grade", "sha256": "a", "graded_by": {}}
    data = {"suites": {}, "weights": [], "context_tokens": 0, "items_sha256_by_seed": {"1": "b"}}
    plain = {"model": {"name": "m", "sha256": "c"}, "reward": reward, "constitution": None, "data": data}
    return seal_recipe(
        plain | {"policy": {"x": "none"}, "refusal_set": {}, "training": {"seed": 1, "steps": 2}} | changes
    )


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        ({"policy": {"y": "int8"}}, True),
        ({"training": {"seed": 2, "steps": 2}}, True),
        ({"training": {"seed": 1, "steps": 3}}, False),
        ({"model": {"name": "m", "sha256": "d"}}, False),
        (None, False),
    ],
)
def test_recipes_of_arms_that_are_alike_but_for_arm_and_seed_are_one(
    changes: dict[str, Any] | None, joined: bool, tmp_path: Path
) -> None:
    for arm, recipe in (("dense", made_of()), ("fast", None if changes is None else made_of(**changes))):
        (tmp_path / arm).mkdir()
        if recipe is not None:
            (tmp_path / arm / "recipe.json").write_text(json.dumps(recipe))
    given = {arm: {"seeds": {1: str(tmp_path / arm)}} for arm in ("dense", "fast")}
    found = joined_recipe(RunFolder(tmp_path, cast(RunSpec, read(checkpoints=given))), {"refusal": {}})
    assert (found is not None) is joined
    if found is not None:
        (tmp_path / "recipe.json").write_text(json.dumps(found))
        held = read_recipe(tmp_path)["sections"]
        assert held["policy"]["holds"].keys() == {"dense", "fast"}
        assert held["training"]["holds"] == {"steps": 2}
        assert held["refusal_set"]["holds"] == {"refusal": {}}


@pytest.mark.parametrize(
    "second",
    [
        {"policy": {"x": "int8"}},  # another policy in another seed of the arm
        {"data": {"suites": {}, "weights": [], "context_tokens": 0, "items_sha256_by_seed": {"1": "other"}}},
    ],
)
def test_recipes_that_contradict_each_other_are_not_joined(second: dict[str, Any], tmp_path: Path) -> None:
    for seed, recipe in ((1, made_of()), (2, made_of(**second))):
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "recipe.json").write_text(json.dumps(recipe))
    given = {arm: {"seeds": {seed: str(tmp_path / str(seed)) for seed in (1, 2)}} for arm in ("dense", "fast")}
    assert joined_recipe(RunFolder(tmp_path, cast(RunSpec, read(checkpoints=given))), {}) is None


@pytest.mark.parametrize("broken", [{"data": []}, {"policy": {}}, {"data": {"items_sha256_by_seed": 3}}])
def test_a_recipe_without_items_or_policy_is_one_line(broken: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(made_of(**broken)))
    spec = cast(RunSpec, read(checkpoints={arm: {"seeds": {1: str(tmp_path)}} for arm in ("dense", "fast")}))
    with pytest.raises(DataError, match="names no items or no policy of its checkpoint"):
        joined_recipe(RunFolder(tmp_path, spec), {})


def test_weights_that_change_while_a_run_rests_are_refused(resumable: Path) -> None:
    next((resumable / "run" / "records").glob("fast*.done.json")).unlink()
    move_weights(resumable / "fast")
    code, output, _ = run(resumable, of_folders())
    assert code == 2
    assert "but the run began with" in output


def move_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: t + 1e-3 for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_is_merged_into_the_runs_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = load_model()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(load_model().model, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    found = load_comparable(str(tmp_path / "adapter"), base, dtype="float32", device="cpu")
    wanted = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.model.state_dict().items())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(found.model.state_dict()[name], base.model.state_dict()[name])
    assert found.sha256 != base.sha256


@PEFT_ASKS_BY_AN_OLD_NAME
def test_a_run_may_begin_from_an_adapter_and_train_another_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    start, over = tmp_path / "start", load_model().model
    over.config._name_or_path = "embedded"
    peft.get_peft_model(over, lora).save_pretrained(start)
    train = {"arms": ["dense"], "seeds": [1], "policy": "none", "suites": ["refusal"], "context_tokens": 128}
    train |= {"steps": 1, "prompts_per_step": 2, "group": 2, "adapter": {"rank": 2}, "learning_rate": 0.01}
    train |= {"sft": {"steps": 2, "prompts_per_step": 2, "learning_rate": 0.01}}
    evaluate = {"policies": ["none"], "suites": {"refusal": {"items": 2}}, "context_tokens": [128], "base": True}
    body = {"format": 1, "name": "stacked", "model": "${BEGIN}", "train": train, "evaluate": evaluate}
    monkeypatch.setenv("BEGIN", str(start))
    code, output, folder = run(tmp_path, body | {"gate": {"reference": "dense"}})
    assert code == 0, output
    assert json.loads((folder / "report" / "verdict.json").read_text())["model"] == "start"
    begun = load_model_or_adapter(str(start), dtype="float32", device="cpu")
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["base_sha256"] == begun.sha256 != load_model().sha256
    trained = load_model_or_adapter(str(folder / "checkpoints" / "dense" / "seed-1"), dtype="float32", device="cpu")
    assert provenance["checkpoints"]["dense/1"] == trained.sha256
    name = "model.layers.0.self_attn.q_proj.weight"
    whole, first, second = (m.model.state_dict()[name] for m in (load_model(), begun, trained))
    assert not torch.equal(whole, first)
    assert 0 < float((second - first).abs().max()) < float((first - whole).abs().max())
    assert load_base_chat(str(start)).count_tokens("a b") == load_model().chat.count_tokens("a b")
    assert pinned(folder / "checkpoints" / "dense", tmp_path) == trained.sha256
    assert pinned(start, tmp_path) == begun.sha256


def test_a_folder_of_the_embedded_models_name_is_pinned_as_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "embedded")
    weights = load_file(tmp_path / "embedded" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "embedded" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert pinned(Path("embedded"), tmp_path) == weights_sha256(tmp_path / "embedded") != weights_sha256(EMBEDDED)


@pytest.mark.parametrize("base", ["missing.gguf", "folder.gguf"])
def test_a_pin_of_an_adapter_over_what_is_no_file_is_one_line(base: str, tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    folder = adapter(tmp_path / "one", str(tmp_path / base))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    result = CliRunner().invoke(app, ["gate", "--pin", str(folder), "--out", str(tmp_path / "pin.json")])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "is no file" in result.output


def test_a_pin_of_a_path_that_no_system_takes_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["gate", "--pin", "a" * 5000, "--out", str(tmp_path / "pin.json")])
    assert result.exit_code == 2
    assert "cannot be a path" in result.output
    assert len(result.output.strip().splitlines()) == 1


def pinned(folder: Path, tmp_path: Path) -> str:
    """The weights of the one checkpoint that ``kvaudit gate --pin`` finds there."""
    out = tmp_path / f"{folder.name}.json"
    result = CliRunner().invoke(app, ["gate", "--pin", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    (one,) = load_pin(out).checkpoints
    return one.sha256


def test_adapters_that_are_for_each_other_are_refused(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", str(tmp_path / "two"))
    adapter(tmp_path / "two", str(one))
    with pytest.raises(DataError, match="which is based on it"):
        load_model_or_adapter(str(one), dtype="float32")


@pytest.mark.parametrize("base", ["~nobody-is-called-so/model", "x" * 5000, "a/" * 5000, "\0"])
def test_an_adapter_for_what_can_be_no_path_is_one_line(base: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_model_or_adapter(str(adapter(tmp_path / "one", base)), dtype="float32")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_whose_weights_have_no_place_is_refused_and_not_merged_as_nothing(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(load_model().model, lora).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("model.layers", "net.blocks"): t for name, t in load_file(path).items()}, path)
    with pytest.raises(DataError, match="missing adapter keys"):
        load_comparable(str(tmp_path / "adapter"), load_model(), dtype="float32", device="cpu")


ATTENTION_LAYERS = {"target_modules": ["q_proj", "v_proj"]}


def saved_adapter(folder: Path, **settings: Any) -> Any:
    """An adapter of the embedded model, all of whose trained weights were moved, saved; returns it over its model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    over = load_model().model
    over.config._name_or_path = "embedded"
    lora = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **ATTENTION_LAYERS | settings)
    adapted = peft.get_peft_model(over, lora)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, adapted.parameters()):
            parameter.add_(0.01 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


def changed_adapter(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


@PEFT_ASKS_BY_AN_OLD_NAME
@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"target_modules": ["q_proj"]}, "8 of the 16"),
        ({"target_modules": ["q_proj", "value_proj"]}, "8 of the 16"),
        ({"layers_to_transform": [0]}, "12 of the 16"),
        ({"exclude_modules": ["v_proj"]}, "8 of the 16"),
    ],
)
def test_an_adapter_whose_config_has_no_place_for_its_tensors_is_refused(
    changes: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    saved_adapter(tmp_path / "adapter")
    changed_adapter(tmp_path / "adapter", **changes)
    with pytest.raises(DataError, match=rf"{lost} tensors .* no place of their own.*lora_A\.weight.* more") as caught:
        load_comparable(str(tmp_path / "adapter"), load_model(), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
    assert "correct adapter_config.json (target_modules, layers_to_transform, use_dora), or merge" in str(caught.value)


@PEFT_ASKS_BY_AN_OLD_NAME
def test_a_magnitude_of_dora_in_an_adapter_without_dora_is_refused(tmp_path: Path) -> None:
    saved_adapter(tmp_path / "adapter", use_dora=True)
    changed_adapter(tmp_path / "adapter", use_dora=False)
    with pytest.raises(DataError, match=r"8 of the 24 tensors .*lora_magnitude_vector"):
        load_comparable(str(tmp_path / "adapter"), load_model(), dtype="float32", device="cpu")


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_that_holds_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    saved_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file(tensors | {name.replace("lora_B", "lora_B.default"): tensors[name] + 1}, path)
    with pytest.raises(DataError, match=r"2 of the 17 tensors .*lora_B\.default\.weight"):
        load_comparable(str(tmp_path / "adapter"), load_model(), dtype="float32", device="cpu")


@PEFT_ASKS_BY_AN_OLD_NAME
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "input_layernorm"]},
        {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 3}},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"trainable_token_indices": [1, 2]},
        {"layers_to_transform": [0, 2]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, about embeddings that are tied
def test_an_adapter_of_any_make_is_merged_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    adapted = saved_adapter(tmp_path / "adapter", **settings)
    found = load_comparable(str(tmp_path / "adapter"), load_model(), dtype="float32", device="cpu").model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in adapted.merge_and_unload().state_dict().items())


def test_an_adapter_with_pickled_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match="pickled weights are not loaded"):
        load_comparable(str(tmp_path), load_model(), dtype="float32", device="cpu")


def adapter(folder: Path, over: str | None) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": over}))
    return folder


@pytest.mark.parametrize(
    "name",
    ["embedded", "/elsewhere/Embedded/", "us/embedded", "hub/models--us--embedded/snapshots/0a1b", None],
)
def test_an_adapter_over_the_runs_model_is_taken_wherever_that_lay(name: str | None, tmp_path: Path) -> None:
    check_comparable(str(adapter(tmp_path / "adapter", name)), load_model())


def test_an_adapter_over_another_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    code, output, folder = run(tmp_path, spec(adapter(tmp_path / "adapter", "Qwen/Qwen2.5-0.5B")))
    assert code == 2
    assert "was trained over 'Qwen/Qwen2.5-0.5B', the run's model is 'embedded'" in output
    assert not folder.exists()


def test_an_adapter_over_other_weights_of_the_same_name_is_refused(trained: Path, tmp_path: Path) -> None:
    """Every run has a folder seed-1, so a name alone shows little where the named folder can be read."""
    for part, refused in (("same", False), ("other", True)):
        named = tmp_path / part / "embedded"
        shutil.copytree(trained if refused else EMBEDDED, named)
        folder = adapter(tmp_path / f"over-{part}", str(named))
        if refused:
            with pytest.raises(DataError, match="which is here and has other weights than the run's model 'embedded'"):
                check_comparable(str(folder), load_model())
        else:
            check_comparable(str(folder), load_model())


def test_an_adapter_with_another_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", "embedded")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder)
    check_comparable(str(folder), load_model())
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="another chat template"):
        check_comparable(str(folder), load_model())


def test_another_architecture_is_refused_before_anything_runs(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    code, output, folder = run(tmp_path, spec(other))
    assert code == 2
    assert "has num_hidden_layers 7" in output
    assert not folder.exists()


def test_another_chat_template_is_refused(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    code, output, _ = run(tmp_path, spec(other))
    assert code == 2
    assert "another chat template" in output


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, spec(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere" in output


def read(**changes: object) -> object:
    return parse_spec(yaml.safe_dump(spec("somewhere", **changes)), "spec.yaml")


def test_a_lone_path_is_a_checkpoint_of_seed_0() -> None:
    found = read(checkpoints={"ours": "folder"}, gate={"reference": "ours"})
    assert found.arms == (("ours", 0),)
    assert found.external_source("ours", 0) == "folder"


def test_the_declared_reference_is_the_gates() -> None:
    assert read().gate.reference == "dense"
    assert read().arms == (("dense", 1), ("fast", 1))


def test_a_written_spec_with_checkpoints_reads_back_the_same() -> None:
    first = read()
    assert parse_spec(yaml.safe_dump(first.written()), "spec.yaml").sha256 == first.sha256


def seeded(reference: tuple[int, ...], *candidates: tuple[int, ...]) -> RunSpec:
    given: dict[str, object] = {"dense": {"seeds": dict.fromkeys(reference, "x"), "role": "reference"}}
    given |= {f"fast-{n}": {"seeds": dict.fromkeys(seeds, "x")} for n, seeds in enumerate(candidates)}
    return parse_spec(yaml.safe_dump(spec("somewhere", checkpoints=given)), "spec.yaml", NAMES)


@pytest.mark.parametrize("seeds", [((1,), (2, 3)), ((0,), (1, 2), (1, 2)), ((1, 2), (1, 2)), ((1, 2), (2,))])
def test_seeds_that_pair_are_accepted(seeds: tuple[tuple[int, ...], ...]) -> None:
    assert len(seeded(*seeds).arms) == sum(map(len, seeds))


@pytest.mark.parametrize("seeds", [((1,), (1, 2)), ((1, 2), (3, 4)), ((1, 2), (1, 2), (1,))])
def test_seeds_that_do_not_pair_are_refused_before_anything_runs(seeds: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(SpecError, match="compared seed by seed"):
        seeded(*seeds)


def test_a_reference_of_one_seed_serves_every_candidate() -> None:
    asked = seeded((0,), (1, 2))
    columns = {name: pd.Series(dtype=object) for name in ("arm", "suite", "policy", "judge", "context_tokens")}
    sides = comparison_of(asked, pd.DataFrame(columns).assign(facets=None), {})
    assert sides.seeds == (1, 2)
    panel = SimpleNamespace(scores={CellKey("dense", 0, "none"): None})
    assert seed_pairs(sides, cast(Any, panel), "fast-0") == [(1, 0), (2, 0)]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(("arm", "seeds"), [("dense", (1, 2)), ("fast", (2, 3))])
def test_seeds_of_one_arm_with_the_same_weights_are_refused_before_anything_is_asked(
    arm: str, seeds: tuple[int, int], is_copied: bool, trained: Path, tmp_path: Path
) -> None:
    body = spec(trained)
    for name, given in body["checkpoints"].items():
        given["seeds"] = {seed: str(moved(trained, tmp_path / f"{name}-{seed}", seed)) for seed in (1, 2, 3)}
    own, other = (Path(body["checkpoints"][arm]["seeds"][seed]) for seed in seeds)
    if is_copied:
        shutil.copy(own / "model.safetensors", other / "model.safetensors")
    else:
        body["checkpoints"][arm]["seeds"][seeds[1]] = str(own)
    code, output, folder = run(tmp_path, body)
    assert code == 2
    assert f"checkpoints.{arm}: seeds {seeds[0]}, {seeds[1]} have the same weights" in output
    assert not folder.exists()


def moved(model: Path, folder: Path, seed: int) -> Path:
    """A copy of a model with its final norm moved by the seed."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 0.001 * seed
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_that_was_never_trained_passes_as_the_weights_of_the_reference_with_a_remark(tmp_path: Path) -> None:
    saved_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * ("lora_A" in name) for name, tensor in load_file(path).items()}, path)
    body = spec(tmp_path / "adapter")
    body["evaluate"] |= {"policies": ["none"]}
    code, output, made = run(tmp_path, body)
    assert code == 0, output
    assert "read first: EQUAL WEIGHTS" in output
    report = (made / "report" / "report.md").read_text()
    assert "EQUAL WEIGHTS: fast (seed 1) has exactly the weights of dense." in report


def test_a_finished_run_is_resumed_as_it_was_and_answers_for_its_own_weights_alone(resumable: Path) -> None:
    """Nothing is loaded again. Without the check the verdict of before would be printed of other weights."""
    own, provenance = resumable / "fast", resumable / "run" / "provenance.json"
    story = json.loads(provenance.read_text())
    provenance.write_text(json.dumps({**story, "finished": "2026-01-02T03:04:05+00:00"}))
    assert run(resumable, of_folders())[0] == 0
    assert json.loads(provenance.read_text())["finished"] == "2026-01-02T03:04:05+00:00"
    edit_config(own)
    code, output, _ = run(resumable, of_folders())
    assert (code, "other files of fast/1: config.json had sha256" in output) == (2, True)
    move_weights(own)
    code, output, _ = run(resumable, of_folders())
    assert (code, "but the run began with" in output) == (2, True)
    shutil.rmtree(own)  # a finished run may outlive the models that it compared
    assert run(resumable, of_folders())[0] == 0


def test_two_references_are_refused() -> None:
    given = {name: {"seeds": {1: "x"}, "role": "reference"} for name in ("one", "two")}
    with pytest.raises(SpecError, match="names 2 references"):
        read(checkpoints=given)


def test_an_arm_that_is_trained_cannot_be_given_too() -> None:
    train = {"arms": ["dense"], "seeds": [1], "policy": "none", "suites": ["refusal"]}
    with pytest.raises(SpecError, match=r"checkpoints\.dense is the name of an arm"):
        read(train=train)


def test_checkpoints_are_evaluated_with_the_number_of_items_that_the_pilot_gives(trained: Path, tmp_path: Path) -> None:
    grid = {"policies": ["none"], "suites": {"refusal": {"items": "auto"}}, "context_tokens": [128], "pilot": 24}
    code, output, folder = run(tmp_path, spec(trained, evaluate=grid, gate={"margins": {"refusal": 15}}))
    assert (code, "KeyError" in output) == (0, False)
    given = json.loads((folder / "provenance.json").read_text())["pilot"]["found"]["items"]["refusal"]
    assert given > 24
    assert {len(path.read_text().splitlines()) for path in (folder / "records").glob("*.jsonl")} == {given}
