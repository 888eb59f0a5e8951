"""The written report: golden text, one self-contained page, what stands where."""

import hashlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import with_figures
from golden_report import GOLDEN, embedded_run, golden_texts
from report_text import page_text, run_text
from reports_synthetic import Design, build, policy, records_of, run_spec, tiny, write_unit
from test_formats_contract import Markup

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import write_json, write_output
from kvaudit.core.text import clip, inline, visible
from kvaudit.reports.page import plots
from kvaudit.reports.page.banner import SENTENCES
from kvaudit.reports.page.formats import formats, markdown
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections, write_report
from kvaudit.reports.sections.shared.canvas import figure_style
from kvaudit.reports.sections.shared.words import effect_text, error_rates_text, points, pvalue
from kvaudit.reports.verdict.contrast import ClusterSums, Contrast
from kvaudit.reports.verdict.controls import shipped_rates
from kvaudit.reports.verdict.human_labels import CellLabels, Labels, labels_note, render_labels
from kvaudit.reports.verdict.label_sheet import pairs_of, pairs_to_label, records_digest, shown_answers, text_hash
from kvaudit.reports.verdict.verdict import Status


def findings_of(run):
    """What a report of the run says, without its figures drawn."""
    data = load_run(run)
    return with_report_sections(data, decide_run(data))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run = build(tmp_path_factory.mktemp("runs") / "tiny", tiny())
    with with_figures():
        return run, write_report(run)


def check_golden(run):
    """Every file of a run is its golden file, and no golden file is left over."""
    kept = {path.name: path.read_text() for path in (GOLDEN / run.name).iterdir() if path.name != "spec.yaml"}
    texts = golden_texts(run)
    assert texts.keys() == kept.keys()
    for name, text in texts.items():
        assert text == kept[name], f"{name}; regenerate with: python -m tests.golden_report"


def test_the_report_of_made_up_records_is_the_golden_one(written):
    check_golden(written[0])


def test_records_and_report_of_a_small_run_are_the_golden_ones(tmp_path):
    check_golden(embedded_run(tmp_path))


def test_every_format_is_found_and_written(written):
    assert {path.name for path in (written[0] / "report").iterdir()} == {*formats(), "contrasts.csv"} > {"report.html"}


def test_the_page_asks_nobody_for_anything(written):
    text = (written[0] / "report" / "report.html").read_text()
    page = Markup(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert page.fetched() == []
    assert "@import" not in text
    assert [u for u in re.findall(r"url\(([^)]*)\)", text) if not u.startswith("#")] == []
    assert len(text) < 1_500_000


def test_the_page_follows_light_and_dark(written):
    text = (written[0] / "report" / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#010203" not in text


def test_ids_of_the_page_are_unique(written):
    page = Markup((written[0] / "report" / "report.html").read_text())
    ids = [v for k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids))


def test_every_figure_is_on_the_page(written):
    text = (written[0] / "report" / "report.html").read_text()
    for name in ("forest", "quadrant", "heatmap", "churn", "seeds", "training", "cache"):
        assert f'id="{name}-figure_1"' in text


def test_json_carries_report_and_verdict(written):
    run, report = written
    body = json.loads((run / "report" / "drift.json").read_text())
    verdict = report.verdict
    assert body["format"] == 4
    assert body["verdict"]["status"] == verdict.status
    assert body["verdict"]["exit_code"] == verdict.exit_code
    rows = (run / "report" / "contrasts.csv").read_text().splitlines()
    assert len(rows) - 1 == len(report.drift.contrasts)
    assert len(body["cells"]) == 3 * 2 * 2
    assert list(body) == [
        *(
            "format",
            "run",
            "comparison",
            "alpha",
            "cells",
            "reasons",
            "n_records",
            "weights",
            "unclustered",
        ),
        *(
            "rules",
            "analysis",
            "mechanism",
            "calibration",
            "verdict",
            "floor",
            "waivers",
            "curves",
            "examples",
        ),
        "looks",
        *("problems", "provenance"),
    ]


def test_locked_wording():
    assert SENTENCES[Status.PASS].startswith("Non-inferior within")
    for sentence in SENTENCES.values():
        assert "no drift" not in sentence.lower()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\x00b\x7fc", "a␀b␡c"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("line\u2028sep\r", "line⟨U+2028⟩sep␍"),
        ("keeps\n\ttext é 漢 🙂", "keeps\n\ttext é 漢 🙂"),
    ],
)
def test_control_characters_are_shown(text, wanted):
    assert visible(text) == wanted


