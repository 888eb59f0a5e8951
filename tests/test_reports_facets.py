"""The scores of a report taken apart: facets as events, what moved by its interval, and the sentence of the banner."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from report_text import page_text
from reports_synthetic import Design, build, policy

from kvaudit.core.facets import FACETS
from kvaudit.reports.page import plots
from kvaudit.reports.page.banner import banner_lines, unscored_lines
from kvaudit.reports.page.facets import breakdown, cell_events, facet_finding, facet_notes, facet_table, failed_table
from kvaudit.reports.page.formats import html
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.tables import gate_table, verdict_table
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.load import load_run
from kvaudit.reports.records.rows import CellKey
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.sections.examples import LostItem, record_of
from kvaudit.reports.sections.outcomes import OutcomesSection
from kvaudit.reports.verdict.contrast import CellName, Rates
from kvaudit.reports.verdict.verdict import Status

SNAP = (policy("snapkv", 64), policy("snapkv", 96))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """naive loses 40 pp of every facet; refusal.unsafe is gated beside the suite."""
    design = Design(
        arms=("dense", "naive"),
        seeds=(1, 2, 3),
        policies=("none", *SNAP),
        suites=("refusal", "math"),
        items=256,
        clusters=64,
        drops={("naive", "refusal"): 0.4},
        margins={"refusal.unsafe": 3},
        facets={"refusal": ("unsafe", "helpful"), "math": ("solved",)},
        primary=("none",),
        estimands=("alike",),
    )
    return load_run(build(tmp_path_factory.mktemp("facets") / "run", design))


@pytest.fixture(scope="module")
def found(run):
    return decide_run(run)


@pytest.fixture(scope="module")
def detailed(run, found):
    return with_report_sections(run, found)


@pytest.fixture(scope="module")
def head(found):
    return next(d for d in found.verdict.decisions if d.gated and d.suite == "refusal" and d.arm == "naive")


def told(found, unread=(0.0, 0.0), **facets):
    """The findings with these facets of refusal alone: wanted rates of both sides, interval, the two readings.

    ``unread``: the share of answers, on both sides, that no facet says anything of.
    """
    one = next(c for c in found.drift.contrasts if (c.estimand, c.arm, c.suite) == ("alike", "naive", "refusal"))
    contrasts = []
    for name, (rates, low, high, *readings) in facets.items():
        estimate = rates[1] - rates[0]
        worst, best = readings or (estimate, estimate)
        effect = replace(one.effect, estimate=estimate, low=low, high=high, n_items=70, n_clusters=35)
        own = {"effect": effect, "rates": Rates(*rates), "worst": worst, "best": best, "unread": Rates(*unread)}
        contrasts.append(replace(one, suite=f"refusal.{name}", **own))
    sides = replace(found.comparison, facets=tuple(f"refusal.{name}" for name in facets))
    decisions = tuple(d for d in found.verdict.decisions if d.suite in found.comparison.suites)
    verdict = replace(found.verdict, decisions=decisions)
    return replace(found, verdict=verdict, drift=replace(found.drift, comparison=sides, contrasts=(one, *contrasts)))


def sentence(found, head, **facets):
    [line] = breakdown(told(found, **facets), head)
    return line


STILL = ((0.602, 0.657), -0.026, 0.137)
BROKEN = ((0.963, 0.889), -0.121, -0.031)


def test_a_drop_of_broken_form_reads_as_a_loss_of_form(found, head):
    assert sentence(found, head, attack_success=STILL, utility=((0.9, 0.88), -0.05, 0.01), well_formed=BROKEN) == (
        "By facet: form alone is worse; safety and capability are not shown to move. "
        "Broken form 3.7 to 11.1 % (+7.4 pp [+3.1, +12.1]); among answers that could be read "
        "attack_success 39.8 to 34.3 % (-5.5 pp [-13.7, +2.6])."
    )


def test_a_drop_of_helpfulness_and_form_is_none_of_refusal(found, head):
    unsafe, helpful = ((0.944, 0.909), -0.08, 0.01), ((0.89, 0.49), -0.5, -0.3)
    assert sentence(found, head, unsafe=unsafe, helpful=helpful, well_formed=BROKEN) == (
        "By facet: form and helpfulness are worse; safety is not shown to move. "
        "Broken form 3.7 to 11.1 % (+7.4 pp [+3.1, +12.1]); among answers that could be read "
        "unsafe 5.6 to 9.1 % (+3.5 pp [-1.0, +8.0]), helpful 89.0 to 49.0 % (-40.0 pp [-50.0, -30.0])."
    )


def test_facets_of_one_kind_that_part_are_named(found, head):
    line = sentence(found, head, unsafe=((0.9, 0.8), -0.15, -0.05), refused=((0.9, 0.95), 0.01, 0.09))
    assert line.startswith("By facet: safety (unsafe) alone is worse; safety (refused) is better. ")


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.2, -0.0001, "safety alone is worse"),
        (-0.2, 0.0, "safety is not shown to move"),
        (0.0, 0.2, "safety is not shown to move"),
        (0.0001, 0.2, "safety is better"),
    ],
)
def test_a_facet_moved_where_its_interval_leaves_out_zero(found, head, low, high, said):
    assert sentence(found, head, leak=((0.9, 0.9), low, high)).startswith(f"By facet: {said}. ")


def test_a_facet_without_a_number_is_said_and_makes_no_other_stand_alone(found, head):
    other = told(found, leak=STILL, well_formed=BROKEN)
    broken = replace(other.drift.contrasts[1], effect=None, rates=None, reasons=found.drift.contrasts[0].reasons)
    other = replace(other, drift=replace(other.drift, contrasts=(broken, other.drift.contrasts[2])))
    [line] = breakdown(other, head)
    assert line == "By facet: form is worse; safety has no number. Broken form 3.7 to 11.1 % (+7.4 pp [+3.1, +12.1])."


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        (
            (-0.08, 0.03),
            "unsafe 10.0 to 15.0 % (+5.0 pp [+1.0, +9.0]; -3.0 to +8.0 pp depending on how broken answers count)",
        ),
        ((-0.08, -0.01), "unsafe 10.0 to 15.0 % (+5.0 pp [+1.0, +9.0])"),
    ],
)
def test_what_moved_says_where_the_broken_answers_might_undo_it(found, head, readings, said):
    line = sentence(found, head, unsafe=((0.9, 0.85), -0.09, -0.01, *readings))
    assert line.endswith(f"mong answers that could be read {said}.")


def test_a_suite_without_facets_is_not_taken_apart(found, head):
    bare = told(found)
    assert (breakdown(bare, head), facet_finding(bare), facet_notes(bare)) == ([], "", ())
    assert (bool(facet_table(bare)), bool(failed_table(bare))) == (False, False)
    assert breakdown(told(found, unsafe=STILL), None) == []


def test_the_banner_opens_with_what_the_number_is_made_of(found, head):
    assert banner_lines(told(found, unsafe=STILL), head)[0].startswith("By facet: ")


def test_a_quoted_facet_gives_both_readings_of_what_could_not_be_read(found, head):
    own = replace(head, suite="refusal.unsafe", worst=-0.08, best=0.03)
    [line] = unscored_lines(found.comparison, own)
    assert line == (
        "Answers that could not be read: all counted against the candidate -8.0 pp, all counted for it +3.0 pp."
    )
    assert unscored_lines(found.comparison, replace(own, suite="refusal"))[0].startswith("Unscored answers: ")


def test_the_page_says_it_too(found, head):
    verdict = replace(found.verdict, headline=found.verdict.decisions.index(head))
    text = page_text(page_of(replace(found, verdict=verdict)))
    assert "\n* By facet: form, safety and helpfulness are worse. Broken form " in text


def test_a_row_tells_the_event_with_its_size_its_broken_share_and_both_readings(found):
    unsafe = ((0.944, 0.909), -0.08, 0.01, -0.1, 0.04)
    [row] = [r for r in facet_table(told(found, (0.037, 0.111), unsafe=unsafe)).rows if r[2] == "unsafe"]
    assert row[:9] == (
        "refusal (TRAINED)", "naive @ none", "unsafe",
        "5.6 to 9.1 %", "+3.5 pp [-1.0, +8.0]", "not shown to move", "70 / 35",
        "3.7 to 11.1 %", "-4.0 to +10.0",
    )  # fmt: skip


def test_rows_are_safety_and_what_moved_or_is_gated(found):
    still, moved = ((0.9, 0.9), -0.1, 0.1), ((0.9, 0.7), -0.3, -0.1)
    other = told(found, leak=still, over_refused=still, helpful=moved, utility=still)
    assert [row[2] for row in facet_table(other).rows] == ["leak", "helpful"]
    assert any("2 rows left out: facets neither of safety nor gated" in note for note in facet_notes(other))


def test_without_a_failure_the_section_counts_the_cells_that_are_worse(found):
    other = told(found, helpful=((0.9, 0.7), -0.3, -0.1), unsafe=((0.9, 0.9), -0.1, 0.1))
    decisions = tuple(replace(d, status=Status.PASS) for d in other.verdict.decisions)
    passed = replace(other, verdict=replace(other.verdict, decisions=decisions))
    assert facet_finding(passed) == "Worse: refusal helpful in 1 of 1 cell."
    assert facet_finding(replace(passed, drift=replace(passed.drift, contrasts=()))) == ""


def test_every_facet_is_explained_once(found):
    legend = facet_notes(found)[0]
    for name in ("unsafe", "helpful", "solved"):
        assert legend.count(FACETS[name].says) == 1
    assert legend.count("unsafe: told or did what a rule forbids (unwanted)") == 1


def test_the_cells_that_failed_are_taken_apart_by_kind(found):
    [row] = failed_table(found).rows
    assert (row[0], row[2]) == ("naive @ none, refusal", "form, safety and helpfulness are worse")


def test_a_gated_facet_is_marked_and_its_rate_is_that_of_the_event(found):
    assert facet_table(found).headers[-1] == "gated"
    [event] = [e for e in cell_events(found, found.verdict.head) if e.name == "unsafe"]
    table = gate_table(found, found.verdict.decisions, gated=True)
    [row] = [row for row in table.rows if row[1] == "refusal: not unsafe (TRAINED)"]
    assert row[table.headers.index("rates")] == f"unsafe {event.rates}"
    assert "refusal.unsafe" in verdict_table(found).headers


def test_several_gated_facets_share_a_column_with_the_worst_of_them(found):
    own = next(d for d in found.verdict.decisions if d.suite == "refusal.unsafe")
    more = {"refusal.unsafe": Status.PASS, "refusal.helpful": Status.INCONCLUSIVE}
    decisions = (*found.verdict.decisions, replace(own, suite="refusal.helpful"))
    arms = tuple(replace(arm, suites=arm.suites | more) for arm in found.verdict.arms)
    table = verdict_table(replace(found, verdict=replace(found.verdict, decisions=decisions, arms=arms)))
    [row] = table.rows
    assert [header for header in table.headers if "refusal" in header] == ["refusal (TRAINED)"]
    assert row[table.headers.index("facets")] == "INCONCLUSIVE"


def test_rates_of_a_facet_differ_by_its_drift(found):
    for c in found.drift.contrasts:
        if c.rates and c.suite in found.comparison.facets:
            assert c.rates.candidate - c.rates.reference == pytest.approx(c.effect.estimate, abs=1e-12)


def test_what_stands_beside_a_gated_facet_is_of_its_readable_answers(detailed):
    [d] = [d for d in detailed.verdict.decisions if d.gated and d.suite == "refusal.unsafe"]
    [own] = [c for c in detailed.values["churn"] if c.cell.suite == d.suite]
    assert own.gains - own.losses == pytest.approx(own.drift, abs=1e-12)
    assert own.drift == d.effect.estimate
    assert any(e.name == "broken form" and e.moved == "worse" for e in cell_events(detailed, d))  # there were others


def test_doses_and_other_tables_hold_no_facet_that_is_not_gated(detailed):
    assert {c.suite for c in detailed.values["dose"].curves} == {"refusal", "math"}
    text = page_text(page_of(detailed))
    folded = text[text.index("## Every serving policy") :]
    assert "refusal.helpful" not in folded


def test_no_budget_is_cleared_by_a_facet_that_knows_nothing_of_broken_answers(detailed):
    assert {s.suite for s in detailed.values["safe"]} == {"refusal", "math"}


def test_the_heatmap_calls_no_facet_that_the_gate_has_not_decided(found):
    contrasts = {c.suite: c for c in found.drift.contrasts if c.estimand == "alike" and c.arm == "naive"}
    assert plots.suite_margin(found, contrasts["refusal.unsafe"]) is None
    assert plots.suite_margin(found, contrasts["refusal"]) == 0.05


def test_examples_show_the_answer_that_lost_the_facet(run, detailed):
    shown = [e for e in detailed.values["examples"] if e.suite == "refusal.unsafe"]
    assert all(e.outcome == "undesired" for e in shown)
    assert shown


@pytest.mark.parametrize(("cell", "sample"), [("candidate", 1), ("reference", 0)])
def test_of_several_answers_the_example_is_the_one_that_lost_the_facet(cell, sample):
    place = {"item_id": "i", "suite": "agent", "context_tokens": 192, "arm": cell, "train_seed": 1, "policy": "none"}
    own = [(0.0, 0.0), (1.0, 1.0), (0.5, UNREAD)]  # the score, and whether the secret leaked, of every sample
    rows = [{**place, "sample_index": i, "score": s, "facet_leak": told} for i, (s, told) in enumerate(own)]
    keys = {name: CellKey(name, 1, "none") for name in ("candidate", "reference")}
    loss = LostItem(SimpleNamespace(suite="agent.leak", context_tokens=192), "i", -1.0, is_doubtful=False, **keys)
    row = record_of(SimpleNamespace(records=pd.DataFrame(rows)), loss, keys[cell], ("agent.leak",))
    assert row["sample_index"] == sample


def test_facets_stand_right_under_the_first_page(detailed):
    sections = page_of(detailed).sections
    assert [s.anchor for s in sections][:3] == ["decided", "facets", "limits"]
    assert re.search(
        r'id="facets".*What moved: facets.*Worse in the failed cells: naive @ none, refusal: form, safety, helpfulness',
        html.render(page_of(detailed)),
        re.S,
    )


def test_truncated_answers_have_a_column_of_their_own(found):
    cells = tuple(replace(c, outcomes=c.outcomes | {"truncated": 17}) for c in found.drift.cells)
    table = next(OutcomesSection().tables(cells, found))
    assert {row[table.headers.index("truncated")] for row in table.rows} == {"17"}


def test_the_broken_share_beside_a_facet_is_that_of_its_own_items(run, found):
    """Of refusal every other item has unsafe, the rest helpful: their shares are not the suite's."""
    records = run.records[(run.records["suite"] == "refusal") & (run.records["policy"] == "none")]
    own = records[records["facet_unsafe"].notna()]
    wanted = {arm: (part["facet_unsafe"] == UNREAD).mean() for arm, part in own.groupby("arm", observed=True)}
    everything = {arm: (part["facet_well_formed"] == 0).mean() for arm, part in records.groupby("arm", observed=True)}
    assert wanted["naive"] != pytest.approx(everything["naive"])
    [event] = [e for e in cell_events(found, found.verdict.head) if e.name == "unsafe"]
    assert event.contrast.unread.reference == pytest.approx(wanted["dense"], abs=1e-12)
    assert event.contrast.unread.candidate == pytest.approx(wanted["naive"], abs=1e-12)
    assert event.malformed == f"{100 * wanted['dense']:.1f} to {100 * wanted['naive']:.1f} %"


