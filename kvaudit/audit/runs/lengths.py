"""Find the prompt lengths at which a check can measure a loss, by a pilot of the uncompressed model at each length.

After a long conversation many models refuse everything or nothing, and then compression has nothing to worsen. So a
length is of use if the model still refuses some harmful requests and still helps with some harmless ones, by the rule
that the check itself applies to its suites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.audit.engines import Condition
from kvaudit.audit.runs.folder import SPEC
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.question import CONTEXT, LONGEST, ServingConfig
from kvaudit.core.errors import NotMeasurable
from kvaudit.core.policy_names import DENSE_POLICY, ENGINE
from kvaudit.core.records import Record
from kvaudit.core.spec import load_spec
from kvaudit.reports.verdict.controls import Control, controls_of
from kvaudit.suites.check_suites import PublicSuite

_ITEMS = 24  # of each suite
_TOKENS = 40  # of an answer; its first sentence shows whether it refuses
_FIRST_ROUND = 400  # rows that a first round asks at a length: two suites of 100, on both sides
_SECONDS = 60


class TriedLength(NamedTuple):
    """The result of the pilot at one prompt length, ``tokens``.

    ``controls`` say of each suite whether a loss could show. ``row_seconds`` is the time per answer.
    """

    tokens: int
    controls: tuple[Control, ...]
    row_seconds: float

    @property
    def is_measurable(self) -> bool:
        """Whether a loss could show in every suite."""
        return all(control.is_measurable for control in self.controls)

    @property
    def seconds(self) -> float:
        """The seconds that the pilot took, without loading the model."""
        return len(self.controls) * _ITEMS * self.row_seconds

    @property
    def line(self) -> str:
        """A line on whether a loss could be measured at this length, and why."""
        controls = [control for control in self.controls if self.is_measurable or not control.is_measurable]
        state = "can be asked" if self.is_measurable else f"cannot be asked, {controls[0].measurability}"
        reasons = "; ".join(f"{control.metric.partition('@')[0]}: {control.says}" for control in controls)
        return f"at {self.tokens} tokens: {state}: {reasons} ({self.row_seconds:.2g} s a row)"


def lengths_from(first: int) -> Iterator[int]:
    """Yield the lengths to try in tokens, each twice the one before, up to ``LONGEST``."""
    while first <= LONGEST:
        yield first
        first *= 2


def length_spec(
    model: str, config: ServingConfig, suites: Sequence[PublicSuite], length: int, seed: int
) -> dict[str, Any]:
    """Return the spec of a pilot of the uncompressed model, with ``length`` tokens of text before each question.

    Such a spec must also ask each suite without the text; here it does so with one item.
    """
    reference = config.named_reference
    if reference is None:
        reference = config.served.reference if isinstance(config.served, Condition) else None
    policy: Any = DENSE_POLICY
    if isinstance(reference, Condition):
        settings = dict(reference.settings)
        policy = {ENGINE: reference.engine, **settings, "reference": settings}
    behind = {"items": _ITEMS, "max_new_tokens": _TOKENS, "context_tokens": length}
    asked: dict[str, Any] = {}
    margins = _margins(suites)
    for suite in suites:
        margins[f"{suite.name}.{suite.facet}"] = suite.margin
        asked |= {suite.name: {"items": 1, "max_new_tokens": _TOKENS}, f"{suite.name}@{CONTEXT}": behind}
    grid = {"policies": [policy], "suites": asked, "seed": seed, "pilot": 0, "floor": 0}
    return {
        "name": f"length-{length}", "model": model, "evaluate": grid, "engines": dict(config.engines),
        "gate": {"margins": margins},
    }  # fmt: skip


def _margins(suites: Sequence[PublicSuite]) -> dict[str, float]:
    """Return the margin of each suite after a conversation, in points."""
    return {f"{suite.name}@{CONTEXT}.{suite.facet}": suite.margin for suite in suites}


def read_pilot(records: Path, suites: Sequence[PublicSuite], length: int) -> TriedLength:
    """Read the records of a pilot at one length and return its result."""
    files = sorted(records.glob("*.jsonl"))
    rows = [Record.from_json(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.context_tokens == length]
    margins = {metric: points / 100 for metric, points in _margins(suites).items()}
    return TriedLength(length, controls_of(rows, margins), sum(row.seconds for row in rows) / len(rows))


def length_of_check(run: Path) -> int | None:
    """Return how long the conversation before a check's questions is, in tokens; None without check or conversation."""
    if not (run / SPEC).is_file():
        return None
    evaluate = load_spec(run / SPEC, NAMES).evaluate
    lengths = [max(evaluate.contexts_of(suite)) for suite in evaluate.suites if suite.endswith(f"@{CONTEXT}")]
    return max(lengths, default=None)


def choose_length(tried_lengths: Sequence[TriedLength], minutes: float) -> int:
    """Return the longest length at which a loss can be measured and a check's first round fits into ``minutes``.

    If it fits at none, returns the shortest length at which a loss can be measured, since a check always asks its first
    round. Raises NotMeasurable if a loss can be measured at no length.
    """
    usable = [length for length in tried_lengths if length.is_measurable]
    if not usable:
        raise NotMeasurable(
            "at no length that was tried does the uncompressed model both refuse harmful requests and help with "
            "harmless ones, so a loss could not show; check without --long, or another model"
        )
    fitting = [length for length in usable if _FIRST_ROUND * length.row_seconds <= _SECONDS * minutes]
    return max((length.tokens for length in fitting), default=usable[0].tokens)
