"""Where an arm fails under a gated policy: what it could be served under instead, and what is left of the drift.

A cell fails as deployed: the compressed arm against the uncompressed reference, or the reference
against itself, since whoever serves a checkpoint meets that, however the reference is served. No serving mends
what is lost uncompressed; an arm that does not pass there is named, and nothing is tried on it. Nor on what an engine
serves: remedies are of our own cache.

A remedy of such an arm and policy passes every gated cell under the gate's own rule, and is shown to win something back
in every cell that failed: the same checkpoints, items and decoding seeds, minus the answers under the policy that
failed. All of that holds at the gate's level (intersection-union). Of several the cheapest is wanted, so they are
tested in the order in which they were declared, each at the full level, until the first that is none
(``rule.fixed_sequence``): what is no remedy is then called one in at most alpha of the runs, however many are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from kvaudit.core.policy_names import short_names
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.drift import CELL, change, contrast, seed_pairs, shares_of_none
from kvaudit.reports.drift.results import Contrast, Drift
from kvaudit.reports.gate.decide import decide_beside
from kvaudit.reports.gate.family import single_cell
from kvaudit.reports.gate.rules import Rules
from kvaudit.reports.gate.verdict import PASSED, Decision, Status, Verdict, worst
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.remedies import Served, Tried
from kvaudit.reports.records.rows import Panels, panels
from kvaudit.reports.stats.rule import fixed_sequence

_KEPT = ["arm", "policy"]


class Cost(NamedTuple):
    """What an answer took, in the mean over the gated suites: allocated peak bytes of its row, their share of those
    under ``none`` (None where it was not served), seconds.
    """

    kv_bytes: float
    kv_ratio: float | None
    seconds: float


@dataclass(frozen=True)
class Failing:
    """An arm that fails as deployed under a gated policy.

    ``cells`` are those that FAIL, the others of that arm and policy are in ``decided`` too. ``uncompressed`` are the
    gated cells that the arm does not pass served dense: where there are any no serving can be a remedy.
    """

    arm: str
    policy: str
    decided: tuple[Decision, ...]
    uncompressed: tuple[Decision, ...]

    @property
    def cells(self) -> tuple[Decision, ...]:
        """What failed."""
        return tuple(d for d in self.decided if d.status is Status.FAIL)


@dataclass(frozen=True)
class Remedy:
    """One way of serving in place of a policy that fails.

    ``cells`` are all gated ones, decided as deployed; ``won`` is what came back in those that had failed. ``helps``:
    all of it is shown to be above 0. ``held``: it is a remedy, and so is every one that is tested before it.
    """

    remedy: str
    policy: str
    label: str
    declared: str
    cells: tuple[Decision, ...]
    won: tuple[Contrast, ...]
    cost: Cost | None
    held: bool = False

    @property
    def status(self) -> Status:
        """The verdict of all its cells."""
        return worst(d.status for d in self.cells) if self.cells else Status.INVALID

    @property
    def helps(self) -> bool:
        """Whether every cell that failed is shown to have won something back."""
        return bool(self.won) and all(c.effect is not None and c.effect.lower > 0 for c in self.won)

    @property
    def mends(self) -> bool:
        """Whether it is a remedy by itself, whatever else was tried."""
        return self.status in PASSED and self.helps


@dataclass(frozen=True)
class Mended:
    """What was tried for one arm under one policy; ``chosen`` is the place of the cheapest that is held."""

    failing: Failing
    label: str
    cost: Cost | None
    dense: Cost | None
    remedies: tuple[Remedy, ...]
    chosen: int | None


def failing(drift: Drift, rules: Rules, verdict: Verdict) -> tuple[Failing, ...]:
    """Every arm under every gated policy of which some cell FAILs as deployed; none where nothing is decided."""
    if verdict.status is Status.INVALID:
        return ()
    sides = drift.comparison
    decided = {_place(d, sides): d for d in verdict.decisions}
    wanted = [c for c in drift.contrasts if _is_deployed(c, sides, rules)]
    missing = [c for c in wanted if _place(c, sides) not in decided]
    beside = [single_cell(c, rules, gated=False) for c in missing]
    decided |= {_place(d, sides): d for d in decide_beside(beside, drift, rules)}
    cells = [decided[_place(c, sides)] for c in wanted]
    found = []
    for arm, policy in dict.fromkeys((d.arm, d.policy) for d in cells if not sides.is_uncompressed(d.policy)):
        own, plain = tuple(d for d in cells if (d.arm, d.policy) == (arm, policy)), sides.uncompressed_of(policy)
        dense = tuple(d for d in cells if (d.arm, d.policy) == (arm, plain) and d.status not in PASSED)
        if any(d.status is Status.FAIL for d in own):
            found.append(Failing(arm, policy, own, dense))
    return tuple(found)


def estimand_of(sides: Comparison, arm: str, policy: str) -> str:
    """What holds an arm under a policy against the uncompressed reference."""
    if arm == sides.reference:
        return "serving"
    return "alike" if sides.is_uncompressed(policy) else "deployed"


def _is_deployed(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast is what users of a gated policy meet, or of the arm behind it, uncompressed."""
    return (
        c.estimand == estimand_of(sides, c.arm, c.policy)
        and c.policy in (*rules.primary, *sides.uncompressed)
        and rules.holds(c.suite)
        and c.context_tokens in rules.contexts
        and c.arm in (sides.reference, *(rules.arms or sides.candidates))
    )


