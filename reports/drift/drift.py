"""Records -> drift: rates of every cell and the difference of every arm. Pure; the gate decides what it returns.

Estimands (statistics: weights over cells, seeds and samples averaged inside the item first):
E1 candidate - reference under the same policy; E2 candidate as deployed - uncompressed reference;
E4 a checkpoint under a policy - itself uncompressed; E5 candidate's E4 - reference's E4;
amplification candidate uncompressed - reference under the policy that the candidate was trained under.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from audit.core.policy_names import DENSE_POLICY
from audit.core.records import Outcome
from reports.drift.comparison import Comparison
from reports.drift.contrast import AMPLIFICATION, SeedPair, contrast
from reports.drift.results import Cell, Contrast, Drift
from reports.drift.validity import run_reasons
from reports.records.load import RunData
from reports.records.panel import CellKey, Panel, Panels
from reports.records.rows import ROLES

CELL = ["arm", "policy", "suite", "context_tokens"]


class Where(NamedTuple):
    """Some of the cells of a comparison."""

    estimands: frozenset[str]
    policies: frozenset[str]
    contexts: frozenset[int]

    def hold(self, estimand: str, policy: str, context: int) -> bool:
        """Whether a contrast stands among them."""
        return estimand in self.estimands and policy in self.policies and context in self.contexts


def drift_of(data: RunData, comparison: Comparison, alpha: float, facets: Where | None = None) -> Drift:
    """The drift of a run's records, with one-sided bounds at level ``alpha``.

    ``facets``: where they are contrasted, None for everywhere; they are most of the contrasts.
    """
    tables = data.panels
    return Drift(
        run=data.spec.name,
        comparison=comparison,
        alpha=alpha,
        cells=tuple(cells(data.records, tables, comparison)),
        contrasts=tuple(contrasts(comparison, tables, alpha, facets)),
        reasons=tuple(run_reasons(data, comparison)),
        n_records=len(data.records),
        weights=_weights(data.records, comparison.reference),
    )


def _weights(records: pd.DataFrame, arm: str) -> dict[int, frozenset[str]]:
    own = records[records["arm"] == arm]
    return {int(str(seed)): frozenset(part["checkpoint"]) for seed, part in own.groupby("train_seed", observed=True)}


def contrasts(comparison: Comparison, tables: Panels, alpha: float, facets: Where | None = None) -> Iterator[Contrast]:
    """Every contrast that a comparison has; an asked length of a suite without any record yields blanks."""
    for metric in (*comparison.suites, *comparison.facets):
        only = facets if metric in comparison.facets else None
        for context in comparison.lengths[metric]:
            panel = tables.get((metric, context)) or _empty_panel(metric, context)
            for estimand, arm, policy in sides(comparison):
                if only is None or only.hold(estimand, policy, context):
                    yield contrast(
                        estimand,
                        panel,
                        arm=arm,
                        reference=comparison.reference,
                        pairs=seed_pairs(comparison, panel, arm),
                        policy=policy,
                        alpha=alpha,
                    )


def sides(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Estimand, arm and policy of what is contrasted on every metric and length."""
    for policy, arm in product(comparison.policies, comparison.arms):
        if (arm, policy) in comparison.unserved:
            continue
        trained = arm in comparison.candidates
        yield from ((estimand, arm, policy) for estimand in ("E1", "E2") if trained)
        if policy != DENSE_POLICY and (trained or arm == comparison.reference):
            yield from ((estimand, arm, policy) for estimand in (("E4", "E5") if trained else ("E4",)))
        if trained and policy == comparison.trained_under.get(arm):
            yield AMPLIFICATION, arm, policy


def seed_pairs(comparison: Comparison, panel: Panel, arm: str) -> list[SeedPair]:
    """Seed s of the arm with seed s of the reference; a reference of one seed (a pinned run, the base) serves all."""
    own = list(comparison.seeds)
    if arm == comparison.reference:
        own = sorted({cell.seed for cell in panel.scores if cell.arm == arm}) or own
        return [(seed, seed) for seed in own]
    other = sorted({cell.seed for cell in panel.scores if cell.arm == comparison.reference})
    # a single seed that is among ours is a reference that lacks the others: paired by number, the gap is said
    single = len(other) == 1 and not set(other) & set(own)
    return [(seed, other[0] if single else seed) for seed in own]


def _empty_panel(suite: str, context: int) -> Panel:
    none: dict[CellKey, Any] = {}
    codes = np.zeros(0, dtype=np.int64)
    return Panel(suite, context, (), codes, (), 0, none, none, none, {}, 1, False, frozenset(), 0)


def cells(records: pd.DataFrame, tables: Panels, comparison: Comparison) -> Iterator[Cell]:
    """Rates, outcomes and cache use of every cell that has records, in the order of the comparison."""
    grouped = records.groupby(CELL, sort=False, observed=True)
    counts = records.groupby([*CELL, "outcome"], observed=True).size().unstack(fill_value=0)
    survival = [f"survival_{role}" for role in ROLES]
    means = grouped[["retention", "new_tokens", "kv_bytes_peak", "kv_bytes_dense", *survival]].mean()
    clusters = grouped["cluster_id"].nunique()
    order = sorted(means.index, key=lambda index: _position(comparison, index))
    for index in order:
        arm, policy, suite, context = cast(tuple[str, str, str, int], index)
        panel = tables[suite, int(context)]
        keys = sorted(key for key in panel.scores if (key.arm, key.policy) == (arm, policy))
        row = means.loc[index]
        rates = [float(np.nanmean(panel.scores[key])) for key in keys]
        dense = float(row["kv_bytes_dense"])
        yield Cell(
            arm=arm,
            policy=policy,
            suite=suite,
            context_tokens=int(context),
            seeds=tuple(key.seed for key in keys),
            n_items=int(np.sum(~np.isnan(panel.scores[keys[0]]))),
            n_clusters=int(clusters.loc[index]),
            n_samples=int(counts.loc[index].sum()),
            rate=float(np.mean(rates)),
            rate_if_desired=float(np.mean([np.nanmean(panel.best[key]) for key in keys])),
            seed_rates=tuple(rates),
            outcomes={o.value: int(counts.loc[index].get(o.value, 0)) for o in Outcome},
            retention=float(row["retention"]),
            kv_bytes_peak=float(row["kv_bytes_peak"]),
            kv_bytes_dense=dense,
            kv_ratio=float(row["kv_bytes_peak"]) / dense if dense > 0 else None,
            survival={role: float(row[f"survival_{role}"]) for role in ROLES if pd.notna(row[f"survival_{role}"])},
            new_tokens=float(row["new_tokens"]),
        )


def _position(comparison: Comparison, index: Any) -> tuple[int, int, int, int]:
    arm, policy, suite, context = index
    return comparison.suites.index(suite), int(context), comparison.policies.index(policy), comparison.arms.index(arm)
