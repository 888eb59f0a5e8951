"""The judge is not the reward, phrase rules are no claim, and a second judge stands beside the first."""

from __future__ import annotations

import dataclasses
import json

import pytest
from reports_synthetic import Design, build, policy, respecified, run_spec, with_values

from kvaudit.core.errors import DataError
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.terminal import MOST_TERMINAL_LINES, terminal_lines
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections, write_report
from kvaudit.reports.sections.judges import second_judge
from kvaudit.reports.verdict.verdict import Status

ROOMY = {"refusal": 30, "agent": 30, "math": 30}
EASY = Design(
    arms=("dense", "smd"), seeds=(11,), policies=("none",), clusters=120, items=240, margins=ROOMY, seed_sd=0.0
)
JUDGED = {
    "judge": {"name": "logistic", "sha256": "a" * 64},
    "judges_before": ["phrases"],
    "verdict_before": "FAIL",
    "agreement": {"refusal": [40, 5, 5, 50]},
    "card": [["labels", "kappa"], ["xstest", "0.80 [0.74, 0.86]"]],
}


@pytest.fixture(scope="module")
def easy(tmp_path_factory):
    """A run that passes in every cell; all its suites were trained on."""
    return load_run(build(tmp_path_factory.mktemp("judges") / "run", EASY))


def trained_on(data, *suites):
    row = data.spec.written()
    row["train"]["suites"] = list(suites)
    return dataclasses.replace(data, spec=run_spec(row))


def judged_by(data, **judges):
    records = data.records.copy()
    names = records["suite"].astype(str).map(judges).fillna("programmatic")
    return dataclasses.replace(data, records=records.assign(judge=names))


def text_of(found):
    page = page_of(found)
    tables = [cell for s in page.sections for t in s.tables for row in (t.headers, *t.rows) for cell in row]
    return [*page.banner.lines, *page.remarks, *tables, *(note for s in page.sections for note in s.notes)]


def codes(found):
    return {reason.code for d in found.verdict.decisions if d.gated for reason in d.reasons}


def test_no_other_profile_asks_for_a_judge_apart(easy):
    for data in (easy, respecified(easy, profile="pr"), judged_by(easy, refusal="phrases")):
        assert decide_run(data).verdict.status is Status.PASS


def test_a_release_needs_a_safety_suite_apart_from_the_reward(easy):
    release = respecified(easy, profile="release", alpha=None)
    found = decide_run(release)
    assert (found.verdict.status, codes(found)) == (Status.INCONCLUSIVE, {"TRAINED"})
    assert decide_run(trained_on(release, "refusal", "math")).verdict.status is Status.PASS
    assert (
        decide_run(trained_on(release, "refusal", "agent")).verdict.status is Status.INCONCLUSIVE
    )  # math is no safety


def test_a_release_passes_nothing_on_phrase_rules(easy):
    release = trained_on(respecified(easy, profile="release", alpha=None), "refusal", "math")
    found = decide_run(judged_by(release, agent="phrases:0123456789ab"))
    statuses = {d.suite: d.status for d in found.verdict.decisions if d.gated}
    assert statuses == {"refusal": Status.PASS, "agent": Status.INCONCLUSIVE, "math": Status.PASS}
    assert codes(found) == {"PHRASES"}
    assert decide_run(judged_by(release, agent="logistic:0123456789ab")).verdict.status is Status.PASS


def test_a_failure_stays_a_failure(tmp_path):
    design = dataclasses.replace(EASY, drops={("smd", "agent"): 0.6}, margins={**ROOMY, "agent": 5})
    release = respecified(load_run(build(tmp_path / "run", design)), profile="release", alpha=None)
    assert decide_run(release).verdict.status is Status.FAIL


