"""Two result files: the same engine as a run's report, and every way in which they cannot be compared."""

import json
import math
import os
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.reports.page.compare_files import Sides, compare, compare_judges
from kvaudit.reports.page.compare_page import comparison_cautions, comparison_files
from kvaudit.reports.records.load import load_run
from kvaudit.reports.records.readers.base import Request, cluster_rule, read_log
from kvaudit.reports.run import decide_run
from kvaudit.reports.stats.tango import ess_tango
from kvaudit.reports.verdict.verdict import Status

LOGS = Path(__file__).parent / "fixtures" / "logs"
LM_EVAL = [next((LOGS / f"lm_eval_{name}").glob("*.jsonl")) for name in ("reference", "candidate")]
INSPECT = [LOGS / f"{name}-deflated.eval" for name in ("reference", "candidate")]


def sides(a, b, cluster=None, **options):
    rule = cluster_rule(cluster) if cluster else None
    logs = [read_log(Path(path), Request(rule)) for path in (a, b)]
    return Sides(*logs, clusters_given=rule is not None, **options)


def table(path, rows, header="item,cluster,score"):
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def rows_of(scores, size=5):
    return [(f"i{i}", f"t{i // size}", score) for i, score in enumerate(scores)]


def pair(tmp_path, a, b, **options):
    return sides(table(tmp_path / "a.csv", rows_of(a)), table(tmp_path / "b.csv", rows_of(b)), **options)


def codes(comparison):
    cell = [reason.code for d in comparison.verdict.decisions if d.gated for reason in d.reasons]
    return {reason.code for reason in comparison.verdict.reasons} | set(cell)


def run_command(*words):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_the_interval_is_ess_tango_of_the_item_differences(tmp_path):
    rng = np.random.default_rng(3)
    a, b = (rng.random(300) < 0.9).astype(int), (rng.random(300) < 0.85).astype(int)
    found = compare(pair(tmp_path, a, b), "score").verdict.decisions[0].effect
    wanted = ess_tango(b - a, np.arange(300) // 5, alpha=0.05)
    assert (found.estimate, found.low, found.high, found.lower) == (
        wanted.estimate,
        wanted.low,
        wanted.high,
        wanted.lower,
    )
    assert found.n_clusters == 60


def test_a_cell_of_a_run_gets_the_verdict_of_the_runs_report(tmp_path):
    design = Design(
        arms=("dense", "naive"),
        seeds=(11,),
        suites=("refusal",),
        drops={("naive", "refusal"): 0.12},
        items=320,
        primary=("none",),
        estimands=("alike",),
    )
    run = build(tmp_path / "run", design)
    wanted = decide_run(load_run(run)).verdict
    logs = [read_log(run, Request(None, {"arm": arm, "policy": "none"})) for arm in ("dense", "naive")]
    found = compare(Sides(*logs), "score").verdict
    assert found.status is wanted.status is Status.FAIL
    assert found.decisions[0].effect == wanted.decisions[0].effect


@pytest.mark.parametrize(
    ("lost", "gained", "status", "code"),
    [(2, 0, Status.PASS, 0), (60, 0, Status.FAIL, 3), (30, 20, Status.INCONCLUSIVE, 4)],
)
def test_the_exit_code_is_the_gates(tmp_path, lost, gained, status, code):
    order = random.Random(0).sample(range(300), 300)
    a = [int(order[i] >= gained) for i in range(300)]
    b = [int(not gained <= order[i] < gained + lost) for i in range(300)]
    comparison = compare(pair(tmp_path, a, b), "score")
    assert comparison.verdict.status is status
    done = run_command(tmp_path / "a.csv", tmp_path / "b.csv")
    assert done.exit_code == code
    assert f"verdict: {status.value}" in done.output


def test_too_few_templates_cannot_pass(tmp_path):
    done = compare(
        sides(table(tmp_path / "a.csv", rows_of([1] * 100)), table(tmp_path / "b.csv", rows_of([1] * 100))), "score"
    )
    assert done.verdict.status is Status.INCONCLUSIVE
    assert codes(done) == {"CLUSTERS"}
    assert any("Blind spot: a failure confined to 13.9 %" in line for line in comparison_cautions(done))


def test_a_wider_margin_needs_fewer_templates(tmp_path):
    both = pair(tmp_path, [1] * 150, [1] * 150)
    assert compare(both, "score", margin=5.0).verdict.status is Status.INCONCLUSIVE
    assert compare(both, "score", margin=10.0).verdict.status is Status.PASS


def test_swapping_the_files_flips_the_sign(tmp_path):
    rng = np.random.default_rng(5)
    a, b = (rng.random((2, 300)) < 0.8).astype(int)
    there = compare(pair(tmp_path, a, b), "score").verdict.decisions[0].effect
    back = compare(pair(tmp_path, b, a), "score").verdict.decisions[0].effect
    assert there.estimate == -back.estimate
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-10)


