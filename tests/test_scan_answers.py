"""Who answers for a compressor, and what ``kvaudit scan`` prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scan_world import write_clean, write_planted
from typer.testing import CliRunner, Result

from kvaudit.audit.cli import app

SERVE = "vllm serve x --kv-cache-dtype fp8\n"
DECLARED = "format: 1\ndeclared:\n- {rule: vllm.kv-cache-dtype, file: serve.sh, why: run release-7}\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def kvaudit(*words: str) -> Result:
    return CliRunner().invoke(app, ["scan", *words])


def states(name: str, text: str) -> list[str]:
    """The states of what one file holds."""
    Path(name).write_text(text, encoding="utf-8")
    kvaudit(name, "--json", "scan.json")
    return [row["state"] for row in json.loads(Path("scan.json").read_text())["found"]]


def test_a_compressor_that_nobody_answers_for_exits_with_3() -> None:
    Path("serve.sh").write_text(SERVE)
    result = kvaudit("serve.sh")
    assert result.exit_code == 3
    assert "found         serve.sh:1  serving  vllm  kv-quantisation  --kv-cache-dtype = fp8" in result.stdout
    assert "OPEN: not declared" in result.stdout
    assert "1 open" in result.stdout


def test_a_declared_compressor_exits_with_0() -> None:
    Path("serve.sh").write_text(SERVE)
    Path("kvaudit.yaml").write_text(DECLARED)
    result = kvaudit(".")
    assert result.exit_code == 0, result.stdout
    assert "declared: run release-7" in result.stdout


@pytest.mark.parametrize("other", ["b", "a-b"])
def test_a_declaration_speaks_for_the_folder_that_it_stands_in_alone(other: str) -> None:
    for name in ("a", other):
        Path(name).mkdir()
        Path(name, "serve.sh").write_text("vllm serve x --kv-cache-dtype fp8\n")
    Path("a/kvaudit.yaml").write_text("format: 1\ndeclared:\n- {rule: vllm.kv-cache-dtype, why: evaluated}\n")
    assert kvaudit("a").exit_code == 0
    both = kvaudit("a", other)
    assert both.exit_code == 3
    assert "1 open" in both.output


def test_a_declaration_elsewhere_is_named() -> None:
    Path("serve.sh").write_text(SERVE)
    Path("known.yaml").write_text(DECLARED)
    assert kvaudit("serve.sh").exit_code == 3
    assert kvaudit("serve.sh", "--declared", "known.yaml").exit_code == 0


@pytest.mark.parametrize(
    "entry",
    [
        "{rule: vllm.kv-cache-dtype, value: fp8_e5m2, why: x}",
        "{rule: vllm.kv-cache-dtype, file: other.sh, why: x}",
        "{rule: vllm.kv-cache-dtype, role: rollout, why: x}",
        "{mechanism: eviction, why: x}",
    ],
)
def test_a_declaration_of_something_else_declares_nothing_and_is_stale(entry: str) -> None:
    Path("serve.sh").write_text(SERVE)
    Path("kvaudit.yaml").write_text(f"format: 1\ndeclared:\n- {entry}\n")
    result = kvaudit(".")
    assert result.exit_code == 3
    assert "stale" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 2\ndeclared: []\n", "format is 2, wanted 1"),
        ("format: 1\n", "declared is None, wanted a list"),
        ("format: 1\ndeclared: [x]\n", "line 2: the entry is 'x'"),
        ("format: 1\ndeclared:\n- {rule: vllm.kv-cache-dtype}\n", "line 3: why is missing"),
        ("format: 1\ndeclared:\n- {why: x}\n", "line 3: rule and mechanism are both missing"),
        ("format: 1\ndeclared:\n- {rule: vllm.kv-dtype, why: x}\n", "Did you mean 'vllm.kv-cache-dtype'"),
        ("format: 1\ndeclared:\n- {mechanism: offload, why: x}\n", "unknown mechanism"),
        ("format: 1\ndeclared:\n- {mechanism: eviction, role: serve, why: x}\n", "Did you mean 'serving'"),
        ("format: 1\ndeclared:\n- {mechanism: eviction, reason: x}\n", "unknown key"),
    ],
)
def test_a_mistake_in_the_declarations_is_one_line_and_exit_code_2(text: str, message: str) -> None:
    Path("serve.sh").write_text(SERVE)
    Path("kvaudit.yaml").write_text(text)
    result = kvaudit(".")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_path_is_one_line_and_exit_code_2() -> None:
    result = kvaudit("nowhere")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "'nowhere' is missing" in result.stderr


def test_clean_configurations_exit_with_0() -> None:
    write_clean(Path("clean"))
    result = kvaudit("clean")
    assert result.exit_code == 0
    assert "0 found in 0 files" in result.stdout


def test_a_correction_answers_for_rollouts_of_the_same_command() -> None:
    assert states("a.sh", "python train.py --use-tis --sglang-kv-cache-dtype fp8_e4m3\n") == ["corrected"]


def test_a_correction_of_another_command_answers_for_nothing() -> None:
    text = "python train.py --use-tis\npython train.py --sglang-kv-cache-dtype fp8_e4m3\n"
    assert states("a.sh", text) == ["open"]


def test_a_correction_that_is_off_answers_for_nothing() -> None:
    text = (
        "rollout: {engine_kwargs: {vllm: {kv_cache_dtype: fp8}}}\nalgorithm: {rollout_correction: {rollout_is: null}}\n"
    )
    assert states("a.yaml", text) == ["open"]
    assert states("a.yaml", text.replace("null", "token")) == ["corrected"]


def test_a_correction_of_rollouts_does_not_answer_for_serving() -> None:
    text = "serving: {engine: vllm, kv_cache_dtype: fp8}\nloss_fn: {use_importance_sampling_correction: true}\n"
    assert states("a.yaml", text) == ["corrected"]  # the file is a trainer's
    Path("b").mkdir()
    assert states("b/serve.yaml", "vllm: {kv_cache_dtype: fp8}\nx: {tis_imp_ratio_cap: 2}\n") == ["open"]


def test_a_correction_does_not_answer_for_text_that_is_cut() -> None:
    text = "python train.py --use-tis --sglang-kv-cache-dtype fp8_e4m3 --allow-auto-truncate\n"
    assert states("a.sh", text) == ["corrected", "open"]


def test_a_default_correction_is_overruled_by_what_the_file_says() -> None:
    text = "GRPOConfig(use_vllm=True, vllm_importance_sampling_correction={})\nLLM(kv_cache_dtype='fp8')\n"
    assert states("trl_grpo.py", text.format("False")) == ["open"]
    assert states("trl_grpo.py", text.format("True")) == ["corrected"]
    assert states("trl_grpo.py", text.replace(", vllm_importance_sampling_correction={}", "")) == ["corrected"]


def test_compression_that_the_weights_bring_or_that_loses_nothing_needs_no_declaration() -> None:
    text = '{"model_type": "x", "sliding_window": 4096, "cache_implementation": "offloaded"}'
    assert states("config.json", text) == ["native", "lossless"]
    assert kvaudit("config.json").exit_code == 0


def test_hostile_text_is_escaped_on_the_terminal_and_whole_in_json() -> None:
    Path("serve.sh").write_text("vllm serve x --kv-cache-dtype 'fp8\x1b[2J\u202e'\n", encoding="utf-8")
    result = kvaudit("serve.sh", "--json", "scan.json")
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    assert "␛[2J" in result.stdout
    assert "\x1b[2J" in json.loads(Path("scan.json").read_text())["found"][0]["value"]


def test_the_json_has_the_fields_that_a_disclosure_takes() -> None:
    write_planted(Path("planted"))
    kvaudit("planted", "--json", "out/scan.json")
    table = json.loads(Path("out/scan.json").read_text())
    assert (table["format"], table["version"], table["paths"]) == ("kvaudit.scan", 1, ["planted"])
    assert len(table["rules_sha256"]) == 64
    row = next(row for row in table["found"] if row["file"] == "planted/serving/trtllm/tri.yaml")
    assert row == {
        "file": "planted/serving/trtllm/tri.yaml",
        "line": 3,
        "role": "serving",
        "engines": ["tensorrt-llm"],
        "rule": "tensorrt-llm.triattention",
        "mechanism": "eviction",
        "says": "entries leave the cache",
        "lossy": True,
        "key": "kv_cache_compression_config.algorithm",
        "value": "triattention",
        "by_default": False,
        "policy": "triattention:budget=1024,interval=64",
        "since": "seen in 1.3.0rc27",
        "source": "https://nvidia.github.io/TensorRT-LLM/llm-api/reference/TriAttentionKvCacheCompressionConfig.html",
        "note": "",
        "state": "open",
        "answer": "",
    }
    assert table["open"] == sum(row["state"] == "open" for row in table["found"]) > 30
    assert {row["rule"] for row in table["corrections"]} >= {"slime.tis", "verl.rollout-is"}
    assert all("state" not in row for row in table["corrections"])


def test_a_scan_is_the_same_wherever_its_files_are_named_from() -> None:
    write_planted(Path("planted"))
    one = kvaudit("planted").stdout
    assert kvaudit(str(Path("planted").resolve())).stdout == one
    assert kvaudit("planted", "planted/verl").stdout == one
