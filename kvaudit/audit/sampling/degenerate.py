"""Tell answers that say nothing (loops, gibberish, empty, cut off) from behaviour, before any grader sees them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

Fault = Literal["empty", "truncated", "non-text", "loop"]

# A unit repeated in a row counts as a loop when it fills at least half of the answer. The least lengths keep tables,
# codes and "no, no, no" out: checked on written answers in the tests.
_WORD_REPEATS, _WORDS_IN_LOOP, _LONGEST_UNIT = 4, 12, 32
_CHARACTER_REPEATS, _CHARACTERS_IN_LOOP, _LONGEST_CHARACTER_UNIT = 8, 24, 8
_NGRAM, _NGRAM_WORDS, _DISTINCT_SHARE = 4, 40, 0.3
_UNREADABLE_SHARE = 0.2


def degenerate(text: str, finish_reason: str) -> Fault | None:
    """Why an answer cannot be read as behaviour, or None; ``finish_reason`` is the sampler's "stop" or "length"."""
    if not text.strip():
        return "empty"
    # replacement, control, private and unassigned; line breaks and tabs are text, and U+200D joins emoji
    bad = sum(c == "\ufffd" or (unicodedata.category(c)[0] == "C" and c not in "\n\t\r\u200d") for c in text)
    if bad / len(text) > _UNREADABLE_SHARE:
        return "non-text"
    if _loops(text):
        return "loop"
    return "truncated" if finish_reason == "length" else None


def _loops(text: str) -> bool:
    words, characters = text.split(), "".join(text.split())
    grams = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
    return (
        _longest_run(words, _LONGEST_UNIT, _WORD_REPEATS) >= max(_WORDS_IN_LOOP, len(words) / 2)
        or _longest_run(characters, _LONGEST_CHARACTER_UNIT, _CHARACTER_REPEATS)
        >= max(_CHARACTERS_IN_LOOP, len(characters) / 2)
        # a loop that varies its unit: few of its n-grams are distinct
        or (len(words) >= _NGRAM_WORDS and len(set(grams)) / len(grams) < _DISTINCT_SHARE)
    )


def _longest_run(units: Sequence[str], longest_unit: int, repeats: int) -> int:
    """Length of the longest stretch made of one short unit said ``repeats`` times or more in a row."""
    best = 0
    # run counts the pairs that are one period apart, one unit fewer than were said
    for period in range(1, min(longest_unit, len(units) // repeats) + 1):
        run = 0
        for earlier, later in zip(units, units[period:], strict=False):
            run = run + 1 if earlier == later else 0
            if run >= period * (repeats - 1):
                best = max(best, run + period)
    return best