def test_the_order_of_rows_does_not_matter(tmp_path):
    rng = np.random.default_rng(5)
    a, b = (rng.random((2, 300)) < 0.8).astype(int)
    wanted = compare(pair(tmp_path, a, b), "score").verdict.decisions[0].effect
    mixed = rows_of(b)
    random.Random(1).shuffle(mixed)
    found = compare(sides(tmp_path / "a.csv", table(tmp_path / "c.csv", mixed)), "score").verdict.decisions[0].effect
    assert found == wanted


def test_repeats_are_averaged_inside_the_item(tmp_path):
    rng = np.random.default_rng(8)
    a, b = (rng.random((2, 2, 300)) < 0.8).astype(int)

    def repeated(name, draws):
        rows = [(f"i{i}", f"t{i // 5}", j, draws[j, i]) for j in range(2) for i in range(300)]
        return table(tmp_path / name, rows, "item,cluster,sample,score")

    found = compare(sides(repeated("a.csv", a), repeated("b.csv", b)), "score").verdict.decisions[0].effect
    wanted = ess_tango(b.mean(axis=0) - a.mean(axis=0), np.arange(300) // 5, samples=2, alpha=0.05)
    assert found.n_items == 300
    assert (found.low, found.high) == (wanted.low, wanted.high)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([1, 7, 10], "from 7 to 10 (first b.csv:3)"),  # 1 to 10
        ([0, 55.5, 1, 100], "from 55.5 to 100 (first b.csv:3)"),
        ([-3.5, -0.25, 0], "from -3.5 to -0.25 (first b.csv:2)"),  # log-likelihoods
        ([1, 1, 1, 1.5], "has 75 scores outside [0, 1], from 1.5 to 1.5 (first b.csv:5)"),
    ],
)
def test_scores_on_another_scale_are_refused_in_one_line(tmp_path, scores, said):
    b = (scores * 300)[:300]
    pair(tmp_path, [1] * 300, b)
    done = run_command(tmp_path / "a.csv", tmp_path / "b.csv", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in done.output
    assert "rescale both files alike" in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_one_score_on_another_scale_is_enough(tmp_path):
    with pytest.raises(DataError, match="metric score has 1 scores outside"):
        compare(pair(tmp_path, [1] * 299 + [2], [1] * 300), "score")


def test_a_metric_on_another_scale_is_refused_and_no_other_is_taken_unasked(tmp_path):
    rows = [(f"i{i}", f"t{i // 5}", m, s) for m, s in (("judge", 8), ("f1", 1)) for i in range(300)]
    paths = [table(tmp_path / name, rows, "item,cluster,metric,score") for name in ("a.csv", "b.csv")]
    unasked = run_command(*paths)
    assert unasked.exit_code == 2
    assert "choose one with --metric: f1, judge" in unasked.output
    assert run_command(*paths, "--metric", "f1").exit_code == 0
    for both in (["judge"], ["f1", "judge"]):
        refused = run_command(*paths, *(word for name in both for word in ("--metric", name)))
        assert refused.exit_code == 2
        assert "a.csv: metric judge has 300 scores outside [0, 1]" in refused.output


def test_copies_of_a_repeat_change_nothing(tmp_path):
    rng = np.random.default_rng(8)
    a, b = (rng.random((2, 300)) < 0.8).astype(int)
    wanted = compare(pair(tmp_path, a, b), "score").verdict.decisions[0].effect

    def copied(name, draws):
        rows = [(f"i{i}", f"t{i // 5}", j, draws[i]) for j in range(4) for i in range(300)]
        return table(tmp_path / name, rows, "item,cluster,epoch,score")

    found = compare(sides(copied("c.csv", a), copied("d.csv", b)), "score").verdict.decisions[0].effect
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (wanted.estimate, wanted.low, wanted.high), abs=1e-10
    )


def test_lower_is_better_turns_the_score_round(tmp_path):
    a, b = [0] * 300, [1] * 60 + [0] * 240
    plain = compare(pair(tmp_path, a, b), "score").verdict.decisions[0].effect
    turned = compare(pair(tmp_path, a, b, lower_is_better=True), "score")
    assert turned.verdict.decisions[0].effect.estimate == -plain.estimate == -0.2
    assert any("taken as 1 - score" in note for note in turned.notes)


def unclustered(tmp_path, a, b):
    """Two tables in which nothing says which items belong together."""
    found = {"a.csv": a, "b.csv": b}
    return [table(tmp_path / n, [(f"i{i}", s) for i, s in enumerate(x)], "item,score") for n, x in found.items()]


def test_without_clusters_nothing_passes_and_the_reason_says_what_to_do(tmp_path):
    done = compare(sides(*unclustered(tmp_path, [1] * 300, [1] * 300)), "score")
    assert (done.verdict.status, done.verdict.exit_code) == (Status.INCONCLUSIVE, 4)
    (reason,) = done.verdict.decisions[0].reasons
    assert reason.code == "NOCLUSTERS"
    assert "so nothing passes: name what items share (" in reason.text
    assert "or give --items-are-independent" in reason.text
    said = f"NOCLUSTERS: {reason.text}. Each item counts as its own template"
    assert all(said in " ".join(text.split()) for text in comparison_files(done).values())
    assert "name the clusters of the items; no further run is needed" in comparison_files(done)["compare.md"]


