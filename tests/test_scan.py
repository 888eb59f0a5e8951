"""Every planted mechanism is found at its line, and nothing else; what cannot be read stops nothing."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from scan_world import CLEAN, PLANTED, write_clean, write_planted
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.policies.compose import parse_policy
from kvaudit.audit.scan.files import find_files
from kvaudit.audit.scan.rules import NO_EQUIVALENT, ScanRule, load_rules
from kvaudit.audit.scan.scan import Scan, scan_files

Rows = dict[str, list[tuple[int, str]]]  # file -> lines and rules


def scanned(folder: Path) -> Scan:
    files, skipped, left_out = find_files([folder])
    return scan_files(files, (), skipped, left_out)


def by_file(result: Scan, folder: Path) -> Rows:
    rows: Rows = {}
    for finding in (*result.findings, *result.corrections):
        name = Path(finding.file).relative_to(folder.as_posix()).as_posix()
        rows.setdefault(name, []).append((finding.line, finding.rule.id))
    return rows


def one(folder: Path, name: str, text: str) -> Scan:
    (folder / name).write_text(text, encoding="utf-8")
    return scanned(folder)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Rows]:
    """What is planted, and what is found, by file."""
    folder = tmp_path_factory.mktemp("planted")
    return write_planted(folder), by_file(scanned(folder), folder)


@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_mechanism_is_found_at_its_line(name: str, planted: tuple[Rows, Rows]) -> None:
    wanted, found = planted
    assert sorted(found[name]) == sorted(wanted[name])


def test_nothing_is_found_where_nothing_is_planted(planted: tuple[Rows, Rows]) -> None:
    wanted, found = planted
    assert len(wanted) >= 30
    assert set(found) == set(wanted)


def test_every_rule_is_met_by_a_planted_configuration(planted: tuple[Rows, Rows]) -> None:
    met = {rule for rows in planted[1].values() for _, rule in rows}
    assert {rule.id for rule in load_rules().rules} - met == set()


def test_nothing_is_found_in_clean_configurations(tmp_path: Path) -> None:
    write_clean(tmp_path)
    result = scanned(tmp_path)
    assert (result.findings, result.corrections, result.not_readable) == ([], [], [])
    assert len(result.clean_files) == len(CLEAN) == 15


def test_at_least_forty_keys_of_ten_engines_are_known() -> None:
    rules = load_rules().rules
    assert len(rules) >= 40
    assert len({rule.engine for rule in rules}) >= 10
    assert len({rule.id for rule in rules}) == len(rules)


@pytest.mark.parametrize("rule", load_rules().rules, ids=lambda rule: rule.id)
def test_every_rule_names_what_exists(rule: ScanRule) -> None:
    rules = load_rules()
    assert rule.engine in rules.engines
    assert rule.mechanism in rules.mechanisms
    assert rule.source.startswith("https://")
    assert rule.since
    assert rule.flags or rule.keys or rule.env or rule.calls or rule.imports
    texts = [rule.policy] if isinstance(rule.policy, str) else rule.policy.values()
    for text in texts:
        if text != NO_EQUIVALENT:
            parse_policy(re.sub(r"\{\w+\}", "64", text))  # raises for what is no policy of ours


def test_names_of_rules_begin_with_their_engine() -> None:
    wrong = [rule.id for rule in load_rules().rules if not rule.id.startswith(rule.engine.removesuffix("-api"))]
    assert wrong == []


BROKEN = {
    "bomb.yaml": (
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(12)),
        "aliases expand to more than",
    ),
    "loop.yaml": ("a: &a\n  b: *a\n", "nested more than"),
    "deep.yaml": ("[" * 500 + "]" * 500, "nested more than"),
    "deep.json": ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested more than"),
    "deep.toml": ("a = " + "[" * 5_000 + "]" * 5_000, "nested more than"),
    "deep.py": ("x = " + "(" * 5_000 + ")" * 5_000, "no Python"),
    "torn.json": ('{"kv_cache_dtype": "fp8"', "no JSON"),
    "torn.yaml": ("a: [1, 2\nb: 3\n", "no YAML"),
    "dotted.toml": ("a." * 150_000 + "a = 1\n", "nested more than"),
    "torn.toml": ("a = \n", "no TOML"),
    "torn.py": ("def f(:\n", "no Python"),
    "torn.sh": ("vllm serve 'x\n", "a quote is never closed"),
    "null.py": ("x = 1\0", "no Python"),
    "control.yaml": ("a: \x01\n", "no YAML"),
    "large.yaml": ("# " + "x" * 500_000, "larger than 500000 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unreadable_file_is_one_line_and_the_rest_is_still_scanned(name: str, tmp_path: Path) -> None:
    text, reason = BROKEN[name]
    (tmp_path / "a.sh").write_text("vllm serve x --kv-cache-dtype fp8\n")
    (tmp_path / "z.sh").write_text("vllm serve x --kv-cache-dtype fp8\n")
    result = one(tmp_path, name, text)
    assert [Path(finding.file).name for finding in result.findings] == ["a.sh", "z.sh"]
    assert len(result.not_readable) == 1
    assert reason in result.not_readable[0].reason
    assert "\n" not in result.not_readable[0].reason


def test_bytes_that_are_no_text_are_not_readable(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    assert scanned(tmp_path).not_readable[0][1:] == (2, "no UTF-8 text")


def test_a_named_file_of_an_unknown_dialect_is_not_readable(tmp_path: Path) -> None:
    path = tmp_path / "engine.hcl"
    path.write_text('kv_cache_dtype = "fp8"\n')
    files, skipped, _ = find_files([path])
    assert "unknown dialect" in scan_files(files).not_readable[0].reason
    assert skipped == 0


def test_a_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert scanned(tmp_path).not_readable[0].reason == "no regular file"


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "engine.sh").write_text("vllm serve x --kv-cache-dtype fp8\n")
    (tmp_path / "below" / "link.sh").symlink_to(tmp_path / "engine.sh")
    result = scanned(tmp_path / "below")
    assert result.findings == []
    assert result.left_out == [f"{tmp_path}/below/link.sh"]


def test_configurations_in_dot_folders_are_read_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    text = "run: vllm serve x --kv-cache-dtype fp8\n"
    folder = tmp_path / "top"
    for name in ("top/.github/workflows", "top/.git", "top/.venv/lib", "top/node_modules", "away"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "serve.yaml").write_text(text)
    (folder / "linked").symlink_to(tmp_path / "away")
    done = CliRunner().invoke(app, ["scan", str(folder)])
    assert done.exit_code == 3
    [found] = [line for line in done.output.splitlines() if line.startswith("found ")]
    assert "/.github/workflows/serve.yaml:1" in found
    [line] = [line for line in done.output.splitlines() if line.startswith("left out")]
    assert line.startswith("left out      4 links or folders: ")
    for name in (".git/", ".venv/", "linked", "node_modules/"):
        assert f"{folder}/{name}" in line


def test_broken_files_keep_what_stands_above_the_break(tmp_path: Path) -> None:
    result = one(tmp_path, "serve.sh", "vllm serve x --kv-cache-dtype fp8\necho 'torn\n")
    assert ([finding.line for finding in result.findings], result.not_readable[0].line) == ([1], 2)


def test_a_notebook_that_is_named_is_not_said_to_be_clean(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text('{"cells": [{"cell_type": "code", "source": ["LLM(kv_cache_dtype=1)"]}]}')
    files, *_ = find_files([path])
    assert "a notebook" in scan_files(files).not_readable[0].reason


def test_a_tag_builds_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"kv_cache_dtype: !!python/object/apply:os.mkdir ['{made}']\nvllm: !include other.yaml\n"
    assert one(tmp_path, "serve.yaml", text).not_readable == []
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "vllm serve x --kv-cache-dtype $1\n"),
        ("a.sh", "for d in auto fp8; do vllm serve x --kv-cache-dtype $d; done\n"),
        ("a.yaml", "vllm: {kv_cache_dtype: '{{ dtype }}'}\n"),
        ("a.yaml", "vllm: {kv_cache_dtype: '${oc.env:DTYPE}'}\n"),
        ("a.yaml", "vllm: {kv_cache_dtype: !env DTYPE}\n"),
        ("a.yaml.j2", "vllm:\n  kv_cache_dtype: {{ dtype }}\n"),
        ("a.py", "llm = LLM(kv_cache_dtype=args.dtype)\n"),
        ("a.py", "llm = LLM(kv_cache_dtype=choose())\n"),
        ("a.json", '{"kv_cache_dtype": "<dtype>"}'),
        ("a.toml", 'kv_cache_dtype = "{{ dtype }}"\n'),
        ("a.py", 'words.append("--kv-cache-dtype")\nwords.append("fp8")\n'),
    ],
)
def test_a_value_that_only_running_would_tell_is_not_readable(name: str, text: str, tmp_path: Path) -> None:
    result = one(tmp_path, name, text)
    assert result.findings == []
    assert len(result.not_readable) == 1
    assert "known only at run time" in result.not_readable[0].reason


def test_a_variable_that_the_script_sets_once_is_its_value(tmp_path: Path) -> None:
    result = one(tmp_path, "a.sh", "DTYPE=fp8_e5m2\nvllm serve x --kv-cache-dtype=${DTYPE}\n")
    assert [(finding.line, finding.value) for finding in result.findings] == [(2, "fp8_e5m2")]


def test_an_anchor_is_followed(tmp_path: Path) -> None:
    text = "base: &base {engine: vllm, kv_cache_dtype: fp8}\nsmall:\n  <<: *base\n"
    assert [finding.line for finding in one(tmp_path, "a.yaml", text).findings] == [1]


def test_a_key_that_two_engines_share_names_both(tmp_path: Path) -> None:
    assert one(tmp_path, "a.yaml", "kv-cache-dtype: fp8_e5m2\n").findings[0].engines == ("vllm", "sglang")


@pytest.mark.parametrize(
    ("name", "text", "role"),
    [
        ("rl/a.yaml", "rollout: {vllm: {kv_cache_dtype: fp8}}\n", "rollout"),
        ("serve/a.yaml", "vllm: {kv_cache_dtype: fp8}\n", "serving"),
        ("a.sh", "vllm serve x --kv-cache-dtype fp8\n", "serving"),
        ("b/a.sh", "vllm serve x --kv-cache-dtype fp8 &\npython grpo.py --config verl.yaml\n", "rollout"),
        ("misc/a.yaml", "vllm: {kv_cache_dtype: fp8}\n", "unknown"),
    ],
)
def test_rollouts_are_told_from_serving(
    name: str, text: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folders above are no part of the path
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert scanned(Path()).findings[0].role == role


@pytest.mark.parametrize(
    ("rule", "value", "siblings", "policy"),
    [
        ("tensorrt-llm.attention-window", (2048, 2048), {"sink_token_length": 4}, "streaming:budget=2048,sink=4"),
        ("tensorrt-llm.attention-window", (512, 4096), {}, NO_EQUIVALENT),
        (
            "tensorrt-llm.triattention",
            "triattention",
            {"budget": 1024, "beta": 64},
            "triattention:budget=1024,interval=64",
        ),
        ("tensorrt-llm.triattention", "triattention", {}, "triattention:budget=2048,interval=128"),
        ("vllm.kv-cache-dtype", "fp8", {}, "fp8:scale=tensor,write=true"),
        ("vllm.kv-cache-dtype", "turboquant_k8v4", {}, NO_EQUIVALENT),
    ],
)
def test_policies_are_filled_from_what_stands_beside(
    rule: str, value: Any, siblings: dict[str, Any], policy: str
) -> None:
    known = next(entry for entry in load_rules().rules if entry.id == rule)
    assert known.policy_of(value, {"max_attention_window": value, **siblings}) == policy


@pytest.mark.parametrize("value", ["1e999", "1" + "0" * 400])
def test_a_number_beyond_all_floats_stops_no_scan(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"import mlx_lm\ngenerate(max_kv_size={value})")
    result = one(tmp_path, "b.json", f'{{"mlx_lm": true, "max_kv_size": {value}}}')
    assert (result.findings, result.not_readable, len(result.clean_files)) == ([], [], 2)


@pytest.mark.parametrize("value", ["0", "disabled", "off"])
def test_a_switch_that_is_off_is_not_found(value: str, tmp_path: Path) -> None:
    assert one(tmp_path, "a.env", f"LLAMA_ARG_CONTEXT_SHIFT={value}").findings == []
    assert len(one(tmp_path, "a.env", "LLAMA_ARG_CONTEXT_SHIFT=1").findings) == 1


@pytest.mark.parametrize("name", ["scan-workflow.yml", "pre-commit-config.yaml"])
def test_the_examples_call_the_command_as_it_is(name: str) -> None:
    text = (Path(__file__).parent.parent / "examples" / name).read_text()
    yaml.safe_load(text)
    words = re.search(r"kvaudit scan (.*)", text)
    assert words is not None
    asked = [word for word in words[1].split() if word.startswith("--")]
    assert CliRunner().invoke(app, ["scan", "--help"]).exit_code == 0
    assert set(asked) <= {"--json", "--declared"}


@pytest.mark.parametrize(
    "above",
    [
        "COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)",
        'git commit -m "don\'t --amend"',
        'ARGS=${ARGS:-"--a b --c d"}',
        'bash -c "bash -c \\"bash -c \\\\\\"x --y z\\\\\\"\\""',
        "python - <<'X'\nprint('--x y\nX",
    ],
)
def test_common_lines_of_scripts_do_not_stop_a_scan(above: str, tmp_path: Path) -> None:
    result = one(tmp_path, "a.sh", f"{above}\nvllm serve x --kv-cache-dtype fp8\n")
    assert [finding.line for finding in result.findings] == [above.count("\n") + 2]


def test_a_text_of_blank_lines_is_read_in_linear_time(tmp_path: Path) -> None:
    blank = "x = '''a=b" + "\n" * 400_000 + "'''\nllm = LLM(kv_cache_dtype='fp8')\n"
    started = time.perf_counter()
    assert len(one(tmp_path, "a.py", blank).findings) == 1
    assert time.perf_counter() - started < 20  # seconds; hours where every line is looked at for every other


def test_an_engines_name_inside_a_longer_word_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "engine: vllm\noverlap: true  # ctrl, observed\nkv_cache_dtype: fp8\n"  # verl, trl, serve
    finding = one(Path(), "a.yaml", text).findings[0]
    assert (finding.role, finding.engines) == ("unknown", ("vllm",))


def test_a_class_that_passes_its_arguments_on_sets_nothing(tmp_path: Path) -> None:
    text = "class C:\n    def __init__(self, x):\n        self.kv_cache_dtype = x\n"
    result = one(tmp_path, "a.py", text)
    assert (result.findings, result.not_readable) == ([], [])
    assert len(one(tmp_path, "a.py", text.replace("= x", "= 'fp8'")).findings) == 1


def test_statements_of_templates_write_nothing_by_themselves(tmp_path: Path) -> None:
    text = "ports: [{% for p in ports %}{{ p }},{% endfor %}]\n{# a {% set x %} #}\nvllm:\n  kv_cache_dtype: fp8\n"
    result = one(tmp_path, "a.yaml.j2", text)
    assert ([finding.line for finding in result.findings], result.not_readable) == ([4], [])


def test_a_package_that_is_imported_name_by_name_is_one_finding(tmp_path: Path) -> None:
    result = one(tmp_path, "a.py", "from kvpress import (\n    KnormPress,\n    SnapKVPress,\n)\n")
    assert [(finding.line, finding.rule.id) for finding in result.findings] == [(2, "kvpress.import")]


def test_tables_of_toml_that_share_a_name_keep_their_lines(tmp_path: Path) -> None:
    text = """
