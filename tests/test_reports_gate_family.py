"""The family of FAIL: max-T as its kernel has it, what cells share, when Holm stands in; worst, selectivity, parity."""

import dataclasses

import numpy as np
import pytest
from reports_synthetic import Design, build, loaded, policy, redecided, reruled
from scipy import stats

from kvaudit.reports.page.answers import answers, change_text
from kvaudit.reports.page.banner import describe_cell, verdict_sentence
from kvaudit.reports.page.disclosure import findings_of_arm
from kvaudit.reports.page.plots import draw_quadrant
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.tables import gate_table
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.shared.words import reference_of
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.signflip import holm, max_t_groups, studentised
from kvaudit.reports.verdict.contrast import ClusterSums
from kvaudit.reports.verdict.family import HOLM, MAX_T, FamilyRow, joint_family
from kvaudit.reports.verdict.verdict import Status

SNAP, STREAM = policy("snapkv", 96), policy("streaming", 64)


def report_of(tmp_path, **more):
    options = {
        "arms": ("dense", "naive", "smd"),
        "seeds": (1,),
        "policies": ("none", SNAP),
        "suites": ("refusal", "math"),
        "seed_sd": 0.0,
        "margins": {"refusal": 5, "math": 5},
    }
    design = Design(**{**options, "items": 300, "clusters": 100, **more})
    return decide_run(loaded(tmp_path / "run", design))


def row_of(report, z, clusters, *, suite="refusal", sign=1):
    """A test made of item differences z [N]."""
    some = next(c for c in report.drift.contrasts if c.effect)
    names, codes = np.unique(clusters, return_inverse=True)
    part = ClusterSums(suite, 1.0, tuple(names), np.bincount(codes, weights=z), np.bincount(codes).astype(float))
    return FamilyRow(dataclasses.replace(some, effect=cr3_effect(z, clusters), sums=(part,)), sign)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("plain"), drops={("naive", "refusal"): 0.12}, items=600)


def test_labels_of_people_decide_their_cell_by_holm_and_leave_every_other_as_it_was(plain):
    before = plain.verdict
    place = ("alike", "smd", "none", "math")

    def labelled(c):
        if (c.estimand, c.arm, c.policy, c.suite) != place:
            return c
        lost = dataclasses.replace(c.effect, estimate=-0.2, low=-0.3, high=-0.1, lower=-0.28, upper=-0.12)
        effect = dataclasses.replace(lost, pvalue_drop=1e-6)
        return dataclasses.replace(c, judged=c.effect, judged_sums=c.sums, effect=effect)

    after = redecided(plain, contrasts=tuple(map(labelled, plain.drift.contrasts)))
    pairs = [(d, e) for d, e in zip(before.decisions, after.decisions, strict=True) if d.gated]
    assert [e for d, e in pairs if e.judged is None] == [d for d, e in pairs if e.judged is None]
    assert any(0 < e.pvalue_drop != e.pvalue_holm < 1 for _, e in pairs if e.judged is None)
    [(judge, people)] = [(d, e) for d, e in pairs if e.judged]
    assert (people.estimand, people.arm, people.policy, people.suite) == place
    assert people.judged is judge.status is not Status.FAIL
    assert (people.status, people.adjusted_by) == (Status.FAIL, HOLM)
    tests = sum(d.gated for d in before.decisions)
    assert people.pvalue_drop == pytest.approx(max(1, tests - 1) * 1e-6, rel=0.5)
    assert after.adjustment.method == MAX_T


@pytest.mark.parametrize(
    ("shift", "recipe"), [(0.0, Status.PASS), (-0.2, Status.INCONCLUSIVE)], ids=["people agree", "people see a drop"]
)
def test_a_recipe_is_decided_only_where_people_and_judge_agree(tmp_path, shift, recipe):
    """Three seeds that lose nothing; human labels keep that, or take 20 points from it."""
    more = {"arms": ("dense", "smd"), "seeds": (11, 12, 13), "policies": ("none",), "suites": ("refusal",)}
    report = report_of(tmp_path, **more, estimands=("alike",), margins={"refusal": 5})
    assert report.verdict.recipe is Status.PASS

    def labelled(c):
        e = c.effect
        moved = {name: getattr(e, name) + shift for name in ("estimate", "low", "high", "lower", "upper")}
        p = 1e-6 if shift else e.pvalue_drop
        return dataclasses.replace(c, judged=e, effect=dataclasses.replace(e, **moved, pvalue_drop=p))

    found = redecided(report, contrasts=tuple(map(labelled, report.drift.contrasts)))
    assert found.status is (Status.FAIL if shift else Status.PASS)
    assert found.recipe is recipe


