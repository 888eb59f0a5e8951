"""What a run set out to compare, read from its spec and matched to what the records hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from audit.core.facets import facet_of
from audit.core.policy_names import DENSE_POLICY, match_policies, short_names
from audit.core.provenance import REWARD_JUDGES
from audit.core.spec import RunSpec
from audit.core.spec_train import BASE_ARM, DENSE_ARM
from reports.records.panel import facets_of

BY_PHRASES, PROGRAMMATIC = "phrases", "programmatic"  # judges of records by name; the second is the suite itself


class PlannedUnit(NamedTuple):
    """One checkpoint under one policy on one suite at one length, with the rows (items x samples) it must have."""

    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    rows: int


@dataclass(frozen=True)
class Comparison:
    """The two sides of every difference.

    ``mode`` "training": candidate arms against the reference arm under the same serving policy.
    ``mode`` "serving": one arm under each serving policy against itself under policy ``none``.
    """

    mode: str
    model: str
    reference: str
    candidates: tuple[str, ...]
    arms: tuple[str, ...]  # everything with records or in the spec, reference first
    seeds: tuple[int, ...]
    policies: tuple[str, ...]  # canonical
    suites: tuple[str, ...]
    facets: tuple[str, ...]  # SUITE.FACET, of the records and of what the gate names
    contexts: tuple[int, ...]
    lengths: Mapping[str, tuple[int, ...]]  # of the suites, and of the facets: where each was asked
    capability: tuple[str, ...]  # the suites that measure it
    labels: dict[str, str]  # canonical policy -> short name
    planned: tuple[PlannedUnit, ...]  # that the spec asks for
    judges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by suite: who graded its records
    unserved: frozenset[tuple[str, str]] = frozenset()  # arm and policy that no record is asked of
    trained_under: Mapping[str, str] = field(default_factory=dict)  # arm -> policy of its compressed rollouts
    rewarded: tuple[str, ...] = ()  # the suites that were trained on, or whose judge gave the reward

    @property
    def by_phrases(self) -> tuple[str, ...]:
        """The suites in which phrase rules decided, which carry no claim alone."""
        return tuple(suite for suite in self.suites if BY_PHRASES in map(_judge_name, self.judges.get(suite, ())))

    @property
    def base(self) -> str:
        """The estimand that is the drift itself: candidate against reference served alike, or a policy against none."""
        return "E1" if self.mode == "training" else "E4"

    @property
    def safety(self) -> tuple[str, ...]:
        """The suites that do not measure capability."""
        return tuple(suite for suite in self.suites if suite not in self.capability)


def comparison_of(spec: RunSpec, records: pd.DataFrame, provenance: Mapping[str, Any]) -> Comparison:
    """The comparison that a complete spec declares, with everything that its records hold besides."""
    seen = list(dict.fromkeys(records["policy"]))
    policies = tuple(dict.fromkeys([*match_policies(spec.evaluate.policies, seen), *sorted(seen)]))
    trained = tuple(dict.fromkeys(arm for arm, _ in spec.arms if arm != BASE_ARM))
    recorded = sorted(set(records["arm"]))
    reference = spec.gate.reference or BASE_ARM
    # a reference of one seed may serve them all; where there is nothing but a reference its own are meant
    asked = [(arm, seed) for arm, seed in spec.arms if arm != BASE_ARM]
    paired = tuple(dict.fromkeys(seed for arm, seed in asked if arm != reference) or dict.fromkeys(s for _, s in asked))
    candidates = tuple(arm for arm in (trained or recorded) if arm not in (reference, BASE_ARM))
    suites = tuple(dict.fromkeys([*spec.evaluate.suites, *sorted(set(records["suite"]))]))
    facets = tuple(dict.fromkeys([*facets_of(records), *(name for name in spec.gate.margins if name not in suites)]))
    lengths = {suite: _lengths(spec, records, suite) for suite in suites}
    return Comparison(
        mode="training" if candidates else "serving",
        model=spec.model,
        reference=reference,
        candidates=candidates,
        arms=tuple(dict.fromkeys([reference, *trained, *recorded])),
        seeds=paired or _recorded_seeds(records, reference),
        policies=policies,
        suites=suites,
        facets=facets,
        contexts=tuple(sorted({length for own in lengths.values() for length in own})),
        lengths={**lengths, **{facet: lengths[facet_of(facet)[0]] for facet in facets}},
        capability=_capability(suites, provenance),
        trained_under=dict(_trained_under(spec, policies)),
        labels=short_names(policies),
        planned=tuple(_planned(spec, policies)),
        unserved=frozenset(_unserved(spec, policies)),
        judges=(judges := _judges(records)),
        rewarded=tuple(suite for suite in suites if _is_rewarded(suite, spec, judges, provenance)),
    )


def _trained_under(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every arm whose rollouts were compressed, with the policy."""
    for arm in () if spec.train is None else spec.train.trained:
        if arm.recipe != DENSE_ARM and arm.policy != DENSE_POLICY:
            yield arm.name, match_policies([arm.policy], policies)[0]


def _judges(records: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for suite, judge in records[["suite", "judge"]].drop_duplicates().itertuples(index=False):
        found.setdefault(str(suite), []).append(str(judge))
    return {suite: tuple(sorted(judges)) for suite, judges in found.items()}


def _judge_name(judge: str) -> str:
    """The name of NAME:12 hex: two versions of one judge are no two judges."""
    return judge.partition(":")[0]


def _is_rewarded(suite: str, spec: RunSpec, judges: Mapping[str, Sequence[str]], provenance: Mapping[str, Any]) -> bool:
    """Whether a model was trained to score here. What grades by construction in two suites is no judge of both."""
    if spec.train is None:
        return False
    paid = {_judge_name(judge) for judge in provenance.get(REWARD_JUDGES, {}).values()} - {PROGRAMMATIC}
    return suite in spec.train.suites or not paid.isdisjoint(map(_judge_name, judges.get(suite, ())))


def _lengths(spec: RunSpec, records: pd.DataFrame, suite: str) -> tuple[int, ...]:
    """Where a suite is to be asked, and where it was."""
    planned = spec.evaluate.contexts_of(suite) if suite in spec.evaluate.suites else ()
    found = records.loc[records["suite"] == suite, "context_tokens"].unique()
    return tuple(sorted({*planned, *map(int, found)}))


def _planned(spec: RunSpec, policies: Sequence[str]) -> Iterator[PlannedUnit]:
    """The grid of the spec."""
    grid = spec.evaluate
    unserved, asked = set(_unserved(spec, policies)), match_policies(grid.policies, policies)
    for suite, part in grid.suites.items():
        for (arm, seed), policy, context in product(spec.arms, asked, grid.contexts_of(suite)):
            if (arm, policy) in unserved:
                continue
            yield PlannedUnit(arm, seed, policy, suite, context, part.items * grid.samples_of(suite))


def _unserved(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Arms and serving policies that the spec does not bring together."""
    grid = spec.evaluate.policies
    known = dict(zip(grid, match_policies(grid, policies), strict=True))
    for arm in dict.fromkeys(arm for arm, _ in spec.arms):
        yield from ((arm, known[policy]) for policy in grid if policy not in spec.served(arm))


def _recorded_seeds(records: pd.DataFrame, reference: str) -> tuple[int, ...]:
    return tuple(sorted({int(s) for s in records.loc[records["arm"] == reference, "train_seed"]}))


def _capability(suites: Sequence[str], provenance: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = provenance.get("suite_kinds", {})
    return tuple(suite for suite in suites if kinds.get(suite) == "capability")
