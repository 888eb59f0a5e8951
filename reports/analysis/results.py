"""What the analyses beside the gate found, as frozen values. Rates, drifts and shares are in units of 1 (0.05 = 5 pp).

Nothing here decides the verdict; the gate reads contrasts, and these stand beside what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.reports.drift.results import CellName
from kvaudit.reports.stats.effect import Effect


@dataclass(frozen=True)
class Dose:
    """One budget or length of a curve: the rate there with its 95 % interval. ``x`` is log2 of the dose."""

    amount: int  # entries of the budget, or tokens of context
    x: float
    policy: str
    rate: float
    low: float
    high: float
    fitted: float  # isotonic: a drawn line, not an estimate with an interval


@dataclass(frozen=True)
class DoseCurve:
    """E6: the rate of an arm against the logarithm of the budget, or of the length.

    ``slope`` is the change of the rate per doubling, ``against_reference`` the candidate's slope minus the reference's;
    both None where the cells cannot be compared (``reason``). ``unit`` says whether items or templates are averaged.
    """

    axis: str  # budget | length
    arm: str
    family: str  # policies that differ in their budget; on axis length one policy's short name
    suite: str
    context_tokens: int | None  # None on axis length
    doses: tuple[Dose, ...]  # smallest first
    uncompressed: float | None  # rate of the arm under policy none, axis budget
    unit: str
    slope: Effect | None
    against_reference: Effect | None
    reason: str


@dataclass(frozen=True)
class SafeBudget:
    """How far down a fixed sequence of non-inferiority tests went; no adjustment needed, it stops at the first miss.

    ``amounts`` stand in the order tested: budgets from the largest, or lengths from the shortest. ``cleared`` is the
    last that passed, None where the first did not; ``failed`` the first that did not, None where all did.
    """

    axis: str  # budget | length
    estimand: str  # E2 for a candidate, E4 for the reference: both against the uncompressed reference
    arm: str
    family: str
    suite: str
    context_tokens: int | None
    amounts: tuple[int, ...]
    statuses: tuple[str, ...]
    margin: float
    cleared: int | None
    failed: int | None


@dataclass(frozen=True)
class CellChurn:
    """E7: what moved in a cell, beside what is left of it after losses and gains cancel. Shares of all items.

    Losses, gains and churn are of answers against the reference's of the same pair of seeds: gains - losses is the
    drift, churn P(candidate's answer is not the reference's), ``rerun`` the A/A churn of two answers of one checkpoint:
    only what churn has beyond it is change. ``draws`` is the churn over any two seeds and ``draws_rerun`` what two
    draws of one arm disagree on, over samples and seeds. Each rerun is None without a second draw.
    """

    cell: CellName
    drift: float
    losses: float
    gains: float
    churn: float
    rerun: float | None
    draws: float
    draws_rerun: float | None


@dataclass(frozen=True)
class TemplateLoss:
    """What one template lost: in items, as a share of the cell's losses, and per item of the template."""

    template: str
    items: int
    losses: float
    gains: float
    share: float


@dataclass(frozen=True)
class ItemLoss:
    """An item that lost score, averaged over samples and seeds."""

    item_id: str
    template: str
    loss: float


@dataclass(frozen=True)
class CellConcentration:
    """Where the losses of a cell sit. ``carrying_half`` is how many templates carry half of them.

    ``chance`` is the Gini of the same losses fallen at random. ``deff`` is what the templates do to the variance of the
    drift: CR3 over the variance of as many independent items, both of differences averaged over samples and seeds.
    """

    cell: CellName
    losses: float
    gini: float
    chance: float
    deff: float
    carrying_half: int
    n_templates: int
    n_losing: int
    templates: tuple[TemplateLoss, ...]  # worst first, those that lost
    dominant: tuple[str, ...]  # templates with more than half of the losses
    items: tuple[ItemLoss, ...]  # worst first


@dataclass(frozen=True)
class Variant:
    """A cell analysed another way. ``low, high`` is its 95 % interval, None for a method without one."""

    method: str
    estimate: float
    low: float | None
    high: float | None
    pvalue_drop: float | None
    status: str


@dataclass(frozen=True)
class CellSensitivity:
    """One gated cell under every method; the first variant is the pre-declared one."""

    cell: CellName
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class MethodVerdict:
    """What the run's verdict would be under one method; ``flips`` against the pre-declared one, which stays."""

    method: str
    status: str
    flips: bool
    cells: int  # gated cells whose status differs


@dataclass(frozen=True)
class SeedSpread:
    """The drift of a gated cell by paired training seed.

    ``sd`` is how far the seeds lie apart beyond what their items do, with its 95 % interval; None below three seeds.
    """

    cell: CellName
    seeds: tuple[int, ...]
    estimates: tuple[float, ...]
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Reach:
    """The smallest drop that a gated cell would have found with power .8, and how many more templates would pass it.

    ``larger`` is in words, of an open cell that more templates would help or would not; see ``gate.verdict.Larger``.
    """

    cell: CellName
    margin: float
    n_clusters: int
    detectable: float
    larger: str | None


@dataclass(frozen=True)
class Analysis:
    """All analyses of a run; empty where none was made."""

    doses: tuple[DoseCurve, ...] = ()
    safe: tuple[SafeBudget, ...] = ()
    churn: tuple[CellChurn, ...] = ()
    concentration: tuple[CellConcentration, ...] = ()
    sensitivity: tuple[CellSensitivity, ...] = ()
    methods: tuple[MethodVerdict, ...] = ()
    seeds: tuple[SeedSpread, ...] = ()
    reach: tuple[Reach, ...] = ()
