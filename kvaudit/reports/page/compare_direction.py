"""Which way a metric is better, and why that is believed: by the command, by the reader, or for want of anything else.

A name that speaks of harm or of mistakes is not taken for a score of which more is better: the user says which it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvaudit.core.errors import SpecError
from kvaudit.core.text import join_names
from kvaudit.reports.records.readers.base import ONE_SUITE, READERS, Log

# beginnings of words of which less is better, as far as a name can tell
_HARMS = (
    *("abuse", "abusive", "attack", "bias", "danger", "decei", "decept", "discriminat", "exfil", "hallucin"),
    *("harm", "hate", "hijack", "infring", "inject", "insult", "jailbr", "leak", "malicious", "misalign", "misuse"),
    *("offens", "poison", "profan", "rejectscore", "stereotyp", "strongreject", "sycophan", "threat", "toxi", "unsafe"),
    *("violat", "violen", "vulnerab", "error", "fail", "mistake", "perplex", "wrong"),
)
_HARMS_WHOLE = {"asr", "cer", "loss", "nll", "ppl", "wer"}
_NO_HARMS = ("harmless", "failsafe")  # begin as one of those, and say the opposite
_SAYS_NOTHING = ("score", "value", "label", "result", "grade", "rating", "mean")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Direction(NamedTuple):
    """Whether a score of 0 is what is desired, and why that is believed."""

    lower_is_better: bool
    because: str

    def sentence(self, metric: str) -> str:
        """What is said of it wherever a verdict is."""
        better = "Lower" if self.lower_is_better else "Higher"
        return f"{better} is better for {metric}: {self.because}"


def direction_of(logs: Sequence[Log], metric: str, *, lower: bool, higher: bool) -> Direction:
    """Which way a metric of two files is better; raises SpecError for two directions, none, and a wrong one."""
    if lower and higher:
        raise SpecError("--lower-is-better and --higher-is-better say opposite things; give one")
    turned = [log for log in logs if READERS.get(log.reader).has_direction]
    if lower and turned:
        raise SpecError(
            f"--lower-is-better: in {turned[0].path.name} ({turned[0].reader}) 1 is what is desired in every metric "
            "already, an attack that failed too; leave the option out"
        )
    if lower:
        return Direction(True, "--lower-is-better says so")
    if higher:
        return Direction(False, "--higher-is-better says so")
    if len(turned) == len(logs):
        return Direction(False, f"what {turned[0].reader} writes is read so that 1 is desired in every metric")
    if harmful := list(dict.fromkeys(filter(speaks_of_harm, _names(logs, metric)))):
        raise SpecError(
            f"metric {metric} has no direction: the name {join_names(map(repr, harmful))} speaks of what is not "
            "wanted, and nothing says whether 1 is the harm or its absence; give --lower-is-better where 1 is the "
            "harm, --higher-is-better where 1 is desired"
        )
    return Direction(False, "taken so, since nothing says otherwise; --lower-is-better turns it round")


def speaks_of_harm(name: str) -> bool:
    """Whether a name has a word of which less is better."""
    words = [word for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if word]
    pairs = ["".join(pair) for pair in pairwise(words)]  # strong_reject
    begins = any(word.startswith(_HARMS) and not word.startswith(_NO_HARMS) for word in (*words, *pairs))
    return begins or bool(_HARMS_WHOLE & {*words})


def _names(logs: Sequence[Log], metric: str) -> Iterator[str]:
    """What names a metric: its own name, and of one that says nothing by itself its suites and the task of its file."""
    yield metric
    if metric.lower() not in _SAYS_NOTHING:
        return
    for log in logs:
        own = log.rows[log.rows["metric"] == metric]
        yield from (str(suite) for suite in sorted(set(own["suite"])) if suite != ONE_SUITE)
        yield log.facts.get("task", "")
