"""Which way a metric is better: always said, and asked for where a name speaks of harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_compare import LM_EVAL, run_command, table

from kvaudit.core.errors import SpecError
from kvaudit.reports.page.compare_pairing import Direction, direction_of, names_harm
from kvaudit.reports.records.readers.base import Request, read_log

HEADER = "item,cluster,score,metric"
PROMPT = "give --lower-is-better if 1 is the harm, --higher-is-better if 1 is desired"


def files(tmp_path: Path, metric: str, before: int = 36, after: int = 86, suite: str = "") -> tuple[Path, Path]:
    """Two tables in which 1 happens so often in 250 items of 60 clusters."""
    found = []
    for name, ones in (("a", before), ("b", after)):
        rows = [(f"i{n}", f"c{n % 60}", int(n < ones), metric, suite) for n in range(250)]
        found.append(table(tmp_path / f"{name}.csv", rows, f"{HEADER},suite"))
    return found[0], found[1]


def direction_by_name(a: Path, b: Path, metric: str) -> Direction:
    """Which way the metric of two files is better, where no option says it."""
    return direction_of([read_log(path, Request(None)) for path in (a, b)], metric, lower=False, higher=False)


@pytest.mark.parametrize(
    "name",
    [
        "attack_success_rate", "ASR", "toxicity", "strong_reject", "StrongREJECT", "strongreject_rubric", "harmfulness",
        "harmScore", "unsafe,none", "jailbreak-rate", "refusal.unsafe", "leakage", "violations", "wer", "error_rate",
        "hallucination", "sycophancy_rate", "bias_score", "injection_success", "brier_score", "ter", "bits_per_byte",
        "rmse", "ece", "incorrect", "false_positive_rate", "compliance_rate", "power_seeking", "over_refusal", "lies",
        "reward_hacking", "selfharm", "pii", "scheming", "exploit_success", "safety_bypass", "backdoorSuccess",
        "phishing", "data_extraction", "manipulated", "breach", "evasion", "refusal", "complies", "wmdp_bio",
    ],
)  # fmt: skip
def test_a_name_of_what_is_not_wanted_speaks_of_harm(name: str) -> None:
    assert names_harm(name)


@pytest.mark.parametrize(
    "name",
    ["score", "exact_match,strict-match", "accuracy", "harmless", "harmlessness", "match", "pass@1",
     "exact_match,flexible-extract", "pass_at_1,extract_code", "mmlu_human_sexuality", "extractive_match", "utility",
     "f1", "answer", "closeness", "certainty", "overall", "schema_match", "believable", "completion", "interest"],
)  # fmt: skip
def test_other_names_do_not_speak_of_harm(name: str) -> None:
    assert not names_harm(name)


@pytest.mark.parametrize(
    "metric",
    ["attack_success_rate", "toxicity", "strong_reject", "unsafe", "refusal", "judge_3", "deflection", "success",
     "accepted", "exploit_success", "safety_bypass", "valid_exploits", "backdoor_acc", "includes", "label",
     "accidents"],
)  # fmt: skip
def test_a_name_that_does_not_say_what_is_wanted_gives_no_direction(tmp_path: Path, metric: str) -> None:
    with pytest.raises(SpecError, match=PROMPT):
        direction_by_name(*files(tmp_path, metric), metric)


def test_a_direction_that_is_asked_for_may_be_given(tmp_path: Path) -> None:
    told = run_command(*files(tmp_path, "judge_3"))
    assert (told.exit_code, told.stderr.count("\n"), PROMPT in told.stderr) == (2, 1, True)
    lower = run_command(tmp_path / "a.csv", tmp_path / "b.csv", "--lower-is-better")
    assert (lower.exit_code, "verdict: FAIL -20.0 pp" in lower.stdout) == (3, True)
    higher = run_command(tmp_path / "a.csv", tmp_path / "b.csv", "--higher-is-better")
    assert (higher.exit_code, "verdict: PASS +20.0 pp" in higher.stdout) == (0, True)


def test_a_suite_that_speaks_of_harm_is_asked_about_where_the_metric_says_nothing(tmp_path: Path) -> None:
    assert PROMPT in run_command(*files(tmp_path, "score", suite="strongreject")).stderr
    assert PROMPT in run_command(*files(tmp_path, "score", suite="agentharm")).stderr
    assert PROMPT in run_command(*files(tmp_path, "accuracy", suite="backdoor")).stderr
    assert PROMPT in run_command(*files(tmp_path, "success", suite="gsm8k")).stderr


@pytest.mark.parametrize(
    ("metric", "suite"),
    [
        ("acc,none", "mmlu_computer_security"), ("acc_norm,none", "hellaswag"), ("exact_match,strict-match", "gsm8k"),
        ("exact_match,flexible-extract", "gsm8k"), ("prompt_level_strict_acc,none", "ifeval"),
        ("instruction_following.inst_level_loose", "ifeval"), ("acc", "bbh_web_of_lies"), ("pass@1", "humaneval"),
        ("rougeL", "xsum"), ("match", "gsm8k"), ("includes", "ctf"), ("choice", "arc"), ("accuracy", ""), ("score", ""),
    ],
)  # fmt: skip
def test_a_well_known_metric_of_a_harmless_task_needs_no_direction(tmp_path: Path, metric: str, suite: str) -> None:
    a, b = files(tmp_path, "METRIC", suite=suite)
    for file in (a, b):
        file.write_text(file.read_text().replace(",METRIC,", f',"{metric}",'))
    assert not direction_by_name(a, b, metric).lower_is_better


@pytest.mark.parametrize(
    ("options", "line", "told"),
    [
        (
            (),
            "Higher is better for score: the default; --lower-is-better reverses it",
            {"better": "higher", "because": "the default; --lower-is-better reverses it"},
        ),
        (
            ("--lower-is-better",),
            "Lower is better for score: set by --lower-is-better",
            {"better": "lower", "because": "set by --lower-is-better"},
        ),
        (
            ("--higher-is-better",),
            "Higher is better for score: set by --higher-is-better",
            {"better": "higher", "because": "set by --higher-is-better"},
        ),
    ],
)
def test_the_line_the_pages_and_the_json_say_which_way_is_better_and_why(
    tmp_path: Path, options: tuple[str, ...], line: str, told: dict[str, str]
) -> None:
    a, b = files(tmp_path, "score")
    done = run_command(a, b, *options, "--out", tmp_path / "out")
    assert line in " ".join(done.stdout.split())
    assert line.split(";", maxsplit=1)[0] in (tmp_path / "out" / "compare.md").read_text().replace("\\", "")
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["direction"] == told


def test_a_comparison_without_a_number_says_the_direction_too(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", [("i1", "c1", 1)])
    b = table(tmp_path / "b.csv", [("i2", "c1", 1)])
    assert "Higher is better for score" in run_command(a, b).stdout


def test_two_directions_are_one_line(tmp_path: Path) -> None:
    told = run_command(*files(tmp_path, "score"), "--lower-is-better", "--higher-is-better")
    assert (told.exit_code, told.stderr.count("\n")) == (2, 1)
    assert "contradict each other" in told.stderr


def test_logs_of_other_tools_say_it_too() -> None:
    told = run_command(*LM_EVAL, "--metric", "exact_match,strict", "--cluster", "kind")
    assert "Higher is better for exact_match,strict: the default" in " ".join(told.stdout.split())
