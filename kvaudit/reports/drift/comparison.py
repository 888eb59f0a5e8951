"""What a run set out to compare, read from its spec and matched to what the records hold, and what makes it INVALID.

A whole run is INVALID where there is no reference, rows are missing or stand twice, weights are not pinned, or inputs
changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, cast

import pandas as pd

from kvaudit.core.facets import facet_of
from kvaudit.core.policy_names import (
    DENSE_POLICY,
    condition_names,
    match_policies,
    reference_of,
    short_names,
    uncompressed_policies,
)
from kvaudit.core.provenance import (
    ENDPOINT,
    INPUTS,
    LOOKS,
    PLANNED,
    REWARD_JUDGES,
    inputs_sha256,
    item_counts,
    last_look,
    table_of,
)
from kvaudit.core.records import Outcome
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import BASE_ARM, DENSE_ARM
from kvaudit.core.text import join_names
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import facet_metrics

BY_PHRASES, PROGRAMMATIC = "phrases", "programmatic"  # judges of records by name; the second is the suite itself
UNIT = ["arm", "train_seed", "policy", "suite", "context_tokens"]


@dataclass(frozen=True)
class Reason:
    """Why there is no number: a code for programs, a sentence for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class PlannedUnit(NamedTuple):
    """One checkpoint under one policy on one suite at one length, with the rows (items x samples) it must have."""

    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    rows: int


class Looked(NamedTuple):
    """How a suite of a run in rounds was looked at: ``tests`` cells are gated, ``is_last`` is the last planned look."""

    tests: int
    is_last: bool


@dataclass(frozen=True)
class Comparison:
    """The two sides of every difference.

    ``mode`` "training": candidate arms against the reference arm under the same serving policy.
    ``mode`` "serving": one arm under each serving policy against itself served uncompressed.

    What serves uncompressed is ``none`` for a policy of our cache, and of an engine's condition the one of the same
    engine that ``references`` names.
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
    references: Mapping[str, str] = field(default_factory=dict)  # an engine's condition -> its uncompressed one
    looked: Mapping[str, Looked] = field(default_factory=dict)  # by suite, of a run that is asked in rounds

    def uncompressed_of(self, policy: str) -> str:
        """What a way of serving is compared with; itself where it compresses nothing."""
        return policy if self.is_uncompressed(policy) else reference_of(policy, self.references)

    def is_uncompressed(self, policy: str) -> bool:
        """Whether a way of serving compresses nothing."""
        return policy in uncompressed_policies(self.references)

    def is_engine(self, policy: str) -> bool:
        """Whether a way of serving is an engine's condition, or its reference."""
        return policy in self.references or policy in self.references.values()

    @property
    def uncompressed(self) -> tuple[str, ...]:
        """The ways of serving that compress nothing, ``none`` first."""
        found = [policy for policy in self.policies if self.is_uncompressed(policy)]
        return tuple(sorted(found, key=lambda policy: policy != DENSE_POLICY))

    def label(self, policy: str) -> str:
        """The short name of a way of serving."""
        return self.labels.get(policy, policy)

    def who(self, arm: str, policy: str) -> str:
        """smd @ snapkv 96."""
        return f"{arm} @ {self.label(policy)}"

    @property
    def by_phrases(self) -> tuple[str, ...]:
        """The suites in which phrase rules decided, which carry no claim alone."""
        return tuple(suite for suite in self.suites if BY_PHRASES in map(_judge_name, self.judges.get(suite, ())))

    @property
    def base(self) -> str:
        """The estimand that is the drift itself: candidate against reference served alike, or a policy against none."""
        return "alike" if self.mode == "training" else "serving"

    @property
    def safety(self) -> tuple[str, ...]:
        """The suites that do not measure capability."""
        return tuple(suite for suite in self.suites if suite not in self.capability)


