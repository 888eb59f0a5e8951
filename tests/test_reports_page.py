"""The words of a page: what a verdict says of its size, what is deployed, whose family a p-value is of."""

import re
from dataclasses import replace

import pytest
from reports_synthetic import Design, build, policy

from kvaudit.reports.page import plots
from kvaudit.reports.page.banner import banner_lines, describe_cell, to_do, verdict_sentence
from kvaudit.reports.page.remarks import cautions
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.tables import gate_notes, gate_table, ungated_notes, verdict_table
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.shared.canvas import figure_style
from kvaudit.reports.sections.shared.tables import footnoted
from kvaudit.reports.sections.shared.words import blind_spot_text, decision_note, rates_text
from kvaudit.reports.verdict.contrast import Rates
from kvaudit.reports.verdict.reasons import Reason, ReasonCode
from kvaudit.reports.verdict.verdict import Status

SNAP = policy("snapkv", 96)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """naive loses 30 pp, and compression takes 40 pp from every arm; only alike is gated."""
    design = Design(
        arms=("dense", "naive", "smd"),
        seeds=(1,),
        policies=("none", SNAP),
        suites=("refusal",),
        items=320,
        clusters=80,
        seed_sd=0.0,
        drops={("naive", "refusal"): 0.3},
        serving={SNAP: 0.4},
        estimands=("alike",),
    )
    return decide_run(load_run(build(tmp_path_factory.mktemp("page") / "run", design)))


def changed(found, **numbers):
    """The same findings with these numbers in every effect."""
    decisions = tuple(replace(d, effect=replace(d.effect, **numbers)) for d in found.verdict.decisions)
    return replace(found, verdict=replace(found.verdict, decisions=decisions))


def test_fail_says_whether_the_drop_is_shown_to_be_beyond_the_margin(found):
    counts = {
        -0.0501: "2 of 4 gated cells: shown to exceed it in 2, size open in none.",
        -0.0499: "2 of 4 gated cells: shown to exceed it in none, size open in 2.",
    }
    for upper, said in counts.items():
        assert verdict_sentence(changed(found, upper=upper).verdict).endswith(said)


def test_a_failing_cell_says_the_same_in_its_note(found):
    [text] = {decision_note(d) for d in found.verdict.decisions if d.gated and d.status is Status.FAIL}
    assert text.startswith("LOSS: regression detected")


def test_the_headline_is_the_most_extreme_of_its_family(found):
    assert "It is the most extreme of 4 gated cells:" in describe_cell(found, found.verdict.head)
    alone = replace(found.verdict, decisions=(found.verdict.head,), headline=0)
    assert describe_cell(replace(found, verdict=alone), alone.head).endswith("It is the only gated cell.")


def test_the_worst_deployed_contrast_stands_in_what_is_decided(found):
    table = verdict_table(found)
    assert table.headers[-1] == "worst as deployed, not gated"
    worst = min((d for d in found.verdict.decisions if d.estimand == "deployed"), key=lambda d: d.effect.lower)
    assert (worst.gated, worst.effect.estimate < -0.5) == (False, True)
    [row] = [row for row in table.rows if row[0] == worst.arm]
    assert row[-1].startswith(f"refusal @ snapkv 96: {100 * worst.effect.estimate:.1f} pp [")
    assert row[-1].endswith("FAIL")
    [line] = [
        line for line in banner_lines(found, found.verdict.head) if line.startswith("As deployed, the worst of 2 cells")
    ]
    assert "naive @ snapkv 96 against uncompressed dense" in line
    assert line.endswith("By the same rule FAIL, but it is not gated.")


def test_a_gated_deployed_contrast_is_not_called_ungated(found):
    every = tuple(replace(d, gated=True) for d in found.verdict.decisions)
    gated = replace(found, verdict=replace(found.verdict, decisions=every))
    assert verdict_table(gated).headers[-1] == "worst as deployed"
    assert any(line.endswith("It is gated: FAIL.") for line in banner_lines(gated, found.verdict.head))


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (
            {"naive": Status.FAIL, "smd": Status.PASS},
            "hold back naive (FAIL); this gate does not hold back smd (PASS).",
        ),
        (
            {"naive": Status.INCONCLUSIVE, "smd": Status.INCONCLUSIVE},
            "do not clear naive, smd yet (INCONCLUSIVE): size the next run with kvaudit plan.",
        ),
        ({"naive": Status.INVALID, "smd": Status.PASS}, "fix the records of naive (INVALID); this gate does not"),
    ],
)
def test_what_to_do_names_every_arm_by_its_verdict(found, statuses, said):
    arms = tuple(replace(arm, status=statuses[arm.arm]) for arm in found.verdict.arms)
    assert to_do(replace(found, verdict=replace(found.verdict, arms=arms))).startswith(f"What to do: {said}")


