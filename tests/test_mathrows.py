"""Answers that are the same in other words, and the layouts that one loader reads."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from suite_world import grade, words, write_rows

from kvaudit.core.errors import DataError
from kvaudit.suites.answers import final_answer, same_answer
from kvaudit.suites.base import SUITES
from kvaudit.suites.mathrows import Amc23, Math500, MathRows, extract_number

real_rows = pytest.mark.skipif("KVAUDIT_DATA" not in os.environ, reason="needs the rows that KVAUDIT_DATA names")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    return write_rows(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,-2", "-2 and 1"),
        ("5", "x=5"),
        ("90", r"90^\circ"),
        ("10080", r"10,\!080"),
        ("2(k+1)", "2k+2"),
        ("(a+5)(b+2)", "(b+2)(a+5)"),
        (r"1-\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\{3, 7\}", "7, 3"),
        (r"\text{Evelyn}", "evelyn"),
        ("C", r"\text{(C)}"),
        ("9/5", r"1\frac{4}{5}"),
        ("32348", r"\$32,\!348"),
        ("864", r"864 \mbox{ inches}^2"),
        ("5.40", r"5.4 \text{ cents}"),
        ("3 metres", "3"),
        ("27.0", "27"),
        (r"\frac{6}{5}", r"\frac65"),
        (r"6.72 \times 10^{-5}", ".0000672"),
        ("7y-5x-11z-4=0", "5x - 7y + 11z + 4 = 0"),
        (r"\left(-\infty,0\right]", r"(-\infty, 0]"),
        ("4210_5", "4210_{5}"),
        (r"\begin{pmatrix} -\frac13 \\ 2 \end{pmatrix}", r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}"),
        ("-5i+6", "6 - 5i"),
        ("25%", r"25\%"),
    ],
)
def test_the_same_answer_in_other_words(one: str, other: str) -> None:
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("52", "52_8"),
        ("(3,4]", "[3,4)"),
        ("(1,2)", "(2,1)"),
        ("1,2", "1,2,2"),
        ("2k+1", "2k+2"),
        ("even", "neve"),
        (r"\frac{1}{3}", "0.333"),
        ("10080", "10081"),
        ("-5", "5"),
        ("1e999", "2e999"),
        ("9^{9^{9^9}}", "9^{9^{9^8}}"),
        ("9" * 400, "9" * 401),
        ("", "0"),
        ("1" + "0" * 200 + "=y", "2=y"),
        ("10^{200}=y", "y=2x"),
        ("(17+17i)*10^{307}", "3"),
    ],
)
def test_another_answer(one: str, other: str) -> None:
    assert not same_answer(one, other)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        ("The answer is 12. I used 3 steps.", "12"),
        ("**Answer:** x = 4", "x = 4"),
        ("ANSWER: .0000672.", ".0000672"),
        ("It is $x^2$ and then $x^3$", "x^3"),
        ("We get 3, then 8", "8"),
        (r"The answer is \(\frac{1}{2}\).", r"$\frac{1}{2}$"),
        ("The final answer is:\n\n$$\\frac{1}{2}$$", r"\frac{1}{2}"),
        (r"The value is \[ x = 7 \]", "x = 7"),
        (r"\boxed{}", None),
        ("no idea", None),
    ],
)
def test_what_an_answer_ends_on(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["The answer is" + " " * 2_000 + "x", "####" + " " * 30_000 + "x"])
def test_a_flood_of_spaces_holds_no_number_and_is_read_at_once(text: str) -> None:
    start = time.process_time()
    assert extract_number(text) is None
    assert time.process_time() - start < 1.0


def test_a_flood_of_digits_behind_a_mark_is_read_at_once() -> None:
    start = time.process_time()
    assert extract_number("####" + "1" * 60_000 + ",,x 4 #### 3: b #### 7") == 7.0
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is: **$ 1,234**.", 1234.0),
        ("#### $ -7", -7.0),
        ("answer = **5", 5.0),
        ("####3 ####  4", 4.0),
        ("#### 5.55,", 5.55),
        ("#### 5.55, so $6 is enough", 5.55),
        ("#### 12.\nThat leaves 3 for Ann.", 12.0),
        ("#### 1,234,", 1234.0),
        ("#### 5.5) Add 3\n#### 7", 7.0),
        ("#### 1. Add both\n#### 12. Sum up\n**18**", 18.0),
        ("Answer: 13 + 5 = 18", 18.0),
        ("The answer is 18 + 5 = $23.", 23.0),
        (r"The final answer is $\boxed{18}$. Shall I show 2 more steps?", 18.0),
        ("The answer is \u221218.", -18.0),
        (r"It is 18{,}000", 18000.0),
        (r"It is 70\,000 then", 70000.0),
    ],
)
def test_the_number_that_an_answer_ends_on(text: str, number: float) -> None:
    assert extract_number(text) == number


@pytest.mark.realdata
@real_rows
def test_every_gold_answer_is_itself_and_no_other() -> None:
    suite = Math500()
    rows = [*suite.items("train", 70, 0, 3000, words), *suite.items("eval", 280, 0, 3000, words)]
    golds = sorted({str(item.payload["answer"]) for item in rows})
    assert len(golds) == 223
    for gold in golds:
        assert same_answer(str(final_answer(rf"Hence it is \boxed{{{gold}}}.")), gold), gold
        assert same_answer(rf" \left. {gold} \right. ".replace(r"\left.", "").replace(r"\right.", ""), gold), gold
    alike = {pair for pair in combinations(golds, 2) if same_answer(*pair)}
    assert alike == {
        (r"10,\!080", "10080"),
        ("120", r"120^\circ"),
        ("30", r"30^\circ"),
        ("36", r"36^\circ"),
        ("5", "x=5"),
        ("90", r"90^\circ"),
    }


@pytest.mark.realdata
@real_rows
@pytest.mark.parametrize("name", ["gsm8k", "math500", "amc23"])
def test_real_gold_answers_differ_from_their_neighbours(name: str) -> None:
    suite = SUITES.get(name)()
    items = suite.items("eval", suite.item_count("eval", 60, 0), 0, 0, words)
    for item, neighbour in pairwise(items):
        same = same_answer(str(item.payload["answer"]), str(neighbour.payload["answer"]))
        assert grade(suite, item, suite.gold(neighbour)).score == float(same), item.item_id


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "?", "answer": 27.0}, "27"),
        ({"question": "?", "answer": "$\\frac12$"}, "\\frac12"),
        ({"question": "?", "final_answer": ["$3$"]}, "3"),
        ({"question": "?", "final_answer": ["1", "2"]}, "1, 2"),
        ({"problem": "?", "solution": "First \\boxed{1}, then \\boxed{2}."}, "2"),
    ],
)
def test_the_layouts_of_rows(row: dict[str, object], answer: str) -> None:
    assert MathRows().read(row) == ("?", {"answer": answer})


@pytest.mark.parametrize(
    "row", [{"problem": "?"}, {"answer": 1}, {"problem": "?", "answer": True}, {"problem": "?", "answer": "$$"}]
)
def test_a_row_without_question_or_answer_is_named(data: Path, row: dict[str, object]) -> None:
    (data / "math_eval" / "amc23.jsonl").write_text(
        "\n".join([json.dumps({"problem": "?", "answer": 1}), json.dumps(row)])
    )
    with pytest.raises(DataError, match=r"amc23.jsonl' line 2 has no question or no readable answer"):
        Amc23().items("eval", 1, 0, 600, words)


def test_a_file_that_is_too_short_to_be_split_is_named(data: Path) -> None:
    (data / "math_eval" / "amc23.jsonl").write_text('{"problem": "?", "answer": 1}')
    with pytest.raises(DataError, match=r"suite amc23 has no rows for eval"):
        Amc23().items("eval", 1, 0, 600, words)


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra math")
def test_computer_algebra_is_asked_where_a_formula_cannot_be_computed_and_named_as_judge(data: Path) -> None:
    item = Math500().items("eval", 1, 0, 600, words)[0]
    hard = type(item)(**{**{name: getattr(item, name) for name in item.__slots__}, "payload": {"answer": "10"}})
    found = grade(Math500(), hard, [r"\boxed{\binom{5}{2}}"])
    assert (found.score, found.judge) == (1.0, "math-verify")
    assert grade(Math500(), hard, [r"\boxed{11}"]).judge == "math-verify", (
        "two judges in one suite are no one measurement"
    )