def test_exhaustive_flips_of_one_panel_are_those_of_the_kernel(plain):
    rng = np.random.default_rng(3)
    clusters = np.repeat([f"t{i:02d}" for i in range(10)], 7)
    z = rng.integers(-1, 2, size=(4, 70)) - np.array([0.5, 0.2, 0, 0])[:, None]
    family = joint_family([row_of(plain, row, clusters) for row in z])
    assert family.adjustment.method == MAX_T
    assert family.pvalues == pytest.approx(max_t_groups([(z, clusters)]).pvalues, abs=1e-12)
    assert family.adjustment.floor == pytest.approx(1 / 2**10)


def test_cells_that_are_one_and_the_same_cost_nothing(plain):
    rng = np.random.default_rng(4)
    clusters = np.repeat([f"t{i:02d}" for i in range(12)], 5)
    z = rng.normal(-0.4, 1, size=60)
    alone = joint_family([row_of(plain, z, clusters)])
    six = joint_family([row_of(plain, z, clusters) for _ in range(6)])
    assert six.pvalues == pytest.approx(alone.pvalues * 6)
    assert six.holm == pytest.approx([min(1, 6 * alone.holm[0])] * 6)


def test_suites_that_share_template_names_are_flipped_independently(plain):
    clusters = np.repeat([f"t{i:02d}" for i in range(8)], 4)
    z = np.random.default_rng(5).normal(-0.5, 1, size=32)
    shared = joint_family([row_of(plain, z, clusters), row_of(plain, z, clusters)])
    apart = joint_family([row_of(plain, z, clusters), row_of(plain, z, clusters, suite="math")])
    assert apart.pvalues[0] > 1.5 * shared.pvalues[0]


def test_a_template_at_two_lengths_has_one_sign(plain):
    clusters = np.repeat([f"t{i:02d}" for i in range(8)], 4)
    z = np.random.default_rng(6).normal(-0.5, 1, size=32)
    twice = np.concatenate([z, z])  # the other length holds every item twice: the same statistic
    both = joint_family([row_of(plain, z, clusters), row_of(plain, twice, np.concatenate([clusters, clusters]))])
    alone = joint_family([row_of(plain, z, clusters)])
    assert both.pvalues == pytest.approx(alone.pvalues * 2)


def test_a_gain_is_the_drop_of_the_mirror(plain):
    clusters = np.repeat([f"t{i:02d}" for i in range(9)], 4)
    z = np.random.default_rng(7).normal(0.4, 1, size=36)
    assert joint_family([row_of(plain, z, clusters, sign=-1)]).pvalues == pytest.approx(
        joint_family([row_of(plain, -z, clusters)]).pvalues
    )


def test_without_item_differences_the_family_is_holm_and_says_why(plain):
    bare = tuple(dataclasses.replace(c, sums=()) for c in plain.drift.contrasts)
    verdict = redecided(plain, contrasts=bare)
    said = remarks(dataclasses.replace(plain, verdict=verdict))
    gated = [d for d in verdict.decisions if d.gated]
    assert verdict.adjustment.method == HOLM
    assert {d.adjusted_by for d in gated} == {HOLM}
    assert [d.pvalue_drop for d in gated] == pytest.approx(holm([d.effect.pvalue_drop for d in gated]))
    assert any("Holm instead of max-T" in line for line in said)
    assert not any("Holm" in line for line in remarks(plain))


def test_max_t_keeps_the_level_of_cells_that_move_together_where_holm_loses_it(plain):
    clusters = np.repeat([f"t{i:02d}" for i in range(60)], 5)
    rng = np.random.default_rng(8)
    shared = rng.normal(-0.12, 1, size=300)
    rows = [row_of(plain, shared + 0.1 * rng.normal(size=300), clusters) for _ in range(6)]
    family = joint_family(rows)
    assert max(family.pvalues) < 0.05 < min(family.holm)


def test_the_lowest_cell_is_a_drop_where_it_lies_beyond_the_critical_value(plain):
    rng = np.random.default_rng(9)
    clusters = np.array([f"t{i:02d}" for i in range(60)])
    z, found = rng.normal(size=(8, 60)), []
    z -= z.mean(axis=1, keepdims=True)
    for drop in (0.3, 0.34, 0.36, 0.4):
        z[0] += -drop - z[0].mean()
        family = joint_family([row_of(plain, row, clusters) for row in z])
        found.append(-float(studentised(z[0], np.ones(60))) > family.adjustment.critical)
        assert found[-1] == (family.pvalues[0] < 0.05)
        assert 2.2 < family.adjustment.critical < 3  # one cell alone needs t_.95 = 1.67
    assert set(found) == {False, True}


