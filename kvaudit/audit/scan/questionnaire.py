"""The questionnaire for a vendor (as Markdown, JSON schema and file to fill in), and the check of its answers.

Answers are declared by the vendor, not verified, and a disclosure says so.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.files import parse_yaml
from kvaudit.core.text import inline, is_text, short_repr, short_text

ANSWERS_FORMAT, ANSWERS_VERSION = "kvaudit.answers", 1
ANSWERS = ("yes", "no", "unknown", "declined")
LARGEST_ANSWERS = 1_000_000  # bytes of a file of answers
LONGEST_TEXT = 5_000  # characters of one text in it
_HEAD = ("vendor", "model", "date", "answered_by")
_FIELDS = ("answer", "evidence", "details")
_PATH = Path(__file__).with_name("questions.yaml")


class VendorQuestion(NamedTuple):
    """A question to a vendor; a vendor who answers yes also has to give all ``details``."""

    id: str
    asks: str
    details: Sequence[str]


class Section(NamedTuple):
    """The questions under one heading."""

    title: str
    questions: Sequence[VendorQuestion]


class Questionnaire(NamedTuple):
    """The whole questionnaire, section by section; ``sha256`` is the hash of its file."""

    sections: Sequence[Section]
    sha256: str

    @property
    def questions(self) -> list[VendorQuestion]:
        """All questions, in order."""
        return [question for section in self.sections for question in section.questions]


@cache
def load_questionnaire() -> Questionnaire:
    """Return the questionnaire that ships with this version of kvaudit."""
    text = _PATH.read_text(encoding="utf-8")
    table = parse_yaml(text, _PATH.name, "questionnaire").table
    sections = [
        Section(section["title"], [VendorQuestion(**row) for row in section["questions"]])
        for section in table["sections"]
    ]
    return Questionnaire(sections, hashlib.sha256(text.encode()).hexdigest())


def markdown() -> str:
    """Return the questionnaire as a Markdown page to fill in."""
    questionnaire = load_questionnaire()
    lines = ["# KV-cache compression: questions for a vendor", ""]
    lines += [
        *(f"* {name.replace('_', ' ')}:" for name in _HEAD),
        "",
        "Each question has one of four answers: **yes**, **no**, **unknown**, **declined**. A yes needs its details;",
        "evidence is a link, a document or a file that a reader can ask for. The answers are declared by the vendor,",
        "not verified.",
    ]
    for section in questionnaire.sections:
        lines += ["", f"## {section.title}"]
        for question in section.questions:
            boxes = " ".join(f"[ ] {answer}" for answer in ANSWERS)
            lines += ["", f"**{question.id}** {question.asks}", "", f"{boxes}", ""]
            lines += [f"* {detail}:" for detail in question.details] + ["* evidence:"]
    return "\n".join([*lines, "", f"Questions {questionnaire.sha256}", ""])


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a file of answers."""
    questionnaire = load_questionnaire()
    text = {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answers about KV-cache compression, declared by a vendor",
        "type": "object",
        "additionalProperties": False,
        "required": ["format", "version", "questions_sha256", *_HEAD, "answers"],
        "properties": {
            "format": {"const": ANSWERS_FORMAT},
            "version": {"const": ANSWERS_VERSION},
            "questions_sha256": {"const": questionnaire.sha256},
            **{name: text for name in _HEAD if name != "date"},
            "date": {"type": "string", "format": "date"},
            "answers": {
                "type": "object",
                "additionalProperties": False,
                "required": [question.id for question in questionnaire.questions],
                "properties": {question.id: _question_schema(question, text) for question in questionnaire.questions},
            },
        },
    }


def _question_schema(question: VendorQuestion, text: dict[str, Any]) -> dict[str, Any]:
    details = {
        "type": "object",
        "additionalProperties": False,
        "properties": {detail: text for detail in question.details},
    }
    return {
        "description": question.asks,
        "type": "object",
        "additionalProperties": False,
        "required": ["answer"],
        "properties": {
            "answer": {"enum": list(ANSWERS)},
            "evidence": {"type": "array", "items": text},
            "details": details,
        },
        "if": {"properties": {"answer": {"const": "yes"}}},
        "then": {"required": ["details"], "properties": {"details": {"required": list(question.details)}}},
    }


def blank_answers() -> dict[str, Any]:
    """Return the content of a file of answers in which every answer is "unknown"."""
    questionnaire = load_questionnaire()
    return {
        "format": ANSWERS_FORMAT,
        "version": ANSWERS_VERSION,
        "questions_sha256": questionnaire.sha256,
        **dict.fromkeys(_HEAD, "unknown"),
        "date": date.today().isoformat(),
        "answers": {question.id: {"answer": "unknown", "evidence": []} for question in questionnaire.questions},
    }


