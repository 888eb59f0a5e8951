"""Every gated cell analysed in other ways, and whether any of them would flip the verdict.

The verdict stays the pre-declared one. Where another way flips it, a reader should know how thin it is. Of these ways
the t interval is known to pass too easily at the margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvaudit.reports.analysis.sides import BothSides, both_sides, two_sided
from kvaudit.reports.drift.results import CellName, Drift
from kvaudit.reports.gate.verdict import FORM, Decision, Status, Verdict, worst
from kvaudit.reports.records.rows import Panels
from kvaudit.reports.stats.clustered import cr3_effect, totals
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin, too_uneven
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS, max_t_groups, sign_flip
from kvaudit.reports.stats.tango import ess_tango

_Codes = npt.NDArray[np.int64]
DECLARED = "as declared"
T_INTERVAL = "CR3-t"
SIGN_FLIP = "cluster sign-flip"
WITHOUT_UNSCORED = "unscored left out"
CLUSTER_MEANS = "templates weighted alike"
METHODS = (T_INTERVAL, SIGN_FLIP, WITHOUT_UNSCORED, CLUSTER_MEANS)


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


class Reading(NamedTuple):
    """A method's reading of a cell: what is printed, and what the rule reads.

    ``values`` with ``clusters`` are tested jointly over the family where the method changes them; None where they are
    the declared ones, whose joint p-value stands.
    """

    estimate: float
    low: float | None
    high: float | None
    within: bool  # shown to lie above minus the margin, one-sided
    shown: bool  # by the template rule
    below: bool  # shown to lie below 0, one-sided
    pvalue_drop: float | None  # of this cell alone
    n_clusters: int
    values: Array | None = None
    clusters: _Codes | None = None


class Known(NamedTuple):
    """A gated cell and its reading by every method, None where too few templates are left."""

    decision: Decision
    difference: Array
    clusters: _Codes
    readings: dict[str, Reading | None]


def sensitivity(
    drift: Drift, tables: Panels, verdict: Verdict
) -> tuple[tuple[CellSensitivity, ...], tuple[MethodVerdict, ...]]:
    """The gated cells under every method, and what each method would make of the run."""
    known = list(_known(drift, tables, verdict.decisions))
    if not known:
        return (), ()
    statuses = {method: _statuses(known, method, drift.alpha) for method in METHODS}
    cells = []
    for i, k in enumerate(known):
        others = (_variant(m, k.readings[m], statuses[m][i]) for m in METHODS)
        cells.append(CellSensitivity(k.decision.name, (_declared(k.decision), *others)))
    read = {k.decision.name for k in known}
    unread = [d.status for d in verdict.gated if d.name not in read]
    unread += [Status.INVALID] if verdict.reasons else []
    return tuple(cells), tuple(_verdict(m, statuses[m], known, unread, verdict.status) for m in METHODS)


def _known(drift: Drift, tables: Panels, decisions: Iterable[Decision]) -> Iterator[Known]:
    for d in decisions:
        if two_sided(d) and d.margin:  # 0 where a ratio allows nothing: no method can decide that
            found = both_sides(tables[d.suite, d.context_tokens], drift.comparison, d.name)
            if found is not None:
                yield Known(d, found.difference, found.clusters, readings(found, d.margin, drift.alpha))


def readings(found: BothSides, margin: float, alpha: float) -> dict[str, Reading | None]:
    """One cell by every method."""
    z, clusters = found.difference, found.clusters
    return {
        T_INTERVAL: _of_effect(cr3_effect(z, clusters, alpha=alpha), margin, _shown(z, clusters, margin, alpha)),
        SIGN_FLIP: _of_signs(z, clusters, margin, alpha),
        WITHOUT_UNSCORED: _of_scored(found, margin, alpha),
        CLUSTER_MEANS: _of_cluster_means(z, clusters, margin, alpha),
    }


def _shown(z: Array, clusters: _Codes, margin: float, alpha: float) -> bool:
    t = totals(z, clusters)
    enough = effective_clusters(t.counts) >= clusters_required(margin, alpha) - 1e-9
    shows = enough and bool(shows_margin(t.sums, t.counts, margin=margin, alpha=alpha))
    return shows and not too_uneven(t.counts, margin, alpha)


def _of_effect(
    e: Effect, margin: float, shown: bool, values: Array | None = None, clusters: _Codes | None = None
) -> Reading:
    within, below = e.lower > -margin, e.upper < 0
    return Reading(e.estimate, e.low, e.high, within, shown, below, e.pvalue_drop, e.n_clusters, values, clusters)


def _of_signs(z: Array, clusters: _Codes, margin: float, alpha: float) -> Reading:
    """No interval: a drop is tested against 0, and non-inferiority by the same test of z + margin."""
    drop = sign_flip(z, clusters)
    within = sign_flip(-(z + margin), clusters).pvalue_drop < alpha
    below, shown = drop.pvalue_drop < alpha, _shown(z, clusters, margin, alpha)
    return Reading(drop.estimate, None, None, within, shown, below, drop.pvalue_drop, drop.n_clusters)


def _of_scored(found: BothSides, margin: float, alpha: float) -> Reading | None:
    kept, reference, candidate = scored(found)
    z, clusters = candidate - reference, found.clusters[kept]
    if len(np.unique(clusters)) < FEWEST_CLUSTERS:
        return None
    effect = ess_tango(z, clusters, samples=found.draws, alpha=alpha, graded=found.graded)
    same = bool(kept.all()) and bool(np.array_equal(z, found.difference))
    shown = _shown(z, clusters, margin, alpha)
    return _of_effect(effect, margin, shown) if same else _of_effect(effect, margin, shown, z, clusters)


def scored(found: BothSides) -> tuple[npt.NDArray[np.bool_], Array, Array]:
    """The items with a scored sample on both sides, and both sides' means over scored samples alone."""
    # what unscored samples leave between the worst and the best reading is their share
    shares = [1 - (found.reference_best - found.reference), 1 - (found.candidate_best - found.candidate)]
    kept = (shares[0] > 0) & (shares[1] > 0)
    reference, candidate = found.reference[kept] / shares[0][kept], found.candidate[kept] / shares[1][kept]
    return kept, np.clip(reference, 0, 1), np.clip(candidate, 0, 1)


