"""Whether a setting acts, on rows as they lie: beside what the engine moves when it is asked the same again."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, wilcoxon

from kvaudit.core.provenance import NOISE
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.stats.slope import signed_rank_above
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.controls import Canaries, Canary, canaries_of, canary_reasons, checked_by_canary
from kvaudit.reports.verdict.drift import hidden_by_noise
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Status
from tests import reports_synthetic as synthetic
from tests.test_reports_engines import F32, U4, U8, floored, served

PLAIN, CODED = "plain", "coded"
COMPARISON = cast(
    Comparison,
    SimpleNamespace(references={CODED: PLAIN}, label=lambda policy: policy, uncompressed_of=lambda _: PLAIN),
)
ITEMS = 16
SAME = [0.0] * ITEMS

Answers = Sequence[float]  # by how much each log-prob is moved; whole nats move the text too


def rows(policy: str, moved: Answers, *, silent: bool = False) -> pd.DataFrame:
    """A run of one arm: item i has log-prob -20 - i, moved."""
    return pd.DataFrame(
        {
            "policy": policy,
            "arm": "base",
            "suite": "refusal",
            "context_tokens": 0,
            "train_seed": 0,
            "item_id": [f"item-{i}" for i in range(len(moved))],
            "sample_index": 0,
            "answer_hash": [f"text {i} {int(by)}" for i, by in enumerate(moved)],
            "logprob": [np.nan if silent else -20.0 - i + by for i, by in enumerate(moved)],
        }
    )


def held(setting: Answers, again: dict[str, Answers] | None = None, *, silent: bool = False) -> tuple[Canary, str]:
    """What is found of a setting that moves answers so, on an engine that moves them so when it is asked again."""
    grid = pd.concat([rows(PLAIN, SAME, silent=silent), rows(CODED, setting, silent=silent)])
    asked = {
        way: pd.concat(
            [rows(PLAIN, moved, silent=silent), rows(CODED, np.add(setting[: len(moved)], moved), silent=silent)]
        )
        for way, moved in (again or {}).items()
    }
    found = canaries_of(grid, asked, COMPARISON)
    (place,) = found.places.values()
    assert place == found.conditions[CODED]
    return place, "; ".join(reason.text for reason in canary_reasons(COMPARISON, found))


def noise_text(canary: Canary) -> str:
    """What the contrast of such a canary says of noise."""
    place = Contrast("serving", "base", CODED, "refusal", 0)
    checked = checked_by_canary(place, COMPARISON, Canaries({}, {CODED: canary}))
    assert checked.noise is not None
    assert checked.noise.code is ReasonCode.NOISE
    return checked.noise.text


def test_a_cell_without_records_of_a_setting_that_changed_nothing_is_no_crash() -> None:
    place = Contrast("serving", "base", CODED, "agent", 0)
    assert checked_by_canary(place, COMPARISON, Canaries({}, {CODED: held(SAME)[0]})) == place


SOME = [0.0, 2.0, 0.001, -0.002] * 4  # four texts of sixteen, and other log-probs of eight more
OTHERS = [0.0, 0.001, -2.0, 0.002] * 4  # as many of others
ALL_A_LITTLE = [0.01 * (1 + i) for i in range(ITEMS)]


def test_an_engine_that_repeats_itself_and_changed_nothing_does_not_act() -> None:
    found, words = held(SAME, {"again": SAME[:8], "shuffled": SAME[:8]})
    assert (found.acts, found.noise) == (False, None)
    assert words == "coded: the setting changed nothing: 16 answers and their log-probs are the same as under plain"


def test_an_engine_that_repeats_itself_acts_by_one_bit_of_one_answer() -> None:
    one = [*SAME[:-1], 1e-6]
    found, words = held(one, {"again": SAME[:8], "shuffled": SAME[:8]})  # an answer beyond the floor, even
    assert (found.acts, found.moved, words) == (True, 1, "")


def test_an_engine_that_moves_as_much_by_itself_does_not_act() -> None:
    found, words = held(SOME, {"again": OTHERS, "shuffled": OTHERS})
    assert (found.acts, found.moved, words) == (False, 12, "")
    assert noise_text(found) == (
        "it is not shown that the setting was applied, because the engine does not repeat itself: of 16 answers 25.0 % "
        "have another text (log-probs 1 nats apart, root mean square) under the setting, and 25.0 % have another text "
        "(log-probs 1 nats apart, root mean square) when the same is asked again without it"
    )


@pytest.mark.parametrize(
    "setting", [pytest.param([2.5] * ITEMS, id="texts and log-probs"), pytest.param(ALL_A_LITTLE, id="log-probs alone")]
)
def test_an_engine_that_moves_less_by_itself_acts(setting: Answers) -> None:
    """A floor of one text, and of log-probs of a few thousandths."""
    found, words = held(setting, {"again": [2.0, *[0.002] * 15]})
    assert (found.acts, words) == (True, "")
    assert found.noise is not None
    assert found.noise.noise_moves.texts == 1 / ITEMS


def test_a_few_answers_that_part_ways_by_chance_hide_no_code_that_moves_all() -> None:
    """Root mean squares are as good as equal, and made by one answer."""
    found, _ = held([2.0, *ALL_A_LITTLE[1:]], {"again": [0.0, 2.0, *[0.001] * 14]})
    assert found.acts


def test_without_log_probs_texts_alone_tell() -> None:
    found, _ = held([1.0] * 4 + SAME[4:], {"again": SAME[:8] + [1.0] * 4 + SAME[:4]}, silent=True)
    assert not found.acts
    assert "25.0 % have another text under the setting, and 25.0 % have another text when" in noise_text(found)
    assert held([1.0] * 12 + SAME[:4], {"again": [1.0, *SAME[1:]]}, silent=True)[0].acts


def test_where_nobody_asked_for_a_floor_any_difference_acts() -> None:
    assert held([*SAME[:-1], 1e-6])[0].acts
    assert not held(SAME)[0].acts


def test_only_the_reference_asked_the_same_again_counts() -> None:
    """Where that repeats itself, a condition that depends on its order is one that acts, if only in one answer."""
    assert held(SOME, {"again": SAME, "shuffled": OTHERS})[0].acts
    assert held([2.0, *SAME[1:]], {"again": SAME, "shuffled": OTHERS})[0].acts
    assert not held(SOME, {"again": OTHERS, "shuffled": SAME})[0].acts


def test_in_a_run_a_setting_within_the_engines_noise_does_not_pass(tmp_path: Path) -> None:
    """Thirty of 64 texts change when the reference is asked again, four under u8; without that noise u8 passes."""
    for again, status, codes in ((30, Status.INCONCLUSIVE, [ReasonCode.NOISE]), (0, Status.PASS, [])):
        run = floored(tmp_path / str(again), {F32: (again, 0, 0)}, way="again", silent=(U8, F32))
        verdict = decide_run(load_run(run)).verdict
        (one,) = [d for d in verdict.decisions if d.policy == U8]
        assert one.effect is not None
        assert (one.status, [reason.code for reason in one.reasons], verdict.reasons) == (status, codes, ())


def test_noise_that_the_run_has_stored_counts_where_the_repeated_answers_are_gone(tmp_path: Path) -> None:
    run = floored(tmp_path, {F32: (30, 0, 0)}, way="again", silent=(U8, F32))
    data = load_run(run)
    stored = hidden_by_noise(data, decide_run(data).comparison)
    assert U8 in stored
    shutil.rmtree(run / "floor")
    statuses = []
    for noise in ({}, stored):
        provenance = json.loads((run / "provenance.json").read_text())
        (run / "provenance.json").write_text(json.dumps(provenance | {NOISE: noise}))
        (one,) = [d for d in decide_run(load_run(run)).verdict.decisions if d.policy == U8]
        statuses.append((one.status, [reason.code for reason in one.reasons]))
    assert statuses == [(Status.PASS, []), (Status.INCONCLUSIVE, [ReasonCode.NOISE])]


def test_a_loss_that_is_shown_is_a_fail_however_noisy_the_engine(tmp_path: Path) -> None:
    design = served(U4, F32, wrong={U4: range(40)})
    run = synthetic.build(tmp_path / "run", design)
    synthetic.ask_again(run, design, {F32: (64, 0, 0)}, changes="again")
    verdict = decide_run(load_run(run)).verdict
    assert (verdict.status, verdict.reasons) == (Status.FAIL, ())


@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_the_signed_rank_test_is_that_of_scipy(size: int) -> None:
    drawn = np.random.default_rng(size).normal(0.3, 1, size)
    assert signed_rank_above(drawn) == pytest.approx(wilcoxon(drawn, alternative="greater", method="exact").pvalue)


@pytest.mark.parametrize("drift", [-0.02, 0.06])
def test_the_signed_rank_test_of_many_pairs_is_nearly_exact_and_takes_no_minutes(drift: float) -> None:
    drawn = np.random.default_rng(0).normal(drift, 1, 4000)
    expected = wilcoxon(drawn, alternative="greater", method="asymptotic", correction=True).pvalue
    assert signed_rank_above(drawn) == pytest.approx(expected, abs=1e-12)
    few, many = drawn[:200], drawn[:201]
    assert signed_rank_above(many) == pytest.approx(signed_rank_above(few), abs=0.03)


def test_millions_of_pairs_overflow_no_number():
    assert signed_rank_above(np.tile([1.0, -1.0, 2.0], 700_000)) < 1e-9


@pytest.mark.parametrize("gains", [110, 120])
def test_the_signed_rank_test_of_many_equal_differences_is_the_sign_test(gains: int) -> None:
    equal = [1.0] * gains + [-1.0] * (210 - gains)
    assert signed_rank_above(equal) == pytest.approx(binomtest(gains, 210, alternative="greater").pvalue, abs=2e-3)


def test_ties_are_a_sign_test_and_no_difference_is_no_evidence() -> None:
    assert signed_rank_above([1, 1, 1, 1, -1, 0, 0]) == 6 / 32
    assert signed_rank_above([0.0, 0.0]) == signed_rank_above(cast(Any, [])) == 1.0
