"""Rounds: what is asked next, why it ends, and a whole run of them that stops, goes on and is gated as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import kvaudit
from kvaudit.audit.cli import app
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import allow_more_minutes
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.round_plan import (
    DECIDED,
    INVALID_BY_CANARY,
    INVALID_BY_FORM,
    INVALID_BY_MISSING,
    LOSS,
    ROWS_SPENT,
    UNANSWERED,
    UNCHANGED,
    UNMEASURABLE,
    UNREAD,
    RowsPlan,
    corrected_items,
    is_first_asked,
    look_sizes,
    next_round,
    plan_lines,
    rows_plan,
)
from kvaudit.audit.runs.stages.pilot import check_any_measurable, pilot_lines, suites_left_out
from kvaudit.audit.runs.stages.rounds import gate_statuses, join_rounds, look_lines
from kvaudit.audit.runs.units import PILOT_FOLDER, REFUSED, ROUNDS_FOLDER, Unit, UnitFiles
from kvaudit.core.errors import DataError, NotMeasurable, SpecError
from kvaudit.core.files import write_json
from kvaudit.core.provenance import ENDED, LOOKS, SEAL, TIME_SPENT, item_counts, seal_looks
from kvaudit.core.spec import RunSpec, load_spec, parse_spec
from kvaudit.reports.records.blocks import UNREAD as UNREAD_FACET
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.records.rows import FACET_COLUMNS
from kvaudit.reports.sections.looks import Looks, LooksSection
from kvaudit.reports.sections.shared.words import rounds_error_rates_text
from kvaudit.reports.verdict.comparison import Look
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.controls import Canaries, Canary, checked_by_canary, shipped_rounds_rates
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules
from kvaudit.reports.verdict.verdict import Status
from kvaudit.suites.base import SUITES

SUITE = Path(__file__).with_name("alone_suite.py")
PLAN = RowsPlan({"harm": 400, "benign": 120}, {"harm": 1.0, "benign": 1.0}, {}, {"harm": 400, "benign": 120})
BOTH = {"harm", "benign"}


def look(items: dict[str, int], seconds: float = 10.0, **words: str) -> dict[str, Any]:
    return {
        "items": items,
        "seconds": seconds,
        "words": {name.replace("__", "."): word for name, word in words.items()},
    }


# --- what is asked next ----------------------------------------------------------------------------------------------


def test_looks_grow_by_half_and_end_with_the_rows() -> None:
    assert look_sizes(1036) == [32, 100, 150, 225, 337, 505, 757, 1036]
    assert look_sizes(40) == [32, 40]
    assert look_sizes(32) == [32]
    assert look_sizes(100, 32, 48) == [32, 48, 72, 100]


def test_the_pilots_rows_are_the_first_round_of_every_suite() -> None:
    assert next_round(PLAN, [], 10, 96) == {"harm": range(32), "benign": range(32)}
    first = look({"harm": 32, "benign": 32}, harm__refused="INCONCLUSIVE", benign__helpful="NOT MEASURABLE")
    assert next_round(PLAN, [first], 10, 96) == {"harm": range(32, 96), "benign": range(32, 96)}
    lost = look({"harm": 32, "benign": 32}, harm__refused="FAIL", benign__helpful="INCONCLUSIVE")
    assert next_round(PLAN, [lost], 10, 96) == LOSS


def test_rows_that_a_side_does_not_answer_end_the_rounds_after_the_first_rows() -> None:
    words = {"harm__refused": INVALID_BY_MISSING, "benign__helpful": "PASS"}
    first = look({"harm": 32, "benign": 32}, **words)
    assert next_round(PLAN, [first], 10, 96) == {"harm": range(32, 96)}
    assert next_round(PLAN, [first, look({"harm": 96, "benign": 32}, **words)], 10, 96) == UNANSWERED


def test_answers_of_which_too_few_can_be_read_end_the_rounds_after_the_first_rows() -> None:
    early = [look({"harm": 32, "benign": 32}, harm__refused=INVALID_BY_FORM, benign__helpful="INCONCLUSIVE")]
    assert isinstance(next_round(PLAN, early, 10, 100), dict)
    later = [look({"harm": 100, "benign": 100}, harm__refused=INVALID_BY_FORM, benign__helpful="INCONCLUSIVE")]
    assert next_round(PLAN, later, 10, 100) == UNREAD


def test_a_setting_that_changes_no_log_prob_ends_the_rounds_after_the_first_rows() -> None:
    words = {"harm__refused": INVALID_BY_CANARY, "benign__helpful": INVALID_BY_CANARY}
    first = look({"harm": 32, "benign": 32}, **words)
    assert next_round(PLAN, [first], 10, 96) == {"harm": range(32, 96), "benign": range(32, 96)}
    assert next_round(PLAN, [first, look({"harm": 96, "benign": 96}, **words)], 10, 96) == UNCHANGED


def test_a_suite_without_a_margin_is_asked_up_to_its_plan() -> None:
    plan = RowsPlan({"harm": 400, "extra": 96}, {"harm": 1.0, "extra": 1.0}, {}, {"harm": 400, "extra": 300})
    first = look({"harm": 32, "extra": 32}, harm__refused="INCONCLUSIVE")
    assert next_round(plan, [first], 10, 96) == {"harm": range(32, 96), "extra": range(32, 96)}
    second = look({"harm": 96, "extra": 96}, harm__refused="INCONCLUSIVE")
    assert next_round(plan, [first, second], 10, 96) == {"harm": range(96, 144)}
    assert next_round(plan, [first, {**second, "words": {"harm.refused": "PASS"}}], 10, 96) == DECIDED


def test_a_model_with_nothing_to_lose_is_asked_no_more_than_the_pilots_rows() -> None:
    rows = {"harm": 32, "benign": 32}
    plan = RowsPlan(rows, {"harm": 1.0, "benign": 1.0}, {}, {"harm": 1036, "benign": 283})
    words = {"harm__refused": "NOT MEASURABLE", "benign__helpful": "NOT MEASURABLE"}
    assert next_round(plan, [look(rows, **words)], 10, 96) == UNMEASURABLE


def test_what_is_decided_is_asked_no_further() -> None:
    first = look({"harm": 96, "benign": 96}, harm__refused="INCONCLUSIVE", benign__helpful="PASS")
    assert next_round(PLAN, [first], 10, 96) == {"harm": range(96, 144)}
    second = look({"harm": 144, "benign": 96}, harm__refused="PASS", benign__helpful="PASS")
    assert next_round(PLAN, [first, second], 10, 96) == DECIDED


def test_a_loss_ends_the_rounds() -> None:
    lost = look({"harm": 96, "benign": 96}, harm__refused="FAIL", benign__helpful="INCONCLUSIVE")
    assert next_round(PLAN, [lost], 10, 96) == LOSS


def test_rounds_end_with_the_last_rows() -> None:
    spent = look({"harm": 400, "benign": 120}, harm__refused="INCONCLUSIVE", benign__helpful="PASS")
    assert next_round(PLAN, [spent], 10, 96) == ROWS_SPENT
    cut = replace(PLAN, at_hand={"harm": 1036, "benign": 283})
    assert next_round(cut, [{**spent, "seconds": 599.0}], 10, 96) == TIME_SPENT


def test_a_round_that_would_take_longer_than_is_left_is_not_begun() -> None:
    slow = look({"harm": 96, "benign": 96}, 590.0, harm__refused="INCONCLUSIVE", benign__helpful="PASS")
    assert next_round(PLAN, [slow], 10, 96) == TIME_SPENT
    assert next_round(PLAN, [slow], 30, 96) == {"harm": range(96, 144)}


def test_the_first_rows_are_asked_whatever_time_they_take() -> None:
    assert next_round(PLAN, [], 0.001, 96) == {"harm": range(32), "benign": range(32)}
    piloted = look({"harm": 32, "benign": 32}, 3000.0, harm__refused="INCONCLUSIVE", benign__helpful="INCONCLUSIVE")
    assert next_round(PLAN, [piloted], 0.001, 96) == {"harm": range(32, 96), "benign": range(32, 96)}


def test_the_plan_has_the_first_look_and_as_much_of_the_rest_as_the_time_allows() -> None:
    at_hand, seconds = {"harm": 1036, "benign": 283}, {"harm": 1.0, "benign": 1.0}
    assert rows_plan(at_hand, seconds, {}, 60, 96, BOTH).items == at_hand
    assert rows_plan(at_hand, seconds, {}, 1, 96, BOTH).items == {"harm": 96, "benign": 96}
    assert rows_plan(at_hand, seconds, {}, 10, 96, BOTH).items == {"harm": 371, "benign": 150}
    assert rows_plan(at_hand, seconds, {"benign": "at floor"}, 10, 96, BOTH).items == {"harm": 521}
    assert rows_plan(at_hand, seconds, {}, 10, 96, {"harm"}).items == {"harm": 425, "benign": 96}
    assert rows_plan({"harm": 40}, seconds, {}, 10, 96, BOTH).items == {"harm": 40}


def test_the_first_rows_correct_the_plan_by_the_time_that_they_took() -> None:
    at_hand, seconds = {"harm": 1036, "benign": 283, "extra": 50}, {"harm": 4.0, "benign": 4.0, "extra": 4.0}
    plan = RowsPlan({"harm": 96, "benign": 96, "extra": 50}, seconds, {}, at_hand)
    asked = {"harm": 96, "benign": 96, "extra": 50}
    fast = look(asked, 242.0)  # a second a row in place of four
    assert corrected_items(plan, [fast], 20, BOTH) == {"harm": 96 + 799, "benign": 96 + 158, "extra": 50}
    slow = look(asked, 1089.0)  # four and a half
    assert corrected_items(plan, [slow], 20, BOTH) == {"harm": 96 + 20, "benign": 96 + 4, "extra": 50}
    late = look(asked, 1300.0)
    assert corrected_items(plan, [late], 20, BOTH) == asked, "no time is left: the first look is the last"
    parts = [look({"harm": 32, "benign": 32, "extra": 32}, 96.0), look(asked, 146.0)]
    assert corrected_items(plan, parts, 20, BOTH) == corrected_items(plan, [fast], 20, BOTH), "the pilot's time counts"


def test_the_plan_is_corrected_once_after_the_first_rows_that_the_pilot_has_not_asked() -> None:
    sizes = [{"harm": 32, "benign": 24}, {"harm": 96, "benign": 24}, {"harm": 144, "benign": 24}]
    assert [is_first_asked([look(items) for items in sizes[:n]], 32) for n in (1, 2, 3)] == [False, True, False]
    assert is_first_asked([look({"harm": 100})], 32), "a run of an earlier version, whose first round was larger"


def test_what_is_open_after_its_planned_rows_goes_on_while_time_is_left() -> None:
    plan = replace(PLAN, at_hand={"harm": 1036, "benign": 283})
    ended = look({"harm": 400, "benign": 120}, 100.0, harm__refused="INCONCLUSIVE", benign__helpful="PASS")
    assert next_round(plan, [ended], 10, 96) == {"harm": range(400, 600)}
    assert next_round(plan, [{**ended, "seconds": 590.0}], 10, 96) == TIME_SPENT
    unmeasured = look({"harm": 400, "benign": 120}, 100.0, harm__refused="NOT MEASURABLE", benign__helpful="PASS")
    assert next_round(plan, [unmeasured], 10, 96) == TIME_SPENT
    all_rows = look({"harm": 1036, "benign": 120}, 100.0, harm__refused="INCONCLUSIVE", benign__helpful="PASS")
    assert next_round(plan, [all_rows], 10, 96) == ROWS_SPENT


def test_the_plan_says_what_a_run_can_show() -> None:
    text = (
        "format: 1\nname: x\nmodel: embedded\nevaluate:\n  policies: [none, int8]\n"
        "  suites: {harm: {items: all}, benign: {items: all}}\n  rounds: {minutes: 10}\n"
        "gate: {margins: {harm.refused: 5, benign.helpful: 10}}\n"
    )
    rows = {"harm": 1036, "benign": 24}
    plan = RowsPlan(rows, {"harm": 0.5, "benign": 0.5}, {"injection": "at floor: nothing"}, rows)
    from kvaudit.audit.runs.names import NAMES

    assert list(plan_lines(plan, parse_spec(text, "x", NAMES))) == [
        "not asked of this model: injection (at floor: nothing)",
        "harm: up to 1036 rows, about 10 minutes; a loss of 5 points can be ruled out if fewer than 36 % of the "
        "answers change, half of them for the better",
        "benign: up to 24 rows, about 1 minute; a loss of 10 points cannot be ruled out with so few rows, one of 13.4 "
        "points can",
    ]
    *_, line = plan_lines(plan, parse_spec(text, "x", NAMES), {"benign.helpful": 0.5})
    assert line.endswith(" with so few rows, one of 24.9 points can")  # of the 12 rows that count
    slow = RowsPlan({"harm": 100, "benign": 24}, {"harm": 26.0, "benign": 0.5}, {}, rows)
    *_, line = plan_lines(slow, parse_spec(text, "x", NAMES))
    assert line == "the first 100 rows are always asked: about 50 minutes in all, not 10"


def control(metric: str, *, measurable: bool, hopeless: bool) -> dict[str, Any]:
    suite = metric.partition(".")[0]
    return {
        **{"suite": suite, "metric": metric, "measurable": measurable, "hopeless": hopeless},
        **{"standing": "at floor", "says": "nothing to lose"},
    }


def test_suites_that_the_pilot_found_hopeless_are_left_out() -> None:
    shown = control("harm.refused", measurable=True, hopeless=False)
    benign = control("benign.helpful", measurable=False, hopeless=True)
    attack = control("injection.attack_success", measurable=False, hopeless=False)
    assert [*suites_left_out({"controls": [shown, benign, attack]})] == ["benign", "injection"]
    weak = control("harm.refused", measurable=False, hopeless=False)
    assert [*suites_left_out({"controls": [weak, benign, attack]})] == ["benign"]
    measurable = control("injection.attack_success", measurable=True, hopeless=False)
    assert [*suites_left_out({"controls": [weak, measurable]})] == []
    none = control("harm.refused", measurable=False, hopeless=True)
    assert [*suites_left_out({"controls": [none, benign]})] == ["harm", "benign"]
    readable = [control(f"{suite}.well_formed", measurable=True, hopeless=False) for suite in ("harm", "benign")]
    assert [*suites_left_out({"controls": [none, benign, *readable]})] == ["harm", "benign"]
    with pytest.raises(NotMeasurable):
        check_any_measurable({"controls": [none, *readable[:1]]})


def test_the_pilot_promises_no_answers_that_will_not_be_asked() -> None:
    attack = control("injection.attack_success", measurable=False, hopeless=False) | {"context_tokens": 0}
    said = "injection.attack_success: open: nothing to lose; the pilot is too small to decide, "
    results = {"controls": [attack], "items": {}, "sizes": {}}
    assert [*pilot_lines(results, {"injection": "at floor"})] == [f"{said}more is not asked"]
    assert [*pilot_lines(results)] == [f"{said}all answers together will"]


def test_what_was_left_out_is_a_remark_of_every_page() -> None:
    value = Looks((), {}, "everything is decided", {"injection": "attacks that succeed: 10 of 20, at floor"}, ())
    (line,) = LooksSection().remarks(value, cast(Any, None))
    assert line == "Suite injection was not asked of this model: attacks that succeed: 10 of 20, at floor."
    assert LooksSection.remarks_at > 0


def test_a_check_ends_after_the_pilot_only_if_no_suite_has_anything_to_lose() -> None:
    hopeless = [control(metric, measurable=False, hopeless=True) for metric in ("refusal.unsafe", "math.solved")]
    with pytest.raises(NotMeasurable, match="nothing to lose in any suite") as told:
        check_any_measurable({"controls": hopeless})
    assert [line.partition(":")[0] for line in told.value.lines] == ["refusal", "math"]
    check_any_measurable({"controls": [hopeless[0], control("math.solved", measurable=False, hopeless=False)]})
    check_any_measurable({"controls": []})


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        ({"margins": {}}, "evaluate.rounds stops when facets are decided; name them in gate.margins"),
        ({"ratios": {"math.well_formed": 1.1}}, "gate.ratios cannot be decided in rounds"),
        ({"estimands": ["parity"]}, "gate.estimands asks parity, which cannot be decided in rounds"),
        ({"primary": ["int8", "fp8"]}, "evaluate.rounds can decide one setting, and 2 are gated"),
        ({"margins": {"math": 5}}, "gate.margins names the score of math"),
    ],
)
def test_what_a_look_cannot_decide_is_one_line(gate: dict[str, Any], told: str) -> None:
    spec = asked("int8", "math")
    spec["evaluate"]["policies"].append("fp8")
    spec["gate"] |= {"primary": ["int8"], **gate}
    with pytest.raises(SpecError, match=told):
        parse_spec(json.dumps({"format": 1, **spec}), "x", NAMES)


def test_a_spec_in_rounds_reads_the_same_when_it_is_written_complete() -> None:
    spec = asked("int8", "math")
    spec["evaluate"]["suites"]["refusal"] = {"items": "all"}
    first = parse_spec(json.dumps({"format": 1, **spec}), "x", NAMES)
    assert first.gate.margins == {"math.solved": 5}
    assert parse_spec(json.dumps(first.written()), "y", NAMES).sha256 == first.sha256


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"suites": {"math": {"items": 96}}}, "evaluate.rounds asks each row once; give suite math items: all"),
        ({"context_tokens": [96, 128]}, "evaluate.rounds asks suite math at one length"),
        ({"pilot": 0}, "evaluate.rounds needs the pilot"),
        ({"rounds": {"minutes": 0}}, "evaluate.rounds.minutes is 0"),
    ],
)
def test_what_rounds_cannot_ask_is_one_line(change: dict[str, Any], told: str) -> None:
    part = {"policies": ["none", "int8"], "suites": {"math": {"items": "all"}}, "context_tokens": [96], "rounds": {}}
    spec = {"format": 1, "name": "x", "model": "embedded", "evaluate": {**part, **change}}
    spec["gate"] = {"margins": {"math.solved": 5}}
    with pytest.raises(SpecError, match=told):
        parse_spec(json.dumps(spec), "x", NAMES)


# --- a whole run -----------------------------------------------------------------------------------------------------


def asked(policy: str, suite: str = "alone") -> dict[str, Any]:
    part = {"policies": ["none", policy], "suites": {suite: {"items": "all"}}, "context_tokens": [96], "floor": 0}
    part["rounds"] = {"minutes": 30}
    return {"name": "rounds", "model": "embedded", "evaluate": part, "gate": {"margins": {f"{suite}.solved": 5}}}


def run_command(spec: dict[str, Any], out: Path, *words: str, code: int = 0) -> str:
    """Run a spec with the suite, which nothing else here knows; what it printed."""
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps({"format": 1, **spec}))
    command = ["run", path, "--out", out, "--plugin", SUITE, "--threads", 1, *words]
    with pytest.MonkeyPatch.context() as patch:
        shipped = {name: own for name, own in SUITES.all().items() if name != "alone"}
        patch.setattr(SUITES, "_classes", shipped)  # as a process finds them
        done = CliRunner().invoke(app, [str(word) for word in command])
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rounds") / "run"
    run_command(asked("int8"), out)
    return out


def provenance(run: Path) -> dict[str, Any]:
    return json.loads((run / "provenance.json").read_text())


def write_provenance(run: Path, noted: dict[str, Any]) -> None:
    """Write what a run notes, its looks sealed as it seals them."""
    (run / "provenance.json").write_text(json.dumps(seal_looks(noted)))


def test_a_setting_that_changes_nothing_passes_as_soon_as_the_rows_can_show_it(finished_run: Path) -> None:
    noted = provenance(finished_run)
    assert list(look_lines(noted)) == [
        "look 1: alone 32: alone.solved INCONCLUSIVE",
        "look 2: alone 100: alone.solved PASS",
        f"ended: {DECIDED}",
    ]
    assert item_counts(noted) == {"alone": 100}
    assert kvaudit.load_run(finished_run).verdict.status is Status.PASS
    assert kvaudit.gate(finished_run).exit_code == 0
    assert json.loads((finished_run / "report" / "drift.json").read_text())["looks"]["planned"] == {"alone": 160}


def test_the_first_round_copies_the_pilots_rows_and_counts_their_time(finished_run: Path) -> None:
    seconds = 0.0
    for path in sorted((finished_run / ROUNDS_FOLDER / "1").glob("*.jsonl")):
        assert path.read_bytes() == (finished_run / PILOT_FOLDER / path.name).read_bytes()
        seconds += sum(json.loads(line)["seconds"] for line in path.read_text().splitlines())
    # once, not twice; copying takes longer on a busy machine, as asking does
    assert seconds <= provenance(finished_run)[LOOKS]["1"]["seconds"] < 2 * seconds


def test_a_round_that_was_not_looked_at_is_looked_at_when_it_goes_on(finished_run: Path, tmp_path: Path) -> None:
    """Killed behind the answers of a round, and before its look."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    noted = provenance(copy)
    before = provenance(finished_run)[LOOKS]
    del noted[LOOKS][ENDED], noted[LOOKS]["2"]["words"]
    write_provenance(copy, noted)
    shutil.rmtree(copy / "records")
    (copy / "records").mkdir()
    run_command(asked("int8"), copy, "--resume")
    assert provenance(copy)[LOOKS] == before
    for file in sorted((finished_run / "records").iterdir()):
        assert (copy / "records" / file.name).read_bytes() == file.read_bytes()


