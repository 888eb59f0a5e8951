"""Engine conditions in a run's reports: each is held against the uncompressed one of its own engine."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from report_text import run_text

from kvaudit.reports.page.plots import figures
from kvaudit.reports.page.publish import hub_results, public_name
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.terminal import terminal_lines
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections, write_report
from kvaudit.reports.sections.base import Inputs
from kvaudit.reports.sections.engines import EnginesSection, FloorSection
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import Status
from tests import reports_synthetic as synthetic

F32, U4, U8 = (f"openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION={kind}" for kind in ("f32", "u4", "u8"))
F16, Q4 = "llama.cpp:type_k=f16,type_v=f16", "llama.cpp:type_k=f16,type_v=q4_0"
REFERENCES = {U4: F32, U8: F32, Q4: F16}
# of 128 items: the engines differ before anything is compressed, and none differs from both
WRONG = {
    "none": range(0, 4),
    F32: range(0, 16),
    U4: range(0, 48),
    U8: range(0, 16),
    F16: range(0, 32),
    Q4: range(0, 32),
}


def floor_beside_gate(found):
    """The table of the floor and its sentences beside the gated cells."""
    gated = [d for d in found.verdict.decisions if d.gated]
    return list(FloorSection().beside_gate(found.values["floor"], found, gated))


def served(*policies, **more):
    references = {p: REFERENCES[p] for p in policies if p in REFERENCES}
    return synthetic.Design(
        **{"arms": ("base",), "train": False, "suites": ("refusal",), "wrong": WRONG, **more},
        policies=policies,
        references=references,
    )


def found_in(tmp_path: Path, design):
    return decide_run(synthetic.loaded(tmp_path / "run", design))


def drifts(found, estimand):
    return {(c.arm, c.policy): round(c.effect.estimate, 6) for c in found.drift.contrasts if c.estimand == estimand}


def test_each_condition_is_held_against_the_reference_of_its_own_engine(tmp_path: Path) -> None:
    found = found_in(tmp_path, served("none", U4, U8, F32, Q4, F16))
    assert drifts(found, "serving") == {("base", U4): -0.25, ("base", U8): 0.0, ("base", Q4): 0.0}
    assert {(d.policy, d.status) for d in found.verdict.decisions} == {
        (U4, Status.FAIL),
        (U8, Status.PASS),
        (Q4, Status.PASS),
    }


def test_a_run_of_one_engine_alone_gates_as_any_other(tmp_path: Path) -> None:
    found = found_in(tmp_path, served(U4, U8, F32))
    assert found.verdict.status is Status.FAIL
    assert [(d.policy, d.status) for d in found.verdict.decisions] == [(U4, Status.FAIL), (U8, Status.PASS)]
    assert [(c.policy, c.rate) for c in found.verdict.controls] == [(F32, 0.875)]


ARM_WRONG = {
    ("dense", "none"): range(0, 4), ("naive", "none"): range(0, 8),
    ("dense", F32): range(0, 16), ("naive", F32): range(0, 24),
    ("dense", U4): range(0, 32), ("naive", U4): range(0, 64),
}  # fmt: skip


def test_trained_arms_meet_engines(tmp_path: Path) -> None:
    design = served("none", U4, F32, arms=("dense", "naive"), seeds=(11,), train=True, wrong=ARM_WRONG)
    found = found_in(tmp_path, design)
    assert drifts(found, "alike") == {("naive", "none"): -4 / 128, ("naive", F32): -8 / 128, ("naive", U4): -32 / 128}
    assert drifts(found, "deployed") == {
        ("naive", "none"): -4 / 128,
        ("naive", F32): -8 / 128,
        ("naive", U4): -48 / 128,
    }
    assert drifts(found, "serving") == {("dense", U4): -16 / 128, ("naive", U4): -40 / 128}
    assert drifts(found, "interaction") == {("naive", U4): -24 / 128}
    gated = [(d.estimand, d.policy) for d in found.verdict.decisions if d.gated]
    assert gated == [("alike", "none"), ("alike", U4), ("deployed", U4), ("alike", F32)], (
        "uncompressed, alike and deployed are one difference"
    )


def test_every_format_of_a_run_of_engines_can_be_written(tmp_path: Path) -> None:
    run = synthetic.build(tmp_path / "run", served("none", U4, U8, F32, Q4, F16, suites=("refusal", "math")))
    write_report(run)
    page = run_text(run)
    assert "served under openvino u4 against the same model under openvino f32" in page
    assert "not shown by the engine" in page
    assert "nan" not in page.lower().replace("finance", "")


@pytest.mark.parametrize("ports", [(8001, 8002), (80, 8001)])  # the first address may be the beginning of the second
def test_what_is_published_names_no_address_of_a_server(tmp_path: Path, ports: tuple[int, int]) -> None:
    one, other = (f"endpoint:base_url=http://10.1.2.3:{port}/my_team/v1,model=m" for port in ports)
    design = replace(served(one, other), references={one: other}, wrong={one: range(40), other: range(0)})
    run = synthetic.build(tmp_path / "run", design)
    write_report(run)
    published = [(run / "report" / name).read_text() for name in ("card.md", "bom.json")]
    published += hub_results(page_of(decide_run(load_run(run))), "base", "org/name").values()
    for text in published:
        assert "10.1.2.3" not in text
        assert "team" not in text
        assert "server-1" in text
    assert "10.1.2.3:8001" in (run / "report" / "disclosure.json").read_text()


@pytest.mark.parametrize(
    "path", ["/home/anna/secret-project/qwen", "/home/anna/prüfung/qwen", "/a/" + "long-folder/" * 9 + "qwen"]
)
def test_what_is_published_names_no_folder(tmp_path: Path, path: str) -> None:
    run = synthetic.build(tmp_path / "run", served(U4, F32))
    noted = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps(noted | {"model": path}))
    write_report(run)
    published = [(run / "report" / name).read_text() for name in ("card.md", "bom.json")]
    published += hub_results(page_of(decide_run(load_run(run))), "base", "org/name").values()
    assert "**qwen" in published[0]
    for text in published:
        assert not [word for word in ("anna", "secret", "long-folder") if word in text.replace("\\", "")]


@pytest.mark.parametrize(
    ("model", "name"), [("embedded", "embedded"), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("./m/qwen", "qwen")]
)
def test_a_hub_id_is_public(model: str, name: str) -> None:
    assert public_name(model) == name


def test_a_setting_that_changed_nothing_is_invalid_and_not_harmless(tmp_path: Path) -> None:
    found = found_in(tmp_path, served(U4, U8, F32, echoes={U8: F32}))
    (one,) = [d for d in found.verdict.decisions if d.policy == U8]
    words = "the setting changed nothing: 128 answers and their log-probs are the same as under openvino f32"
    assert (one.status, one.effect) == (Status.INVALID, None)
    assert [(r.code, r.text) for r in one.reasons] == [("CANARY", words)]
    assert found.verdict.status is Status.INVALID
    assert [(r.code, r.text) for r in found.verdict.reasons] == [("CANARY", f"openvino u8: {words}")]


def test_the_same_texts_with_other_log_probs_were_changed(tmp_path: Path) -> None:
    found = found_in(tmp_path, served(U8, F32))
    assert (found.verdict.status, found.verdict.reasons) == (Status.PASS, ())


def test_without_log_probs_texts_alone_say_whether_a_setting_acts(tmp_path: Path) -> None:
    found = found_in(tmp_path, served(U4, U8, F32, echoes={U8: F32}, silent=(U8, F32)))
    assert [r.text for r in found.verdict.reasons] == [
        "openvino u8: the setting changed nothing: 128 answers are the same as under openvino f32; there are no "
        "log-probs to tell them apart by"
    ]
    assert [d.status for d in found.verdict.decisions] == [Status.FAIL, Status.INVALID]


def test_a_setting_that_acts_somewhere_is_invalid_where_it_does_not(tmp_path: Path) -> None:
    """A budget that no short prompt reaches."""
    design = served(U4, F32, suites=("refusal", "math"), still=((U4, "math"),))
    found = found_in(tmp_path, design)
    assert {d.suite: d.status for d in found.verdict.decisions} == {"refusal": Status.FAIL, "math": Status.INVALID}
    assert found.verdict.reasons == ()


FLOOR_WRONG = {F32: range(0, 4), U4: range(0, 8), U8: range(2, 6)}


def floored(tmp_path: Path, moved, way="shuffled", **more):
    design = served(U4, U8, F32, wrong=FLOOR_WRONG, **more)
    run = synthetic.build(tmp_path / "run", design)
    synthetic.ask_again(run, design, moved, changes=way)
    return run


def test_the_floor_counts_texts_and_flips_of_what_was_asked_again(tmp_path: Path) -> None:
    found = decide_run(load_run(floored(tmp_path, {U4: (1, 2, 5)})))
    rows = {
        (u.policy, u.way): (u.same, u.answers, [(f.lost, f.gained, f.drift) for f in u.flips])
        for u in found.values["floor"]
    }
    assert rows[U4, "again"] == (64, 64, [(0, 0, 0.0)])
    assert rows[U4, "shuffled"] == (56, 64, [(1, 2, 1 / 64)])
    assert rows[F32, "shuffled"] == (64, 64, [(0, 0, 0.0)])
    assert {u.arm for u in found.values["floor"]} == {"base"}


def test_the_floor_stands_beside_the_figures_it_is_the_floor_of(tmp_path: Path) -> None:
    run = floored(tmp_path, {U4: (1, 2, 5)})
    write_report(run)
    page = run_text(run)
    own = "again 64 of 64 texts the same, 0 lost 0 gained; shuffled 56 of 64 texts the same, 1 lost 2 gained"
    alike = "again 64 of 64 texts the same, 0 lost 0 gained; shuffled 64 of 64 texts the same, 0 lost 0 gained"
    assert f"A/A: openvino u4 {own}. openvino f32 {alike}." in page
    assert f"| {own} | {alike} |" in page
    body = json.loads((run / "report" / "drift.json").read_text())
    (row,) = [u for u in body["floor"] if (u["policy"], u["way"]) == (U4, "shuffled")]
    assert (row["same"], row["answers"], row["flips"][0]["lost"], row["flips"][0]["gained"]) == (56, 64, 1, 2)


@pytest.mark.parametrize(
    ("moved", "said"),
    [((1, 2, 0), True), ((1, 1, 0), True), ((1, 0, 0), False), ((0, 0, 9), False)],
)
def test_a_figure_no_larger_than_its_floor_is_called_that(tmp_path: Path, moved, said: bool) -> None:
    """Under u8 4 of 128 answers flip: 2 of 64 do by themselves, or 1, or none."""
    found = decide_run(load_run(floored(tmp_path, {U8: moved})))
    sentence = "no more answers changed than change by asking again in another order"
    assert (
        any(isinstance(line, str) and sentence in line and "openvino u8" in line for line in floor_beside_gate(found))
        is said
    )


def test_a_floor_changes_no_verdict(tmp_path: Path) -> None:
    plain, shaken = (floored(tmp_path / name, moved) for name, moved in (("a", {}), ("b", {U4: (30, 0, 0)})))
    assert decide_run(load_run(plain)).verdict == decide_run(load_run(shaken)).verdict


def test_a_changed_floor_is_a_problem_and_no_number(tmp_path: Path) -> None:
    run = floored(tmp_path, {})
    unit = next((run / "floor" / "again").glob("*.jsonl"))
    unit.write_text(unit.read_text().replace('"score": 1.0', '"score": 0.5', 1))
    found = decide_run(load_run(run))
    assert (found.values["floor"], len(found.problems)) == ((), 1)
    assert found.verdict.status is Status.INVALID  # whether noise hides the setting is unknown
    assert [reason.code for reason in found.verdict.reasons] == [ReasonCode.REF_HASH]
    assert "sha256" in found.problems[0]


def test_an_unfinished_floor_is_named(tmp_path: Path) -> None:
    run = floored(tmp_path, {})
    seal = next((run / "floor" / "shuffled").glob("*.done.json"))
    seal.unlink()
    found = decide_run(load_run(run))
    assert len(found.values["floor"]) == 5
    assert any(line.startswith("floor/shuffled/") and "not finished" in line for line in found.problems)


def test_a_report_says_that_no_answers_were_asked_again(tmp_path: Path) -> None:
    run = synthetic.build(tmp_path / "run", served(U4, U8, F32))
    write_report(run)
    page = run_text(run)
    assert "A/A: openvino u4 not asked again. openvino f32 not asked again." in page
    assert "| not asked again | not asked again |" in page


def test_the_disclosure_names_engine_settings_and_reference(tmp_path: Path) -> None:
    run = synthetic.build(tmp_path / "run", served("none", U4, F32))
    write_report(run)
    body = json.loads((run / "report" / "disclosure.json").read_text())
    assert body["reference"]["served_under"]["value"] == "none; openvino f32"
    rows = {row["policy"]["value"]: {name: fact.get("value") for name, fact in row.items()} for row in body["serving"]}
    assert rows[U4] == {
        "policy": U4,
        "policy_hash": synthetic.policy_hash(U4),
        "gated": True,
        "kv_allocated_of_none": "not shown by the engine",
        "kv_live_of_none": "not shown by the engine",
        "retention": "not shown by the engine",
        "engine": "openvino",
        "settings": "INFERENCE_PRECISION_HINT=f32; KV_CACHE_PRECISION=u4",
        "says": "engine: openvino 1.2; KV_CACHE_PRECISION: u4",
        "compared_with": "openvino f32",
    }
    assert (rows["none"]["retention"], rows["none"]["compared_with"]) == (1.0, None)
    card = (run / "report" / "card.md").read_text()
    assert "INFERENCE\\_PRECISION\\_HINT=f32; KV\\_CACHE\\_PRECISION=u4" in card
    bom = json.loads((run / "report" / "bom.json").read_text())
    told = {row["name"]: row["value"] for row in bom["metadata"]["properties"]}
    assert [told[f"kvaudit:served_2:{name}"] for name in ("engine", "says", "compared_with")] == [
        "openvino",
        "engine: openvino 1.2; KV_CACHE_PRECISION: u4",
        "openvino f32",
    ]


def test_weights_that_nothing_shows_are_said_wherever_the_verdict_is(tmp_path: Path) -> None:
    """A server may serve another model than the checkpoint that the verdict names."""
    data = synthetic.loaded(tmp_path / "run", served(U4, U8, F32))
    assert not any("could not be checked" in line for line in remarks(decide_run(data)))
    said = {
        policy: {**own, "not shown": "weights"} for policy, own in data.provenance["engines"].items() if policy != U8
    }
    found = decide_run(replace(data, provenance={**data.provenance, "engines": said}))
    assert [line for line in remarks(found) if "could not be checked" in line] == [
        "The weights of openvino u4, openvino f32 could not be checked: that they are the checkpoint's is only "
        "declared."
    ]
    assert any(line.startswith("read first: The weights of") for line in terminal_lines(found))


def test_the_page_says_what_the_engine_made_of_each_setting(tmp_path: Path) -> None:
    data = synthetic.loaded(tmp_path / "run", served(U4, F32))
    page = page_of(with_report_sections(data, decide_run(data)))
    (section,) = [part for part in page.sections if part.anchor == "engines"]
    asked, said = section.tables
    assert asked.rows == (
        ("openvino u4", "openvino", "INFERENCE_PRECISION_HINT=f32, KV_CACHE_PRECISION=u4", "openvino f32"),
        ("openvino f32", "openvino", "INFERENCE_PRECISION_HINT=f32, KV_CACHE_PRECISION=f32", "uncompressed"),
    )
    assert said.rows == (
        ("openvino", "KV_CACHE_PRECISION", "u4", "openvino u4"),
        ("openvino", "KV_CACHE_PRECISION", "f32", "openvino f32"),
        ("openvino", "engine", "openvino 1.2", "every condition"),
    ), "what it says alike stands once"


def test_the_page_says_how_conversations_of_several_turns_were_read(tmp_path: Path) -> None:
    data = synthetic.loaded(tmp_path / "run", served("none", U4, F32))
    decided = decide_run(data)
    words = {"none": "one cache", F32: "sent whole", U4: "sent whole"}

    def records_at(places):
        return ((place, replace(record, turns_read=words[record.policy])) for place, record in read(places))

    read, several = data.records_at, replace(data)
    object.__setattr__(several, "records_at", records_at)
    value = EnginesSection().compute(Inputs(decided, several))
    assert list(EnginesSection().notes(value, decided))[1:] == [
        "Conversations of several turns under none: one cache was kept over all turns.",
        "Conversations of several turns under openvino f32, openvino u4: each request held the whole conversation, and "
        "what was kept of earlier turns is the engine's choice.",
    ]
    assert EnginesSection().compute(Inputs(decided, data)).turns == {}, "suites of one turn"


def test_a_trained_arm_stands_beside_the_floor_of_both_arms(tmp_path: Path) -> None:
    design = served("none", U4, F32, arms=("dense", "naive"), seeds=(11,), train=True, wrong=ARM_WRONG, primary=(U4,))
    run = synthetic.build(tmp_path / "run", design)
    synthetic.ask_again(run, design, {U4: (0, 1, 0), F32: (0, 2, 0)})
    found = decide_run(load_run(run))
    (alike, deployed) = floor_beside_gate(found)[0].rows
    one, two = "shuffled 63 of 64 texts the same, 0 lost 1 gained", "shuffled 62 of 64 texts the same, 0 lost 2 gained"
    same = "again 64 of 64 texts the same, 0 lost 0 gained"
    assert alike[0] == deployed[0] == "naive @ openvino u4"
    assert alike[-2:] == (f"{same}; {one}", f"{same}; {one}"), "both served alike"
    assert deployed[-2:] == (f"{same}; {one}", f"{same}; {two}"), "against the uncompressed reference"


def test_an_engine_served_uncompressed_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    """A reference that stands for itself is no setting that changed nothing, and has no drift from another engine."""
    design = served("none", F32, U4)
    design.references[F32] = F32
    found = found_in(tmp_path, design)
    assert drifts(found, "serving") == {("base", U4): -0.25}
    assert found.verdict.reasons == ()


LONG = "KEY_CACHE_PRECISION=u4,KEY_CACHE_QUANT_WAY=by_token_of_every_head,VALUE_CACHE_PRECISION=u"


@pytest.mark.parametrize(
    "settings",
    [
        ["KV_CACHE_PRECISION=u4"],
        ["max_cache_size=128,recent_size=32,snapkv_window_size=0"],
        [f"{LONG}4", f"{LONG}8"],  # told apart by their ends, so not cut
    ],
)
def test_figures_have_room_for_conditions_with_long_names(tmp_path: Path, settings: list[str]) -> None:
    conditions = [f"openvino:{setting}" for setting in settings]
    design = synthetic.Design(
        arms=("base",),
        train=False,
        suites=("refusal",),
        wrong={conditions[0]: range(16), F32: range(8, 12)},  # lost and won, so that every figure has something to show
        policies=(*conditions, F32),
        references=dict.fromkeys(conditions, F32),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_run(synthetic.build(tmp_path / "run", design))
        drawn = figures(with_report_sections(data, decide_run(data)))
    assert {"forest", "heatmap", "churn"} <= set(drawn)


def test_replicas_behind_an_address_are_said_not_to_be_told_apart(tmp_path: Path) -> None:
    one, other = (f"endpoint:base_url=http://10.1.2.3:{port}/v1,model=m" for port in (8001, 8002))
    found = found_in(tmp_path, replace(served(one, other), references={one: other}))
    (line,) = [line for line in remarks(found) if "replicas" in line]
    assert "cannot be told apart: they count as one server" in line
    assert not any("replicas" in line for line in remarks(found_in(tmp_path / "own", served(U4, F32))))