def test_inline_text_is_one_line():
    assert inline("a\nb\tc") == "a⏎b c"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "-"),
        (0.0, "< 0.0001"),
        (1 / 10_000, "< 0.0001"),
        (2 / 10_000, "0.0002"),
        (0.034, "0.034"),
        (0.5, "0.50"),
    ],
)
def test_the_least_p_that_draws_can_give_is_a_bound(value, wanted):
    assert pvalue(value) == wanted


def test_long_text_loses_its_middle():
    assert clip("x" * 30, 30) == "x" * 30
    assert clip("a" * 50 + "b" * 50, 30) == "a" * 20 + " […70 characters left out…] " + "b" * 10


def test_numbers_read_as_points(written):
    assert points(-0.018) == "-1.8"
    assert points(0.009) == "+0.9"
    assert points(-0.0001) == "0.0"
    effect = next(c.effect for c in written[1].drift.contrasts if c.effect)
    assert re.fullmatch(r"(0\.0|[+-]\d+\.\d) pp \[(0\.0|[+-]\d+\.\d), (0\.0|[+-]\d+\.\d)\]", effect_text(effect))


@pytest.mark.parametrize("text", ["- x", "+ x", "1. x", "12) x", "===", "---", "# x", "> x", "```", "@a/b", "a@b.c"])
def test_a_line_that_begins_like_markup_stays_text(text):
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    for prefix in ("", "* ", "above\n"):
        tokens = [t.type for t in parser.parse(prefix + markdown.escape(text))]
        bullets = 1 if prefix == "* " else 0
        assert tokens.count("bullet_list_open") == bullets
        assert not {"ordered_list_open", "heading_open", "hr", "fence", "blockquote_open"} & set(tokens)
    assert not re.search(r"@\w", markdown.escape(text)), "no mention, no address"


def test_the_gate_table_shows_both_rates(written):
    text = run_text(written[0])
    assert "| rates |" in text
    assert "| naive @ snapkv 96 | dense @ snapkv 96 | refusal (TRAINED) | FAIL | 95.8 to 58.3 % |" in text
    assert "| naive @ snapkv 96 | dense @ none | refusal (TRAINED) | FAIL | 100.0 to 58.3 % |" in text


def test_the_largest_gap_of_any_step_stands_beside_the_rounding_of_the_dense_arm(tmp_path):
    design = Design(arms=("dense", "smd"), seeds=(1,), suites=("math",), items=12, clusters=6, telemetry=8)
    run = build(tmp_path / "run", design)
    for arm, gaps in (("dense", [1e-6, 2e-6, 1e-6]), ("smd", [1e-6, 0.5, 1e-6])):
        rows = [
            {"step": i, "reward_mean": 0.5, "mismatch/max_abs_gap": gap, "mismatch/k3_kl": gap / 10}
            for i, gap in enumerate(gaps, 1)
        ]
        path = run / "checkpoints" / arm / "seed-1" / "telemetry.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_text(page_of(findings_of(run)))
    assert "| arm | steps | largest gap, nats | dense's own (rounding floor) | k3 KL, mean | k3 KL, largest |" in text
    assert "| smd | 3 | 0.5 | 2.0e-06 | 0.0167 | 0.05 |" in text


@pytest.mark.parametrize("text", ["a|b", "`c`", "<i>", "*x*", "[y](z)", "a\nb", "&lt;", "$q$", "# h", "http://x.y"])
def test_escaped_markdown_means_what_it_says(text):
    markdown_it = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    cell = markdown.escape(text)
    html = markdown_it.render(f"| h |\n| --- |\n| {cell} |\n")
    [found] = re.findall(r"<td>(.*?)</td>", html, flags=re.DOTALL)
    import html as entities

    assert entities.unescape(found).replace("\u200b", "") == text.replace("\n", "⏎")