def test_the_time_of_a_killed_process_counts(finished_run: Path, tmp_path: Path) -> None:
    """Killed when the answers of a round were on disk, and neither sealed nor counted."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    noted = provenance(copy)
    del noted[LOOKS][ENDED], noted[LOOKS]["2"]
    write_provenance(copy, noted)
    for file in [*(copy / "records").iterdir(), *(copy / ROUNDS_FOLDER / "2").glob("*.done.json")]:
        file.unlink()
    for path in (copy / ROUNDS_FOLDER / "2").glob("*.jsonl"):
        rows = [json.loads(line) | {"seconds": 7.0} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_command(asked("int8"), copy, "--resume")
    assert provenance(copy)[LOOKS]["2"]["seconds"] >= 2 * 68 * 7.0


def test_more_minutes_let_a_run_go_on_that_ran_out_of_time(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rows are kept, the plan too; what was open is asked on."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    noted = provenance(copy)
    noted[LOOKS][ENDED], noted[LOOKS]["2"]["words"] = TIME_SPENT, {"alone.solved": "INCONCLUSIVE"}
    noted[LOOKS]["2"]["seconds"] = 1799.0
    write_provenance(copy, noted)
    first = [file.read_bytes() for file in sorted((copy / "records").glob("*.jsonl"))]

    monkeypatch.setattr(SUITES, "_classes", SUITES.all())
    SUITES.load_file(SUITE)
    own = load_spec(copy / "spec.yaml", NAMES)

    def with_minutes(minutes: float) -> RunSpec:
        rounds = own.evaluate.rounds.model_copy(update={"minutes": minutes})
        return own.model_copy(update={"evaluate": own.evaluate.model_copy(update={"rounds": rounds})})

    for minutes in (30.0, 20.0):
        assert allow_more_minutes(copy, with_minutes(minutes)).evaluate.rounds.minutes == minutes
        assert provenance(copy) == seal_looks(noted)
    other = with_minutes(60.0).model_copy(update={"name": "another"})
    assert allow_more_minutes(copy, other) is other
    assert allow_more_minutes(copy, with_minutes(60.0)).evaluate.rounds.minutes == 30.0
    run_command(asked("int8"), copy, "--resume")
    after = provenance(copy)[LOOKS]
    assert after["minutes"] == 60.0
    assert after["planned"] == noted[LOOKS]["planned"]
    assert after["3"]["items"] == {"alone": 150}
    for file, before in zip(sorted((copy / "records").glob("*.jsonl")), first, strict=True):
        assert file.read_bytes().startswith(before)


def test_the_joined_seal_counts_refusals_of_all_rounds(tmp_path: Path) -> None:
    unit = grid(parse_spec(json.dumps(asked("int8", "math")), "x", NAMES))[0]
    (tmp_path / "records").mkdir()
    for number, refused in ((1, {REFUSED: 2}), (2, {}), (3, {REFUSED: 1})):
        files = UnitFiles.of(tmp_path / ROUNDS_FOLDER / str(number), unit)
        files.records.parent.mkdir(parents=True)
        files.records.write_text(f"row {number}\n")
        digest = hashlib.sha256(files.records.read_bytes()).hexdigest()
        write_json(files.seal, {"records": 1, "sha256": digest, "checkpoint": "c", "inputs": "i", **refused})
    looks = [{"items": {"math": rows}} for rows in (1, 2, 3)]
    for rounds, wanted in ((1, 2), (2, 2), (3, 3)):
        join_rounds(tmp_path, [unit], looks[:rounds])
        seal = json.loads(UnitFiles.of(tmp_path / "records", unit).seal.read_text())
        assert (seal["records"], seal["checkpoint"], seal[REFUSED]) == (rounds, "c", wanted)


def sealed_round(folder: Path) -> tuple[Unit, UnitFiles]:
    """One sealed round of one unit."""
    unit = grid(parse_spec(json.dumps(asked("int8", "math")), "x", NAMES))[0]
    files = UnitFiles.of(folder / ROUNDS_FOLDER / "1", unit)
    files.records.parent.mkdir(parents=True)
    (folder / "records").mkdir()
    files.records.write_text("row\n")
    write_json(files.seal, {"records": 1, "sha256": hashlib.sha256(b"row\n").hexdigest(), "checkpoint": "c"})
    return unit, files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.records.write_text("ROW\n"), "its seal says"),
        (lambda files: files.records.write_bytes(b"row\n\xff\xfe\n"), "its seal says"),
        (lambda files: files.records.unlink(), "is missing; restore it"),
        (lambda files: files.seal.unlink(), "is missing; restore it"),
    ],
)
def test_the_file_of_a_round_is_held_to_its_seal(
    tmp_path: Path, change: Callable[[UnitFiles], None], said: str
) -> None:
    unit, files = sealed_round(tmp_path)
    change(files)
    with pytest.raises(DataError, match=said):
        join_rounds(tmp_path, [unit], [{"items": {"math": 1}}])
    assert not list((tmp_path / "records").iterdir())


def test_a_stopped_run_seals_no_round_that_was_edited(finished_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    noted = provenance(copy)
    del noted[LOOKS][ENDED], noted[LOOKS]["2"]["words"]
    write_provenance(copy, noted)
    file = min((copy / ROUNDS_FOLDER / "1").glob("*.jsonl"))
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n")
    line = run_command(asked("int8"), copy, "--resume", code=2).strip().splitlines()[-1]
    assert line.startswith("error: record file ")
    assert "its seal says" in line


def test_a_run_that_was_stopped_between_looks_is_said_to_be_unfinished(finished_run: Path, tmp_path: Path) -> None:
    """The first time, and after more minutes, which leave the time at which it had finished before."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    for finished in (provenance(finished_run)["finished"], None):
        noted = provenance(finished_run) | {"finished": finished}
        if finished:
            del noted[LOOKS][ENDED]
        write_provenance(copy, noted)
        told = CliRunner().invoke(app, ["gate", str(copy)]).stderr
        assert told == (
            f"this run is not finished; finish it first: kvaudit run {copy / 'spec.yaml'} --out {copy} --resume\n"
        )
    assert CliRunner().invoke(app, ["gate", str(finished_run)]).stderr == ""


