"""Row 14 of the calibration: how often a reference counts as measurable that has nothing to lose, and how often not.

Nothing to lose: one of the wanted rate, the control's rate and the difference of the two kinds of items is exactly the
margin, or only half of the answers are readable; everything else is perfect. Healthy: at least half as wanted, the
control right in three of ten, a difference of .5, and nine of ten answers readable. All kinds are in the same
templates, whose difficulty they have in common, separately, or in opposite directions. A measurable cell must still
pass, so a cell with nothing to lose passes more rarely than these figures say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import special

from bench.calibration.case import Case, CaseRates, Figure, Scale, Simulated, at_most, reported
from bench.calibration.streams import EVEN, THREE_TO_ONE, blocks
from kvaudit.reports.stats.clustered import Array, many_totals
from kvaudit.reports.stats.shares import READABLE, ShownShare, correlation, shares, told_apart

CONTROLS_ROW = 14
MARGINS = (0.03, 0.05, 0.1)
_DRAWS = 4_000
_WITHIN = 0.5  # of what a template leaves open, that an item's draws have in common
_SIZES = ((16, 1), (24, 1), (48, 1), (24, 2), (72, 1), (12, 4), (72, 2), (80, 4), (320, 1))  # templates, items in each
_SHARED = (0.0, 0.3, 0.6, 0.9)  # of the latent difficulty, by template
_KINDS = 3  # of items in a suite, all of which tell of its form
_WANTED = (0.1, 0.3, 0.5, 0.8, 0.95)


@dataclass(frozen=True)
class ControlCase(Case):
    """True rates of a reference: of wanted answers, of its control twin, of its benign twin, and of readable answers.
    ``together`` is 1 if templates are hard for all kinds alike, -1 if a template that is hard for one is easy for the
    twin. None: a suite without such items. ``healthy`` tells on which side of the rule it is.
    """

    own: float
    control: float | None
    twin: float | None
    form: float
    clusters: int
    items: int  # of each kind, in a template
    sizes: str
    shared: float
    together: int
    draws: int
    margin: float
    healthy: bool

    @property
    def name(self) -> str:
        rates = f"own={self.own:g} control={self.control} twin={self.twin} form={self.form:g}"
        where = f"C={self.clusters} items={self.items} {self.sizes} k={self.draws} D={self.margin:g}"
        return f"standing {rates} {where} shared={self.shared:g} together={self.together}"

    def rates(self, seed: int) -> CaseRates:
        found = 0
        for block in blocks(
            self.name,
            seed=seed,
            simulations=self.simulations,
            clusters=self.clusters,
            items=self.items,
            sizes=self.sizes,
        ):
            found += int(np.count_nonzero(self._measurable(block.rng, block.size, block.counts)))
        return {"measurable": found / self.simulations, "turned away": 1 - found / self.simulations}

    def _measurable(
        self, rng: np.random.Generator, simulations: int, counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        hard = rng.standard_normal((simulations, len(counts)))
        own = self._answers(rng, hard, counts, self.own)
        shown = self._shown(own, counts)
        held = shown.low > self.margin
        if self.form < 1:
            every = _KINDS * counts
            form = self._answers(rng, rng.standard_normal(hard.shape), every, self.form)
            held &= self._shown(form, every).low > READABLE
        if self.control is not None:
            control = self._answers(rng, hard, counts, self.control)
            held &= self._shown(control, counts).low > self.margin
        if self.twin is not None:
            other = self.together * hard if self.together else rng.standard_normal(hard.shape)
            twin = self._answers(rng, other, counts, self.twin)
            alike = correlation(many_totals(own, counts).residuals, many_totals(twin, counts).residuals)
            held &= told_apart(shown, self._shown(twin, counts), alike).low > self.margin
        return held

    def _shown(self, values: Array, counts: npt.NDArray[np.int64]) -> ShownShare:
        return shares(values, counts, draws=self.draws)

    def _answers(self, rng: np.random.Generator, hard: Array, counts: npt.NDArray[np.int64], rate: float) -> Array:
        """Draw item means [simulations, N] of answers that are right if their latent difficulty is low."""
        if rate >= 1:
            return np.ones((len(hard), int(counts.sum())))
        common = np.repeat(hard, counts, axis=1) * np.sqrt(self.shared)
        rest = 1 - self.shared
        if self.draws > 1:
            common += np.sqrt(rest * _WITHIN) * rng.standard_normal(common.shape)
            rest *= 1 - _WITHIN
        found, limit = np.zeros(common.shape), special.ndtri(rate)
        for _ in range(self.draws):
            found += common + np.sqrt(rest) * rng.standard_normal(common.shape) < limit
        return found / self.draws


def cases(scale: Scale) -> list[ControlCase]:
    """Return references with nothing to lose, at the exact edge, and healthy ones."""
    edge = list(_edges(scale))
    return [*(edge if scale.every_case else edge[:: len(edge) // 24]), *_healthy(scale)]


def _edges(scale: Scale) -> Iterator[ControlCase]:
    designs = [
        (c, n, sizes, shared)
        for (c, n), shared in product(_SIZES, _SHARED)
        for sizes in ((EVEN, THREE_TO_ONE) if n > 1 else (EVEN,))
        if n > 1 or shared == 0
    ]
    for (clusters, items, sizes, shared), margin in product(designs, MARGINS):
        where = {"clusters": clusters, "items": items, "sizes": sizes, "shared": shared, "margin": margin}
        more = {**where, "simulations": scale.draws(_DRAWS), "healthy": False}
        for draws in (1, 4):
            yield _case(own=margin, draws=draws, **more)
        yield _case(control=margin, **more)
    for clusters, items, sizes, shared in designs:
        where = {"clusters": clusters, "items": items, "sizes": sizes, "shared": shared, "margin": 0.05}
        yield _case(form=READABLE, simulations=scale.draws(_DRAWS), healthy=False, **where)
    for (clusters, items), shared, margin, own in product(_SIZES, _SHARED[::2] + _SHARED[-1:], MARGINS[1:], _WANTED):
        where = {"clusters": clusters, "items": items, "shared": shared, "margin": margin}
        for together in (1, -1) if shared else (0,):
            more = {**where, "together": together, "simulations": scale.draws(_DRAWS), "healthy": False}
            yield _case(own=own, twin=min(1.0, 1 + margin - own), **more)


# of what is wanted, of the control and of the benign twin
_HEALTHY = ((0.5, 0.3, 1.0), (0.6, 0.4, 0.9), (0.75, 0.75, 0.75), (0.9, 0.3, 0.6))
_FIRM = ((0.75, 0.75, 0.95), (0.95, 0.75, 0.75), (0.9, 0.9, 0.9))  # what fewer items are enough for
_LARGE, _SMALL = ((48, 1), (72, 2)), ((16, 1), (24, 2))  # templates, items of each kind in one
_FORM = 0.9


def _healthy(scale: Scale) -> Iterator[ControlCase]:
    for ((own, control, twin), (clusters, items)), shared in product(
        (*product(_HEALTHY, _LARGE), *product(_FIRM, _SMALL)), (0.0, 0.3)
    ):
        if items > 1 or not shared:
            rates = {"own": own, "control": control, "twin": twin, "form": _FORM, "shared": shared}
            where = {"clusters": clusters, "items": items, "together": 1 if shared else 0, "margin": 0.05}
            yield _case(simulations=scale.draws(_DRAWS), healthy=True, **rates, **where)


def _case(**more: object) -> ControlCase:
    """Return a case with these rates, otherwise perfect and without twins."""
    perfect = {"own": 1.0, "control": None, "twin": None, "form": 1.0, "sizes": EVEN, "together": 0, "draws": 1}
    return ControlCase(**{**perfect, **more})  # type: ignore[arg-type]


def figures(outcomes: Sequence[Simulated], scale: Scale) -> list[Figure]:
    own = [(o, o.case) for o in outcomes if isinstance(o.case, ControlCase)]
    edge = [o for o, case in own if not case.healthy]
    healthy = [(o, case) for o, case in own if case.healthy]
    large = [o for o, case in healthy if (case.clusters, case.items) in _LARGE]
    small = [o for o, case in healthy if (case.clusters, case.items) in _SMALL]
    return [
        at_most(CONTROLS_ROW, NOTHING_TO_LOSE, edge, "measurable", 0.01, scale=scale),
        at_most(CONTROLS_ROW, TURNED_AWAY, large, "turned away", 0.05, scale=scale),
        reported(CONTROLS_ROW, FEW_ITEMS, small, "turned away"),
    ]


NOTHING_TO_LOSE = "controls: a reference with nothing to lose counts as measurable"
TURNED_AWAY = "controls: a healthy reference does not, 48 templates of one item of each kind or 72 of two"
FEW_ITEMS = "same at rates of .75 and more, 16 templates of one or 24 of two"
