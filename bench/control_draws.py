"""Verdicts on random parts of answers that were sampled once: each draw goes through the gate's own path."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from bench.control_runs import AGAIN, BASE, MARGIN, Spoil
from kvaudit.core.spec_evaluate import SuiteSpec
from kvaudit.reports.records.load import RunData
from kvaudit.reports.run import decided
from kvaudit.reports.verdict.sizes import Design, pass_chance
from kvaudit.reports.verdict.verdict import Decision, Status, Verdict

ALPHA = 0.05
Rng = np.random.Generator
CellOf = tuple[str, str]  # suite, policy


def paired(data: RunData, first: str, second: str) -> RunData:
    """Two arms as reference and candidate; the same one twice is a candidate that answers letter for letter alike."""
    arms = data.records["arm"].astype(str)
    parts = [data.records[arms == arm].assign(arm=name) for arm, name in ((first, BASE), (second, AGAIN))]
    return with_rows(data, pd.concat(parts, ignore_index=True))


def with_rows(data: RunData, rows: pd.DataFrame) -> RunData:
    """The run with other rows; it then declares as many items of each suite as they hold."""
    rows = rows[rows["policy"].isin(data.spec.evaluate.policies)]
    items = rows.groupby("suite", observed=True)["item_id"].nunique()
    suites = {str(suite): SuiteSpec(items=int(n)) for suite, n in items.items()}
    evaluate = data.spec.evaluate.model_copy(update={"suites": suites})
    spec = data.spec.model_copy(update={"evaluate": evaluate})
    return replace(data, records=rows.reset_index(drop=True), spec=spec)


def templates_of(data: RunData) -> dict[str, list[str]]:
    """The templates of each suite, in order."""
    groups = data.records.groupby("suite", observed=True)["cluster_id"]
    return {str(suite): sorted(map(str, own.unique())) for suite, own in groups}


def some(data: RunData, rng: Rng, share: float) -> frozenset[str]:
    """A random share of every suite's templates, rounded up."""
    names = [rng.choice(own, size=math.ceil(share * len(own)), replace=False) for own in templates_of(data).values()]
    return frozenset(str(name) for part in names for name in part)


def halves(data: RunData, arms: Sequence[str], draws: int, rng: Rng) -> Iterator[RunData]:
    """Two different runs of one checkpoint, gated on a random half of the templates."""
    for _ in range(draws):
        pair = _two(data, arms, rng)
        yield with_rows(pair, pair.records[pair.records["cluster_id"].isin(some(data, rng, 0.5))])


def swaps(data: RunData, arms: Sequence[str], draws: int, rng: Rng) -> Iterator[RunData]:
    """Two different runs on all templates; in a random half of them the two change places."""
    for _ in range(draws):
        pair = _two(data, arms, rng)
        turned = pair.records["cluster_id"].isin(some(data, rng, 0.5))
        other = pair.records["arm"].map({BASE: AGAIN, AGAIN: BASE})
        yield with_rows(pair, pair.records.assign(arm=pair.records["arm"].where(~turned, other)))


def spoilt(pair: RunData, templates: frozenset[str], spoil: Spoil) -> RunData:
    """The candidate's scores of these templates become what ``spoil`` makes of them."""
    hit = pair.records["cluster_id"].isin(templates) & (pair.records["arm"] == AGAIN)
    score = pair.records["score"]
    return with_rows(pair, pair.records.assign(score=score.where(~hit, score.map(spoil))))


def losses(
    data: RunData, arms: Sequence[str], draws: int, rng: Rng, *, share: float, spoil: Spoil, copy: bool
) -> Iterator[RunData]:
    """Labels spoilt in a random ``share`` of the templates: of a letter for letter copy, or of another run."""
    for _ in range(draws):
        arm = str(rng.choice(arms))
        yield spoilt(paired(data, arm, arm) if copy else _two(data, arms, rng), some(data, rng, share), spoil)


def _two(data: RunData, arms: Sequence[str], rng: Rng) -> RunData:
    first, second = rng.choice(arms, size=2, replace=False)
    return paired(data, str(first), str(second))


@dataclass(frozen=True)
class Shares:
    """How often each status came out: of the whole verdict, and of every gated cell."""

    verdicts: Counter[Status]
    cells: dict[CellOf, Counter[Status]]

    @property
    def draws(self) -> int:
        """Verdicts taken."""
        return self.verdicts.total()

    @property
    def fail(self) -> float:
        """Share of verdicts that are FAIL."""
        return self.verdicts[Status.FAIL] / self.draws


def shares(runs: Iterable[RunData]) -> Shares:
    """The verdicts of many runs."""
    found = Shares(Counter(), {})
    for data in runs:
        verdict = decided(data).verdict
        found.verdicts[verdict.status] += 1
        for d in gated(verdict):
            found.cells.setdefault((d.suite, d.policy), Counter())[d.status] += 1
    return found


def gated(verdict: Verdict) -> list[Decision]:
    """The cells that enter the verdict."""
    return [d for d in verdict.decisions if d.gated]


def limit(draws: int) -> float:
    """The share of FAIL that ``draws`` A/A verdicts may show: three standard errors above the level."""
    return ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / draws)


def planned_pass(data: RunData, arms: Sequence[str]) -> dict[CellOf, float]:
    """P(PASS) of every cell at no drift on all templates, by the planner, from how often neighbouring runs differ."""
    table = data.records.assign(arm=data.records["arm"].astype(str)).pivot_table(
        index=["suite", "policy", "item_id"], columns="arm", values="score", observed=True
    )
    squares = table[list(arms)].diff(axis=1).iloc[:, 1:].pow(2).mean(axis=1).groupby(["suite", "policy"], observed=True)
    templates = {suite: len(names) for suite, names in templates_of(data).items()}

    def passes(suite: str, differs: float, items: int) -> float:
        size = Design(MARGIN / 100, max(differs, 1e-9), templates[suite], items // templates[suite], correlation=0.0)
        return pass_chance(size)

    return {
        (str(suite), str(policy)): passes(str(suite), float(own.mean()), len(own))
        for (suite, policy), own in squares
        if own.notna().all()
    }
