"""The decision rule: literal cells, precedence, exit codes, the family of FAIL."""

import dataclasses

import numpy as np
import pytest
from reports_synthetic import Design, build, loaded, policy, records_of, redecided, reruled, write_unit

from kvaudit.core.records import Outcome
from kvaudit.reports.page.banner import run_banner
from kvaudit.reports.page.remarks import cautions
from kvaudit.reports.page.tables import gate_table
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.shared.words import decision_note
from kvaudit.reports.stats.rule import SuiteTotals, effective_clusters
from kvaudit.reports.stats.tango import ess_tango
from kvaudit.reports.verdict.cell import decide_cell
from kvaudit.reports.verdict.chance import larger_run
from kvaudit.reports.verdict.contrast import ClusterSums, Contrast
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.verdict import EXIT_CODES, Larger, Status, worst

SNAP = policy("snapkv", 96)
STREAMING = policy("streaming", 96)


def effect(losses, gains, clusters=60, size=5):
    z = np.zeros(clusters * size)
    z[: losses * size : size] = -1
    z[1 : gains * size + 1 : size] += 1
    return ess_tango(z, np.repeat(np.arange(clusters), size), alpha=0.05)


def totals_of(losses, gains, clusters=60, size=5):
    """The same as template totals: a loss and a gain of one template cancel."""
    sums = np.zeros(clusters)
    np.add.at(sums, np.arange(losses) % clusters, -1)
    sums[:gains] += 1
    return [SuiteTotals(1.0, sums, np.full(clusters, float(size)))]


@pytest.mark.parametrize(
    ("losses", "gains", "clusters", "status"),
    [
        (2, 2, 60, Status.PASS),
        (7, 0, 90, Status.PASS_NOTED),
        (40, 0, 60, Status.FAIL),
        (20, 14, 60, Status.INCONCLUSIVE),  # neither bound decides
        (0, 0, 58, Status.INCONCLUSIVE),  # one cluster short of C_min
        (0, 0, 59, Status.PASS),
    ],
)
def test_rule_of_one_cell(losses, gains, clusters, status):
    e = effect(losses, gains, clusters)
    found, reasons = decide_cell(e, 0.05, e.pvalue_drop, totals_of(losses, gains, clusters))
    assert found is status
    assert bool(reasons) == (status in (Status.FAIL, Status.INCONCLUSIVE))


def test_too_few_clusters_never_pass_whatever_the_interval():
    rng = np.random.default_rng(2)
    for _ in range(200):
        clusters = int(rng.integers(6, 59))
        z = (rng.random(clusters) < 0.02) * -1.0
        effect = ess_tango(np.repeat(z, 20), np.repeat(np.arange(clusters), 20))
        found, reasons = decide_cell(effect, 0.05, 1.0, [SuiteTotals(1.0, 20 * z, np.full(clusters, 20))])
        assert found is Status.INCONCLUSIVE or found is Status.FAIL
        assert reasons


def test_clusters_are_the_reason_when_they_are():
    e = effect(0, 0, 20, size=40)
    assert e.lower > -0.05
    _, [reason] = decide_cell(e, 0.05, 0.5, totals_of(0, 0, 20, size=40))
    assert reason.code == "CLUSTERS"
    assert "59 are needed" in reason.text


def test_a_drop_that_is_not_significant_in_its_family_does_not_fail():
    e = effect(40, 0)
    assert decide_cell(e, 0.05, 0.2, totals_of(40, 0, 60))[0] is Status.INCONCLUSIVE