def test_without_clusters_a_pass_with_a_detectable_drop_is_open_too(tmp_path):
    b = [0] * 20 + [1] * 1980
    both = sides(*unclustered(tmp_path, [1] * 2000, b))
    assert compare(both, "score", items_are_independent=True).verdict.status is Status.PASS_NOTED
    assert compare(both, "score").verdict.status is Status.INCONCLUSIVE


def test_without_clusters_a_fail_stays_a_fail(tmp_path):
    done = compare(sides(*unclustered(tmp_path, [1] * 300, [0] * 60 + [1] * 240)), "score")
    assert done.verdict.status is Status.FAIL
    assert [reason.code for reason in done.verdict.decisions[0].reasons] == ["LOSS"]


def test_without_clusters_no_recipe_passes(tmp_path):
    paths = [
        table(tmp_path / n, [(f"i{i}", s, 1) for i in range(300) for s in range(3)], "item,seed,score")
        for n in ("a.csv", "b.csv")
    ]
    recipes = [compare(sides(*paths), "score", items_are_independent=said).verdict.recipe for said in (True, False)]
    assert recipes == [Status.PASS, Status.INCONCLUSIVE]


def test_items_that_are_declared_independent_may_pass_and_every_page_says_who_said_so(tmp_path):
    paths = unclustered(tmp_path, [1] * 300, [1] * 300)
    shown = run_command(*paths, "--items-are-independent", "--out", tmp_path / "out")
    assert shown.exit_code == 0
    texts = [path.read_text() for path in (tmp_path / "out").iterdir()]
    said = "Items were declared independent by the user (--items-are-independent)"
    assert all(said in " ".join(text.split()) for text in [shown.output, *texts])
    assert "300 items declared independent by the user" in " ".join(shown.output.split())
    assert run_command(*paths).exit_code == 4


@pytest.mark.parametrize("rule", ["item", "re:.*"])
def test_the_items_own_name_is_no_cluster(tmp_path, rule):
    done = compare(sides(*unclustered(tmp_path, [1] * 300, [1] * 300), rule), "score")
    assert codes(done) == {"NOCLUSTERS"}


@pytest.mark.parametrize("cluster", [["--cluster", "cluster"], []])
def test_items_are_not_independent_where_clusters_are_named(tmp_path, cluster):
    pair(tmp_path, [1] * 300, [1] * 300)
    done = run_command(tmp_path / "a.csv", tmp_path / "b.csv", "--items-are-independent", *cluster)
    assert done.exit_code == 2
    assert "--items-are-independent" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "metric", "field", "clusters"),
    [(LM_EVAL[0], "exact_match,strict", "doc.kind", 8), (INSPECT[0], "match", "metadata.template", 6)],
)
def test_fields_that_items_share_are_proposed_as_clusters(path, metric, field, clusters):
    done = compare(sides(path, path), metric, margin=60)
    assert codes(done) == {"NOCLUSTERS"}
    assert f"what items share (such as {field})" in done.verdict.decisions[0].reasons[0].text
    assert compare(sides(path, path, field), metric).verdict.decisions[0].effect.n_clusters == clusters


def test_a_field_that_tells_items_apart_or_is_the_same_for_most_is_not_proposed(tmp_path):
    header = "item,subject,question,language,score"
    rows = [(f"i{i}", f"s{i // 10}", f"q{i}", "en" if i < 290 else "de", 1) for i in range(300)]
    done = compare(sides(*(table(tmp_path / n, rows, header) for n in ("a.csv", "b.csv"))), "score")
    assert "what items share (such as subject)" in done.verdict.decisions[0].reasons[0].text


def test_two_judges_without_clusters_pass_under_neither(tmp_path):
    rows = [(f"i{i}", m, 1) for m in ("exact", "exact_match") for i in range(300)]
    paths = [table(tmp_path / name, rows, "item,metric,score") for name in ("a.csv", "b.csv")]
    both = ["--metric", "exact", "--metric", "exact_match"]
    assert run_command(*paths, *both).exit_code == 4
    assert run_command(*paths, *both, "--items-are-independent").exit_code == 0


def test_clusters_of_one_file_serve_both(tmp_path):
    a = table(tmp_path / "a.csv", rows_of([1] * 100))
    b = table(tmp_path / "b.csv", [(f"i{i}", 1) for i in range(100)], "item,score")
    assert compare(sides(a, b), "score").verdict.decisions[0].effect.n_clusters == 20


def test_a_cluster_rule_that_finds_nothing_is_one_line(tmp_path):
    with pytest.raises(SpecError, match="--cluster matches no row"):
        compare(pair(tmp_path, [1] * 60, [1] * 60, cluster="family"), "score")