def comparison_of(spec: RunSpec, records: pd.DataFrame, provenance: Mapping[str, Any]) -> Comparison:
    """The comparison that a complete spec declares, with everything that its records hold besides."""
    seen = list(records["policy"].unique())  # of a million rows a few words
    references = spec.evaluate.references
    policies = tuple(dict.fromkeys([*_served_as(spec, seen), *sorted(seen)]))
    trained = tuple(dict.fromkeys(arm for arm, _ in spec.arms if arm != BASE_ARM))
    recorded = sorted(records["arm"].unique())
    reference = spec.gate.reference or BASE_ARM
    # a reference of one seed may serve them all; where there is nothing but a reference its own are meant
    asked = [(arm, seed) for arm, seed in spec.arms if arm != BASE_ARM]
    paired = tuple(dict.fromkeys(seed for arm, seed in asked if arm != reference) or dict.fromkeys(s for _, s in asked))
    candidates = tuple(arm for arm in (trained or recorded) if arm not in (reference, BASE_ARM))
    suites = tuple(dict.fromkeys([*spec.evaluate.suites, *sorted(records["suite"].unique())]))
    held = (*spec.gate.margins, *spec.gate.ratios)  # also where no item has the facet: that is said, not passed over
    facets = tuple(dict.fromkeys([*facet_metrics(records), *(name for name in held if name not in suites)]))
    lengths = {suite: _lengths(spec, records, suite) for suite in suites}
    engines, kinds = condition_names(references), provenance.get("suite_kinds", {})
    return Comparison(
        mode="training" if candidates else "serving",
        model=spec.model,
        reference=reference,
        candidates=candidates,
        arms=tuple(dict.fromkeys([reference, *trained, *recorded])),
        seeds=paired or tuple(sorted(map(int, records.loc[records["arm"] == reference, "train_seed"].unique()))),
        policies=policies,
        suites=suites,
        facets=facets,
        contexts=tuple(sorted({length for own in lengths.values() for length in own})),
        lengths={**lengths, **{facet: lengths[facet_of(facet)[0]] for facet in facets}},
        capability=tuple(suite for suite in suites if kinds.get(suite) == "capability"),
        trained_under=dict(_trained_under(spec, policies)),
        labels={**short_names([p for p in policies if p not in engines]), **engines},
        planned=tuple(_planned(spec.sized(item_counts(provenance)), policies)),
        unserved=frozenset(_unserved(spec, policies)),
        judges=(judges := _judges(records)),
        rewarded=tuple(suite for suite in suites if _is_rewarded(suite, spec, judges, provenance)),
        references=dict(references),
        looked=dict(_looked(spec, suites, provenance)),
    )


def _looked(spec: RunSpec, suites: Sequence[str], provenance: Mapping[str, Any]) -> Iterator[tuple[str, Looked]]:
    """How each suite was looked at; none of a run that is asked at once."""
    if spec.evaluate.rounds is None:
        return
    tests = max(1, len(spec.gate.margins) * len(spec.gate.primary))
    planned = table_of(table_of(table_of(provenance, LOOKS), PLANNED), "items")
    asked = table_of(last_look(provenance) or {}, "items")
    for suite in suites:
        yield suite, Looked(tests, suite in planned and planned[suite] == asked.get(suite))


def _served_as(spec: RunSpec, known: Sequence[str]) -> list[str]:
    """The grid's ways of serving as records name them; an engine's condition has one spelling from the beginning."""
    engines = {text for pair in spec.evaluate.references.items() for text in pair}
    ours = [policy for policy in spec.evaluate.policies if policy not in engines]
    named = dict(zip(ours, match_policies(ours, [p for p in known if p not in engines]), strict=True))
    return [named.get(policy, policy) for policy in spec.evaluate.policies]