def test_precedence_and_exit_codes():
    everything = list(Status)
    assert worst(everything) is Status.FAIL
    assert worst([Status.INVALID, Status.INCONCLUSIVE]) is Status.INVALID
    assert worst([Status.PASS, Status.INCONCLUSIVE, Status.FAIL]) is Status.FAIL
    assert worst([Status.PASS, Status.INCONCLUSIVE]) is Status.INCONCLUSIVE
    assert worst([Status.INCONCLUSIVE, Status.NOT_MEASURABLE]) is Status.INCONCLUSIVE
    assert worst([Status.PASS, Status.NOT_MEASURABLE]) is Status.NOT_MEASURABLE
    assert worst([Status.FAIL, Status.NOT_MEASURABLE]) is Status.FAIL
    assert worst([Status.PASS, Status.PASS_NOTED]) is Status.PASS_NOTED
    assert worst([Status.WAIVED, Status.PASS_NOTED]) is Status.WAIVED
    assert [EXIT_CODES[s] for s in everything] == [0, 0, 3, 6, 4, 5, 0]


def report_of(tmp_path, **more):
    options = {
        "arms": ("dense", "naive", "smd"),
        "seeds": (1,),
        "policies": ("none", SNAP),
        "suites": ("refusal",),
        "seed_sd": 0.0,
    }
    design = Design(**{**options, "items": 300, "clusters": 100, **more})
    return decide_run(loaded(tmp_path / "run", design))


def test_arms_are_gated_separately_and_the_worst_decides(tmp_path):
    verdict = report_of(tmp_path, drops={("naive", "refusal"): 0.3}).verdict
    assert {a.arm: a.status for a in verdict.arms} == {"naive": Status.FAIL, "smd": Status.PASS}
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 3)
    head = verdict.decisions[verdict.headline]
    assert (head.arm, head.status) == ("naive", Status.FAIL)
    assert head.effect.estimate < -0.2


def test_only_the_primary_policies_are_gated(tmp_path):
    verdict = report_of(tmp_path, primary=(SNAP,)).verdict
    assert {d.policy for d in verdict.decisions} == {SNAP}
    assert all(d.gated for d in verdict.decisions)


def test_served_alike_and_end_to_end_both_decide(tmp_path):
    verdict = report_of(tmp_path, serving={SNAP: 0.5}).verdict
    found = {(d.estimand, d.policy, d.arm): d.status for d in verdict.decisions if d.gated}
    assert set(found) == {
        (e, p, a) for e, p in (("alike", "none"), ("alike", SNAP), ("deployed", SNAP)) for a in ("naive", "smd")
    }
    assert {found["deployed", SNAP, arm] for arm in ("naive", "smd")} == {Status.FAIL}
    assert Status.FAIL not in {status for (estimand, *_), status in found.items() if estimand == "alike"}
    assert verdict.status is Status.FAIL


def test_serving_beside_trained_arms_holds_the_reference_under_every_policy(tmp_path):
    """``primary`` is of the arms; what serving costs the reference is no verdict about their training."""
    found = report_of(
        tmp_path,
        seeds=(1, 2, 3),
        arms=("dense", "smd"),
        policies=("none", SNAP, STREAMING),
        serving={SNAP: 0.5},
        primary=("none",),
        estimands=("serving", "alike"),
    )
    verdict = found.verdict
    served = {(d.arm, d.policy): d.status for d in verdict.decisions if d.gated and d.estimand == "serving"}
    assert served == {("dense", SNAP): Status.FAIL, ("dense", STREAMING): Status.PASS}
    assert {d.policy for d in verdict.decisions if d.gated and d.estimand == "alike"} == {"none"}
    assert {a.arm: a.status for a in verdict.arms} == {
        "dense": Status.FAIL,
        "smd": Status.PASS,
    }
    assert verdict.status is Status.FAIL
    assert verdict.recipe in (Status.PASS, Status.PASS_NOTED), "what serving costs is not what a recipe does"


def test_a_spec_may_gate_served_alike_only(tmp_path):
    verdict = report_of(tmp_path, serving={SNAP: 0.5}, estimands=("alike",)).verdict
    assert {d.estimand for d in verdict.decisions if d.gated} == {"alike"}
    assert [d.status for d in verdict.decisions if not d.gated] == [Status.FAIL, Status.FAIL]
    assert verdict.status is not Status.FAIL