def _of_cluster_means(z: Array, clusters: _Codes, margin: float, alpha: float) -> Reading:
    """Every template one value: where sizes differ, large templates no longer speak louder."""
    _, codes = np.unique(clusters, return_inverse=True)
    means = np.bincount(codes, weights=z) / np.bincount(codes)  # [templates]
    rows = np.arange(len(means))
    return _of_effect(cr3_effect(means, rows, alpha=alpha), margin, _shown(means, rows, margin, alpha), means, rows)


def _statuses(known: Sequence[Known], method: str, alpha: float) -> list[Status]:
    found = [k.readings[method] for k in known]
    rows = zip(known, found, _joint(known, found), strict=True)
    return [status_of(r, pvalue, k.decision, alpha) if r else Status.INVALID for k, r, pvalue in rows]


def _joint(known: Sequence[Known], found: Sequence[Reading | None]) -> list[float]:
    """p-values of a drop over the family: the declared ones, or max-T again where the method changed the values.

    Cells on the same rows share their signs; a cell whose rows differ gets signs of its own, which is valid and no
    sharper.
    """
    joint = [1.0 if k.decision.pvalue_drop is None else k.decision.pvalue_drop for k in known]
    groups: dict[tuple[str, int, bytes], list[int]] = {}
    for i, (k, r) in enumerate(zip(known, found, strict=True)):
        clusters = k.clusters if r is None or r.clusters is None else r.clusters
        groups.setdefault((k.decision.suite, k.decision.context_tokens, clusters.tobytes()), []).append(i)
    # this method left every value as it was declared
    if all(r is None or r.values is None for r in found):
        return joint
    tables = [
        (np.array([_values(known[i], found[i]) for i in members]), np.frombuffer(key[2], dtype=np.int64))
        for key, members in groups.items()
    ]
    # p-values come back group by group
    order = [i for members in groups.values() for i in members]
    for i, pvalue in zip(order, max_t_groups(tables).pvalues, strict=True):
        joint[i] = float(pvalue)
    return joint


def _values(k: Known, r: Reading | None) -> Array:
    return k.difference if r is None or r.values is None else r.values


def status_of(r: Reading, pvalue: float, d: Decision, alpha: float) -> Status:
    """The gate's rule for one reading; no method makes a cell measurable, or lets a facet without form pass."""
    assert d.margin is not None
    dropped = r.below and pvalue < alpha
    if not r.within:
        return Status.FAIL if dropped else Status.INCONCLUSIVE if d.is_measurable else d.status
    if not d.is_measurable:
        return d.status
    formless = any(reason.code == FORM for reason in d.reasons)
    if formless or not r.shown:
        return Status.INCONCLUSIVE
    return Status.PASS_NOTED if dropped else Status.PASS


def _declared(d: Decision) -> Variant:
    e = d.effect
    assert e is not None
    return Variant(f"{DECLARED} ({e.method})", e.estimate, e.low, e.high, d.pvalue_drop, d.status.value)


def _variant(method: str, r: Reading | None, status: Status) -> Variant:
    numbers = (r.estimate, r.low, r.high, r.pvalue_drop) if r else (0.0, None, None, None)
    return Variant(method, *numbers, status.value)


def _verdict(
    method: str, statuses: Sequence[Status], known: Sequence[Known], others: Sequence[Status], declared: Status
) -> MethodVerdict:
    status = worst([*statuses, *others])
    differ = sum(_same(s) != _same(k.decision.status) for s, k in zip(statuses, known, strict=True))
    return MethodVerdict(method, status.value, _same(status) != _same(declared), differ)


def _same(status: Status) -> Status:
    """PASS* is PASS with a note."""
    return Status.PASS if status is Status.PASS_NOTED else status
