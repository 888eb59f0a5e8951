"""What stands beside the gate, on runs made by hand: slopes, safe budgets, churn."""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports_synthetic import Beside, Design, looked_at, policy, tables_of, with_values
from test_reports_drift import data_of, scored, small, spec_of

from kvaudit.core.records import Outcome
from kvaudit.reports.page.banner import describe_cell
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.safe import cleared_sentence
from kvaudit.reports.sections.shared.safe import families

SNAP = {b: policy("snapkv", b) for b in (24, 48, 96)}
BUDGETS = ("none", *SNAP.values())


def analysed(design, score, spec=None):
    data = data_of(scored(design, score), spec or spec_of(design))
    report = decide_run(data)
    return Beside(looked_at(report, data)), report


def by_budget(lost):
    """A score from how many of the first items each (arm, budget) loses; none loses nothing."""

    def score(arm, _seed, served, i):
        budget = int(served.split("budget=")[1].split(",")[0]) if "budget" in served else 0
        return i >= lost.get((arm, budget), 0)

    return score


def curve(found, arm, **more):
    [one] = [c for c in found.doses if c.arm == arm and all(getattr(c, k) == v for k, v in more.items())]
    return one


def test_families_are_policies_that_differ_in_their_budget():
    known = ("none", SNAP[96], SNAP[24], policy("h2o", 96, window=48), policy("h2o", 48, window=24), policy("tova", 9))
    found = families(known)
    assert [(f.name, f.budgets) for f in found] == [("snapkv", (24, 96)), ("h2o", (48, 96))]
    assert found[0].policies == (SNAP[24], SNAP[96])


def test_a_name_with_one_budget_twice_is_split_by_its_other_fields():
    known = ("a:budget=8,w=1", "a:budget=16,w=1", "a:budget=8,w=2", "a:budget=32,w=2")
    assert [(f.name, f.budgets) for f in families(known)] == [("a w=1", (8, 16)), ("a w=2", (8, 32))]


def test_a_composition_is_a_family_and_a_draw_of_several_is_none():
    known = ("a:budget=8+q:bits=4", "a:budget=16+q:bits=4", "a:budget=8|none", "a:budget=16|none", "b:budget=x")
    assert [(f.name, f.budgets) for f in families(known)] == [("a+q", (8, 16))]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="ab:=,+|1budget ", max_size=20), max_size=6))
def test_any_policy_text_has_families_or_none(policies):
    for family in families(policies):
        assert len(set(family.budgets)) == len(family.policies) > 1
        assert list(family.budgets) == sorted(family.budgets)


def test_slope_is_the_change_of_the_rate_per_doubling():
    design = small(policies=BUDGETS, clusters=8, items=16)
    lost = {("dense", 24): 4, ("dense", 48): 2, ("naive", 24): 12, ("naive", 48): 6}
    found, _ = analysed(design, by_budget(lost))
    dense, naive = curve(found, "dense"), curve(found, "naive")
    assert [d.amount for d in naive.doses] == [24, 48, 96]
    assert [d.x for d in naive.doses] == pytest.approx([math.log2(b / 192) for b in (24, 48, 96)])
    assert [d.rate for d in naive.doses] == [4 / 16, 10 / 16, 1]
    assert dense.slope.estimate == pytest.approx(2 / 16)  # 12, 14, 16 of 16 over three doublings
    assert naive.slope.estimate == pytest.approx(6 / 16)
    assert naive.against_reference.estimate == pytest.approx(4 / 16)
    assert naive.against_reference.low < 4 / 16 < naive.against_reference.high
    assert dense.against_reference is None
    assert naive.slope.method == "dose slope, CR3-t"
    assert naive.uncompressed == 1


def test_slope_of_the_difference_is_the_weighted_interaction():
    """Two doses: the slope is the difference of rates over the distance, whatever the middle."""
    design = small(policies=("none", SNAP[24], SNAP[96]))
    found, report = analysed(design, by_budget({("naive", 24): 8, ("dense", 24): 2, ("naive", 96): 1}))
    e5 = {c.policy: c.effect.estimate for c in report.drift.contrasts if c.estimand == "interaction"}
    assert curve(found, "naive").against_reference.estimate == pytest.approx((e5[SNAP[96]] - e5[SNAP[24]]) / 2)


def test_a_flat_curve_still_has_width():
    found, _ = analysed(small(policies=BUDGETS), lambda *_: True)
    naive = curve(found, "naive")
    assert naive.slope.estimate == 0
    assert naive.slope.low < -0.05
    assert naive.against_reference.high > naive.slope.high
    assert all(d.low < 0.9 < d.high == 1 for d in naive.doses)