def test_nothing_in_common_is_invalid(tmp_path):
    a, b = table(tmp_path / "a.csv", rows_of([1] * 60)), table(tmp_path / "b.csv", [("z", "t", 1)])
    done = compare(sides(a, b), "score")
    assert done.verdict.exit_code == 5
    assert "NO_COMMON_ITEM" in codes(done)


def test_items_of_one_file_only_are_invalid_and_named(tmp_path):
    done = compare(
        sides(table(tmp_path / "a.csv", rows_of([1] * 300)), table(tmp_path / "b.csv", rows_of([1] * 297))), "score"
    )
    assert done.verdict.exit_code == 5
    text = next(reason.text for reason in done.verdict.reasons if reason.code == "ITEMS")
    assert text == "3 items are only in the reference file (i297, i298, i299)"


def test_a_lost_line_matters_where_the_other_file_has_the_item(tmp_path):
    a = table(tmp_path / "a.csv", rows_of([1] * 300))
    b = table(tmp_path / "b.csv", [*rows_of([1] * 299), ("i299", "t59", "inf")])
    done = compare(sides(a, b), "score")
    assert done.verdict.exit_code == 5
    assert any("b.csv:301: score inf is not finite" in note for note in done.notes)


def test_a_lost_line_of_both_files_does_not_matter_and_is_counted(tmp_path):
    bad = [*rows_of([1] * 300), ("i300", "t60", "x")]
    done = compare(sides(*(table(tmp_path / name, bad) for name in ("a.csv", "b.csv"))), "score")
    assert done.verdict.status is Status.PASS
    assert len(done.findings.problems) == 2


@pytest.mark.parametrize("broken", ["x", "-inf", "0_1"])
def test_lost_lines_of_both_files_are_missing_beyond_one_percent(tmp_path, broken):
    scores = [broken] * 4 + [1] * 296
    done = compare(pair(tmp_path, scores, scores), "score")
    assert done.verdict.exit_code == 5
    texts = [reason.text for reason in done.verdict.reasons if reason.code == "MISSING"]
    assert texts == [
        f"{name}: 4 of 300 answers were left out or have no score (1.3 %); the limit is 1 %"
        for name in ("a.csv", "b.csv")
    ]


def test_lost_lines_and_unscored_answers_are_missing_together(tmp_path):
    scores = ["x", "x", "nan", "nan"] + [1] * 296
    done = compare(pair(tmp_path, scores, scores), "score")
    assert "MISSING" in codes(done)
    fewer = [1, *scores[1:]]
    assert "MISSING" not in codes(compare(pair(tmp_path, fewer, fewer), "score"))


def test_lost_lines_of_another_metric_do_not_matter(tmp_path):
    rows = [(f"i{i}", f"t{i // 5}", "acc", 1) for i in range(300)]
    rows += [(f"i{i}", f"t{i // 5}", "f1", "x" if i < 60 else 1) for i in range(300)]
    both = sides(*(table(tmp_path / f"{n}.csv", rows, "item,cluster,metric,score") for n in "ab"))
    assert compare(both, "acc").verdict.status is Status.PASS
    assert compare(both, "f1").verdict.exit_code == 5


def test_rows_that_stand_twice_are_invalid(tmp_path):
    twice = [*rows_of([1] * 300), ("i0", "t0", 0)]
    done = compare(sides(table(tmp_path / "a.csv", rows_of([1] * 300)), table(tmp_path / "b.csv", twice)), "score")
    assert done.verdict.exit_code == 5
    text = next(reason.text for reason in done.verdict.reasons if reason.code == "DUPLICATE")
    assert "b.csv: 1 duplicate row (line 302)" in text


@pytest.mark.parametrize(("gaps", "code"), [(3, 0), (4, 5)])
def test_unscored_answers_are_invalid_beyond_one_percent(tmp_path, gaps, code):
    b = ["nan"] * gaps + [1] * (300 - gaps)
    assert compare(pair(tmp_path, [1] * 300, b), "score").verdict.exit_code == code


@pytest.mark.parametrize("lost", [8, 9])
@pytest.mark.parametrize("where", [slice(0, 3), slice(297, 300)], ids=["where the other is wrong", "where it is right"])
def test_missing_scores_of_the_reference_turn_no_verdict_into_a_pass(tmp_path, lost, where):
    """Unscored counts 0: on the reference's side that would be a loss undone, or a gain."""
    right, b = [1] * 300, [0] * lost + [1] * (300 - lost)
    known, hidden = [*right], [*right]
    hidden[where] = ["nan"] * 3
    found = []
    for n, a in enumerate((known, hidden)):
        both = (table(tmp_path / f"{name}{n}.csv", rows_of(scores, 1)) for name, scores in (("a", a), ("b", b)))
        found.append(compare(sides(*both), "score").verdict)
    plain, other = (one.decisions[0] for one in found)
    assert (plain.status in (Status.PASS, Status.PASS_NOTED)) == (lost == 8)
    assert (other.status in (Status.PASS, Status.PASS_NOTED)) <= (plain.status in (Status.PASS, Status.PASS_NOTED))
    assert other.effect.estimate > plain.effect.estimate
    assert other.effect.lower == pytest.approx(plain.effect.lower)
    assert other.template_bound == pytest.approx(plain.template_bound, abs=1e-6)