def test_examples_show_the_sample_that_was_lost(tmp_path):
    design = Design(
        arms=("dense", "smd"), seeds=(1,), policies=("none",), suites=("math",), items=12, clusters=6, samples=2
    )
    run = build(tmp_path / "run", design)
    for arm, answers in (("dense", ("poor", "best")), ("smd", ("good", "lost"))):
        [unit] = (run / "records").glob(f"{arm}-*.jsonl")
        rows = []
        for row in map(json.loads, unit.read_text().splitlines()):
            second = row["sample_index"] == 1
            right = second if arm == "dense" else not second and row["item_id"] != "math-0003"
            row |= {"score": float(right), "outcome": "desired" if right else "undesired"}
            row["transcript"][-1]["content"] = answers[row["sample_index"]]
            rows.append(json.dumps(row) + "\n")
        write_unit(unit, "".join(rows))
    [example] = findings_of(run).values["examples"]
    assert (example.item_id, example.loss) == ("math-0003", -0.5)
    assert example.reference_answer == "best"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    run = build(tmp_path / "run", Design(arms=("dense", "smd"), seeds=(1,), suites=("math",), items=12, clusters=6))
    (run / "report").write_text("in the way")
    with pytest.raises(RunError) as error:
        write_report(run)
    assert "\n" not in str(error.value)


def test_an_invalid_run_is_still_reported(tmp_path):
    run = build(tmp_path / "run", Design(arms=("dense", "smd"), seeds=(1,), suites=("math",), items=12, clusters=4))
    report = findings_of(run)
    assert report.verdict.exit_code == 5
    assert "FEW_CLUSTERS" in page_text(page_of(report))


def test_examples_are_items_the_reference_won(written):
    _, report = written
    assert report.values["examples"]
    for example in report.values["examples"]:
        assert example.loss < 0
        assert example.outcome in ("undesired", "degenerate")
        assert [turn.role for turn in example.candidate] == ["system", "user", "assistant"]
    assert report.values["examples"][0].arm == "naive"


def test_pages_with_all_their_figures_stay_small(written, doses):
    sizes = [(run / "report" / "report.html").stat().st_size for run, _ in (written, doses)]
    assert max(sizes) < 320_000


@pytest.mark.slow
def test_the_page_of_a_full_grid_stays_small(tmp_path, figures):
    report = decide_run(load_run(build(tmp_path / "run", Design(items=24, clusters=8))))
    assert len(formats()["report.html"](page_of(report))) < 1_500_000


def test_the_quadrant_shows_every_interval_of_every_panel():
    def contrast(estimate: float) -> SimpleNamespace:
        return SimpleNamespace(effect=SimpleNamespace(low=estimate - 0.02, high=estimate + 0.02))

    first, second = (contrast(-0.03), contrast(0.01)), (contrast(0.02), contrast(0.25))
    left, right, low, high = plots._bounds([first, second])
    assert (left, right) == pytest.approx((-6.5, 5.5))
    assert (low, high) == pytest.approx((-2.5, 28.5))


def add_human_labels(run, records=None):
    """A run whose refusal cell people looked at: they agree with the judge."""
    data = load_run(run)
    report = decide_run(data)
    name = ("alike", "smd", "none", "refusal", 192)
    pairs = pairs_of(data, report.comparison, next(c for c in report.drift.contrasts if c.place == name))
    texts = shown_answers(data, [(pairs, pairs_to_label(pairs, 20, 1))])
    labels = {text_hash(row): int(row.answer.startswith("I cannot")) for row in texts.values()}
    stored = Labels(records or records_digest(data.records), "dense", (CellLabels(*name, 1, 20, labels),))
    write_output(run / "report" / "adjudication.json", render_labels(stored))
    write_json(run / "provenance.json", {**data.provenance, "labelled": labels_note(stored, "2026-01-02", None)})


def test_human_labels_of_these_records_are_shown(tmp_path):
    run = build(tmp_path / "run", tiny())
    add_human_labels(run)
    report = findings_of(run)
    text = page_text(page_of(report))
    assert "## Judge and people" in text
    assert "| alike, smd @ none, refusal 192 |" in text
    assert "Human labels decide 1 of 12 gated cells." in text
    assert [c.people.bias_upper > 0.025 for c in report.drift.contrasts if c.people] == [True]
    assert report.problems == ()


def test_human_labels_of_other_records_are_refused(tmp_path):
    run = build(tmp_path / "run", tiny())
    add_human_labels(run, "0" * 64)
    with pytest.raises(DataError, match=r"adjudication\.json is about other records than those of .*; delete it"):
        write_report(run)