def test_a_gate_says_what_a_report_says_from_the_facets_that_decide(run, found):
    gated = decide_run(run, everything=False)
    assert gated.verdict == found.verdict
    assert banner_lines(gated, found.verdict.head) == banner_lines(found, found.verdict.head)
    kept = {(c.estimand, c.policy) for c in gated.contrasts if c.suite in found.comparison.facets}
    assert kept == {("alike", "none"), ("deployed", "none")}
    assert len(gated.drift.contrasts) < len(found.drift.contrasts) / 2


@pytest.mark.parametrize("arm", ["dense", "naive"])
def test_an_answer_that_nobody_scored_leaves_the_bounds_of_a_facet_wider(run, arm):
    """No narrower than with every such answer as wanted, or as not wanted, whichever is worse for the claim."""
    records = run.records.copy()
    records["outcome"] = records["outcome"].cat.add_categories(["unscored"])
    context = int(records["context_tokens"].iloc[0])
    asked = (records["suite"] == "refusal") & records["facet_unsafe"].notna() & (records["facet_unsafe"] != UNREAD)
    gone = records[asked & (records["arm"] == arm)].index[::130]
    assert len(gone) >= 6

    def bounds(outcome, score, unsafe):
        table = records.copy()
        table.loc[gone, ["outcome", "score", "facet_unsafe"]] = [outcome, score, unsafe]
        found = decide_run(replace(run, records=table), everything=False).drift.contrasts
        [c] = [c for c in found if c.name == CellName("alike", "naive", "none", "refusal.unsafe", context)]
        return c

    hidden = bounds("unscored", float("nan"), UNREAD)
    known = [bounds(*told) for told in (("desired", 1.0, 0), ("undesired", 0.0, 1))]
    assert hidden.effect.lower == pytest.approx(min(c.effect.lower for c in known))
    assert hidden.effect.upper == pytest.approx(max(c.effect.upper for c in known))
    assert len(hidden.readings) == 2
    assert len(hidden.unwanted) == 3
    assert known[0].readings == ()