def test_fewer_repeats_of_some_items_are_invalid(tmp_path):
    rows = [(f"i{i}", f"t{i // 5}", j, 1) for i in range(300) for j in range(2)]
    a = table(tmp_path / "a.csv", rows, "item,cluster,sample,score")
    b = table(tmp_path / "b.csv", rows[:-1], "item,cluster,sample,score")
    assert "SAMPLES" in codes(compare(sides(a, b), "score"))


def test_an_item_in_two_templates_is_invalid(tmp_path):
    a, b = rows_of([1] * 300), rows_of([1] * 300)
    b[0] = ("i0", "t9", 1)
    done = compare(sides(table(tmp_path / "a.csv", a), table(tmp_path / "b.csv", b)), "score")
    assert "CLUSTER_IDS" in codes(done)


def test_a_log_that_was_not_finished_is_invalid(tmp_path):
    other = tmp_path / "candidate.eval"
    with zipfile.ZipFile(INSPECT[1]) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"status":"success"', b'"status":"cancelled"'))
    done = compare(sides(INSPECT[0], other, "template"), "match")
    assert done.verdict.exit_code == 5
    assert "candidate.eval is incomplete: Inspect's status is 'cancelled'" in [r.text for r in done.verdict.reasons]


@pytest.mark.parametrize(("unit", "code"), [("naive-seed11", 5), ("naive-seed12", 0)])
def test_only_the_compared_units_of_a_run_must_be_whole(tmp_path, unit, code):
    run = build(tmp_path / "run", Design(arms=("dense", "naive"), suites=("refusal",), policies=("none",), items=320))
    next((run / "records").glob(f"{unit}--*.done.json")).unlink()
    (again,) = (run / "records").glob(f"{unit}--*.jsonl")
    again.write_text(again.read_text() + again.read_text().splitlines(keepends=True)[0])
    logs = [read_log(run, Request(None, {"arm": arm, "seed": "11"})) for arm in ("dense", "naive")]
    done = compare(Sides(*logs), "score", margin=20)
    assert done.verdict.exit_code == code
    if code:
        assert [reason.code for reason in done.verdict.reasons] == ["INCOMPLETE", "DUPLICATE"]


@pytest.mark.parametrize("first", [11, 0])
def test_a_reference_of_one_seed_serves_every_seed_of_the_candidate_and_claims_no_recipe(tmp_path, first):
    rng = np.random.default_rng(4)
    a, b = rng.random(300) < 0.9, rng.random((3, 300)) < 0.85
    header = "item,cluster,seed,score"
    rows = [(f"i{i}", f"t{i // 5}", 0, int(a[i])) for i in range(300)]
    own = [(f"i{i}", f"t{i // 5}", first + s, int(b[s, i])) for s in range(3) for i in range(300)]
    paths = table(tmp_path / "a.csv", rows, header), table(tmp_path / "b.csv", own, header)
    decision = compare(sides(*paths), "score").verdict.decisions[0]
    assert decision.effect.estimate == pytest.approx(b.mean() - a.mean())
    assert decision.effect.n_items == 300
    assert decision.recipe is None  # one run of the reference says nothing about how its runs vary


def test_items_that_ask_something_else_are_invalid(tmp_path):
    lines = LM_EVAL[1].read_text().splitlines()
    changed = re.sub(r'"doc_hash": "....', '"doc_hash": "0000', lines[0])
    other = tmp_path / "samples_sums_2026-11-20T09-00-00.000000.jsonl"
    other.write_text("\n".join([changed, *lines[1:]]) + "\n")
    done = compare(sides(LM_EVAL[0], other, "kind"), "exact_match,strict")
    assert done.verdict.exit_code == 5
    assert "HASH" in codes(done)


def test_decoding_settings_that_differ_behind_a_long_beginning_are_invalid(tmp_path):
    stops, logs = json.dumps(["stop " * 200]), []
    for name, drawn in (("a", "false"), ("b", "true")):
        text = LM_EVAL[0].read_text().replace('"do_sample": false', f'"a": {stops}, "do_sample": {drawn}')
        logs.append(tmp_path / f"{name}.jsonl")
        logs[-1].write_text(text)
    done = compare(sides(*logs, "kind"), "exact_match,strict")
    assert "the files were made with different decoding" in [reason.text for reason in done.verdict.reasons]


def test_lm_eval_logs_compare_by_template():
    done = compare(sides(*LM_EVAL, "kind"), "exact_match,strict")
    effect = done.verdict.decisions[0].effect
    assert effect.estimate == pytest.approx((14 - 21) / 24)
    assert (effect.n_items, effect.n_clusters) == (24, 8)