def _place(c: Contrast | Decision, sides: Comparison) -> tuple[str, str, str, str, int]:
    # uncompressed, alike and deployed are the same difference
    return "alike" if sides.is_uncompressed(c.policy) else c.estimand, *c.place[1:]


def mended(
    records: pd.DataFrame, served: Served, drift: Drift, rules: Rules, found: Sequence[Failing]
) -> tuple[Mended, ...]:
    """The remedies of every failing arm and policy; of one that fails uncompressed none."""
    if not served.tried:
        return ()
    everything = pd.concat([records, served.records], ignore_index=True)
    return tuple(_mended(everything, served.tried, drift, rules, one) for one in found)


def _mended(records: pd.DataFrame, tried: Sequence[Tried], drift: Drift, rules: Rules, failed: Failing) -> Mended:
    instead = [(one, one.instead[failed.policy]) for one in tried if failed.policy in one.instead]
    sides = drift.comparison
    if failed.uncompressed or sides.is_engine(failed.policy):
        instead = []
    plain = sides.uncompressed_of(failed.policy)
    policies = list(dict.fromkeys([plain, failed.policy, *(policy for _, policy in instead)]))
    labels = {**short_names(policies), **sides.labels}  # as everywhere in the report where it has a name for one
    own = records[records["arm"].isin([failed.arm, sides.reference]) & records["policy"].isin(policies)]
    tables = panels(own)
    remedies = [
        Remedy(
            remedy=one.remedy,
            policy=policy,
            label=labels[policy] if one.remedy == policy else f"{labels[failed.policy]} with {one.remedy}",
            declared=one.declared,
            cells=tuple(_decided(tables, drift, rules, failed.arm, policy)),
            won=tuple(_won(tables, sides, rules, failed, policy)),
            cost=_cost(own, failed.arm, policy, plain, rules),
        )
        for one, policy in instead
    ]
    last = fixed_sequence([remedy.mends for remedy in remedies])
    remedies = [replace(remedy, held=last is not None and i <= last) for i, remedy in enumerate(remedies)]
    held = [(one.cost.kv_bytes, one.cost.seconds, i) for i, one in enumerate(remedies) if one.held and one.cost]
    return Mended(
        failing=failed,
        label=labels[failed.policy],
        cost=_cost(own, failed.arm, failed.policy, plain, rules),
        dense=_cost(own, failed.arm, plain, plain, rules),
        remedies=tuple(remedies),
        chosen=min(held)[2] if held else None,
    )


def _decided(tables: Panels, drift: Drift, rules: Rules, arm: str, policy: str) -> Iterator[Decision]:
    sides = drift.comparison
    found = [
        contrast(sides, panel, estimand=estimand_of(sides, arm, policy), arm=arm, policy=policy, alpha=rules.alpha)
        for (_, context), panel in tables.items()
        if context in rules.contexts
    ]
    cells = [single_cell(c, rules, gated=False) for c in found if rules.holds(c.suite)]
    yield from decide_beside(cells, replace(drift, contrasts=tuple(found)), rules)


def _won(tables: Panels, sides: Comparison, rules: Rules, failed: Failing, policy: str) -> Iterator[Contrast]:
    for d in failed.cells:
        panel = tables[d.suite, d.context_tokens]
        seeds = [pair[0] for pair in seed_pairs(sides, panel, failed.arm)]
        yield change(panel, arm=failed.arm, seeds=seeds, policy=policy, instead_of=failed.policy, alpha=rules.alpha)


def _cost(records: pd.DataFrame, arm: str, policy: str, plain: str, rules: Rules) -> Cost | None:
    """Means over suites and lengths of their means, so that no suite counts more for its number of items.

    None where no bytes are known: policies of our own cache have them, engines show none.
    """
    near = records[records["policy"].isin([policy, plain]) & records["context_tokens"].isin(rules.contexts)]
    means = near.groupby(CELL, observed=True)[["kv_bytes_peak", "kv_bytes_dense", "seconds"]].mean()
    found = [index for index in means.index if index[:2] == (arm, policy)]
    if not found or means.loc[found, "kv_bytes_peak"].isna().any():
        return None
    every = shares_of_none(means, "kv_bytes_peak")
    shares = [every[index] for index in found]
    known = [share for share in shares if share is not None]
    peak, seconds = means.loc[found, ["kv_bytes_peak", "seconds"]].mean().tolist()
    return Cost(peak, sum(known) / len(known) if len(known) == len(shares) else None, seconds)


class Remedies(NamedTuple):
    """The remedies of a run: ``declared`` in its spec, what fails, and what was tried for it."""

    declared: tuple[str, ...]
    failing: tuple[Failing, ...]
    mended: tuple[Mended, ...]


def remedies_of(data: RunData, drift: Drift, rules: Rules, verdict: Verdict) -> Remedies | None:
    """What was tried on a decided run, None where nothing was and nothing was to be; DataError for unfit files."""
    if not data.spec.remedies and not data.remedies.tried:
        return None
    found = failing(drift, rules, verdict)
    return Remedies(data.spec.remedies, found, mended(data.records, data.remedies, drift, rules, found))
