"""The questions for a vendor, and the check of what comes back: one line per fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvaudit.audit.cli import app
from kvaudit.audit.scan.questionnaire import (
    ANSWERS,
    blank_answers,
    check_answers,
    json_schema,
    load_questionnaire,
    markdown,
)


def kvaudit(*words: str) -> Result:
    return CliRunner().invoke(app, ["questionnaire", *words])


def faults(table: dict[str, Any], tmp_path: Path) -> list[str]:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(table))
    return check_answers(path)[0]


def answered(name: str, row: Any) -> dict[str, Any]:
    table = blank_answers()
    table["answers"][name] = row
    return table


def test_every_topic_of_a_vendor_is_asked_once() -> None:
    questions = load_questionnaire().questions
    assert len({question.id for question in questions}) == len(questions) >= 35
    topics = {question.id.partition(".")[0] for question in questions}
    assert topics == {"rollout", "learner", "reference", "serving", "evaluation", "operation"}
    assert all(question.asks.endswith("?") for question in questions)


def test_the_page_has_every_question_with_four_boxes_and_a_place_for_evidence() -> None:
    page, questions = markdown(), load_questionnaire().questions
    assert all(f"**{question.id}** {question.asks}" in page for question in questions)
    assert page.count("[ ] yes [ ] no [ ] unknown [ ] declined") == len(questions)
    assert page.count("* evidence:") == len(questions)


def test_a_blank_file_has_no_fault_and_knows_nothing(tmp_path: Path) -> None:
    assert faults(blank_answers(), tmp_path) == []
    summary = check_answers(tmp_path / "answers.json")[1]
    assert summary.startswith(f"0 yes, 0 no, {len(load_questionnaire().questions)} unknown, 0 declined; 0 yes without")
    assert summary.endswith("declared, not verified")


@pytest.mark.parametrize("answer", ["no", "unknown", "declined"])
def test_only_a_yes_owes_details(answer: str, tmp_path: Path) -> None:
    assert faults(answered("reference.exists", {"answer": answer}), tmp_path) == []


def test_a_yes_says_its_details(tmp_path: Path) -> None:
    row = {"answer": "yes", "details": {"name": "dense-7"}}
    assert faults(answered("reference.exists", row), tmp_path) == [
        "answers.reference.exists.details.hash of its weights is missing"
    ]
    row["details"] = {"name": "dense-7", "hash of its weights": "ab"}
    assert faults(answered("reference.exists", row), tmp_path) == []
    assert "1 yes, 0 no" in check_answers(tmp_path / "answers.json")[1]
    assert "1 yes without evidence" in check_answers(tmp_path / "answers.json")[1]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (None, "answers.serving.told is missing; wanted an object with answer: yes, no, unknown, declined"),
        ("yes", "answers.serving.told is 'yes'; wanted an object with answer: yes, no, unknown, declined"),
        ({"answer": "maybe"}, "answers.serving.told.answer is 'maybe', wanted one of yes, no, unknown, declined"),
        ({"answer": True}, "answers.serving.told.answer is True, wanted one of yes, no, unknown, declined"),
        ({"answer": []}, "answers.serving.told.answer is [], wanted one of yes, no, unknown, declined"),
        ({"answer": "no", "why": "x"}, "answers.serving.told: unknown key 'why'"),
        ({"answer": "no", "evidence": "x"}, "answers.serving.told.evidence is 'x', wanted a list of texts"),
        ({"answer": "no", "evidence": [" "]}, "answers.serving.told.evidence[0] is ' ', wanted a text"),
        ({"answer": "no", "details": []}, "answers.serving.told.details is [], wanted an object"),
        ({"answer": "no", "details": {"when": "x"}}, "answers.serving.told.details: unknown key 'when'"),
    ],
)
def test_a_faulty_answer_is_one_line(row: Any, fault: str, tmp_path: Path) -> None:
    assert faults(answered("serving.told", row), tmp_path) == [fault]


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("format", "x", "format is 'x', wanted 'kvaudit.answers'"),
        ("version", 2, "version is 2, wanted 1"),
        ("version", True, "version is True, wanted 1"),
        ("date", "2026-02-30", "date is '2026-02-30', wanted YYYY-MM-DD"),
        ("vendor", 7, "vendor is 7, wanted a text"),
        ("model", None, "model is missing"),
        ("more", 1, "unknown key 'more'"),
        ("answers", [], "answers is [], wanted an object"),
    ],
)
def test_a_faulty_head_is_one_line(key: str, value: Any, fault: str, tmp_path: Path) -> None:
    assert faults({**blank_answers(), key: value}, tmp_path) == [fault]


def test_answers_to_other_questions_are_named(tmp_path: Path) -> None:
    table = {**blank_answers(), "questions_sha256": "0" * 64}
    table["answers"]["serving.magic"] = {"answer": "no"}
    first, second = faults(table, tmp_path)
    assert first.endswith("it answers another version of the questions")
    assert second == "answers.serving.magic: no such question"


def test_every_fault_is_a_line_and_the_exit_code_is_2(tmp_path: Path) -> None:
    table = blank_answers()
    del table["answers"]["serving.told"]
    table["answers"]["serving.dense"] = {"answer": "per\x1b[2J\nhaps"}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(table))
    result = kvaudit("--check", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 2)
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000, b'"' + b"x" * 1_000_001 + b'"', b"1" * 10_000]
)
def test_what_is_no_file_of_answers_is_one_line(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_bytes(raw)
    result = kvaudit("--check", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_missing_file_and_another_ending_are_one_line(tmp_path: Path) -> None:
    for words in (("--check", str(tmp_path / "no.json")), ("--out", str(tmp_path / "q.html"))):
        result = kvaudit(*words)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_questions_schema_and_blank_are_written(tmp_path: Path) -> None:
    page, form, answers = tmp_path / "q.md", tmp_path / "q.json", tmp_path / "a.json"
    assert kvaudit("--out", str(page)).exit_code == 0
    assert kvaudit("--out", str(form), "--blank", str(answers)).exit_code == 0
    assert page.read_text() == markdown() == kvaudit().stdout
    assert json.loads(form.read_text()) == json_schema()
    assert kvaudit("--check", str(answers)).exit_code == 0


def test_the_schema_asks_what_the_check_asks() -> None:
    form, asked = json_schema(), load_questionnaire()
    names = [question.id for question in asked.questions]
    assert form["properties"]["answers"]["required"] == names == list(form["properties"]["answers"]["properties"])
    assert set(form["required"]) == set(blank_answers())
    told = form["properties"]["answers"]["properties"]["serving.told"]
    assert told["properties"]["answer"] == {"enum": list(ANSWERS)}
    assert told["then"]["properties"]["details"]["required"] == ["where"]


@pytest.mark.parametrize(
    ("row", "valid"),
    [
        ({"answer": "no"}, True),
        ({"answer": "yes"}, False),
        ({"answer": "yes", "details": {"where": "a header"}, "evidence": ["https://x"]}, True),
        ({"answer": "maybe"}, False),
    ],
)
def test_the_schema_and_the_check_agree(row: Any, valid: bool, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the validator is not installed")
    table = answered("serving.told", row)
    assert (faults(table, tmp_path) == []) is valid
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(table) is valid


def test_a_check_that_would_write_something_is_refused(tmp_path: Path) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(blank_answers()))
    done = CliRunner().invoke(app, ["questionnaire", "--check", str(answers), "--out", str(tmp_path / "q.md")])
    assert done.exit_code == 2
    assert "leave out --out and --blank" in done.stderr
