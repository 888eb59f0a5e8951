"""The filler has the length asked for, repeats nothing, and needles land where they are put."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from kvaudit.core.errors import SpecError
from kvaudit.suites.haystack import filler_lines, fit, insert_at, scatter
from kvaudit.suites.templates import templates


def words(text: str) -> int:
    return len(text.split()) + text.count("\n")


@pytest.mark.parametrize("room", [0, 30, 200, 5000, 40_000])
def test_filler_is_short_of_the_room_by_less_than_a_line(room):
    lines = filler_lines(random.Random("a"), room, words)
    used = sum(words(line + "\n") for line in lines)
    assert room - 10 < used <= room or room < 10
    assert used <= room


def test_no_line_occurs_twice_in_a_long_context():
    lines = filler_lines(random.Random("long"), 32_768, words)
    assert len(lines) > 3000
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [
        ("start", ["rule", "a", "b", "c", "d"]),
        ("middle", ["a", "b", "rule", "c", "d"]),
        ("end", ["a", "b", "c", "d", "rule"]),
        ("system", ["a", "b", "c", "d"]),
    ],
)
def test_a_needle_lands_at_its_placement(placement, wanted):
    assert insert_at(["a", "b", "c", "d"], ["rule"], placement) == wanted


def test_scatter_keeps_the_order_of_lines_and_of_needles():
    woven = scatter(random.Random(1), ["a", "b", "c"], ["1", "2", "3"])
    assert [x for x in woven if x.isalpha()] == ["a", "b", "c"]
    assert [x for x in woven if x.isdigit()] == ["1", "2", "3"]


def test_fit_fills_up_to_the_request_and_not_beyond():
    (text,) = fit(lambda lines: ["\n".join(["one two three", *lines])], random.Random(2), 100, words)
    assert 90 < words(text) <= 100
    assert text.startswith("one two three\n")


def test_an_unknown_split_is_the_users_error():
    with pytest.raises(SpecError, match="unknown split 'test'"):
        templates("math", (2, 2, 2), "test")


def test_suites_do_not_import_torch():
    script = "import sys; from kvaudit.suites.base import SUITES; SUITES.all(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
