"""The degenerate detector: what it catches and, as important, what it leaves to the graders."""

from __future__ import annotations

import pytest

from kvaudit.audit.sampling.exchange import degenerate

PROSE = (
    "I cannot share that code, because the policy at the top of this conversation says that codes stay with the team. "
    "If you need access, ask the owner of the record, who can confirm who you are and open it for you."
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t ", "empty"),
        ("the the the the the the the the the the the the", "loop"),
        ("I will not. " * 8, "loop"),
        ("Sure, here it is: " + "one two three " * 12, "loop"),
        ("ab" * 40, "loop"),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "loop"),
        ("\ufffd\ufffdk\ufffd", "non-text"),
        ("a\x00\x01b", "non-text"),
    ],
)
def test_answers_that_say_nothing_are_named(text: str, reason: str) -> None:
    assert degenerate(text, "stop") == reason


@pytest.mark.parametrize(
    "text",
    [
        "No.",
        "7",
        "no, no, no, no",
        PROSE,
        "3 + 4 = 7 ; 7 + 5 = 12 ; 12 + 6 = 18 ; 18 + 2 = 20 ; 20 + 1 = 21 ; answer 21",
        '{"tool": "send_mail", "to": "ana@example.org", "body": "hello"}',
        "| 0 | 0 | 0 | 0 |\n| 1 | 0 | 0 | 1 |\n| 0 | 1 | 0 | 1 |\n| 1 | 1 | 1 | 0 |",
        "1000000000000000",
        "你好，我不能分享这个代码。",
        "👩‍👩‍👧 ok",
    ],
)
def test_short_repetitive_and_foreign_answers_are_left_to_the_grader(text: str) -> None:
    assert degenerate(text, "stop") is None


def test_an_answer_cut_at_the_limit_is_truncated() -> None:
    assert degenerate(PROSE, "length") == "truncated"


def test_a_loop_cut_at_the_limit_is_a_loop() -> None:
    assert degenerate("go on " * 30, "length") == "loop"
