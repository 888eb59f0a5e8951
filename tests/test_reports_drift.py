"""Drift from records: literal contrasts, the data contract, serving runs, seeds."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from reports_synthetic import Design, frame_of, pins, policy, policy_hash, records_of, run_spec, spec_of

from kvaudit.core.policy_names import match_policies, short_names
from kvaudit.core.records import Outcome
from kvaudit.reports.records.load import RunData
from kvaudit.reports.run import decide_run

SNAP = policy("snapkv", 96)

RESUME = "resume this run first, it is incomplete: "


def rows_of(design):
    return [row for _, rows in records_of(design) for row in rows]


def data_of(rows, spec, **more):
    frame = frame_of(("unit.jsonl", i, row) for i, row in enumerate(rows, 1))
    more.setdefault("provenance", pins(rows, spec.get("gate", {}).get("reference", "dense")))
    return RunData(run=Path("demo"), records=frame, spec=run_spec(spec), **more)


def small(**more):
    options = {"arms": ("dense", "naive"), "seeds": (1,), "policies": ("none", SNAP), "suites": ("refusal",)}
    return Design(**{**options, "clusters": 8, "items": 16, **more})


def scored(design, score):
    """The design's records with scores from a function of (arm, seed, policy, item number)."""
    rows = []
    for row in rows_of(design):
        value = score(row.arm, row.train_seed, row.policy, int(row.item_id.split("-")[1]))
        outcome = Outcome.DESIRED if value else Outcome.UNDESIRED
        rows.append(dataclasses.replace(row, score=float(value), outcome=outcome))
    return rows


def find(report, estimand, arm="naive", policy_text=SNAP, suite="refusal"):
    [found] = [
        c
        for c in report.drift.contrasts
        if (c.estimand, c.arm, c.policy, c.suite) == (estimand, arm, policy_text, suite)
    ]
    return found


def test_the_estimands_of_a_hand_made_run():
    def score(arm, _seed, served, i):
        if served == "none":
            return i >= (2 if arm == "naive" else 0)  # naive loses 2 of 16
        return i >= (8 if arm == "naive" else 4)  # under compression dense loses 4, naive 8

    design = small()
    report = decide_run(data_of(scored(design, score), spec_of(design)))
    assert find(report, "alike", policy_text="none").effect.estimate == pytest.approx(-2 / 16)
    assert find(report, "alike").effect.estimate == pytest.approx(-4 / 16)
    assert find(report, "deployed").effect.estimate == pytest.approx(-8 / 16)
    assert find(report, "serving").effect.estimate == pytest.approx(-6 / 16)
    assert find(report, "serving", arm="dense").effect.estimate == pytest.approx(-4 / 16)
    assert find(report, "interaction").effect.estimate == pytest.approx(-2 / 16)
    assert find(report, "interaction").effect.method == "CR3-t"
    assert find(report, "amplification").effect.estimate == pytest.approx(2 / 16)  # -2 of training, +4 of serving
    assert (find(report, "amplification").effect.losses, find(report, "amplification").effect.gains) == (0, 2)
    assert find(report, "alike").effect.method == "ESS-Tango"
    assert (find(report, "alike").effect.losses, find(report, "alike").effect.gains) == (4, 0)


def test_an_interaction_without_any_spread_still_has_width():
    design = small()
    effect = find(decide_run(data_of(scored(design, lambda *_: True), spec_of(design))), "interaction").effect
    assert effect.estimate == 0
    assert effect.low < -0.2
    assert effect.high > 0.2


def test_seed_s_is_paired_with_seed_s():
    design = small(seeds=(1, 2, 3))
    rows = scored(design, lambda arm, seed, _p, i: i >= seed + (2 * seed if arm == "naive" else 0))
    contrast = find(decide_run(data_of(rows, spec_of(design))), "alike")
    assert contrast.seed_estimates == pytest.approx((-2 / 16, -4 / 16, -6 / 16))
    assert contrast.effect.estimate == pytest.approx(-4 / 16)
    assert contrast.recipe.method.startswith("CR3 + seed variance")
    assert contrast.recipe.low <= contrast.effect.low