def test_a_spec_may_gate_end_to_end_only(tmp_path):
    verdict = report_of(tmp_path, estimands=("deployed",)).verdict
    assert {(d.estimand, d.policy) for d in verdict.decisions if d.gated} == {("deployed", "none"), ("deployed", SNAP)}
    assert {(d.estimand, d.policy) for d in verdict.decisions if not d.gated} == {("alike", SNAP)}


def test_the_family_of_fail_spans_all_gated_cells(tmp_path):
    report = report_of(tmp_path, drops={("naive", "refusal"): 0.08})
    both = {key(d): d.pvalue_holm for d in report.verdict.decisions if d.gated}
    one = reruled(report, estimands=("alike",))
    alone = {key(d): d.pvalue_holm for d in one.verdict.decisions if d.gated}
    smallest = min(alone, key=alone.get)
    assert len(both) == 6
    assert both[smallest] == pytest.approx(alone[smallest] * 6 / 4)


def key(d):
    return d.estimand, d.arm, d.policy, d.suite


def at_floor(tmp_path, **more):
    """Every answer on refusal is undesired under compression, for all arms; at none nearly all are desired."""
    return report_of(tmp_path, serving={SNAP: 0.84}, estimands=("alike",), **more)


def test_a_reference_at_the_floor_never_passes(tmp_path):
    verdict = at_floor(tmp_path).verdict
    floor = [d for d in verdict.decisions if d.gated and d.policy == SNAP]
    assert len(floor) == 2
    for d in floor:
        assert d.rates.reference < 0.05
        assert d.effect.lower > -0.05, "the interval alone would pass"
        assert d.status is Status.NOT_MEASURABLE
        assert d.reasons[0].code == "FLOOR"
        assert d.reasons[0].text.endswith("of 300 answers right served alike: nothing to lose")
    assert {d.status for d in verdict.decisions if d.gated and d.policy == "none"} == {Status.PASS}
    assert (verdict.status, verdict.exit_code) == (Status.NOT_MEASURABLE, 6)


def test_a_cell_at_the_floor_is_not_the_headline_while_another_exists(tmp_path):
    report = at_floor(tmp_path / "a")
    verdict = report.verdict
    assert verdict.decisions[verdict.headline].policy == "none"
    top = run_banner(report)
    assert "This cell is PASS; the verdict comes from cells that cannot be measured." in top.about
    assert top.lines[0].startswith("NOT MEASURABLE: refusal (2 gated cells), at floor: ")
    alone = at_floor(tmp_path / "b", primary=(SNAP,)).verdict
    assert not alone.decisions[alone.headline].is_measurable


def test_a_recipe_at_the_floor_does_not_pass_either(tmp_path):
    verdict = at_floor(tmp_path, arms=("dense", "smd"), seeds=(1, 2, 3), primary=(SNAP,)).verdict
    assert {d.recipe for d in verdict.decisions if d.gated} == {Status.NOT_MEASURABLE}


def test_a_gain_that_is_shown_passes_at_the_floor(tmp_path):
    """dense answers one in fifty as desired, naive nine in ten: nothing is lost, however little there was to lose."""
    options = {"serving": {SNAP: 0.84}, "primary": (SNAP,), "estimands": ("alike",), "seeds": (1, 2, 3)}
    verdict = report_of(tmp_path, drops={("naive", "refusal"): -0.86}, **options).verdict
    found = {d.arm: d for d in verdict.decisions if d.gated}
    assert found["naive"].rates.reference < 0.05
    assert (found["naive"].status, found["naive"].recipe) == (Status.PASS, Status.PASS)
    assert (found["smd"].status, found["smd"].recipe) == (Status.NOT_MEASURABLE, Status.NOT_MEASURABLE)