def check_answers(path: Path) -> tuple[list[str], str]:
    """Return the faults in a file of answers, one line each, and a summary of the answers in one line.

    Raises DataError if the file is no JSON object.
    """
    table = _read_answers(path)
    faults = [inline(fault) for fault in _faults(table)]
    answers = table.get("answers")
    rows = answers.values() if isinstance(answers, dict) else ()
    counts = Counter(row["answer"] for row in rows if isinstance(row, dict) and row.get("answer") in ANSWERS)
    unproven = sum(isinstance(row, dict) and row.get("answer") == "yes" and not row.get("evidence") for row in rows)
    totals = ", ".join(f"{counts[answer]} {answer}" for answer in ANSWERS)
    return faults, f"{totals}; {unproven} yes without evidence; declared, not verified"


def _read_answers(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_ANSWERS + 1)
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror}); give a file of answers") from None
    except (ValueError, RecursionError) as error:
        size = f"larger than {LARGEST_ANSWERS} bytes" if len(raw) > LARGEST_ANSWERS else str(error)
        raise DataError(f"{str(path)!r} is no file of answers ({size})") from None
    if not isinstance(table, dict):
        raise DataError(f"{str(path)!r} holds a {type(table).__name__}, wanted an object with answers")
    return table


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from JSON pairs; raises ValueError for a repeated key, of which JSON would keep the last."""
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"key {short_text(repeated[0])!r} is given twice")
    return dict(pairs)


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    questionnaire = load_questionnaire()
    wanted = {"format": ANSWERS_FORMAT, "version": ANSWERS_VERSION, "questions_sha256": questionnaire.sha256}
    for name, value in wanted.items():
        if table.get(name) != value or isinstance(table.get(name), bool):
            more = (
                "; it answers another version of the questions" if name == "questions_sha256" and name in table else ""
            )
            yield f"{name} is {short_repr(table.get(name))}, wanted {value!r}{more}"
    for name in _HEAD:
        yield from _text_faults(name, table.get(name))
    try:
        normalised = date.fromisoformat(str(table.get("date"))).isoformat()
    except ValueError:
        normalised = ""
    if isinstance(table.get("date"), str) and normalised != table["date"]:
        yield f"date is {short_repr(table['date'])}, wanted YYYY-MM-DD"
    yield from (f"unknown key {short_text(key)!r}" for key in table if key not in (*wanted, *_HEAD, "answers"))
    answers = table.get("answers")
    if not isinstance(answers, dict):
        yield f"answers is {short_repr(answers)}, wanted an object"
        return
    questions = {question.id: question for question in questionnaire.questions}
    yield from (f"answers.{short_text(key)}: no such question" for key in answers if key not in questions)
    for name, question in questions.items():
        yield from _answer_faults(question, answers.get(name))


def _answer_faults(question: VendorQuestion, row: Any) -> Iterator[str]:
    place = f"answers.{question.id}"
    if not isinstance(row, dict):
        got = "missing" if row is None else short_repr(row)
        yield f"{place} is {got}; wanted an object with answer: {', '.join(ANSWERS)}"
        return
    yield from (f"{place}: unknown key {short_text(key)!r}" for key in row if key not in _FIELDS)
    if row.get("answer") not in ANSWERS:
        yield f"{place}.answer is {short_repr(row.get('answer'))}, wanted one of {', '.join(ANSWERS)}"
    evidence = row.get("evidence", [])
    if not isinstance(evidence, list):
        yield f"{place}.evidence is {short_repr(evidence)}, wanted a list of texts"
    else:
        for index, text in enumerate(evidence):
            yield from _text_faults(f"{place}.evidence[{index}]", text)
    yield from _detail_faults(question, row.get("details", {}), f"{place}.details", row.get("answer") == "yes")


def _detail_faults(question: VendorQuestion, details: Any, place: str, is_required: bool) -> Iterator[str]:
    if not isinstance(details, dict):
        yield f"{place} is {short_repr(details)}, wanted an object"
        return
    yield from (f"{place}: unknown key {short_text(key)!r}" for key in details if key not in question.details)
    for name in question.details:
        if name in details or is_required:
            yield from _text_faults(f"{place}.{name}", details.get(name))


def _text_faults(place: str, value: Any) -> Iterator[str]:
    if value is None:
        yield f"{place} is missing"
    elif not isinstance(value, str) or not value.strip():
        yield f"{place} is {short_repr(value)}, wanted a text"
    elif len(value) > LONGEST_TEXT or not is_text(value):
        yield f"{place} is longer than {LONGEST_TEXT} characters, or has characters that no text file can hold"