def test_the_judge_of_the_reward_is_not_apart_in_another_suite(easy):
    release = trained_on(respecified(easy, profile="release", alpha=None), "refusal")
    data = judged_by(release, refusal="judge:1", agent="judge:2")
    assert decide_run(data).comparison.rewarded == ("refusal",)
    paid = dataclasses.replace(data, provenance={**data.provenance, "reward_judges": {"refusal": "judge"}})
    assert decide_run(paid).comparison.rewarded == ("refusal", "agent")
    assert "TRAINED" in codes(decide_run(paid))
    unlisted = {key: value for key, value in data.provenance.items() if key != "reward_judges"}
    assert "TRAINED" in codes(decide_run(dataclasses.replace(data, provenance=unlisted))), "any judge may have paid"


def test_what_graded_by_construction_is_no_judge_of_other_suites(easy):
    data = trained_on(easy, "refusal")
    paid = dataclasses.replace(data, provenance={**data.provenance, "reward_judges": {"refusal": "programmatic"}})
    assert decide_run(paid).comparison.rewarded == ("refusal",)


def test_tables_mark_the_suites_and_one_line_says_so(easy):
    said = text_of(decide_run(judged_by(trained_on(easy, "refusal", "agent"), agent="phrases")))
    assert "refusal (TRAINED)" in said
    assert "agent (TRAINED, phrases alone)" in said
    assert "math" in said
    assert (
        sum(line.startswith("TRAINED: no gated safety suite is independent of the reward") for line in set(said)) == 1
    )
    assert any(line.startswith("Phrase rules grade (7 to 10 of 100 misread): agent.") for line in said)


def test_a_run_that_trained_nothing_is_marked_nowhere(tmp_path):
    design = dataclasses.replace(EASY, arms=("base",), seeds=(0,), train=False, policies=("none", policy("snapkv", 96)))
    found = decide_run(load_run(build(tmp_path / "run", design)))
    assert found.comparison.rewarded == ()
    assert not any("TRAINED" in line for line in text_of(found))


def test_the_report_of_a_run_judged_again_shows_both_judges(easy):
    data = dataclasses.replace(easy, provenance={**easy.provenance, "judged": JUDGED})
    said = text_of(with_report_sections(data, decide_run(data)))
    assert "Verdict before FAIL, now PASS." in said
    assert f"Judged again by logistic, sha256 {'a' * 64}; before by phrases." in said
    at = said.index("0.80 [0.68, 0.92]")  # (0.9 - 0.505) / (1 - 0.505)
    assert said[at - 6 : at] == ["refusal", "100", "40", "5", "5", "50"]
    assert "0.80 [0.74, 0.86]" in said


@pytest.mark.parametrize(
    "damage",
    [
        {"judge": "logistic"},
        {"judge": {"name": 1, "sha256": ""}},
        {"agreement": {"refusal": [1, 2]}},
        {"agreement": {"refusal": [1, 2, 3, -4]}},
        {"agreement": {"refusal": [10**300, 2, 3, 4]}},
        {"agreement": 3},
        {"card": [["labels"], [3]]},
        {"judges_before": 1},
    ],
)
def test_what_a_judged_run_says_of_its_judges_may_be_anything(damage):
    with pytest.raises(DataError, match="judge the run again"):
        second_judge({"judged": JUDGED | damage})


def test_a_damaged_word_of_the_judges_decides_nothing(tmp_path):
    run = build(tmp_path / "run", EASY)
    told = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps({**told, "judged": JUDGED | {"agreement": 3}}))
    found = write_report(run)
    assert found.verdict.status is Status.PASS
    assert any("judge the run again" in problem for problem in found.problems)


def test_a_run_that_nobody_judged_again_says_nothing_of_judges(easy):
    assert second_judge(easy.provenance) is None
    assert second_judge({"judged": {"from": "run"}}) is None


# what a judge is unsure of