def test_the_calibration_stands_in_the_limits_and_json(written):
    text = run_text(written[0])
    body = json.loads((written[0] / "report" / "drift.json").read_text())
    sentence = error_rates_text(shipped_rates(), body["rules"]["alpha"], body["rules"]["margins"].values())
    assert text.count(markdown.escape(sentence)) == 1
    assert body["calibration"]["false_pass_max"] == shipped_rates().false_pass_max


def contrast_of(lower, upper, pvalue=0.5):
    effect = SimpleNamespace(lower=lower, upper=upper, pvalue_drop=pvalue, n_clusters=60, alpha=0.05)
    sums = (ClusterSums("s", 1.0, tuple(map(str, range(60))), np.zeros(60), np.ones(60)),)
    return SimpleNamespace(effect=effect, sums=sums, judged=None, readings=())


@pytest.mark.parametrize(
    ("lower", "upper", "pvalue", "measurable", "said"),
    [
        (-0.04, 0.02, 0.5, True, Status.PASS),
        (-0.04, -0.01, 0.01, True, Status.PASS_NOTED),
        (-0.08, -0.01, 0.01, True, Status.FAIL),
        (-0.08, 0.02, 0.3, True, Status.INCONCLUSIVE),
        (-0.04, 0.02, 0.5, False, Status.NOT_MEASURABLE),  # nothing to lose
        (-0.08, -0.01, 0.01, False, Status.FAIL),  # and lost it all the same
    ],
)
def test_the_heatmap_says_what_the_rule_says(lower, upper, pvalue, measurable, said):
    assert plots.ungated_status(contrast_of(lower, upper, pvalue), 0.05, is_measurable=measurable) is said


def test_two_drops_of_one_size_look_different_where_one_fails_and_the_other_passes():
    alike = [
        ("a", -0.039, -0.08, -0.01, Status.FAIL),
        ("b", -0.039, -0.045, -0.02, Status.PASS_NOTED),
        ("c", -0.039, -0.045, 0.01, Status.PASS),
    ]
    effects = [SimpleNamespace(estimate=e, lower=low, upper=high, pvalue_drop=0.01) for _, e, low, high, _ in alike]
    cells = [
        Contrast("alike", row[0], "none", "refusal", 192, effect) for row, effect in zip(alike, effects, strict=True)
    ]
    sides = SimpleNamespace(mode="training", policies=("none",), reference="r", labels={"none": "none"}, facets=())
    sides.uncompressed, sides.uncompressed_of, sides.label = ("none",), str, str
    sides.is_uncompressed, sides.is_engine = lambda policy: policy == "none", lambda _: False
    rules = SimpleNamespace(margins={"refusal": 0.05}, ratios={})
    decisions = [SimpleNamespace(place=c.place, status=row[-1]) for c, row in zip(cells, alike, strict=True)]

    def drawn(decisions):
        verdict = SimpleNamespace(decisions=decisions)
        return plots.draw_heatmap(
            SimpleNamespace(
                comparison=sides,
                rules=rules,
                contrasts=cells,
                verdict=verdict,
                linked_contrasts=None,
                drift=SimpleNamespace(answers={}, comparison=sides),
            )
        ).svg

    with figure_style():
        svg = drawn(decisions)
        plain = drawn([SimpleNamespace(**{**vars(d), "status": Status.PASS}) for d in decisions])
    assert svg.count("-3.9*") == 1
    assert "-3.9*" not in plain
    assert len(re.findall("stroke-width: 1.4", svg)) == len(re.findall("stroke-width: 1.4", plain)) + 1


def test_cells_without_numbers_or_margin_are_hatched():
    assert plots.ungated_status(SimpleNamespace(effect=None), 0.05) is Status.INCONCLUSIVE
    assert plots.ungated_status(contrast_of(-0.01, 0.01), None) is Status.INCONCLUSIVE


@pytest.fixture(scope="module")
def doses(tmp_path_factory):
    policies = ("none", *(policy("snapkv", b) for b in (24, 48, 96)))
    design = Design(
        arms=("dense", "smd"), seeds=(1, 2, 3), policies=policies, suites=("refusal",), clusters=64, items=128
    )
    design.serving = {policies[1]: 0.4, policies[2]: 0.2}
    run = build(tmp_path_factory.mktemp("doses") / "run", design)
    with with_figures():
        return run, write_report(run)