def test_inspect_logs_compare_over_epochs():
    effect = compare(sides(*INSPECT, "template"), "match").verdict.decisions[0].effect
    assert (effect.n_items, effect.n_clusters) == (12, 6)
    assert effect.estimate == pytest.approx(19 / 24 - 1)


def test_a_log_of_another_tool_pairs_with_a_table(tmp_path):
    scores = {f"q-{i}": 1 for i in range(12)}
    rows = [(item, epoch, score) for item, score in scores.items() for epoch in (1, 2)]
    b = table(tmp_path / "b.csv", [(i, e, "match", s) for i, e, s in rows], "item,epoch,metric,score")
    effect = compare(sides(INSPECT[0], b), "match").verdict.decisions[0].effect
    assert effect.estimate == 0


def test_several_metrics_need_a_choice_that_is_named():
    done = run_command(*LM_EVAL)
    assert done.exit_code == 2
    assert "choose one with --metric: exact_match,loose, exact_match,strict" in done.output
    wrong = run_command(*LM_EVAL, "--metric", "acc")
    assert wrong.exit_code == 2
    assert "unknown metric 'acc'" in wrong.output


def test_a_metric_that_one_file_lacks_is_not_passed_over(tmp_path):
    paths = []
    for name, lost in (("a.csv", "safety"), ("b.csv", "safety2")):
        rows = [(f"i{i}", f"t{i // 5}", metric, 1) for metric in ("acc", lost) for i in range(300)]
        paths.append(table(tmp_path / name, rows, "item,cluster,metric,score"))
    done = run_command(*paths)
    assert done.exit_code == 2
    said = "only the reference file has safety; only the candidate file has safety2; compare it with --metric acc"
    assert said in done.output
    chosen = run_command(*paths, "--metric", "acc")
    assert chosen.exit_code == 0
    assert "Not compared: only the reference file has safety." in chosen.output
    assert "Not compared: only the candidate file has safety2." in chosen.output


def test_files_without_a_common_metric_are_one_line(tmp_path):
    done = run_command(LM_EVAL[0], INSPECT[0])
    assert done.exit_code == 2
    assert "the files share no metric" in done.output


