"""What human labels say about a run: frozen values, worked out from its records and never read from a file."""

from __future__ import annotations

from dataclasses import dataclass

from reports.drift.report import Reason
from reports.gate.verdict import Status


@dataclass(frozen=True)
class Rate:
    """A share with its Clopper-Pearson interval; ``estimate`` is None without trials."""

    estimate: float | None
    low: float
    high: float
    successes: int
    trials: int


@dataclass(frozen=True)
class Arm:
    """The judge's sensitivity and specificity in one arm of a cell."""

    sensitivity: Rate
    specificity: Rate


@dataclass(frozen=True)
class Bounds:
    """A drift with its 95 % interval and the one-sided bounds that the gate reads, in score units."""

    estimate: float
    low: float
    high: float
    lower: float
    upper: float


@dataclass(frozen=True)
class JudgedCell:
    """One gated cell on judge labels and on adjudicated ones.

    ``bias`` is the largest drift that the judge's gap between the arms makes by itself (None without labels of a kind),
    ``bias_upper`` its upper limit; ``guard`` says whether that is at most half the margin, so that judge labels alone
    may pass the cell. ``status`` is the verdict of the corrected interval, ``judged`` that of the judge's labels.
    """

    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    margin: float
    pairs: int
    discordant: int  # all of them labelled
    concordant: int  # labelled, drawn at random
    reference: Arm
    candidate: Arm
    bias: float | None
    bias_upper: float
    guard: bool
    raw: Bounds
    corrected: Bounds
    judged: Status
    status: Status
    reasons: tuple[Reason, ...]

    @property
    def alone(self) -> Status:
        """The verdict on judge labels alone: no PASS where the judge could have made half the margin itself."""
        held = not self.guard and self.judged in (Status.PASS, Status.PASS_NOTED)
        return Status.INCONCLUSIVE if held else self.judged


@dataclass(frozen=True)
class Adjudication:
    """What human labels say about a run. ``status`` is its verdict with the corrected cells in place of the judged.

    ``records`` is the digest of what was scored: labels of other records say nothing (``adjudication.digest``).
    """

    records: str
    labels: int
    cells: tuple[JudgedCell, ...]
    judged: Status
    status: Status