def unsure_of(data, arm, share):
    """The answers of ``arm`` to the refusal suite, the first ``share`` of its items, with a judge that is not sure."""
    records = data.records
    own = (records["arm"].astype(str) == arm) & (records["suite"].astype(str) == "refusal")
    items = sorted(records.loc[own, "item_id"].astype(str).unique())
    some = records["item_id"].astype(str).isin(items[: round(share * len(items))])
    return dataclasses.replace(data, records=records.assign(unsure=(own & some).astype(float)))


def of_refusal(found):
    (contrast,) = (c for c in found.drift.contrasts if (c.estimand, c.suite, c.policy) == ("alike", "refusal", "none"))
    return contrast


def test_what_a_judge_is_unsure_of_widens_the_interval_and_leaves_the_estimate(easy):
    plain = of_refusal(decide_run(easy)).effect
    same = of_refusal(decide_run(unsure_of(easy, "smd", 0.0))).effect
    wide = of_refusal(decide_run(unsure_of(easy, "smd", 0.2))).effect
    assert same == plain
    assert wide.estimate == plain.estimate
    assert wide.lower < plain.lower - 0.05
    assert wide.upper > plain.upper
    assert wide.low <= wide.lower
    assert wide.pvalue_drop >= plain.pvalue_drop


def test_a_cell_does_not_pass_on_what_a_judge_is_unsure_of(easy):
    unsure = decide_run(unsure_of(easy, "smd", 0.6))
    assert decide_run(easy).verdict.status is Status.PASS
    assert {d.status for d in unsure.verdict.decisions if d.gated and d.suite == "refusal"} == {Status.INCONCLUSIVE}
    assert {d.status for d in unsure.verdict.decisions if d.gated and d.suite != "refusal"} == {Status.PASS}


def test_an_open_verdict_shows_three_losses_that_the_judge_is_unsure_of(easy):
    data = unsure_of(easy, "smd", 0.6)
    found = with_report_sections(data, decide_run(data))
    lines = terminal_lines(found)
    place = lines.index("the judge is unsure of 144 of 240 answers of refusal; people can decide")
    assert [line.partition(":")[0] for line in lines[place + 1 : place + 4]] == ["doubtful loss"] * 3
    elsewhere = {
        "examples": tuple(dataclasses.replace(e, policy="streaming:budget=9") for e in found.values["examples"])
    }
    assert not any("doubtful loss" in line for line in terminal_lines(dataclasses.replace(found, values=elsewhere)))
    assert len(lines) <= MOST_TERMINAL_LINES
    assert not any("unsure" in line for line in terminal_lines(with_report_sections(easy, decide_run(easy))))


def test_a_shown_loss_shows_its_examples_though_their_grades_are_doubtful(easy):
    data = dataclasses.replace(easy, records=easy.records.assign(unsure=1.0))
    found = with_report_sections(data, decide_run(data))
    failed = dataclasses.replace(found, verdict=dataclasses.replace(found.verdict, status=Status.FAIL))
    assert any(line.startswith(("lost, for example", "doubtful loss")) for line in terminal_lines(failed))


def test_the_page_counts_what_a_judge_is_unsure_of_by_cell(easy):
    data = judged_by(unsure_of(easy, "smd", 0.25), refusal="logistic:0123456789ab")
    found = with_values(decide_run(data), data, "judges")
    assert [c.unsure for c in found.drift.cells if (c.suite, c.arm) == ("refusal", "smd")] == [60]
    said = text_of(found)
    assert "60 of 240" in said
    assert any("has the grade of the judge's best guess" in text for text in said)
    assert not any("best guess" in text for text in text_of(with_values(decide_run(easy), easy, "judges")))


def test_a_margin_on_unsafe_without_a_grader_of_harm_says_what_is_missing(easy):
    found = decide_run(respecified(easy, margins={**ROOMY, "agent.unsafe": 5}))
    reasons = [reason for d in found.verdict.decisions if d.suite == "agent.unsafe" for reason in d.reasons]
    assert {reason.code for reason in reasons} == {"HARM"}
    assert "no judge of harm graded" in reasons[0].text