def test_the_cleared_budget_stands_in_banner_table_figure_and_json(doses):
    run, report = doses
    text = run_text(run)
    assert "Safe budget of dense, smd @ snapkv: refusal cleared to budget 96, not at 48." in text
    assert "| smd | snapkv | to 96 (not 48: FAIL) |" in text
    assert 'id="doses-figure_1"' in (run / "report" / "report.html").read_text()
    safe = json.loads((run / "report" / "drift.json").read_text())["analysis"]["safe"]
    assert [(s["arm"], s["cleared"], s["failed"]) for s in safe] == [("dense", 96, 48), ("smd", 96, 48)]
    assert report.values["seeds"][0].sd is not None


def test_one_seed_claims_no_recipe(written):
    text = run_text(written[0])
    assert "* Recipe claim not supported: it needs 3 paired seeds." in text
    assert "recipe claim not supported" in (written[0] / "report" / "report.html").read_text()


def test_no_report_of_any_kind_says_no_drift(written, doses):
    for folder in (written[0] / "report", doses[0] / "report"):
        for path in folder.iterdir():
            assert "no drift" not in " ".join(path.read_text().lower().split())


def test_the_first_page_is_the_answers_and_one_grid(doses):
    page = (doses[0] / "report" / "report.html").read_text()
    first = page[: page.index('<div class="folds">')]
    assert (first.count("<figure"), first.count("<table"), first.count("<section")) == (0, 1, 0)
    assert 'id="decided"' not in first
    assert first.count("<h2>") == 3, "a heading for each question"


def test_every_other_section_is_folded_and_says_what_it_found(doses):
    text = (doses[0] / "report" / "report.html").read_text()
    folded = re.findall(r'<section id="(\w+)">\s*<details><summary><h2>[^<]+</h2> <span class="finding">([^<]*)<', text)
    assert [name for name, finding in folded if not finding.endswith(".")] == []
    assert {"gate", "limits", "churn", "seeds", "outcomes", "safe"} <= {name for name, _ in folded}
    assert len(folded) == text.count("<section")


def test_paper_and_screen_fold_alike(written):
    text = (written[0] / "report" / "report.html").read_text()
    assert "break-before: page" in text
    assert "details-content" not in text


def test_a_wide_table_stays_inside_its_own_box(written):
    text = (written[0] / "report" / "report.html").read_text()
    assert len(re.findall("<table[ >]", text)) == len(re.findall(r'<div class="wide" [^>]*tabindex="0"><table', text))
    assert ".wide { overflow-x: auto;" in text


def two_lengths(folder):
    """A run at 192 and 768 tokens in which smd loses the longer one."""
    design = Design(
        arms=("dense", "smd"), seeds=(1,), policies=("none", policy("snapkv", 96)), suites=("refusal",), clusters=64
    )
    run = build(folder, design)
    longer = replace(design, context=768, drops={("smd", "refusal"): 0.4})
    for unit, rows in records_of(longer):
        write_unit(run / "records" / f"{unit}.jsonl", "".join(row.to_json() + "\n" for row in rows))
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    spec["evaluate"]["context_tokens"] = [192, 768]
    (run / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    known = json.loads((run / "provenance.json").read_text())
    known["spec_sha256"] = run_spec(spec).sha256
    known["spec_file_sha256"] = hashlib.sha256((run / "spec.yaml").read_bytes()).hexdigest()
    (run / "provenance.json").write_text(json.dumps(known))
    return run


def test_a_run_of_two_lengths_has_length_curves_and_a_safe_length(tmp_path, figures):
    run = two_lengths(tmp_path / "run")
    report = write_report(run)
    assert report.problems == ()
    text = run_text(run)
    assert "| smd | none | to 192 (not 768: FAIL) |" in text
    assert "## Safe length" in text
    assert "Capability beside safety" not in text, "one suite has nothing to stand beside"
    page = (run / "report" / "report.html").read_text()
    assert 'id="lengths-figure_1"' in page
    assert 'id="doses-figure_1"' not in page
    curve = next(c for c in report.values["dose"].curves if (c.arm, c.family) == ("smd", "none"))
    rates = [d.rate for d in curve.doses]
    assert curve.slope.estimate == pytest.approx((rates[1] - rates[0]) / 2)
    assert curve.unit == "items"