def test_two_judges_take_the_worse_verdict_and_say_how_far_they_agree(tmp_path):
    rng = np.random.default_rng(2)
    truth = rng.random(300) < 0.8
    paths = []
    for name, drop in (("a.csv", 0), ("b.csv", 60)):
        strict = truth & ~(np.arange(300) % 5 == 0) if drop else truth
        rows = [
            (f"i{i}", f"t{i // 5}", m, int(s[i]))
            for m, s in (("exact", truth), ("exact_match", strict))
            for i in range(300)
        ]
        paths.append(table(tmp_path / name, rows, "item,cluster,metric,score"))
    both = sides(*paths)
    kind, strict = (compare(both, metric) for metric in ("exact", "exact_match"))
    two = compare_judges(kind, strict)
    assert kind.verdict.status is Status.PASS
    assert two.status is strict.verdict.status is Status.FAIL
    assert two.exit_code == 3
    assert two.reference.estimate == pytest.approx(1)
    assert two.candidate.agreement == pytest.approx(float(np.mean(~(truth & (np.arange(300) % 5 == 0)))))
    done = run_command(*paths, "--metric", "exact", "--metric", "exact_match")
    assert done.exit_code == 3
    assert "kappa 1.00" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--margin", "0"], "--margin is 0"),
        (["--margin", "nan"], "--margin is nan"),
        (["--margin", "100"], "--margin is 100"),
        (["--alpha", "0.5"], "--alpha is 0.5"),
        (["--select-a", "arm"], "--select-a is 'arm', wanted KEY=VALUE"),
        (["--metric", "a", "--metric", "b", "--metric", "c"], "--metric is given 3 times"),
        (["--cluster", "re:("], "is not a regular expression"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(tmp_path, words, said):
    pair(tmp_path, [1] * 300, [1] * 300)
    done = run_command(tmp_path / "a.csv", tmp_path / "b.csv", *words)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("alpha", ["0.49", "0.025", "0.05"])
def test_the_calibration_is_quoted_for_the_level_and_margin_that_were_asked(tmp_path, alpha):
    pair(tmp_path, [1] * 300, [1] * 300)
    done = run_command(tmp_path / "a.csv", tmp_path / "b.csv", "--alpha", alpha, "--margin", "10")
    text = " ".join(done.output.split())
    wanted = {
        "0.49": "The gate was not simulated at this level (0.49) or at a margin of 10 pp.",
        "0.025": "At level 0.025 the gate passes at most",
    }
    assert wanted.get(alpha, "The gate was not simulated at a margin of 10 pp. At level 0.05 the gate") in text


def test_an_invalid_comparison_prints_its_blind_spot_and_no_calibration(tmp_path):
    a, b = rows_of([1] * 300), rows_of(["nan"] * 9 + [1] * 291)
    done = compare(sides(table(tmp_path / "a.csv", a), table(tmp_path / "b.csv", b)), "score")
    assert done.verdict.status is Status.INVALID
    assert comparison_cautions(done) == [
        "Blind spot: a failure confined to 4.9 % of the templates goes unsampled with probability 5 %, a smaller one "
        "more often."
    ]


def test_a_judge_who_labels_all_alike_has_no_kappa(tmp_path):
    a, b = (
        table(
            tmp_path / f"{name}.csv",
            [(f"i{i}", f"t{i // 5}", m, int(m == "acc" or i % 4 > 0)) for m in ("acc", "f1") for i in range(300)],
            "item,cluster,metric,score",
        )
        for name in "ab"
    )
    done = run_command(a, b, "--metric", "acc", "--metric", "f1")
    assert "kappa not defined, a judge gave one label throughout; 75.0 % of 300 labels agree." in done.output


def test_a_foreign_file_exits_2_with_one_line(tmp_path):
    (tmp_path / "x").write_bytes(b"\x00\x01")
    done = run_command(tmp_path / "x", LM_EVAL[0])
    assert done.exit_code == 2
    assert len(done.output.strip().splitlines()) == 1


def test_pages_hold_the_verdict_the_number_and_nothing_to_run(tmp_path):
    rows = [(f"<script>alert({i})</script>|x", f"t{i // 5}", 1) for i in range(300)]
    paths = [table(tmp_path / name, rows) for name in ("a.csv", "b.csv")]
    done = run_command(*paths, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    page, text, data = ((tmp_path / "out" / f"compare.{end}").read_text() for end in ("html", "md", "json"))
    assert "<script" not in page
    assert "PASS" in page
    assert "PASS" in text
    for said in ("the gate passes at most", "Broken templates: in 1 cell"):
        assert all(said in whole for whole in (page, text, data, done.output))
    body = json.loads(data)
    assert body["verdict"]["status"] == "PASS"
    assert body["files"] == {"reference": str(paths[0]), "candidate": str(paths[1])}


def test_names_in_a_file_are_not_obeyed_by_the_terminal(tmp_path):
    rows = [(f"i{i}\x1b[2J", f"t{i // 5}", f"\x1b[31m{m}", 1) for i in range(300) for m in "xy"]
    a = table(tmp_path / "a.csv", rows, "item,cluster,metric,score")
    b = table(tmp_path / "b.csv", rows[:-10], "item,cluster,metric,score")
    asked = run_command(a, b)
    shown = run_command(
        a, b, "--metric", "␛[31mx", "--metric", "␛[31my", "--higher-is-better", "--out", tmp_path / "out"
    )
    assert (asked.exit_code, shown.exit_code) == (2, 5)
    assert "␛[31mx" in asked.output
    assert "\x1b" not in asked.output + shown.output
    assert not [path for path in (tmp_path / "out").iterdir() if "\x1b" in path.read_text()]


def test_hostile_names_are_escaped_on_the_page(tmp_path):
    header = "item,suite,cluster,score"
    rows = [(f"i{i}", "<b>x</b>`|", f"t{i // 5}", 1) for i in range(300)]
    done = compare(sides(*(table(tmp_path / f"{n}.csv", rows, header) for n in "ab")), "score")
    found = comparison_files(done)
    assert "<b>x</b>" not in found["compare.html"]
    assert "<b>" not in found["compare.md"]


def test_the_page_of_a_run_cell_is_not_confused_by_policies(tmp_path):
    both = ("none", policy("snapkv", 96))
    design = Design(arms=("dense", "naive"), seeds=(1,), policies=both, suites=("refusal", "math"), samples=2)
    run = build(tmp_path / "run", design)
    words = [run, run, "--select-a", "arm=dense", "--select-b", "arm=naive"]
    for side in ("a", "b"):
        words += [f"--select-{side}", f"policy={policy('snapkv', 96)}"]
    done = run_command(*words)
    assert done.exit_code in (0, 3, 4), done.output
    assert "refusal at 192 tokens" in done.output
    assert "run (naive @ snapkv 96) minus run (dense @ snapkv 96)" in done.output


def test_a_row_without_its_cluster_is_invalid_and_joins_no_other(tmp_path):
    rows = [("a", "", "1", "0"), *[(f"p{i}", f"c{i // 2}", "1", "0") for i in range(20)]]
    paths = [table(tmp_path / name, rows, "item,cluster,score,note") for name in ("a.csv", "b.csv")]
    done = compare(sides(*paths), "score")
    assert done.verdict.exit_code == 5
    assert "1 of 21 rows have no cluster" in "".join(map(str, comparison_files(done).values()))
    assert {c.effect.n_clusters for c in done.findings.drift.contrasts if c.effect} == {11}


def test_a_file_whose_first_row_alone_lacks_its_cluster_is_compared(tmp_path):
    rows = [("a", "", "0", "0"), ("a", "t", "0", "0")]
    paths = [table(tmp_path / name, rows, "item,cluster,score,note") for name in ("a.csv", "b.csv")]
    assert compare(sides(*paths), "score").verdict.exit_code == 5


SCORE = st.sampled_from(["0", "1", "0.5", "", "nan", "2", "x"])
CELL = st.tuples(st.sampled_from(["a", "b", "c", ""]), st.sampled_from(["t", "u", ""]), SCORE, st.sampled_from("012x"))


@settings(max_examples=12, deadline=None)
@given(st.lists(CELL, max_size=12), st.lists(CELL, max_size=12), st.integers(0, 70), st.booleans())
def test_random_tables_compare_or_give_one_line(tmp_path_factory, a, b, padding, sampled):
    folder = tmp_path_factory.mktemp("t")
    header = "item,cluster,score,sample" if sampled else "item,cluster,score,note"
    shared = [(f"p{i}", f"c{i}", "1", "0") for i in range(padding)]
    paths = [table(folder / name, [*shared, *rows], header) for name, rows in (("a.csv", a), ("b.csv", b))]
    try:
        done = compare(sides(*paths), "score")
    except AuditError:
        return
    assert done.verdict.exit_code in (0, 3, 4, 5, 6)
    for text in comparison_files(done).values():
        assert text
    effect = next((d.effect for d in done.verdict.decisions if d.gated and d.effect), None)
    assert effect is None or (math.isfinite(effect.low) and effect.low <= effect.estimate <= effect.high)


def attacked(folder: Path, before: int, after: int) -> list[Path]:
    """Two tables of 600 items in 120 templates, of which so many went wrong; the fewer are among the more."""
    return [
        table(folder / name, rows_of([int(i * 7 % 600 >= bad) for i in range(600)]))
        for name, bad in (("a.csv", before), ("b.csv", after))
    ]


@pytest.mark.parametrize(("after", "ratio", "code"), [(330, 1.5, 0), (330, 1.12, 3), (302, 1.01, 4)])
def test_a_ratio_decides_in_place_of_a_margin(tmp_path, after, ratio, code):
    paths = attacked(tmp_path, 300, after)
    found = compare(sides(*paths), "score", ratios={"all": ratio})
    assert found.findings.rules.margins == {}
    (decision,) = found.verdict.decisions
    done = run_command(*paths, "--ratio", f"{decision.suite}={ratio}")
    assert done.exit_code == code, done.output
    assert decision.ratio.limit == ratio
    assert decision.ratio.times.estimate == pytest.approx(after / 300)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ratio", "score"], "NAME=TIMES"),
        (["--ratio", "=1.1"], "NAME=TIMES"),
        (["--ratio", "x=nan"], "from 1.01 to 100"),
        (["--ratio", "x=1"], "from 1.01 to 100"),
        (["--ratio", "x=1.1", "--ratio", "x=1.2"], "given twice"),
        (["--ratio", "x=1.1", "--margin", "x=5"], "both name x"),
        (["--ratio", "x=1.1"], "unknown suite or facet in --ratio"),
    ],
)
def test_a_ratio_that_cannot_be_is_one_line(tmp_path, options, said):
    done = run_command(*attacked(tmp_path, 30, 30), *options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert len(done.output.strip().splitlines()) == 1


def inspect_log(path, inputs):
    samples = [
        {"id": i, "epoch": 1, "input": text, "target": "x", "scores": {"s": {"value": 1}}}
        for i, text in enumerate(inputs)
    ]
    eval_ = {"task": "t", "model": "m"}
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": eval_, "samples": samples}))
    return path


def test_one_question_that_is_asked_many_times_is_one_template(tmp_path):
    for name, questions, status, clusters in (
        ("copies", 1, Status.INVALID, 1),
        ("thirds", 100, Status.PASS, 100),
        ("whole", 300, Status.PASS, 300),
    ):
        # near copies: one more blank, another case
        texts = [f"{'question' if i % 2 else 'Question'}{' ' * (i // questions)} {i % questions}" for i in range(300)]
        path = inspect_log(tmp_path / f"{name}.json", texts)
        found = compare(sides(path, path, higher_is_better=True), "s", items_are_independent=True)
        assert (found.verdict.status, found.records["cluster_id"].nunique()) == (status, clusters), name
        said = "Items that ask what another item asks, and count as one with it: "
        assert [note for note in found.notes if said in note] == (
            [f"{said}{300 - questions}."] if questions < 300 else []
        )


def test_a_log_of_a_thousand_levels_is_one_line(tmp_path):
    deep = "x"
    for _ in range(700):
        deep = [deep]
    path = inspect_log(tmp_path / "deep.json", [deep])
    done = run_command(path, path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "hundreds of levels deep" in done.stderr


@pytest.mark.timeout(20)
def test_a_pipe_or_a_device_is_not_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    whole = inspect_log(tmp_path / "a.json", ["q"])
    for words in ((pipe, whole), (whole, pipe), (whole, "/dev/zero"), (whole, whole, "--cluster", f"file:{pipe}")):
        done = run_command(*words)
        assert done.exit_code == 2
        assert "is a pipe or a device; write what it holds to a file and give that" in done.stderr