def test_a_loss_that_is_shown_fails_at_the_floor_too(tmp_path):
    report = report_of(tmp_path, drops={("naive", "refusal"): 0.3}, policies=("none",), margins={"refusal": 95})
    [d] = [d for d in report.verdict.decisions if d.arm == "naive"]
    assert d.status is Status.NOT_MEASURABLE  # within so wide a margin, which says nothing at such a rate
    own = report.drift.answers["none"]
    nothing = tuple(dataclasses.replace(a, wanted=np.zeros_like(a.wanted), hits=0.0) for a in own)
    strict = dataclasses.replace(report.rules, margins={"refusal": 0.05})
    again = decide(dataclasses.replace(report.drift, answers={"none": nothing}), strict)
    assert {x.arm: x.status for x in again.decisions} == {"naive": Status.FAIL, "smd": Status.NOT_MEASURABLE}


def test_too_few_templates_for_the_margin_are_said_plainly(tmp_path):
    report = report_of(tmp_path, suites=("math",), items=288, clusters=72, policies=("none",))
    words = "needs 99 templates for 3 pp, the run has 72: add templates"
    verdict = report.verdict
    assert f"math {words}." in run_banner(report).lines
    open_cells = [d for d in verdict.decisions if d.gated and d.larger]
    assert open_cells
    assert all(decision_note(d).endswith(words) for d in open_cells)


@pytest.mark.parametrize(
    ("flipped", "words"),
    [(0.12, Larger.TWICE), (0.3, Larger.TEN_TIMES), (1.0, Larger.NEVER)],
    ids=str,
)
def test_an_open_cell_says_how_many_more_templates_would_pass_without_a_drift(flipped, words):
    """A share of 72 templates differs in one of two items, half of them for the better."""
    flips = round(72 * flipped / 2)
    sums = np.array([-1.0] * flips + [1.0] * flips + [0.0] * (72 - 2 * flips))
    z = np.stack([sums, np.zeros(72)], axis=1).ravel()
    clusters = np.arange(144) // 2
    effect = ess_tango(z, clusters)
    own = ClusterSums("refusal", 1.0, tuple(map(str, range(72))), sums, np.full(72, 2.0))
    c = Contrast("alike", "smd", "none", "refusal", 192, effect, None, (1,), (), None, None, (), sums=(own,))
    assert larger_run(c, 0.05 if flipped < 1 else 0.03, 1) is words


def test_serving_runs_gate_each_policy_against_none(tmp_path):
    ruin = policy("streaming", 64)
    design = {"arms": ("base",), "train": False, "policies": ("none", ruin, SNAP), "serving": {ruin: 0.4}}
    verdict = report_of(tmp_path, **design).verdict
    assert {(d.policy, d.status) for d in verdict.decisions} == {(ruin, Status.FAIL), (SNAP, Status.PASS)}
    assert verdict.recipe is None


def test_three_seeds_give_a_recipe_verdict_and_two_do_not(tmp_path):
    more = {"arms": ("dense", "smd"), "policies": ("none",)}
    three = report_of(tmp_path / "a", seeds=(1, 2, 3), **more).verdict
    two = report_of(tmp_path / "b", seeds=(1, 2), **more).verdict
    assert three.recipe is not None
    assert all(d.recipe for d in three.decisions)
    assert two.recipe is None


def test_a_run_wide_reason_makes_the_verdict_invalid(tmp_path):
    report = report_of(tmp_path)
    assert report.drift.reasons == ()
    from kvaudit.reports.verdict.contrast import Reason

    verdict = redecided(report, reasons=(Reason("HASH", "two weights"),))
    assert (verdict.status, verdict.exit_code) == (Status.INVALID, 5)


def test_nothing_to_compare_is_invalid(tmp_path):
    verdict = report_of(tmp_path, arms=("base",), train=False, policies=("none",)).verdict
    assert verdict.status is Status.INVALID
    assert [r.code for r in verdict.reasons] == ["NOTHING"]
    assert verdict.headline is None


def test_a_suite_without_a_margin_is_invalid(tmp_path):
    verdict = report_of(tmp_path, suites=("poetry",)).verdict
    assert {r.code for d in verdict.decisions for r in d.reasons} == {"NOMARGIN"}
    assert verdict.status is Status.INVALID