def test_the_drawn_line_is_isotonic_where_rates_are_not():
    design = small(policies=BUDGETS)
    found, _ = analysed(design, by_budget({("naive", 24): 4, ("naive", 48): 6, ("naive", 96): 0}))
    assert [d.fitted for d in curve(found, "naive").doses] == pytest.approx([11 / 16, 11 / 16, 1])
    assert [d.rate for d in curve(found, "naive").doses] == [12 / 16, 10 / 16, 1]


def test_a_curve_whose_cells_cannot_be_compared_says_why():
    design = small(policies=BUDGETS, clusters=5)
    found, _ = analysed(design, lambda *_: True)
    assert curve(found, "naive").doses == ()
    assert "(5, wanted 6)" in curve(found, "naive").reason


def lengths(score, **more):
    """One policy at two lengths whose items have other names, as templates filled anew do."""
    rows = []
    designs = [small(policies=("none",), context=c, items=16, clusters=8, **more) for c in (128, 512)]
    for design in designs:
        made = scored(design, lambda arm, s, p, i, c=design.context: score(arm, c, i))
        rows += [dataclasses.replace(row, item_id=f"{row.item_id}-t{design.context}") for row in made]
    spec = spec_of(designs[0])
    spec["evaluate"]["context_tokens"] = [128, 512]
    data = data_of(rows, spec)
    report = decide_run(data)
    return Beside(looked_at(report, data))


def test_lengths_with_other_items_are_compared_by_template():
    found = lengths(lambda arm, context, i: i >= (4 if arm == "naive" and context == 512 else 0))
    naive = curve(found, "naive", axis="length")
    assert naive.unit == "templates"
    assert [d.amount for d in naive.doses] == [128, 512]
    assert naive.slope.estimate == pytest.approx(-4 / 16 / 2)  # two doublings
    assert naive.against_reference.estimate == pytest.approx(-4 / 16 / 2)
    assert naive.slope.n_clusters == 8


def test_safe_length_goes_from_the_shortest_up():
    found = lengths(
        lambda arm, context, i: i >= (12 if arm == "naive" and context == 512 else 0), margins={"refusal": 60.0}
    )
    [safe] = [s for s in found.safe if s.axis == "length" and s.arm == "naive"]
    assert (safe.amounts, safe.cleared, safe.failed) == ((128, 512), 128, 512)
    assert cleared_sentence(safe) == "refusal cleared to 128 tokens, not at 512"


def roomy(lost, **more):
    """Budgets with 64 clusters of 2 items, so that a 10 pp margin can be passed."""
    design = small(policies=BUDGETS, clusters=64, items=128, margins={"refusal": 10.0}, **more)
    return analysed(design, by_budget(lost))


def test_safe_budget_stops_at_the_first_that_does_not_pass():
    found, _ = roomy({("naive", 48): 64, ("naive", 24): 0})
    safe = {s.arm: s for s in found.safe}
    assert (safe["dense"].estimand, safe["dense"].cleared, safe["dense"].failed) == ("serving", 24, None)
    assert (safe["naive"].estimand, safe["naive"].amounts) == ("deployed", (96, 48, 24))
    assert safe["naive"].statuses == ("PASS", "FAIL", "PASS")
    assert (safe["naive"].cleared, safe["naive"].failed) == (96, 48)
    assert cleared_sentence(safe["naive"]) == "refusal cleared to budget 96, not at 48"
    assert cleared_sentence(safe["dense"]) == "refusal cleared to budget 24, the last one tested"


def test_a_largest_budget_that_fails_clears_none():
    found, _ = roomy({("naive", 96): 64})
    [safe] = [s for s in found.safe if s.arm == "naive"]
    assert (safe.cleared, safe.failed) == (None, 96)
    assert cleared_sentence(safe) == "refusal cleared at no budget: not at 96"


def test_a_reference_with_nothing_to_lose_clears_nothing():
    design = small(policies=BUDGETS, clusters=64, items=128, margins={"refusal": 10.0})
    found, _ = analysed(design, lambda *_: False)
    assert {s.statuses for s in found.safe} == {("NOT MEASURABLE",) * 3}
    assert {s.cleared for s in found.safe} == {None}


def test_churn_shows_what_a_drift_of_zero_hides():
    design = small(policies=("none",), clusters=8, items=16)
    found, report = analysed(design, lambda arm, _s, _p, i: (i % 4 != 0) if arm == "naive" else (i % 4 != 1))
    [churn] = found.churn
    assert churn.drift == 0
    assert (churn.losses, churn.gains, churn.churn, churn.draws) == (0.25, 0.25, 0.5, 0.5)
    assert (churn.rerun, churn.draws_rerun) == (None, None)
    effect = next(c.effect for c in report.drift.contrasts if c.estimand == "alike")
    assert (effect.losses / 16, effect.gains / 16) == (churn.losses, churn.gains)


