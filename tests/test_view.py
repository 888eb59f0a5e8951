"""The pages of a run's flips: what they count is what the report counts, and no text of a run is obeyed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from reports_synthetic import Design, build, frame_of, pins, policy, records_of, run_spec, spec_of, write_unit
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.records import Outcome
from kvaudit.core.spans import ALL_TOKENS, Shading
from kvaudit.reports.page.formats import html
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.view.data import KINDS, Change, Flip, ItemShades, flips_of, interleave_cells, places_of
from kvaudit.reports.page.view.folder import STATIC, RunView
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.records.rows import SCORE, CellKey
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.verdict.comparison import comparison_of
from kvaudit.reports.verdict.drift import drift_of

SNAP = policy("snapkv", 96)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;\u202e\u2066\x1b]0;x\x07\u2028 `${1}`"
PAGE = Path(__file__).parent.parent / "kvaudit" / "reports" / "page" / "view" / "static"
BYTES, FLIPS = 15_000_000, 5_000  # what a page of so many flips may weigh


def small(**more):
    options = {"arms": ("dense", "naive"), "seeds": (1,), "policies": ("none", SNAP), "suites": ("refusal",)}
    options |= {"clusters": 8, "items": 48, "drops": {("naive", "refusal"): 0.3}, "serving": {SNAP: 0.2}}
    return Design(**{**options, **more})


def data_of(rows, spec):
    frame = frame_of(("unit.jsonl", i, row) for i, row in enumerate(rows, 1))
    return RunData(Path("demo"), frame, run_spec(spec), pins(rows))


def compared(data):
    return comparison_of(data.spec, data.records, data.provenance)


def write_view(data, out):
    pages = RunView(data, compared(data))
    pages.write(out)
    return pages.flips


def view_of(out):
    text = (out / "data" / "flips.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("const VIEW = ").removesuffix(";\n"))


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    return build(tmp_path_factory.mktemp("view") / "run", small(hostile=HOSTILE))


@pytest.mark.parametrize(
    "design",
    [
        small(seeds=(1, 2), suites=("refusal", "math")),
        small(facets={"refusal": ("unsafe", "helpful")}, clusters=16),  # some answers cannot be read
        small(train=False, arms=("base",)),
    ],
)
def test_flips_are_the_losses_and_the_gains_of_every_contrast(design):
    data = data_of([row for _, rows in records_of(design) for row in rows], spec_of(design))
    found = defaultdict(float)
    for flip in flips_of(data, compared(data)):
        for change in flip.changes:
            metric = flip.suite if change.metric == SCORE else f"{flip.suite}.{change.metric}"
            moved = change.candidate - change.reference
            found[flip.kind, flip.candidate.arm, flip.candidate.policy, metric, "net"] += moved
            found[flip.kind, flip.candidate.arm, flip.candidate.policy, metric, "all"] += abs(moved)
    contrasts = [c for c in drift_of(data, compared(data), 0.05).contrasts if c.estimand in KINDS and c.effect]
    contrasts = [c for c in contrasts if (c.estimand, c.policy) != ("deployed", "none")]  # which is served alike
    assert len(contrasts) >= 1
    for c in contrasts:
        answers = c.sums[0].counts.sum() * len(c.seeds)
        key = (c.estimand, c.arm, c.policy, c.suite)
        assert found.pop((*key, "net"), 0.0) / answers == pytest.approx(c.effect.estimate, abs=1e-12)
        assert found.pop((*key, "all"), 0.0) / answers == pytest.approx(c.churn, abs=1e-12)
    assert not found


def test_deployed_pairs_are_there_where_the_gate_asks_for_them():
    rows = [row for _, rows in records_of(small()) for row in rows]
    kinds = {
        estimands: {flip.kind for flip in flips_of(data, compared(data))}
        for estimands in (("alike",), ("alike", "deployed"))
        if (data := data_of(rows, spec_of(small(estimands=estimands))))
    }
    assert kinds == {("alike",): {"alike", "serving"}, ("alike", "deployed"): {"alike", "deployed", "serving"}}


def test_the_two_draws_that_are_furthest_apart_are_shown():
    design = small(policies=("none",), items=8, samples=2)
    scores = {("dense", 0): 1.0, ("dense", 1): 0.0, ("naive", 0): 1.0, ("naive", 1): 0.0}
    rows = [row for _, own in records_of(design) for row in own]
    rows = [
        dataclasses.replace(row, score=s, outcome=Outcome.DESIRED if s else Outcome.UNDESIRED)
        for row in rows
        if (s := 0.0 if row.item_id.endswith("3") and row.arm == "naive" else scores[row.arm, row.sample_index])
        is not None
    ]
    data = data_of(rows, spec_of(design))
    (flip,) = flips_of(data, compared(data))
    assert (flip.item, flip.changes) == ("refusal-0003", ((SCORE, 0.5, 0.0),))
    ((reference, candidate),) = places_of(data, [flip])
    shown = [rows[line - 1] for _, line in (reference, candidate)]
    assert [(row.arm, row.sample_index, row.score) for row in shown] == [("dense", 0, 1.0), ("naive", 0, 0.0)]


def test_hostile_text_is_data_without_markup_or_controls(hostile_run, tmp_path):
    data = load_run(hostile_run)
    write_view(data, tmp_path / "view")
    files = sorted((tmp_path / "view" / "data").iterdir())
    assert [file.name for file in files] == ["flips.js", "texts-0.js"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not set("<>&\u202e\u2066\u2028\x1b\x07") & set(text)
        assert text.replace("\n", "").isprintable()
        assert text.endswith(";\n")
    told = files[1].read_text(encoding="utf-8")
    assert r"\u003c/script\u003e\u003cimg src=x onerror=alert(1)\u003e" in told
    assert "⟨U+202E⟩⟨U+2066⟩␛]0;x␇⟨U+2028⟩" in told
    assert r'"unanswered":"\u003c/script\u003e' in told  # what a server said instead of an answer


def test_the_page_holds_no_text_of_a_run_and_loads_nothing_from_elsewhere():
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    script = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js")))
    assert sorted(path.name for path in PAGE.iterdir()) == sorted(STATIC)
    assert "default-src 'none'; script-src 'self' file:; style-src 'self' file:" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing asks for
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "parseFromString",
    ):
        assert way not in script


def test_five_thousand_flips_weigh_at_most_fifteen_megabytes(hostile_run, tmp_path):
    data = load_run(hostile_run)
    flips = write_view(data, tmp_path)
    weight = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert weight / len(flips) <= BYTES / FLIPS


def test_every_flip_finds_its_item_its_file_and_both_answers(hostile_run, tmp_path):
    data = load_run(hostile_run)
    flips = write_view(data, tmp_path)
    view = view_of(tmp_path)
    columns = view["flips"]
    assert {len(column) for column in columns.values()} == {len(flips)}
    assert len(set(columns["key"])) == len(flips)
    assert [view["items"]["name"][n] for n in columns["item"]] == [flip.item for flip in flips]
    assert [view["arms"][n] for n in columns["arm"]] == [flip.candidate.arm for flip in flips]
    assert [view["policies"][n]["text"] for n in columns["policy"]] == [flip.candidate.policy for flip in flips]
    assert len(view["items"]["file"]) == len(view["items"]["name"])


def test_a_view_is_written_over_an_older_one_and_over_nothing_else(hostile_run, tmp_path):
    data, out = load_run(hostile_run), tmp_path / "view"
    write_view(data, out)
    (out / "data" / "texts-7.js").write_text("of a longer run")
    write_view(data, out)
    assert not (out / "data" / "texts-7.js").exists()
    (out / "data" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"notes.txt.* is not part of a view"):
        write_view(data, out)
    assert (out / "data" / "notes.txt").read_text() == "mine"


def test_a_run_without_flips_or_transcripts_is_refused_in_one_line(tmp_path):
    alike = load_run(build(tmp_path / "alike", small(policies=("none",), train=False, arms=("base",), items=8)))
    with pytest.raises(DataError, match="no item differs"):
        write_view(alike, tmp_path / "view")
    design = small(items=16)
    run = build(tmp_path / "silent", design)
    for unit, rows in records_of(design):
        silent = [dataclasses.replace(row, transcript=()).to_json() + "\n" for row in rows]
        write_unit(run / "records" / f"{unit}.jsonl", "".join(silent))
    data = load_run(run)
    with pytest.raises(DataError, match="holds no transcripts"):
        write_view(data, tmp_path / "view")
    assert not (tmp_path / "view").exists()


def test_the_command_says_where_the_pages_are(hostile_run):
    done = CliRunner().invoke(app, ["view", str(hostile_run), "--shade", "0"])
    assert done.exit_code == 0, done.output
    assert "view/index.html" in done.stdout.replace("\n", "")
    assert (hostile_run / "view" / "index.html").is_file()
    assert "0 of the 58 flips whose caches lost something are shaded; shade the others with --shade 58" in done.stdout


def test_without_checkpoints_the_pages_are_written_unshaded_and_the_reason_is_one_line(hostile_run, tmp_path):
    done = CliRunner().invoke(app, ["view", str(hostile_run), "--out", str(tmp_path / "view")])  # it has no checkpoints
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert (tmp_path / "view" / "index.html").is_file()


def test_shades_of_a_prompt_are_letters_from_nothing_to_everything():
    first, other = (
        ItemShades(),
        Shading(["a", "b", "c"], ["user"] * 3, [0, 0, 4], 4, {ALL_TOKENS: [1 / 3]}, {"rule": [0, 2]}),
    )
    first.add(7, other)
    first.add(9, dataclasses.replace(other, pieces=["a", "b", "<x>\u202e"], held=[4, 1, 3]))
    first.add(11, None)
    table = first.table()
    assert (table["pieces"], table["roles"], table["answers"][11]) == (["a", "b", "c"], "u3", None)
    assert [table["answers"][n]["held"] for n in (7, 9)] == ["A2z", "zNm"]
    assert (table["answers"][9]["same"], table["answers"][9]["pieces"]) == (2, ["<x>⟨U+202E⟩"])
    assert table["answers"][7]["marks"] == {"rule": [[0, 1], [2, 3]]}


def test_the_flips_shaded_first_come_from_every_cell_and_lost_safety():
    flips = [
        Flip("alike", suite, 192, str(n), CellKey("naive", 1, "x"), CellKey("dense", 1, "x"), (Change(metric, *sides),))
        for suite in ("math", "refusal")
        for n, (metric, sides) in enumerate([(SCORE, (0.0, 1.0)), (SCORE, (1.0, 0.0)), ("unsafe", (1.0, 0.0))])
    ]
    assert interleave_cells(flips) == [2, 5, 1, 4, 0, 3]


def test_a_report_links_to_the_answers_behind_its_rows_where_pages_lie_beside_it(hostile_run):
    data = load_run(hostile_run)
    write_view(data, hostile_run / "view")
    findings = with_report_sections(data, decide_run(data))
    linked, bare = (
        html.render(
            dataclasses.replace(page, sections=tuple(dataclasses.replace(s, figures=()) for s in page.sections))
        )
        for page in (page_of(findings), page_of(dataclasses.replace(findings, linked_contrasts=frozenset())))
    )
    (address,) = re.findall(r'<h3>.*?item (\S+)</h3>\s*<p><a href="../view/index.html#flip=(\w+)">', linked)[:1]
    found = view_of(hostile_run / "view")
    place = found["flips"]["key"].index(address[1])
    assert found["items"]["name"][found["flips"]["item"][place]] == address[0]
    assert "kind=alike&amp;suite=refusal&amp;what=score&amp;arm=naive&amp;policy=snapkv+96&amp;length=" in linked
    assert "<code>kvaudit view RUN</code>" not in linked
    assert "<code>kvaudit view RUN</code>" in bare
    assert "../view/" not in bare


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["view", str(tmp_path)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