def test_fewer_templates_than_a_pass_takes_are_never_twice_enough(tmp_path):
    verdict = report_of(tmp_path, items=120, clusters=24).verdict
    found = [d for d in verdict.decisions if d.gated and d.effect.estimate > -0.05]
    assert found
    assert {d.status for d in found} == {Status.INCONCLUSIVE}
    assert {d.larger for d in found} <= {Larger.TEN_TIMES, Larger.NEVER}


def unscored(tmp_path, share, arm="naive"):
    """A run in which a share of one arm's answers was not graded."""
    run = build(tmp_path / "run", Design(**UNSCORED))
    for unit, rows in records_of(Design(**UNSCORED)):
        if rows[0].arm == arm:
            for i in range(round(share * len(rows))):
                rows[i] = dataclasses.replace(rows[i], outcome=Outcome.UNSCORED, score=None)
            write_unit(run / "records" / f"{unit}.jsonl", "".join(row.to_json() + "\n" for row in rows))
    return decide_run(load_run(run))


UNSCORED = {
    "arms": ("dense", "naive"),
    "seeds": (1,),
    "policies": ("none",),
    "suites": ("refusal",),
    "items": 600,
    "clusters": 100,
    "seed_sd": 0.0,
}


def test_unscored_answers_are_bounded_beside_the_number(tmp_path):
    report = unscored(tmp_path, 0.01)  # 6 of 600: the most that is allowed
    verdict = report.verdict
    head = verdict.decisions[verdict.headline]
    assert head.worst == pytest.approx(head.effect.estimate)
    assert head.best == pytest.approx(head.effect.estimate + 0.01)
    [line] = [line for line in run_banner(report).lines if line.startswith("Unscored answers")]
    assert f"all counted for it {100 * head.best:+.1f} pp" in line


def test_more_than_one_percent_unscored_is_invalid_and_says_how_far_apart_the_cells_are(tmp_path):
    report = unscored(tmp_path, 0.02)
    verdict = report.verdict
    assert (verdict.status, verdict.exit_code) == (Status.INVALID, 5)
    [reason] = [r for d in verdict.decisions if d.gated for r in d.reasons]
    assert reason.code == "MISSING"
    assert reason.text == "2.0% of the samples of a cell are unscored, 2.0 pp more than of another; the limit is 1 %"


def test_the_blind_spot_is_printed_whatever_the_verdict(tmp_path):
    for report in (unscored(tmp_path / "a", 0.02), unscored(tmp_path / "b", 0.0)):
        lines = cautions(report, report.verdict.head)
        assert sum("Blind spot: a failure confined to 3.0 % of the templates" in line for line in lines) == 1


def test_uneven_templates_leave_a_larger_blind_spot(tmp_path):
    """60 templates of 1 item and 20 of 3: 120^2 / (60 + 180) = 60 say as much."""
    from kvaudit.reports.verdict.contrast import ClusterSums

    report = report_of(tmp_path, items=160, clusters=80, policies=("none",))
    counts = np.array([1.0] * 60 + [3.0] * 20)
    uneven = (ClusterSums("refusal", 1.0, tuple(map(str, range(80))), np.zeros(80), counts),)
    contrasts = tuple(dataclasses.replace(c, sums=uneven) for c in report.drift.contrasts)
    verdict = decide(dataclasses.replace(report.drift, contrasts=contrasts), report.rules)
    assert verdict.decisions[0].blind_spot == pytest.approx(1 - 0.05 ** (1 / 60))
    assert report.verdict.decisions[0].blind_spot == pytest.approx(1 - 0.05 ** (1 / 80))
    assert effective_clusters(counts) == 60


def test_a_pvalue_at_its_floor_says_so(tmp_path):
    report = report_of(tmp_path, drops={("naive", "refusal"): 0.3}, policies=("none",))
    verdict = report.verdict
    assert min(d.pvalue_drop for d in verdict.decisions) == verdict.adjustment.floor == 1e-4
    assert "<= 0.0001" in [row[-2] for row in gate_table(report, report.verdict.decisions, gated=True).rows]