def test_churn_does_not_cancel_between_seeds():
    design = small(policies=("none",), clusters=8, items=16, seeds=(11, 12))
    found, report = analysed(design, lambda arm, seed, _p, i: not (arm == "naive" and seed == 11) and i % 4 != 1)
    [churn] = found.churn
    contrast = next(c for c in report.drift.contrasts if c.estimand == "alike")
    assert (churn.drift, churn.churn) == (contrast.effect.estimate, contrast.churn)
    # seed 11 loses 12 of 16 items, seed 12 nothing
    assert (churn.losses, churn.gains, churn.churn) == (0.375, 0, 0.375)


def test_a_flip_in_one_seed_and_back_in_another_is_two_flips():
    design = small(policies=("none",), clusters=8, items=16, seeds=(11, 12))
    found, report = analysed(design, lambda arm, seed, _p, i: (seed == 11) is (arm == "naive"))
    [churn] = found.churn
    assert (churn.drift, churn.losses, churn.gains, churn.churn) == (0, 0.5, 0.5, 1.0)
    assert "churn 100.0 %" in describe_cell(report, next(d for d in report.verdict.decisions if d.gated))


def test_two_samples_put_the_churn_of_one_checkpoint_beside_that_of_the_arm():
    """naive answers every other item right once in two draws: two of its answers disagree there, dense's never."""
    design = small(policies=("none",), clusters=8, items=16, samples=2)
    rows = scored(design, lambda *_: True)
    flipped = [
        dataclasses.replace(r, score=0.0, outcome=Outcome.UNDESIRED)
        if r.arm == "naive" and r.sample_index == 1 and int(r.item_id[-4:]) % 2
        else r
        for r in rows
    ]
    data = data_of(flipped, spec_of(design))
    report = decide_run(data)
    [c] = [c for c in report.drift.contrasts if c.estimand == "alike"]
    assert (c.churn, c.rerun) == (0.25, 0.25)  # 1/2 of half the items; 1/2 * (1 + 0) of half the items
    assert "churn 25.0 %, 25.0 % between two answers of one checkpoint (A/A)" in describe_cell(
        report, report.verdict.head
    )
    found = with_values(report, data)
    [table] = tables_of(found, "churn")
    assert table.rows[0][table.headers.index("A/A churn")] == "25.0 %"


def test_a_column_of_reruns_that_nobody_made_is_left_out():
    design = small(policies=("none",), clusters=8, items=16)
    data = data_of(scored(design, lambda arm, _s, _p, i: arm != "naive" or i > 1), spec_of(design))
    [table] = tables_of(with_values(decide_run(data), data), "churn")
    assert "A/A churn" not in table.headers


def test_seeds_of_a_gated_cell():
    design = small(seeds=(1, 2, 3), policies=("none",))
    found, _ = analysed(design, lambda arm, seed, _p, i: i >= (seed if arm == "naive" else 0))
    [seeds] = found.seeds
    assert seeds.estimates == pytest.approx((-1 / 16, -2 / 16, -3 / 16))
    # items 1 and 2 are lost by two seeds and by one: template residuals squared sum to 13/12, CR3 has N - n = 14
    assert seeds.sd == pytest.approx(math.sqrt(1 / 16**2 - 7 / 8 * (13 / 12) / 14**2 / 2))


def test_serving_runs_have_slopes_and_safe_budgets_of_the_checkpoint():
    design = small(arms=("base",), train=False, policies=BUDGETS, clusters=64, items=128, margins={"refusal": 10.0})
    found, _ = analysed(design, by_budget({("base", 24): 64}))
    [safe] = found.safe
    assert (safe.estimand, safe.cleared, safe.failed) == ("serving", 48, 24)
    assert curve(found, "base").slope.estimate == pytest.approx(0.25)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_damage_leaves_analyses_that_can_be_printed(data):
    design = Design(
        arms=("dense", "naive"), seeds=(1, 2), policies=BUDGETS[:3], suites=("refusal",), clusters=6, items=12
    )
    rows = scored(design, lambda *_: True)
    kept = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique_by=id))
    outcomes = data.draw(st.lists(st.sampled_from(list(Outcome)), min_size=len(kept), max_size=len(kept)))
    values = {Outcome.DESIRED: 1.0, Outcome.UNSCORED: None}
    changed = [
        dataclasses.replace(row, outcome=o, score=values.get(o, 0.0)) for row, o in zip(kept, outcomes, strict=True)
    ]
    found = data_of(changed, spec_of(design))
    report = decide_run(found)
    result = Beside(looked_at(report, found))
    for c in result.doses:
        assert bool(c.doses) != bool(c.reason)
        for dose in c.doses:
            assert 0 <= dose.low <= dose.rate <= dose.high <= 1