def test_a_reference_of_one_seed_supports_no_recipe_and_the_untrained_model_does():
    design = small(arms=("dense", "naive"), seeds=(11, 12, 13))
    rows = rows_of(design)
    one = [row for row in rows if row.arm == "naive"]
    one += [dataclasses.replace(row, train_seed=99) for row in rows if (row.arm, row.train_seed) == ("dense", 11)]
    assert find(decide_run(data_of(one, spec_of(design))), "alike").effect is not None
    assert find(decide_run(data_of(one, spec_of(design))), "alike").recipe is None
    base = [dataclasses.replace(row, arm="base") if row.arm == "dense" else row for row in one]
    spec = spec_of(design)
    spec["gate"] = {**spec["gate"], "reference": "base"}
    spec["evaluate"]["base"] = True
    assert find(decide_run(data_of(base, spec)), "alike").recipe is not None


def test_two_seeds_support_no_recipe():
    design = small(seeds=(1, 2))
    assert find(decide_run(data_of(rows_of(design), spec_of(design))), "alike").recipe is None


def test_one_pinned_reference_run_serves_every_seed():
    design = small(seeds=(1, 2))
    rows = [r for r in scored(design, lambda arm, *_: arm == "dense") if r.arm != "dense" or r.train_seed == 1]
    rows = [dataclasses.replace(r, train_seed=99) if r.arm == "dense" else r for r in rows]
    contrast = find(decide_run(data_of(rows, spec_of(design))), "alike")
    assert contrast.effect.estimate == -1
    assert contrast.seeds == (1, 2)


def test_samples_are_averaged_inside_the_item():
    one, four = small(samples=1), small(samples=4)
    score = lambda arm, _s, _p, i: i >= (3 if arm == "naive" else 0)  # noqa: E731
    first = find(decide_run(data_of(scored(one, score), spec_of(one))), "alike").effect
    second = find(decide_run(data_of(scored(four, score), spec_of(four))), "alike").effect
    assert first == second


def test_degenerate_counts_as_zero_even_if_it_carries_a_score():
    design = small()
    rows = scored(design, lambda *_: True)
    rows = [dataclasses.replace(r, outcome=Outcome.DEGENERATE) if r.arm == "naive" else r for r in rows]
    report = decide_run(data_of(rows, spec_of(design)))
    assert find(report, "alike").effect.estimate == -1
    cell = next(c for c in report.drift.cells if c.arm == "naive" and c.policy == SNAP)
    assert cell.outcomes == {"desired": 0, "undesired": 0, "degenerate": 16, "truncated": 0, "unscored": 0}


def unscored(rows, share, arm="naive"):
    count = 0
    for row in rows:
        count += row.arm == arm
        hit = row.arm == arm and count % round(1 / share) == 0
        yield dataclasses.replace(row, score=None, outcome=Outcome.UNSCORED) if hit else row


def test_unscored_beyond_one_percent_is_invalid():
    design = small()
    rows = list(unscored(scored(design, lambda *_: True), 1 / 16))
    report = decide_run(data_of(rows, spec_of(design)))
    contrast = find(report, "alike")
    assert contrast.effect is None
    assert [r.code for r in contrast.reasons] == ["MISSING"]
    cell = next(c for c in report.drift.cells if c.arm == "naive" and c.policy == SNAP)
    assert (cell.rate, cell.rate_if_desired) == (15 / 16, 1.0)


def test_few_unscored_samples_widen_to_worst_and_best_case():
    design = small(items=128, clusters=16)
    rows = list(unscored(scored(design, lambda *_: True), 1 / 128))
    contrast = find(decide_run(data_of(rows, spec_of(design))), "alike")
    assert contrast.effect.estimate == pytest.approx(-1 / 128)
    assert (contrast.worst, contrast.best) == pytest.approx((-1 / 128, 0))
    other = list(unscored(scored(design, lambda *_: True), 1 / 128, arm="dense"))
    contrast = find(decide_run(data_of(other, spec_of(design))), "alike")
    assert (contrast.worst, contrast.best) == pytest.approx((0, 1 / 128))


def codes(rows, design, **more):
    report = decide_run(data_of(rows, spec_of(design), **more))
    return {r.code for r in find(report, "alike").reasons}, {r.code for r in report.drift.reasons}


def test_different_item_sets_are_invalid():
    rows = rows_of(small())
    assert codes([r for r in rows if not (r.arm == "naive" and r.item_id.endswith("3"))], small())[0] == {"ITEMS"}


def test_a_cell_that_was_not_evaluated_is_invalid():
    rows = rows_of(small())
    assert codes([r for r in rows if not (r.arm == "naive" and r.policy == SNAP)], small())[0] == {"CELL"}