def _trained_under(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
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
    planned = spec.evaluate.contexts_of(suite) if suite in spec.evaluate.suites else ()
    found = records.loc[records["suite"] == suite, "context_tokens"].unique()
    return tuple(sorted({*planned, *map(int, found)}))


def _planned(spec: RunSpec, policies: Sequence[str]) -> Iterator[PlannedUnit]:
    grid = spec.evaluate
    unserved, asked = set(_unserved(spec, policies)), _served_as(spec, policies)
    for suite, part in grid.suites.items():
        for (arm, seed), policy, context in product(spec.arms, asked, grid.contexts_of(suite)):
            if (arm, policy) in unserved:
                continue
            items = part.items if isinstance(part.items, int) else 0  # a run whose pilot is not done has none yet
            yield PlannedUnit(arm, seed, policy, suite, context, items * grid.samples_of(suite))


def _unserved(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
    grid = spec.evaluate.policies
    known = dict(zip(grid, _served_as(spec, policies), strict=True))
    for arm in dict.fromkeys(arm for arm, _ in spec.arms):
        yield from ((arm, known[policy]) for policy in grid if policy not in spec.served(arm))


# --- what makes a whole run INVALID ----------------------------------------------------------------------------------


def run_reasons(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Every reason for which the run as a whole is INVALID."""
    records = data.records
    if comparison.reference not in set(records["arm"].unique()):
        yield Reason("REFERENCE", f"the reference arm {comparison.reference!r} has no records")
    duplicates = sum("duplicate of" in problem.reason for problem in data.problems)
    if duplicates:
        yield Reason("DUPLICATE", f"{duplicates} records stand twice; the first of each was kept")
    yield from part_reasons(data, comparison)


def part_reasons(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Those of a part of a run, whatever it is compared with: it is not whole, or not what provenance lists."""
    yield from _incomplete(data, comparison)
    yield from _conflicts(data.records)
    yield from _unlisted(data)
    if ENDPOINT not in data.provenance:  # whose weights nobody has seen
        yield from _unpinned(data, comparison)
    yield from _other_inputs(data)


def _incomplete(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """A grid that is not whole says something else than the one that was declared."""
    counts = {index: int(rows) for index, rows in data.records.groupby(UNIT, observed=True).size().items()}
    found = {unit: counts.get(tuple(unit[:5]), 0) for unit in comparison.planned}
    absent = [unit for unit, rows in found.items() if rows == 0]
    short = [unit for unit, rows in found.items() if 0 < rows != unit.rows]
    parts = []
    if absent:
        names = [f"{u.arm} seed {u.seed} @ {comparison.label(u.policy)}, {u.suite}" for u in absent]
        parts.append(f"planned units missing: {len(absent)} of {len(comparison.planned)} ({some_of(names)})")
    if data.incomplete:
        parts.append(f"units not sealed: {len(data.incomplete)} ({some_of(data.incomplete)})")
    if short:
        names = [
            f"{found[u]} of {u.rows} rows in {u.arm} seed {u.seed} @ {comparison.label(u.policy)}, {u.suite}"
            for u in short
        ]
        missing = sum(abs(unit.rows - found[unit]) for unit in short)
        parts.append(f"rows missing or too many: {missing} ({some_of(names)})")
    if parts:
        yield Reason("INCOMPLETE", f"resume this run first, it is not whole: {'; '.join(parts)}")


def some_of(names: Iterable[str]) -> str:
    """The first names, which may hold commas, and how many more there are."""
    return join_names(names, between="; ", last="; and ")


def _conflicts(records: pd.DataFrame) -> Iterator[Reason]:
    """A name that stands for two things: weights, policy, suite version or judge."""
    # of the rest a suite's judge has said nothing
    judged = records.loc[records["outcome"].isin([Outcome.DESIRED.value, Outcome.UNDESIRED.value]), ["suite", "judge"]]
    for table, by, column, what in (
        (records, ["arm", "train_seed"], "checkpoint", "a checkpoint's weights"),
        (records, ["policy"], "policy_hash", "a policy's hash"),
        (records, ["suite"], "suite_version", "a suite's version"),
        (judged, ["suite"], "judge", "a suite's judge"),
    ):
        several = table.groupby(by, observed=True)[column].nunique()
        names = [str(index) for index in several[several > 1].index]
        if names:
            yield Reason("HASH", f"{what} differs within {', '.join(names)}")


def _unlisted(data: RunData) -> Iterator[Reason]:
    """Policies and suites of the records that are not the ones provenance lists; what it does not list is not held."""
    for table, name, column in (("policies", "policy", "policy_hash"), ("suite_versions", "suite", "suite_version")):
        listed = table_of(data.provenance, table)
        found = data.records.groupby(name, observed=True)[column].unique()
        by_name = {str(key): set(values) for key, values in found.items()}
        strange = [key for key, values in by_name.items() if key in listed and values != {listed[key]}]
        if strange:
            yield Reason("HASH", f"{column} of the records is not what provenance lists for {some_of(strange)}")


def _unpinned(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Records whose weights are not exactly those that provenance lists for their arm and seed."""
    listed = table_of(data.provenance, "checkpoints")
    pinned = table_of(data.provenance, "reference_sha256")
    strange, unpinned = [], []
    weights = data.records.groupby(["arm", "train_seed"], observed=True)["checkpoint"].unique()
    for index, several in weights.items():
        arm, seed = cast(tuple[str, int], index)
        found = set(several)
        known = listed.get(f"{arm}/{seed}")
        if known is None and arm == BASE_ARM:  # otherwise it is the warm start of its seed
            known = data.provenance.get("base_sha256")
        if found != {known}:
            strange.append(f"{arm} seed {seed}")
        if arm == comparison.reference and found != {pinned.get(str(seed))}:
            unpinned.append(f"{arm} seed {seed}")
    remedy = "evaluate those units again, or resume the run to finish it"
    if strange:
        yield Reason("REFHASH", f"provenance lists other weights, or none, for {some_of(strange)}: {remedy}")
    if unpinned:
        yield Reason("REFHASH", f"the reference is not the one that provenance pins, {some_of(unpinned)}: {remedy}")


def _other_inputs(data: RunData) -> Iterator[Reason]:
    """Units whose seal stands for other public rows, plug-ins or model files than provenance lists."""
    wanted = inputs_sha256(data.provenance.get(INPUTS))
    # None: an older seal, which does not say what its unit was evaluated from
    strange = [unit for unit, found in data.inputs.items() if found not in (None, wanted)]
    if strange:
        yield Reason(
            "INPUTS",
            f"{len(strange)} units were evaluated from other rows, plug-ins or model files than provenance lists "
            f"({some_of(strange)}): delete them and their seals, and resume the run",
        )