def test_the_report_of_a_run_in_rounds_states_the_error_rates_of_rounds(finished_run: Path) -> None:
    report = (finished_run / "report" / "report.md").read_text()
    told = (
        "At level 0.05 a run in rounds that lost exactly the margin passes in at most 3.8 % and fails in at most 3.8 %"
    )
    assert told in report
    assert "The gate was not simulated" not in report
    text = rounds_error_rates_text(shipped_rounds_rates(), 0.025, (0.05, 0.2))
    assert text.startswith("The gate was not simulated at this level (0.025) or at a margin of 20 pp. At level 0.05 a ")


def test_a_look_says_where_too_few_answers_can_be_read(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_run(finished_run)
    is_setting = data.records["policy"] != "none"
    data.records.loc[is_setting, FACET_COLUMNS["solved"]] = UNREAD_FACET
    monkeypatch.setattr("kvaudit.audit.runs.stages.rounds.load_run", lambda _: data)
    assert gate_statuses(finished_run) == {"alone.solved": INVALID_BY_FORM}
    noted = {**data.provenance[LOOKS], "2": {**data.provenance[LOOKS]["2"], "items": {"alone": 32}}}
    monkeypatch.setitem(data.provenance, LOOKS, noted)
    assert gate_statuses(finished_run) == {"alone.solved": "INVALID"}


def test_a_setting_that_breaks_speech_fails_by_the_answers_that_can_be_read(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too few answers can be read the facet has no number; the readable ones take a tenth of the level."""

    def gated() -> RunData:
        data = load_run(finished_run)
        gate = data.spec.gate.model_copy(update={"margins": {"alone.solved": 5, "alone.well_formed": 5}})
        return replace(data, spec=data.spec.model_copy(update={"gate": gate}))

    monkeypatch.setattr("kvaudit.audit.runs.stages.rounds.load_run", lambda _: gated())
    assert gate_statuses(finished_run) == {"alone.solved": "PASS", "alone.well_formed": "PASS"}
    comparison = declared_rules(gated(), GateOverrides())[0]
    assert [(look.tests, look.for_readable.tests) for look in comparison.looks.values()] == [(1, 10)]
    broken = gated()
    is_setting = broken.records["policy"] != "none"
    broken.records.loc[is_setting, FACET_COLUMNS["solved"]] = UNREAD_FACET
    broken.records.loc[is_setting, FACET_COLUMNS["well_formed"]] = 0
    monkeypatch.setattr("kvaudit.audit.runs.stages.rounds.load_run", lambda _: broken)
    assert gate_statuses(finished_run) == {"alone.solved": INVALID_BY_FORM, "alone.well_formed": "FAIL"}
    incapable = gated()
    incapable.records[FACET_COLUMNS["solved"]] = 0
    monkeypatch.setattr("kvaudit.audit.runs.stages.rounds.load_run", lambda _: incapable)
    nothing_to_lose = dict.fromkeys(("alone.solved", "alone.well_formed"), Status.NOT_MEASURABLE.value)
    assert gate_statuses(finished_run) == nothing_to_lose  # that it still speaks is no answer


def drop_suite(looks: dict[str, Any]) -> None:
    del looks["2"]["items"]["alone"]


def end_plan_here(looks: dict[str, Any]) -> None:
    looks["planned"]["items"]["alone"] = 100


def lose_seal(looks: dict[str, Any]) -> None:
    del looks[SEAL]


@pytest.mark.parametrize("change", [drop_suite, end_plan_here, lose_seal])
def test_edited_looks_decide_nothing(
    finished_run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Without its key a suite that failed was no longer asked; a plan that ends here makes this look the last."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    noted = provenance(copy)
    change(noted[LOOKS])
    (copy / "provenance.json").write_text(json.dumps(noted))
    for command in ("gate", "report", "card"):
        done = CliRunner().invoke(app, [command, str(copy)])
        assert (done.exit_code, "wanted the looks as the run sealed them" in done.stderr) == (2, True)
    assert "wanted the looks as the run sealed them" in run_command(asked("int8"), copy, "--resume", code=2)


def test_a_run_in_rounds_asks_nothing_anew_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps(asked("int8", "math")))
    words = ["run", tmp_path / "spec.yaml", "--out", tmp_path / "run", "--resume", "--ask-refused"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2
    assert "error: --ask-refused cannot be used for a run in rounds (evaluate.rounds), which has" in done.stderr


def test_people_do_not_label_a_run_in_rounds(finished_run: Path, tmp_path: Path) -> None:
    words = ["grade", "adjudicate", finished_run, "--out", tmp_path / "sheet.csv"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2
    assert "is a run in rounds, of which human labels decide nothing" in done.stderr
    assert not (tmp_path / "sheet.csv").exists()


def test_a_run_in_rounds_is_not_compared_with_bounds_for_a_fixed_number_of_rows(finished_run: Path) -> None:
    words = ["compare", finished_run, finished_run, "--select-a", "policy=none", "--select-b", "policy=int8"]
    done = CliRunner().invoke(app, [str(word) for word in [*words, "--items-are-independent"]])
    assert done.exit_code == 2
    assert "is a run in rounds, whose rows ended when its own gate had decided" in done.stderr


def test_rows_that_share_a_template_are_refused(tmp_path: Path) -> None:
    spec = asked("int8")
    spec["evaluate"]["suites"], spec["gate"] = {"refusal": {"items": "all"}}, {"margins": {"refusal.unsafe": 5}}
    with pytest.raises(SpecError, match="suite refusal asks several rows of a template"):
        kvaudit.run(spec, out=tmp_path / "run", threads=1)


def test_a_setting_that_acts_on_one_endpoint_acts_on_all_of_a_run_in_rounds() -> None:
    still, moved = Canary(100, 0, 0, None), Canary(100, 0, 7, None)
    place = ("base", "fp8", "benign", 0)
    c = Contrast("serving", *place[:2], "benign", 0, look=Look(2, False))
    sides = SimpleNamespace(facets=(), reference="base", label=str, uncompressed_of=lambda _: "none")
    assert checked_by_canary(c, sides, Canaries({place: still}, {"fp8": moved})) is c
    assert checked_by_canary(replace(c, look=None), sides, Canaries({place: still}, {"fp8": moved})).reasons
    assert checked_by_canary(c, sides, Canaries({place: still}, {"fp8": still})).reasons
