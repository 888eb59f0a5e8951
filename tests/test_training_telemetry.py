"""A step's numbers as literals, and a log that survives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from training_world import config, rows

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.training.batch import collect
from kvaudit.audit.training.checkpoint import TelemetryLog
from kvaudit.audit.training.mismatch import mismatch_panel
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.telemetry import certificate, entries_seen, mean_metrics, memory_numbers, reward_numbers
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.records import Grade, Item, Outcome

LN2 = math.log(2)


def panel(ratios: list[list[float]], advantages: list[float], mask: list[list[bool]] | None = None) -> dict:
    learner = torch.tensor(ratios, dtype=torch.float64).log()
    seen = torch.ones_like(learner, dtype=torch.bool) if mask is None else torch.tensor(mask)
    found = mismatch_panel(torch.zeros_like(learner), learner, seen, torch.tensor(advantages)[:, None])
    return {name.removeprefix("mismatch/"): value for name, value in found.items()}


def test_the_panel_of_two_tokens_with_ratios_two_and_a_half() -> None:
    found = panel([[2.0, 0.5]], [1.0])
    assert found["kl"] == pytest.approx(0.0)
    assert found["k3_kl"] == pytest.approx(0.25)
    assert found["chi2_token"] == pytest.approx((4 + 0.25) / 2 - 1)
    assert found["chi2_seq"] == pytest.approx(0.0)  # the rollout's product is 1
    assert found["ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert found["max_abs_log_ratio"] == found["max_abs_gap"] == pytest.approx(LN2)
    assert found["overlap_mean"] == pytest.approx(0.75)
    assert found["overlap_p5"] == pytest.approx(0.525)
    assert found["frac_ratio_below_1e-4"] == 0.0


def test_kl_is_the_samplers_surprise_about_the_learner() -> None:
    assert panel([[0.5, 0.5]], [1.0])["kl"] == pytest.approx(LN2)


def test_the_clamped_ess_caps_ratios_at_two() -> None:
    found = panel([[8.0, 1.0]], [1.0])
    assert found["ess"] == pytest.approx(81 / (2 * 65))
    assert found["ess_clamped"] == pytest.approx(9 / (2 * 5))


def test_the_gap_is_raw_and_the_log_ratio_clamped() -> None:
    found = panel([[math.exp(-30), 1.0]], [1.0])
    assert found["max_abs_gap"] == pytest.approx(30.0)
    assert found["max_abs_log_ratio"] == 20.0
    assert found["frac_ratio_below_1e-4"] == 0.5


def test_the_panel_splits_by_third_of_the_rollout_and_sign_of_advantage() -> None:
    found = panel([[1.0, 1.0, 2.0], [0.5, 1.0, 1.0]], [1.0, -1.0])
    two, half = 1 - LN2, LN2 - 0.5
    assert found["k3_kl_first_third"] == pytest.approx(half / 2)
    assert found["k3_kl_middle_third"] == 0.0
    assert found["k3_kl_last_third"] == pytest.approx(two / 2)
    assert found["k3_kl_positive"] == pytest.approx(two / 3)
    assert found["k3_kl_negative"] == pytest.approx(half / 3)
    assert found["k3_kl_zero"] is None


def test_thirds_count_sampled_tokens_not_columns() -> None:
    mask = [[False, True, False, True, False, True]]
    found = panel([[9.0, 1.0, 9.0, 1.0, 9.0, 2.0]], [0.0], mask)
    assert found["k3_kl_last_third"] == pytest.approx(1 - LN2)
    assert found["k3_kl_first_third"] == 0.0


def test_no_token_is_none_everywhere_never_nan() -> None:
    assert set(panel([[1.0]], [1.0], [[False]]).values()) == {None}


def test_a_log_prob_that_is_not_finite_is_counted_and_left_out() -> None:
    found = panel([[0.0, 1.0]], [1.0])  # log 0 = -inf
    assert found["frac_not_finite"] == 0.5
    assert found["k3_kl"] == 0.0


def played(suite: str, outcome: Outcome, score: float | None, retention: float = 1.0) -> GradedRow:
    """A rollout of 5 prompt tokens and 4 new ones; the first entry leaves before query 6; 30 of 100 bytes at most."""
    sampled, gone = torch.arange(9) >= 5, torch.full((1, 1, 9), 10**6)
    gone[..., 0] = 6
    rollout = Rollout(torch.zeros(9), 5, sampled, torch.zeros(9), gone, 30, 100, retention, 5)
    return GradedRow(
        Item(suite, "i", "c", (), 9, "start"), (), Grade(outcome, score), rollout, "stop", 5, 4, {}, 0, 0.1
    )


STEP = [
    played("math", Outcome.DESIRED, 1.0, 0.5),
    played("math", Outcome.DEGENERATE, 0.0, 0.25),
    played("refusal", Outcome.DESIRED, 1.0),
    played("refusal", Outcome.UNSCORED, None),
]


def test_rewards_are_told_over_all_and_by_suite_and_what_was_not_graded_is_counted() -> None:
    found = reward_numbers(STEP, [1.0, 0.0, 1.0, None], config(suites=["math", "refusal", "agent"], group=2))
    assert found == {
        "reward_mean": pytest.approx(2 / 3),
        "reward_std": pytest.approx(math.sqrt(2) / 3),
        "frac_reward_zero_std": 0.5,  # of the groups; one of them has one graded rollout
        "frac_degenerate": 0.25,
        "frac_truncated": 0.0,
        "frac_unscored": 0.25,
        "length_mean": 4.0,
        "reward/math": 0.5,
        "reward/refusal": 1.0,
        "reward/agent": None,
    }


def test_memory_is_summed_over_rows_and_savings_are_what_was_not_kept() -> None:
    batch = collect([row.rollout for row in STEP], [1.0, 0.0, 1.0, None], 2, torch.device("cpu"))
    assert memory_numbers(STEP, batch) == {
        "learner_tokens": 2 * 5 + 4 * 4,
        "prompt_tokens_mean": 5.0,
        "kv_bytes_peak": 120,
        "kv_bytes_dense": 400,
        # queries 4 to 7 see 5 + 6 + 7 + 8 entries of a dense cache, the last two one less
        "token_savings": pytest.approx(2 / 26),
    }


def test_entries_are_counted_as_the_ledger_defines_who_sees_what() -> None:
    draw = torch.Generator().manual_seed(3)
    own = torch.arange(12)
    gone = own + torch.randint(1, 20, (2, 3, 12), generator=draw)
    sampled = torch.rand(12, generator=draw) < 0.4
    sampled[0] = False
    rollout = Rollout(own, 3, sampled, torch.zeros(12), gone, 1, 1, 1.0, 5)
    queries = [int(token) - 1 for token in sampled.nonzero()[:, 0]]
    seen = [sum(j <= i < int(gone[a, h, j]) for i in queries for j in range(12)) for a in range(2) for h in range(3)]
    assert entries_seen(rollout) == (pytest.approx(sum(seen) / 6), sum(i + 1 for i in queries))


def halves_of(model: torch.nn.Linear, *gradients: list[float]) -> dict[str, float | None]:
    """What an optimiser says of the gradient after the first half of a batch, and after the second."""
    optimiser = Optimiser(model, learning_rate=0.0, warmup_steps=0, max_grad_norm=1e9)
    for gradient in gradients:
        model.weight.grad = torch.tensor([gradient], dtype=model.weight.dtype)
        optimiser.end_half()
    return optimiser.step().halves


def test_halves_of_a_gradient_are_told_apart() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    one, two = halves_of(model, [3.0, 0.0], [3.0, 4.0]), halves_of(model, [3.0, 0.0], [6.0, 0.0])
    assert one == {"grad_variance": pytest.approx(25.0), "grad_half_cosine": pytest.approx(0.0)}
    assert two == {"grad_variance": pytest.approx(0.0), "grad_half_cosine": pytest.approx(1.0)}
    assert halves_of(model, [3.0, 0.0]) == {"grad_variance": None, "grad_half_cosine": None}


def test_halves_that_are_nearly_alike_are_told_apart_in_bfloat16_too() -> None:
    model = torch.nn.Linear(300, 1, bias=False).to(torch.bfloat16)
    found = halves_of(model, [1.0] * 300, [2.0625] * 300)  # the second half's is 1.0625
    assert found["grad_variance"] == pytest.approx(300 * 0.0625**2, abs=1e-3)


def test_the_certificate_is_the_panel_of_the_replayed_rollouts_and_empty_without_them() -> None:
    seen, advantages = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    sampler, replayed = torch.zeros(1, 2), torch.tensor([[0.0, LN2]])
    found = certificate(sampler, replayed, seen, advantages)
    assert found == {"shadow/max_abs_gap": pytest.approx(LN2), "shadow/k3_kl": pytest.approx((1 - LN2) / 2)}
    assert certificate(sampler, None, seen, advantages) == {"shadow/max_abs_gap": None, "shadow/k3_kl": None}


def test_metrics_are_means_per_token_over_microbatches() -> None:
    metrics = [{"entropy": 3.0}, {"clipped": torch.tensor(2.0), "entropy": torch.tensor(1.0)}]
    assert mean_metrics(metrics, 4) == {"entropy": 1.0, "clipped": 0.5}
    assert mean_metrics(metrics, 0) == {"entropy": None, "clipped": None}


def test_rows_are_appended_one_line_each_and_nan_becomes_null(tmp_path: Path) -> None:
    log = TelemetryLog(tmp_path / "telemetry.jsonl")
    log.append({"step": 1, "loss": float("nan")})
    log.append({"step": 2, "loss": 0.5})
    assert rows(log.path.parent) == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_a_number_that_is_not_finite_becomes_null_inside_mappings_too(tmp_path: Path) -> None:
    TelemetryLog(tmp_path / "telemetry.jsonl").append({"a": {"b": float("inf")}, "c": 1})
    assert rows(tmp_path) == [{"a": {"b": None}, "c": 1}]


def test_truncating_forgets_later_rows_and_half_a_line(tmp_path: Path) -> None:
    log = TelemetryLog(tmp_path / "telemetry.jsonl")
    log.append({"step": 1})
    size = log.size
    log.append({"step": 2})
    log.path.write_bytes(log.path.read_bytes() + b'{"ste')
    log.truncate(size)
    assert rows(tmp_path) == [{"step": 1}]


def test_a_log_shorter_than_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    log = TelemetryLog(tmp_path / "telemetry.jsonl")
    log.append({"step": 1})
    with pytest.raises(DataError, match="it was cut"):
        log.truncate(log.size + 1)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((1, 2, 2, 3), "has step 2 where step 3 is expected"),
        ((1, 3), "has step 3 where step 2 is expected"),
        ((1, 2), "has the end where step 3 is expected"),
        ((1, 2, 3, 3), "has step 3 where the end is expected"),
    ],
)
def test_steps_out_of_order_are_refused(tmp_path: Path, steps: tuple[int, ...], message: str) -> None:
    log = TelemetryLog(tmp_path / "telemetry.jsonl")
    for step in steps:
        log.append({"step": step})
    with pytest.raises(DataError, match=message):
        log.check_steps(3)


def test_a_disk_that_refuses_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = TelemetryLog(tmp_path / "file" / "telemetry.jsonl")
    with pytest.raises(RunError, match=r"cannot write .*Not a directory.*run again to resume"):
        log.append({"step": 1})


def test_a_full_disk_is_a_run_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        TelemetryLog(full).append({"step": 1})


def test_a_log_that_is_gone_or_no_json_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        TelemetryLog(tmp_path / "none.jsonl").check_steps(1)
    (tmp_path / "bad.jsonl").write_text("{oops\n")
    with pytest.raises(DataError, match="not JSON"):
        TelemetryLog(tmp_path / "bad.jsonl").check_steps(1)


@pytest.mark.parametrize("line", ["[1]", "3", "[" * 100_000])
def test_a_line_that_is_no_row_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="has a line that is not"):
        TelemetryLog(tmp_path / "bad.jsonl").check_steps(1)