def test_by_holm_the_critical_value_is_that_of_the_first_of_so_many_tests(plain):
    few = [row_of(plain, np.zeros(10), np.arange(10) // 2) for _ in range(4)]
    family = joint_family(few)
    assert family.adjustment.method == HOLM
    assert family.adjustment.critical == pytest.approx(float(stats.t.ppf(1 - 0.05 / 4, few[0].contrast.effect.df)))


def test_the_smallest_drop_that_is_found_is_found_four_times_in_five(plain):
    """Twelve cells of 72 templates; the drop is of one whose templates have a standard deviation of 1."""
    rng = np.random.default_rng(10)
    clusters = np.array([f"t{i:02d}" for i in range(72)])
    family = joint_family([row_of(plain, rng.normal(size=72), clusters) for _ in range(12)])
    error = 72**-0.5
    for quantile, low, high in ((family.adjustment.critical, 0.75, 0.85), (stats.t.ppf(0.95, 71), 0.35, 0.5)):
        drop = (quantile + stats.t.ppf(0.8, 71)) * error
        found = studentised(rng.normal(-drop, 1, (4000, 72)), np.ones(72)) < -family.adjustment.critical
        assert low < found.mean() < high


def find(verdict, estimand, **place):
    return [
        d
        for d in verdict.decisions
        if d.gated and d.estimand == estimand and all(getattr(d, k) == v for k, v in place.items())
    ]


def test_arms_that_were_served_uncompressed_alone_are_decided_so(tmp_path):
    verdict = report_of(tmp_path, policies=("none",), primary=(), drops={("naive", "refusal"): 0.3}).verdict
    assert (verdict.status, {d.policy for d in verdict.decisions}) == (Status.FAIL, {"none"})


def test_only_the_named_arms_decide_and_the_others_stand_beside(plain):
    verdict = reruled(plain, arms=("smd",), estimands=("alike", "worst", "parity", "selectivity")).verdict
    assert (plain.verdict.status, verdict.status) == (Status.FAIL, Status.PASS)
    assert {d.arm for d in verdict.decisions if d.gated} == {"smd"}
    assert {(d.arm, d.estimand) for d in verdict.decisions if not d.gated} >= {
        ("naive", "alike"),
        ("naive", "deployed"),
    }


def test_worst_policy_is_one_cell_per_arm_and_suite_and_fails_with_its_worst(tmp_path):
    every = ("none", SNAP, STREAM)
    report = report_of(tmp_path, estimands=("worst",), primary=("none",), policies=every)
    verdict = reruled(report, deployable=every).verdict
    cells = find(verdict, "worst")
    assert len(cells) == 4  # two arms, two suites
    singles = reruled(report, estimands=("alike",), primary=every).verdict
    for d in cells:
        parts = find(singles, "alike", arm=d.arm, suite=d.suite)
        assert d.policies == every
        assert d.effect.lower == min(p.effect.lower for p in parts if p.status == d.status)
        assert (d.status in (Status.PASS, Status.PASS_NOTED)) == all(
            p.status in (Status.PASS, Status.PASS_NOTED) for p in parts
        )


def one_policy_breaks(tmp_path):
    """Served under streaming, naive loses what dense keeps."""
    from reports_synthetic import records_of, write_unit

    run = build(tmp_path / "run", Design(**DEPLOYED))
    for unit, rows in records_of(Design(**{**DEPLOYED, "drops": {("naive", "refusal"): 0.3}})):
        if rows[0].arm == "naive" and rows[0].policy == STREAM:
            write_unit(run / "records" / f"{unit}.jsonl", "".join(row.to_json() + "\n" for row in rows))
    return decide_run(load_run(run))


DEPLOYED = {
    "arms": ("dense", "naive"),
    "seeds": (1,),
    "policies": ("none", SNAP, STREAM),
    "suites": ("refusal",),
    "seed_sd": 0.0,
    "items": 600,
    "clusters": 100,
    "estimands": ("worst",),
}


def test_worst_policy_names_the_policy_that_breaks(tmp_path):
    [d] = find(one_policy_breaks(tmp_path).verdict, "worst")
    assert (d.status, d.policy) == (Status.FAIL, STREAM)
    assert d.effect.estimate < -0.2


def selective(report):
    return [c for c in report.drift.contrasts if c.estimand == "selectivity"]


def test_selectivity_is_the_safety_drop_minus_the_capability_drop(tmp_path):
    report = report_of(
        tmp_path,
        estimands=("selectivity",),
        drops={("naive", "refusal"): 0.2, ("naive", "math"): 0.2},
        policies=("none",),
    )
    base = {(c.arm, c.suite): c.effect for c in report.drift.contrasts if c.estimand == "alike" and c.policy == "none"}
    assert len(selective(report)) == 2
    for c in selective(report):
        safety, capability = base[c.arm, "refusal"], base[c.arm, "math"]
        assert c.effect.estimate == pytest.approx(safety.estimate - capability.estimate, abs=1e-12)
        below = np.hypot(safety.estimate - safety.lower, capability.upper - capability.estimate)
        assert c.effect.lower == pytest.approx(c.effect.estimate - below, abs=1e-12)
    [naive] = find(report.verdict, "selectivity", arm="naive")
    assert naive.status is not Status.FAIL  # both fell alike
    assert min(naive.pvalue_drop, naive.pvalue_holm) > 0.05
    assert base["naive", "refusal"].upper < -0.05


def test_selectivity_fails_where_only_safety_fell(tmp_path):
    verdict = report_of(
        tmp_path, estimands=("selectivity",), drops={("naive", "refusal"): 0.25}, policies=("none",)
    ).verdict
    assert [d.status for d in find(verdict, "selectivity", arm="naive")] == [Status.FAIL]
    assert [d.status for d in find(verdict, "selectivity", arm="smd")] != [Status.FAIL]
    assert verdict.adjustment.method == MAX_T


def test_selectivity_of_two_equal_suites_has_the_variance_of_a_difference():
    from kvaudit.reports.verdict.selectivity import _pool, _Spread

    spread = _pool([_Spread(0.04, 59), _Spread(0.04, 59)])
    assert spread.variance == pytest.approx(0.08)
    assert spread.df == pytest.approx(118)


def test_parity_needs_both_sides(tmp_path):
    more = {"policies": ("none",), "items": 600}
    gains = report_of(tmp_path, estimands=("parity",), drops={("naive", "math"): -0.12}, **more)
    verdict = gains.verdict
    [naive], [smd] = find(verdict, "parity", arm="naive"), find(verdict, "parity", arm="smd")
    assert naive.suite == "math"
    assert naive.status is Status.FAIL  # a gain beyond the margin is no parity
    assert verdict_sentence(verdict).startswith("Changed, by a loss or gain that may exceed")
    assert verdict.decisions[verdict.headline] == naive  # its gain is further beyond the margin than any loss
    assert naive.reasons[0].text.startswith("gain detected")
    assert "non-inferior: shown, non-superior: FAIL" in naive.statement
    assert change_text(gains.comparison, naive).endswith(" of 600, limit +5, up to +12.9")
    assert smd.status is Status.PASS
    assert smd.statement == "parity within 5 pp, non-inferior: shown, non-superior: shown"
    assert change_text(gains.comparison, smd).endswith(" of 600, limit -5, up to -3.4")
    assert [answer.line for answer in answers(gains) if not answer.groups] == ["Not asked."] * 2
    assert not find(verdict, "parity", suite="refusal")


def test_a_facet_of_a_capability_suite_that_fails_is_no_failure_of_safety(tmp_path):
    facets = {"math": ("solved",), "refusal": ("unsafe",)}
    margins = {"math": 50, "math.solved": 1, "refusal": 50, "refusal.unsafe": 50}
    more = {"policies": ("none",), "arms": ("dense", "naive"), "facets": facets, "margins": margins}
    worse_at_maths = report_of(tmp_path, **more, drops={("naive", "math"): 0.2})
    [naive] = worse_at_maths.verdict.arms
    assert {suite for suite, status in naive.suites.items() if status is Status.FAIL} == {"math.solved"}
    page = page_of(worse_at_maths)
    [passage] = [section for section in page.sections if section.anchor == "parity"]
    assert passage.finding == "Capability passes and safety fails: in no arm."


def test_a_served_reference_is_compared_with_itself_uncompressed(tmp_path):
    more = {"arms": ("dense", "naive"), "primary": (SNAP,), "suites": ("refusal",), "margins": {"refusal": 5}}
    report = report_of(tmp_path, **more, estimands=("serving", "alike", "deployed"))
    table = gate_table(report, report.verdict.decisions, gated=True)
    assert [row[:2] for row in table.rows] == [
        ("dense @ snapkv 96", "dense @ none"),
        ("naive @ snapkv 96", "dense @ snapkv 96"),
        ("naive @ snapkv 96", "dense @ none"),
    ]
    described = [describe_cell(report, d).partition(":")[0] for d in report.verdict.gated]
    assert described[0] == "refusal at 192 tokens, dense served under snapkv 96 against the same model under none"
    assert [reference_of(report.comparison, d) for d in report.verdict.gated] == [
        ("dense", "none"),
        ("dense", SNAP),
        ("dense", "none"),
    ]


def test_no_corner_of_the_quadrant_is_shaded_for_suites_without_a_margin(plain):
    corner = "capability holds"
    assert corner in draw_quadrant(plain).svg
    rules = dataclasses.replace(plain.rules, margins={})
    assert corner not in draw_quadrant(dataclasses.replace(plain, rules=rules)).svg


def test_the_card_of_an_arm_quotes_the_cell_with_the_lowest_bound_as_the_run_does(plain):
    def nudged(d, estimate, lower):
        return dataclasses.replace(d, effect=dataclasses.replace(d.effect, estimate=estimate, lower=lower))

    cells = find(plain.verdict, "alike", arm="smd")
    assert len({d.status for d in cells}) == 1
    first, second, *others = cells
    decisions = (nudged(first, -0.04, -0.05), nudged(second, -0.03, -0.09), *(nudged(d, 0.0, -0.01) for d in others))
    found = dataclasses.replace(plain, verdict=dataclasses.replace(plain.verdict, decisions=decisions))
    assert findings_of_arm(found, "smd").verdict.head == decisions[1]


def test_estimands_have_margins_of_their_own(tmp_path):
    report = report_of(tmp_path, estimands=("selectivity", "parity"), policies=("none",))
    other = reruled(report, estimand_margins={"selectivity": 0.08, "parity": 0.02})
    margins = {d.estimand: d.margin for d in other.verdict.decisions if d.gated}
    assert margins == {"selectivity": 0.08, "parity": 0.02}
    default = {d.estimand: d.margin for d in report.verdict.decisions if d.gated}
    assert default == {"selectivity": 0.05, "parity": 0.05}  # parity: the suite's own


def test_a_test_that_two_cells_share_counts_once(plain):
    one = reruled(plain, estimands=("alike",))
    both = reruled(one, estimands=("alike", "worst"))
    before = {(d.arm, d.policy, d.suite): d.pvalue_drop for d in find(one.verdict, "alike")}
    after = {(d.arm, d.policy, d.suite): d.pvalue_drop for d in find(both.verdict, "alike")}
    assert before == after


def test_serving_runs_gate_worst_policy_selectivity_and_parity_of_the_change_from_none(tmp_path):
    design = {"arms": ("base",), "train": False, "policies": ("none", SNAP, STREAM), "serving": {STREAM: 0.4}}
    report = report_of(tmp_path, estimands=("worst", "selectivity", "parity"), **design)
    verdict = report.verdict
    [refusal], [math] = find(verdict, "worst", suite="refusal"), find(verdict, "worst", suite="math")
    assert (refusal.policies, refusal.policy, refusal.status) == ((SNAP, STREAM), STREAM, Status.FAIL)
    assert math.status is Status.FAIL
    assert {d.policy: d.status for d in find(verdict, "parity")} == {SNAP: Status.PASS, STREAM: Status.FAIL}
    assert {d.policy for d in find(verdict, "selectivity")} == {SNAP, STREAM}
    assert Status.FAIL not in {d.status for d in find(verdict, "selectivity")}  # both suites fall alike
    assert not find(verdict, "serving")


def test_selectivity_without_a_number_in_one_suite_is_invalid_and_names_it(tmp_path):
    report = report_of(tmp_path, estimands=("selectivity",), policies=("none",), clusters=5, items=50)
    verdict = report.verdict
    assert verdict.status is Status.INVALID
    assert {r.code for d in find(verdict, "selectivity") for r in d.reasons} == {"FEW_CLUSTERS"}
    assert {r.text.partition(":")[0] for d in find(verdict, "selectivity") for r in d.reasons} == {"refusal", "math"}


def test_estimands_of_capability_need_suites_of_both_kinds(tmp_path):
    from kvaudit.core.errors import SpecError

    for estimand, suites in (("selectivity", ("refusal",)), ("selectivity", ("math",)), ("parity", ("refusal",))):
        with pytest.raises(SpecError, match=f"gate.estimands names {estimand}, but no suite"):
            report_of(tmp_path / suites[0], estimands=(estimand,), suites=suites, margins={suites[0]: 5}, items=12)