def test_a_missing_reference_is_invalid():
    rows = [r for r in rows_of(small()) if r.arm != "dense"]
    assert codes(rows, small()) == ({"CELL"}, {"REFERENCE", "INCOMPLETE"})


def test_fewer_than_six_clusters_are_invalid():
    design = small(clusters=5)
    assert codes(rows_of(design), design)[0] == {"FEW_CLUSTERS"}


def test_an_item_in_two_clusters_is_invalid():
    rows = rows_of(small())
    rows[0] = dataclasses.replace(rows[0], cluster_id="elsewhere")
    assert codes(rows, small())[0] == {"CLUSTER_IDS"}


def test_uneven_samples_are_invalid():
    design = small(samples=2)
    rows = rows_of(design)
    assert codes(rows[:-1], design)[0] == {"SAMPLES"}


def test_two_weights_under_one_name_are_invalid():
    rows = rows_of(small())
    rows[0] = dataclasses.replace(rows[0], checkpoint="0" * 64)
    assert codes(rows, small())[1] == {"HASH", "REFHASH"}
    (text,) = [reason.text for reason in reasons_of(rows) if reason.code == "HASH"]
    assert text == f"records have several weights for {rows[0].arm} seed {rows[0].train_seed}"


def test_of_many_records_that_contradict_each_other_three_are_named():
    rows = [dataclasses.replace(row, arm=f"arm{i % 9}") for i, row in enumerate(rows_of(small()))]
    rows = [dataclasses.replace(row, checkpoint=str(i // 9 % 2)) for i, row in enumerate(rows)]
    weights = next(reason.text for reason in reasons_of(rows) if "weights" in reason.text)
    assert weights.endswith("; and 6 more")


@pytest.mark.parametrize(
    ("table", "listed", "said"),
    [
        ("policies", {"none": "f" * 12}, f"policy_hash of the records is not what provenance lists for none; {SNAP}"),
        ("policies", {}, f"policy_hash of the records is not what provenance lists for none; {SNAP}"),
        ("policies", {"none": policy_hash("none"), "snapkv as once spelled": policy_hash(SNAP)}, None),
        ("suite_versions", {"refusal": "2"}, "suite_version of the records is not what provenance lists for refusal"),
        ("suite_versions", {}, "suite_version of the records is not what provenance lists for refusal"),
        ("suite_versions", {"refusal": "1", "poetry": "9"}, None),
        ("suite_kinds", {}, "provenance does not list the kind of suite refusal"),
    ],
)
def test_policies_and_suites_are_those_that_provenance_lists(table, listed, said):
    more = {"provenance": {**pins(rows_of(small())), table: listed}}
    assert [r.text for r in reasons_of(rows_of(small()), **more) if r.code == "HASH"] == ([said] if said else [])


@pytest.mark.parametrize(("dense", "claimed"), [((11, 12, 13), True), ((1,), False)])
def test_selectivity_claims_a_recipe_only_with_three_seeds_on_either_side(dense, claimed):
    more = {"seeds": (11, 12, 13), "policies": ("none",), "suites": ("refusal", "math"), "estimands": ("selectivity",)}
    design = small(**more)
    rows = [
        dataclasses.replace(row, train_seed=dense[0] if row.arm == "dense" and len(dense) == 1 else row.train_seed)
        for row in rows_of(design)
        if row.arm != "dense" or row.train_seed in (11, *dense)
    ]
    report = decide_run(data_of(rows, spec_of(design)))
    [found] = [c for c in report.drift.contrasts if c.estimand == "selectivity"]
    assert found.effect is not None
    assert (found.recipe is not None) == claimed


def test_weights_that_provenance_does_not_list_are_invalid():
    more = {"provenance": {**pins(rows_of(small())), "checkpoints": {"dense/1": "f" * 64}}}
    assert codes(rows_of(small()), small(), **more)[1] == {"REFHASH"}


def test_weights_listed_for_another_arm_are_not_the_pinned_ones():
    known = pins(rows_of(small()))
    swapped = {"dense/1": known["checkpoints"]["naive/1"], "naive/1": known["checkpoints"]["dense/1"]}
    more = {"provenance": {**known, "checkpoints": swapped}}
    assert codes(rows_of(small()), small(), **more)[1] == {"REFHASH"}


@pytest.mark.parametrize("pinned", [{"1": "f" * 64}, {}, None])
def test_a_reference_other_than_the_pinned_one_is_invalid(pinned):
    more = {"provenance": {**pins(rows_of(small())), "reference_sha256": pinned}}
    assert codes(rows_of(small()), small(), **more)[1] == {"REFHASH"}


def test_the_base_model_is_pinned_without_training_too():
    design = small(arms=("base",), train=False)
    rows = rows_of(design)
    reasons = []
    for known in (pins(rows, "base"), {**pins(rows, "base"), "base_sha256": "f" * 64}):
        report = decide_run(data_of(rows, spec_of(design), provenance=known))
        reasons.append([r.code for r in report.drift.reasons])
    assert reasons == [[], ["REFHASH"]]


def reasons_of(rows, **more):
    return decide_run(data_of(rows, spec_of(small()), **more)).drift.reasons


def test_items_that_no_cell_has_are_missing_rows():
    rows = [r for r in rows_of(small()) if not r.item_id.endswith("3")]
    assert codes(rows, small())[0] == set()
    [reason] = reasons_of(rows)
    assert reason.code == "INCOMPLETE"
    assert reason.text.startswith(f"{RESUME}rows missing or too many: 8 (")  # items 3 and 13 of 4 units
    assert "14 of 16 rows in dense seed 1 @ none, refusal" in reason.text


def test_a_planned_unit_without_records_is_named():
    [reason] = reasons_of([r for r in rows_of(small()) if not (r.arm == "naive" and r.policy == SNAP)])
    assert reason.text.startswith(f"{RESUME}planned units missing: 1 of 4 (naive seed 1 @ snapkv 96, refusal)")


def test_a_unit_without_a_seal_makes_the_run_incomplete():
    [reason] = reasons_of(rows_of(small()), incomplete=("some-unit.jsonl",))
    assert (reason.code, reason.text) == ("INCOMPLETE", f"{RESUME}units not sealed: 1 (some-unit.jsonl)")


def test_both_rates_stand_beside_a_drift():
    def score(arm, _seed, served, i):
        return i >= (8 if arm == "naive" else 4) if served != "none" else i >= 2

    design = small()
    report = decide_run(data_of(scored(design, score), spec_of(design)))
    alike, end_to_end = find(report, "alike").rates, find(report, "deployed").rates
    assert (alike.reference, alike.candidate) == (12 / 16, 8 / 16)
    assert (end_to_end.reference, end_to_end.candidate) == (14 / 16, 8 / 16)
    assert find(report, "serving", arm="dense").rates.reference == 14 / 16
    assert find(report, "interaction").rates is None


def test_without_training_policies_are_compared_with_none():
    design = small(arms=("base",), train=False)
    rows = scored(design, lambda _a, _s, served, i: served == "none" or i >= 5)
    report = decide_run(data_of(rows, spec_of(design)))
    assert report.comparison.mode == "serving"
    assert {c.estimand for c in report.drift.contrasts} == {"serving"}
    assert find(report, "serving", arm="base").effect.estimate == pytest.approx(-5 / 16)


def test_cells_carry_cache_use_and_survival():
    design = small()
    report = decide_run(data_of(rows_of(design), spec_of(design)))
    cell = next(c for c in report.drift.cells if c.policy == SNAP)
    assert cell.retention == pytest.approx(0.5)
    assert cell.kv_ratio == pytest.approx(0.7, abs=1e-6)
    assert cell.survival == pytest.approx({"system": 0.45, "user": 0.5, "format": 1.0})


def test_policies_match_by_name_and_mentioned_fields():
    known = ["none", policy("snapkv", 48), policy("snapkv", 96), policy("snapkv", 96, window=16)]
    asked = ["snapkv:budget=96,window=16", "snapkv:budget=96", "snapkv:budget=48", "none", "h2o:budget=4"]
    assert match_policies(asked, known) == [known[3], known[2], known[1], "none", "h2o:budget=4"]


def test_short_names_tell_twins_apart():
    names = short_names(["none", policy("snapkv", 96), policy("snapkv", 96, window=16), policy("h2o", 48)])
    assert list(names.values()) == ["none", "snapkv 96 window=8", "snapkv 96 window=16", "h2o 48"]


def test_drift_does_not_depend_on_the_order_of_records():
    design = small()
    rows = rows_of(design)
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    one, two = (decide_run(data_of(r, spec_of(design))) for r in (rows, mixed))
    assert one.drift.contrasts == two.drift.contrasts
