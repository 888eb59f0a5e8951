"""Records -> report: rates of every cell and drift of every arm. Pure; the gate and the formats read what it returns.

Estimands (statistics: weights over cells, seeds and samples averaged inside the item first):
E1 candidate - reference under the same policy; E2 candidate as deployed - uncompressed reference;
E4 a checkpoint under a policy - itself uncompressed; E5 candidate's E4 - reference's E4; selectivity where it is gated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pandas as pd

from audit.core.records import Outcome
from audit.core.yaml_file import name_of
from reports.analysis.curves import curves
from reports.drift.contrast import SeedPair, contrast
from reports.drift.plan import DENSE_POLICY, Plan
from reports.drift.report import Cell, Contrast, Report
from reports.drift.selectivity import selectivity
from reports.drift.validity import pin_reasons, run_reasons
from reports.gate.gate_file import Asked, declared_plan, waivers_for
from reports.records.columns import ROLES
from reports.records.load import RunData
from reports.records.panel import CellKey, Panel

CELL = ["arm", "policy", "suite", "context_tokens"]
MOST_PROBLEMS = 1000  # that a report names


def drift_report(data: RunData, asked: Asked | None = None) -> Report:
    """The report of a run without its examples, decided by its spec or as ``asked``.

    Raises SpecError when the gate section, the gate file or the waivers cannot be used.
    """
    asked = asked or Asked()
    plan = declared_plan(data, asked)
    tables = data.panels
    found = tuple(contrasts(plan, tables))
    return Report(
        run=name_of(data.spec.get("name", data.run.name)),
        plan=plan,
        reasons=(*run_reasons(data, plan), *pin_reasons(data, plan, asked.pin)),
        cells=tuple(cells(data.records, tables, plan)),
        contrasts=(*found, *selectivity(plan, found)),
        curves=curves(data.telemetry, plan.arms),
        examples=(),
        problems=tuple(_problems(data)),
        n_records=len(data.records),
        provenance=dict(data.provenance),
        waivers=waivers_for(plan, asked),
    )


def contrasts(plan: Plan, tables: Mapping[tuple[str, int], Panel]) -> Iterator[Contrast]:
    """Every contrast the plan asks for; a suite and length without any record yields blanks with a reason."""
    for suite in plan.suites:
        for context in plan.contexts:
            panel = tables.get((suite, context)) or _empty_panel(suite, context)
            yield from _panel_contrasts(plan, panel)


def _panel_contrasts(plan: Plan, panel: Panel) -> Iterator[Contrast]:
    for policy in plan.policies:
        for arm in plan.arms:
            estimands = ["E1", "E2"] if arm in plan.candidates else []
            if policy != DENSE_POLICY and (arm in plan.candidates or arm == plan.reference):
                estimands += ["E4", "E5"] if arm in plan.candidates else ["E4"]
            pairs = seed_pairs(plan, panel, arm)
            for estimand in estimands:
                yield contrast(
                    estimand,
                    panel,
                    arm=arm,
                    reference=plan.reference,
                    pairs=pairs,
                    policy=policy,
                    alpha=plan.alpha,
                )


def seed_pairs(plan: Plan, panel: Panel, arm: str) -> list[SeedPair]:
    """Seed s of the arm with seed s of the reference; a reference of one seed (a pinned run, the base) serves all."""
    own = list(plan.seeds)
    if arm == plan.reference:
        own = sorted({cell.seed for cell in panel.scores if cell.arm == arm}) or own
        return [(seed, seed) for seed in own]
    other = sorted({cell.seed for cell in panel.scores if cell.arm == plan.reference})
    single = len(other) == 1 and not set(other) & set(own)
    return [(seed, other[0] if single else seed) for seed in own]


def _empty_panel(suite: str, context: int) -> Panel:
    none: dict[CellKey, Any] = {}
    codes = np.zeros(0, dtype=np.int64)
    return Panel(suite, context, (), codes, (), 0, none, none, {}, 1, frozenset(), 0)


def cells(records: pd.DataFrame, tables: Mapping[tuple[str, int], Panel], plan: Plan) -> Iterator[Cell]:
    """Rates, outcomes and cache use of every cell that has records, in the plan's order."""
    grouped = records.groupby(CELL, sort=False, observed=True)
    counts = records.groupby([*CELL, "outcome"], observed=True).size().unstack(fill_value=0)
    survival = [f"survival_{role}" for role in ROLES]
    means = grouped[["retention", "new_tokens", "kv_bytes_peak", "kv_bytes_dense", *survival]].mean()
    clusters = grouped["cluster_id"].nunique()
    order = sorted(means.index, key=lambda index: _position(plan, index))
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


def _position(plan: Plan, index: Any) -> tuple[int, int, int, int]:
    arm, policy, suite, context = index
    return plan.suites.index(suite), int(context), plan.policies.index(policy), plan.arms.index(arm)


def _problems(data: RunData) -> Iterator[str]:
    for problem in data.problems[:MOST_PROBLEMS]:
        where = f"{problem.file}:{problem.line}" if problem.line else problem.file
        yield f"{where}: {problem.reason}"
    if len(data.problems) > MOST_PROBLEMS:
        yield f"and {len(data.problems) - MOST_PROBLEMS} more problems in the files"
    for unit in data.incomplete:
        yield f"{unit}: not finished (no seal); resume the run to complete it"
    unheld = [unit for unit, found in data.inputs.items() if found is None]
    if unheld:
        yield (
            f"{len(unheld)} units have a seal without a hash of what they were evaluated from, first {unheld[0]}; "
            "whether rows, plug-ins or model files changed in between is not known"
        )