vllm = 1
[[engine]]
name = "a"
[engine.inner]
kv_cache_dtype = "fp8"

[[engine]]
[engine.inner]
kv_cache_dtype = "fp8_e5m2"

[more]
args = [
  "--x",
  "--kv-cache-dtype", "nvfp4",
]
inline = {a = 1, kv_cache_dtype = "fp8_inc"}
"quoted.key".kv_cache_dtype = "int4_per_token_head"
"""
    found = one(tmp_path, "a.toml", text).findings
    assert [(finding.line, finding.value) for finding in found] == [
        (6, "fp8"),
        (10, "fp8_e5m2"),
        (15, "nvfp4"),
        (17, "fp8_inc"),
        (18, "int4_per_token_head"),
    ]


# what another tool writes in

TEMPLATED = {
    "a word of a list": ("a.yaml", 'args: ["--kv-cache-dtype", "{{ kv }}"]\n'),
    "a flag with its value": ("a.yaml", "args:\n- --kv-cache-dtype={{ .Values.kv }}\n"),
    "a flag with a prefix": ("a.yaml", "args:\n- --kv-cache-dtype=fp8_{{ .Values.kind }}\n"),
    "a command in a string": ("a.yaml", 'command: ["sh", "-c", "vllm serve m --kv-cache-dtype {{ kv }} --port 1"]\n'),
    "a closed list of values": ("a.yaml", 'args: ["lmdeploy", "--quant-policy", "{{ policy }}"]\n'),
    "a variable in a list": ("a.yaml", 'environment: ["OLLAMA_KV_CACHE_TYPE={{ kv }}"]\n'),
    "a reference of a cloud": ("a.yaml", "args:\n- --kv-cache-dtype\n- !Ref KvType\n"),
    "a reference in a list": ("a.yaml", 'args: ["--kv-cache-dtype", !Ref KvType]\n'),
    "a text of a cloud": ("a.yaml", 'args:\n- !Sub "--kv-cache-dtype=${KvType}"\n'),
    "a joined text of a cloud": ("a.yaml", 'args: !Join [" ", ["--kv-cache-dtype", !GetAtt A.Kv]]\n'),
    "a variable of a cloud": ("a.yaml", "env:\n- name: OLLAMA_KV_CACHE_TYPE\n  value: !Ref KvType\n"),
    "a value of a mapping": ("a.yaml", "vllm:\n  kv-cache-dtype: !vault |\n    abc\n"),
    "a list with a reference": ("a.yaml", "vllm:\n  kv_cache_dtype: [!Ref KvType]\n"),
    "json": ("a.json", '{"args": ["--cache-type-k", "{{kv}}"]}'),
    "toml": ("a.toml", 'args = ["--cache-type-k", "{{ kv }}"]\n'),
    "a script that is written": ("a.sh.j2", "vllm serve {{ model }} --kv-cache-dtype {{ kv_dtype }}\n"),
    "variables that are written": ("a.env.j2", "OLLAMA_KV_CACHE_TYPE={{ kv }}\n"),
    "a justfile": ("justfile", "serve:\n    vllm serve m --kv-cache-dtype {{kv}}\n"),
    "erb": ("a.yaml", 'args: ["--kv-cache-dtype", "<%= kv %>"]\n'),
    "a blank of sed": ("a.sh", "vllm serve m --kv-cache-dtype @KV_DTYPE@\n"),
    "a format of python": ("a.py", 'run("vllm serve m --kv-cache-dtype {kv}")\n'),
    "a variable within": ("a.sh", "vllm serve m --kv-cache-dtype fp8_$KIND\n"),
    "an expression in a list": ("a.py", 'run(["vllm", "serve", "--kv-cache-dtype", choose(1)])\n'),
    "a default that is off": ("a.sh", 'vllm serve m --kv-cache-dtype "${KV:-auto}"\n'),
}


@pytest.mark.parametrize(("name", "text"), TEMPLATED.values(), ids=TEMPLATED)
def test_a_value_that_another_tool_writes_is_not_readable(name: str, text: str, tmp_path: Path) -> None:
    result = one(tmp_path, name, text)
    assert (len(result.not_readable), result.findings, result.clean_files) == (1, [], [])
    assert "a_template" not in result.not_readable[0].reason


DEFAULTS = {
    "a shell": ("a.sh", 'vllm serve m --kv-cache-dtype "${KV:-fp8}"\n', "fp8"),
    "a dash": ("a.sh", 'vllm serve m --kv-cache-dtype "${KV-fp8}"\n', "fp8"),
    "an assignment": ("a.sh", 'vllm serve m --kv-cache-dtype "${KV:=fp8}"\n', "fp8"),
    "an argument": ("a.sh", "KV=${1:-fp8}\nvllm serve m --kv-cache-dtype $KV\n", "fp8"),
    "a variable of its own name": (
        "a.sh",
        'KV_CACHE_DTYPE="${KV_CACHE_DTYPE:-fp8}"\nvllm serve m --kv-cache-dtype "${KV_CACHE_DTYPE}"\n',
        "fp8",
    ),
    "compose": ("a.yml", "services: {ollama: {environment: ['OLLAMA_KV_CACHE_TYPE=${KV:-q8_0}']}}\n", "q8_0"),
    "omegaconf": ("a.yaml", 'vllm: {kv_cache_dtype: "${oc.env:KV,fp8}"}\n', "fp8"),
    "helm": ("a.yaml", 'args:\n- --kv-cache-dtype={{ .Values.kv | default "fp8_e5m2" }}\n', "fp8_e5m2"),
    "ansible": ("a.yaml", "args: ['--kv-cache-dtype', \"{{ kv | default('fp8') }}\"]\n", "fp8"),
    "a workflow": ("a.yaml", "run: vllm serve m --kv-cache-dtype ${{ inputs.kv || 'fp8' }}\n", "fp8"),
    "python": ("a.py", 'import os\nLLM("m", kv_cache_dtype=os.environ.get("KV", "fp8"))\n', "fp8"),
}


@pytest.mark.timeout(20)
def test_a_default_behind_a_long_run_of_blanks_is_read_at_once(tmp_path: Path) -> None:
    blanks = " \n" * 100_000
    text = f"args: --kv-cache-dtype={{{{ .Values.kv | default {blanks}}}}}\n"
    assert [finding.by_default for finding in one(tmp_path, "a.yaml", text).findings] in ([], [False])


@pytest.mark.parametrize(("name", "text", "value"), DEFAULTS.values(), ids=DEFAULTS)
def test_a_default_that_compresses_is_found_as_default(name: str, text: str, value: str, tmp_path: Path) -> None:
    result = one(tmp_path, name, text)
    assert [(finding.value, finding.by_default) for finding in result.findings] == [(value, True)]


# names in every spelling


@pytest.mark.parametrize(
    ("text", "engines", "value"),
    [
        ("sglang: {kvCacheDtype: fp8_e4m3}\n", ("sglang",), "fp8_e4m3"),
        ("vllmConfig: {kvCacheDtype: fp8}\n", ("vllm",), "fp8"),
        ("spec: {cacheTypeK: q8_0}\n", ("llama.cpp",), "q8_0"),
        ("lmdeploy: {quantPolicy: 8}\n", ("lmdeploy",), "8"),
        ("mlxServer: {kvBits: 4}\n", ("mlx",), "4"),
        ("ollama: {OLLAMA_KV_CACHE_TYPE: q4_0}\n", ("ollama",), "q4_0"),
    ],
)
def test_a_key_in_camel_case_is_the_key(text: str, engines: tuple[str, ...], value: str, tmp_path: Path) -> None:
    assert [(one.engines, one.value) for one in one(tmp_path, "a.yaml", text).findings] == [(engines, value)]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        (".env", "KV_CACHE_DTYPE=fp8\n", "fp8"),
        ("prod.env", "KV_CACHE_DTYPE=fp8_e5m2\n", "fp8_e5m2"),
        ("a.env", "VLLM_KV_CACHE_DTYPE=fp8\n", "fp8"),
        ("a.env", "QUANT_POLICY=8\n", "8"),
        ("a.env", "TYPE_K=8\n", "8"),
    ],
)
def test_a_variable_that_is_named_like_a_key_is_found(name: str, text: str, value: str, tmp_path: Path) -> None:
    assert [finding.value for finding in one(tmp_path, name, text).findings] == [value]


def test_a_variable_that_the_script_itself_uses_is_found_once_and_by_its_engine(tmp_path: Path) -> None:
    text = "export KV_CACHE_DTYPE=fp8_e5m2\nvllm serve m --kv-cache-dtype $KV_CACHE_DTYPE\n"
    assert [(one.line, one.engines) for one in one(tmp_path, "a.sh", text).findings] == [(2, ("vllm",))]


def test_a_variable_of_the_environment_of_tgi_is_still_its_own(tmp_path: Path) -> None:
    text = "export KV_CACHE_DTYPE=fp8_e5m2\ntext-generation-launcher --model-id m\n"
    assert [(one.line, one.engines) for one in one(tmp_path, "a.sh", text).findings] == [(1, ("tgi",))]


# who launches it


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "trtllm-serve m --kv_cache_dtype fp8\n"),
        ("a.sh", "python quantize.py --qformat full_prec --kv_cache_dtype int8\ntrtllm-build --checkpoint_dir c\n"),
        ("a.yaml", "# trtllm-serve --config\nkv_cache_dtype: fp8\n"),
        ("a.sh", "python quantize.py --qformat int4_awq --kv_cache_dtype fp8\n"),
    ],
)
def test_a_flag_that_several_engines_have_is_of_the_one_that_is_named(name: str, text: str, tmp_path: Path) -> None:
    assert [finding.engines for finding in one(tmp_path, name, text).findings] == [("tensorrt-llm",)]


@pytest.mark.parametrize(
    ("name", "text", "state"),
    [
        ("a.sh", "uv run -m skyrl.train.main generator.engine_init_kwargs.kv_cache_dtype=fp8\n", "open"),
        (
            "a.sh",
            "uv run -m skyrl.train.main trainer.algorithm.off_policy_correction.tis_ratio_type=token "
            "generator.engine_init_kwargs.kv_cache_dtype=fp8\n",
            "corrected",
        ),
        ("a.yaml", "actor: {use_decoupled_loss: true}\nsglang: {kv_cache_dtype: fp8_e5m2}\n", "corrected"),
        ("a.yaml", "actor: {use_decoupled_loss: false}\nsglang: {kv_cache_dtype: fp8_e5m2}\n", "open"),
        ("a.sh", 'swift rollout --vllm_engine_kwargs \'{"kv_cache_dtype": "fp8"}\'\n', "open"),
        (
            "a.sh",
            'swift rlhf --rlhf_type grpo --vllm_engine_kwargs \'{"kv_cache_dtype": "fp8"}\' '
            "--rollout_importance_sampling_mode token_truncate\n",
            "corrected",
        ),
        (
            "a.sh",
            "python -m openrlhf.cli.train_ppo_ray --kv_cache_dtype fp8 --enable_vllm_is_correction\n",
            "corrected",
        ),
    ],
)
def test_an_engine_that_a_trainer_launches_makes_rollouts(name: str, text: str, state: str, tmp_path: Path) -> None:
    assert [(one.role, one.state) for one in one(tmp_path, name, text).findings] == [("rollout", state)]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a.json", '{"models": [{"model": "q.gguf", "type_k": 8}]}', "8"),
        ("a.sh", "llama-server -m g.gguf -ctk-first q8_0,4\n", "q8_0,4"),
        ("a.py", "import llama_cpp\nllama_cpp.Llama('m', type_k=llama_cpp.GGML_TYPE_Q8_0)\n", "Q8_0"),
        ("a.py", "from llama_cpp import GGML_TYPE_Q4_0, Llama\nLlama('m', type_k=GGML_TYPE_Q4_0)\n", "Q4_0"),
        ("a.py", "import llama_cpp\nllama_cpp.Llama('m', type_k=llama_cpp.GGMLType.Q8_0)\n", "q8_0"),
        ("a.ini", "[model]\nctk = q8_0\n", "q8_0"),
        ("a.json", '{"llama": {"kCacheQuantizationType": "q8_0"}}', "q8_0"),
    ],
)
def test_the_type_of_a_cache_is_found_in_what_wraps_llama_cpp(name: str, text: str, value: str, tmp_path: Path) -> None:
    assert [finding.value for finding in one(tmp_path, name, text).findings] == [value]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "import llama_cpp\nllama_cpp.Llama('m', type_k=llama_cpp.GGML_TYPE_F16)\n"),
        ("a.sh", "llama-server -m g.gguf -ctk-first f16,4\n"),
        ("a.yaml", "spec: {cacheTypeK: f16}\n"),
        ("a.env", "KV_CACHE_DTYPE=auto\n"),
    ],
)
def test_a_cache_that_is_not_compressed_is_not_found(name: str, text: str, tmp_path: Path) -> None:
    result = one(tmp_path, name, text)
    assert (result.findings, result.not_readable) == ([], [])
