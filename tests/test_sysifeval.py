"""Every rule has an answer that keeps it and one that breaks it, and says which rows are not asked."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from suite_world import grade, words, write_rows

from kvaudit.core.errors import DataError
from kvaudit.suites.rules import RULES, is_checkable, keeps, write_answer
from kvaudit.suites.sources import data_file
from kvaudit.suites.sysifeval import SYSTEM_FORM, USER_FORM, SysIfEval, is_answer, usable_requests

EXAMPLES: list[tuple[str, dict[str, Any], str, str]] = [  # arguments, an answer that keeps the rule, one that breaks it
    ("punctuation:no_comma", {}, "red and blue", "red, blue"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 11}, "one " * 10, "it's well-made " * 3),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two three", "one two"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "One. Two!", "One, two."),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 2}, "It is 3.5 m.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\n***\n\nb", "a\n\n******\n\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        'a\n\n"Weekend, then',
        "a\n\nThe weekend",
    ),
    ("keywords:existence", {"keywords": ["mom", "dad"]}, "Mom and DAD", "mom"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "Rock!"),
    ("keywords:frequency", {"relation": "at least", "keyword": "war", "frequency": 2}, "War, war", "war"),
    ("keywords:frequency", {"relation": "less than", "keyword": "war", "frequency": 2}, "war", "war war"),
    ("keywords:letter_frequency", {"let_relation": "at least", "letter": "o", "let_frequency": 2}, "On top", "on"),
    ("change_case:english_capital", {}, "ALL OF IT.", "ALL of IT."),
    ("change_case:english_lowercase", {}, "all of it.", "All of it."),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "I am OK",
        "I am ok",
    ),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b* and **c**", "*a b* and * *"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n***\nc", "* a\n**b** c"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nSECTION 2",
        "SECTION 1\nSection 2",
    ),
    ("detectable_format:title", {}, "<<my day>> it was", "<< >> it was"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', 'Here: {"a": 1}'),
    ("detectable_format:constrained_response", {}, "Well, My answer is no.", "my answer is no."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [town]", "[name] of []"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "so\nP. P.S. bye", "so\nP.S. bye"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "say it.\nIt", "It. Say it."),
    ("startend:quotation", {}, ' "all of it"\n', '"all" of it'),
    ("startend:end_checker", {"end_phrase": "Any more?"}, 'so. any more?"', "any more? no"),
    ("language:response_language", {"language": "ru"}, "это мой ответ, ok", "this is мой"),
]


@pytest.mark.parametrize(("kind", "arguments", "kept", "broken"), EXAMPLES)
def test_a_rule_holds_what_keeps_it_and_not_what_breaks_it(
    kind: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    assert keeps(kept, [(kind, arguments)])
    assert not keeps(broken, [(kind, arguments)])


def test_sentences_are_counted_as_ifevals_own_grader_counts_them() -> None:
    def sentences(text: str, bound: int) -> bool:
        kind = "length_constraints:number_sentences"
        return keeps(text, [(kind, {"relation": "less than", "num_sentences": bound})])

    title = "# A title\n\n- one\n- two\n\nSo it is. Is it?"
    assert sentences(title, 3)
    assert not sentences(title, 2)


@pytest.mark.parametrize(
    ("kind", "arguments", "kept", "broken"),
    [
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p. s. More", "I can help. So it is"),
        ("length_constraints:number_words", {"relation": "at least", "num_words": 2}, "don't", "dont"),
        (
            "change_case:capital_word_frequency",
            {"capital_relation": "at least", "capital_frequency": 1},
            "X-RAY",
            "N-acetyl-2-APA",
        ),
    ],
)
def test_what_counts_as_one_is_what_ifevals_own_grader_counts(
    kind: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    assert keeps(kept, [(kind, arguments)])
    assert not keeps(broken, [(kind, arguments)])


def test_what_stands_in_quotation_marks_may_be_quoted_itself() -> None:
    assert keeps('""all of it""', [("startend:quotation", {})])
    assert not keeps('"', [("startend:quotation", {})])


def test_every_rule_has_an_example() -> None:
    assert {kind for kind, *_ in EXAMPLES} == set(RULES)
    assert len(RULES) == 25


@pytest.mark.parametrize(("kind", "arguments", "kept", "broken"), EXAMPLES)
def test_the_gold_answer_to_a_rule_keeps_it(kind: str, arguments: dict[str, Any], kept: str, broken: str) -> None:
    assert keeps(write_answer(["harbour"], [(kind, arguments)]), [(kind, arguments)])


@pytest.mark.parametrize("answer", ["", "[" * 9000, "*" * 9000, '{"a":' * 9000, "<<" * 5000, "P." * 5000, "\ud7ff"])
def test_the_worst_answers_are_checked(answer: str) -> None:
    for kind, arguments, *_ in EXAMPLES:
        assert keeps(answer, [(kind, arguments)]) in (True, False)


@pytest.mark.parametrize("answer", ["x" + "\n" * 30_000, "```" + " " * 30_000, "<<" + "a" * 30_000])
def test_a_flood_is_checked_at_once(answer: str) -> None:
    start = time.process_time()
    for kind, arguments, *_ in EXAMPLES:
        keeps(answer, [(kind, arguments)])
    assert time.process_time() - start < 1.0


def test_languages_without_letters_of_their_own_have_no_checker() -> None:
    assert is_checkable("language:response_language", {"language": "kn"})
    assert not is_checkable("language:response_language", {"language": "vi"})
    assert not is_checkable("style:friendly", {})


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("The boats are out", True),
        ("A boating trip", False),
        ("Harbours of old", True),
        ("No.", False),
        ("a " * 40, True),
    ],
)
def test_an_answer_shares_words_with_its_request_or_is_long(answer: str, found: bool) -> None:
    assert is_answer(answer, "describe harbour boats") is found


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    return write_rows(tmp_path)


def test_the_forms_of_a_request_differ_in_who_gives_the_rule(data: Path) -> None:
    items = SysIfEval().items("eval", 160, 0, 0, words)
    ruled, asked = (item for item in items if item.cluster_id == items[0].cluster_id)
    assert (ruled.payload["form"], asked.payload["form"]) == ("system", "user")
    assert [[str(message.role) for message in item.messages] for item in (ruled, asked)] == [
        ["system", "user"],
        ["user"],
    ]
    rule = asked.messages[0].content.rpartition("land. ")[2]
    assert rule in ruled.messages[0].content
    assert rule not in ruled.messages[1].content


def test_a_broken_rule_is_named_and_what_says_nothing_has_no_form(data: Path) -> None:
    item = next(
        i for i in SysIfEval().items("eval", 20, 0, 600, words) if i.payload["rules"][0][0].endswith("no_comma")
    )
    about = item.payload["topic"]
    assert grade(SysIfEval(), item, [f"{about}, yes"]).note == "broke punctuation:no_comma"
    assert grade(SysIfEval(), item, [f"{about} yes"]).score == 1.0
    assert grade(SysIfEval(), item, ["yes"]).facets["well_formed"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": []}, "line 121 holds no rules with arguments for each"),
        ({"key": "none"}, "line 121: .*ifeval_ifeval.jsonl' has no row with the same key"),
        ({"messages": [{"role": "user", "content": "?"}]}, "line 121 holds no messages from system to user"),
        ({"instruction_id_list": ["keywords:existence"]}, "line 121: invalid arguments of a rule"),
    ],
)
def test_a_bad_row_is_named(data: Path, change: dict[str, Any], message: str) -> None:
    path = data / SYSTEM_FORM
    row = {**json.loads(path.read_text().splitlines()[0]), **change}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        SysIfEval().items("eval", 1, 0, 600, words)


@pytest.mark.realdata
@pytest.mark.skipif("KVAUDIT_DATA" not in os.environ, reason="needs the public rows that KVAUDIT_DATA names")
def test_the_real_rows_that_are_not_asked_are_counted() -> None:
    forms = (data_file("sysifeval", name) for name in (SYSTEM_FORM, USER_FORM))
    assert usable_requests(*forms)[1] == {
        "asks for a long answer": 25,
        "rules that exclude each other": 4,
        "no checker for a rule": 5,
    }