@pytest.mark.parametrize(
    ("reference", "candidate", "said"),
    [
        (0.144, 0.100, "14.4 to 10.0 % (-31 % of it)"),
        (0.144, 0.238, "14.4 to 23.8 %"),  # a gain is none of it lost
        (0.160, 0.100, "16.0 to 10.0 %"),  # more than three margins
        (0.0, 0.0, "0.0 to 0.0 %"),
    ],
)
def test_a_loss_near_the_floor_is_also_given_as_a_share(found, reference, candidate, said):
    d = replace(found.verdict.head, rates=Rates(reference, candidate), margin=0.05)
    assert rates_text(found.comparison, d) == said
    assert (f"Rates: {said}." in describe_cell(found, d)) == ("of it" in said)


def test_each_pvalue_names_its_own_family(found):
    assert any("adjusted over the 4 gated cells" in line for line in gate_notes(found))
    [line] = ungated_notes(found)
    assert "adjusted over the 2 cells of this table, separately from the gated cells" in line
    shown = {section.anchor: section.notes for section in page_of(found).sections}
    assert shown["beside"] == (line,)


def test_the_blind_spot_has_a_level_and_counts_uneven_templates_as_fewer():
    assert blind_spot_text(1 - 0.05 ** (1 / 72), 0.05, 72) == (
        "Blind spot: a failure confined to 4.1 % of the templates goes unsampled with probability 5 %, a smaller one "
        "more often."
    )
    assert blind_spot_text(1 - 0.05 ** (1 / 51), 0.05, 72).endswith("(72 templates of uneven size count as 51).")


def test_the_limits_are_folded_under_their_blind_spot(found):
    [limits] = [section for section in page_of(found).sections if section.anchor == "limits"]
    assert limits.finding == limits.notes[0] == cautions(found, found.verdict.head)[0]


def test_notes_that_repeat_are_one_footnote():
    table = footnoted(["a", "note"], [["1", "late"], ["2", ""], ["3", "late"], ["4", "early"]])
    assert [row[-1] for row in table.rows] == ["1", "", "1", "2"]
    assert table.footnotes == ("late", "early")


def test_no_design_effect_stands_beside_the_gate(found):
    """It would be the averaging over seeds and samples, not the templates."""
    assert not any("deff" in header for header in gate_table(found, found.verdict.decisions, gated=True).headers)


def test_a_cell_that_fails_by_one_seed_is_not_called_worse_on_average(found):
    one = tuple(
        replace(d, reasons=(Reason(ReasonCode.SEED, "fails by itself: seed 2"),)) if d.policy == SNAP else d
        for d in found.verdict.decisions
    )
    assert verdict_sentence(replace(found.verdict, decisions=one)).endswith(
        "shown to exceed it in 1, size open in none, one seed alone fails in 1."
    )


def test_what_stands_beside_the_gate_is_called_by_what_it_compares(found):
    [shown] = [section for section in page_of(found).sections if section.anchor == "beside"]
    assert shown.finding == "2 cells as deployed: 2 FAIL."
    assert shown.explain.startswith("The candidate compressed, the reference not:")
    assert "against" not in shown.tables[0].headers, "it would be the same in every row"


def test_cells_of_one_arm_share_one_panel_of_the_forest(found):
    """Two files compared have one row in each suite: side by side in panels, they would not be compared by eye."""
    suites = [replace(found.verdict.head, suite=name) for name in ("refusal", "agent", "math")]

    def titles(decisions):
        with figure_style():
            svg = plots.draw_forest(replace(found, verdict=replace(found.verdict, decisions=tuple(decisions)))).svg
        return svg.count("drift, pp (margin 5)")

    assert titles(suites) == 1
    assert titles([*suites, replace(suites[0], arm="smd")]) == 3


def test_the_long_name_of_an_arm_leaves_the_forest_its_panel(found):
    head = found.verdict.head

    def width(arm):
        rows = tuple(replace(head, arm=name) for name in (arm, "smd"))
        with figure_style():
            svg = plots.draw_forest(replace(found, verdict=replace(found.verdict, decisions=rows))).svg
        return float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) / 72  # inches

    assert width("naive") == pytest.approx(2.1 + 2.7, abs=0.1)
    assert width("naive_int8-x2-or-snapkv-112-or-none") > 2.6 + 2.7


def test_a_checkpoint_is_decided_by_policy(tmp_path):
    ruin = policy("streaming", 64)
    design = {"arms": ("base",), "train": False, "policies": ("none", ruin, SNAP), "serving": {ruin: 0.4}}
    run = build(tmp_path / "run", Design(**design, suites=("refusal",), items=600, clusters=100, seed_sd=0.0))
    served = decide_run(load_run(run))
    table = verdict_table(served)
    assert table.headers == ("policy", "verdict", "refusal", "deciding cell")
    assert {row[0]: row[1] for row in table.rows} == {"streaming 64": "FAIL", "snapkv 96": "PASS"}
    assert to_do(served) == "What to do: hold back streaming 64 (FAIL); this gate does not hold back snapkv 96 (PASS)."
