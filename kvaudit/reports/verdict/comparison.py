"""The two sides that a run compares (reference and candidates), and the reasons why a run is INVALID as a whole.

Both follow from spec and records. A run is INVALID if it has no reference, if rows are missing or duplicated, or if
weights or inputs are not those that provenance lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, cast

import pandas as pd

from kvaudit.core.facets import facet_of, is_well_formed
from kvaudit.core.policy_names import (
    DENSE_POLICY,
    condition_names,
    match_policies,
    reference_of,
    short_names,
    uncompressed_policies,
)
from kvaudit.core.provenance import (
    CHECKPOINTS,
    ENDPOINT,
    INPUTS,
    LOADED,
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
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

BY_PHRASES, PROGRAMMATIC = "phrases", "programmatic"  # names of judges: a search for phrases, the suite's own grader
UNIT = ["arm", "train_seed", "policy", "suite", "context_tokens"]


class PlannedUnit(NamedTuple):
    """One checkpoint under one policy on one suite at one length, with the number of rows (items x samples) planned."""

    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    rows: int


class Look(NamedTuple):
    """The last look (test between rounds) at a suite, in a run that asks its items in rounds.

    ``tests`` is the number of gated cells by which the level is divided. Cells of readable answers (``well_formed``)
    are not counted in it; each gets a tenth of the others' level (``for_readable``). ``is_last`` is whether no further
    look was planned.
    """

    tests: int
    is_last: bool

    @property
    def for_readable(self) -> Look:
        """The look at cells of readable answers, tested at a tenth of the level.

        They need less power, since a setting that breaks form breaks it in many answers.
        """
        return self._replace(tests=10 * self.tests)


@dataclass(frozen=True)
class Comparison:
    """The two sides of every difference, and the planned grid.

    In ``mode`` "training", candidate arms are compared with the reference arm under the same serving policy. In
    ``mode`` "serving", one arm under each serving policy is compared with the same arm served uncompressed.

    For kvaudit's own cache, "uncompressed" is the policy ``none``. For a setting of an engine it is the setting of the
    same engine that ``references`` names.
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
    lengths: Mapping[str, tuple[int, ...]]  # suite or facet -> the lengths at which it was asked
    capability: tuple[str, ...]  # the suites that measure it
    labels: dict[str, str]  # canonical policy -> short name
    planned: tuple[PlannedUnit, ...]
    judges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by suite: who graded its records
    unserved: frozenset[tuple[str, str]] = frozenset()  # pairs of arm and policy that the spec does not serve
    trained_under: Mapping[str, str] = field(default_factory=dict)  # arm -> policy of its compressed rollouts
    rewarded: tuple[str, ...] = ()  # the suites that were trained on, or whose judge gave the reward
    references: Mapping[str, str] = field(default_factory=dict)  # an engine's condition -> its uncompressed one
    looks: Mapping[str, Look] = field(default_factory=dict)  # by suite; only a run in rounds has them
    weights: Mapping[tuple[str, int], str] = field(default_factory=dict)  # (arm, seed) -> what its weights hash to

    def uncompressed_of(self, policy: str) -> str:
        """Return the uncompressed policy that a policy is compared with."""
        return policy if self.is_uncompressed(policy) else reference_of(policy, self.references)

    def is_uncompressed(self, policy: str) -> bool:
        """Whether a policy compresses nothing."""
        return policy in uncompressed_policies(self.references)

    def is_engine(self, policy: str) -> bool:
        """Whether a policy is a setting of a serving engine, or an engine's uncompressed setting."""
        return policy in self.references or policy in self.references.values()

    @property
    def uncompressed(self) -> tuple[str, ...]:
        """The policies that compress nothing, ``none`` first."""
        policies = [policy for policy in self.policies if self.is_uncompressed(policy)]
        return tuple(sorted(policies, key=lambda policy: policy != DENSE_POLICY))

    def label(self, policy: str) -> str:
        """Return the short name of a policy, as pages print it."""
        return self.labels.get(policy, policy)

    def who(self, arm: str, policy: str) -> str:
        """Return arm and policy as pages print them: smd @ snapkv 96."""
        return f"{arm} @ {self.label(policy)}"

    @property
    def by_phrases(self) -> tuple[str, ...]:
        """The suites graded by phrase rules (a search for fixed phrases), which alone cannot support a conclusion."""
        return tuple(suite for suite in self.suites if BY_PHRASES in map(_judge_name, self.judges.get(suite, ())))

    @property
    def base(self) -> str:
        """The run's basic kind of difference, of which the kinds "worst", "parity" and "selectivity" are made.

        It is "alike" if arms were trained (both sides under the same policy), else "serving" (compressed against not).
        """
        return "alike" if self.mode == "training" else "serving"

    def alike(self, arm: str) -> tuple[int, ...]:
        """Return the seeds of an arm that have the same weights as another of its seeds: they are one training run."""
        # the base model is the same whatever is trained from it
        weights = {seed: sha256 for (name, seed), sha256 in sorted(self.weights.items()) if name == arm != BASE_ARM}
        return tuple(seed for seed, sha256 in weights.items() if [*weights.values()].count(sha256) > 1)

    def equal_to_reference(self, arm: str) -> tuple[int, ...]:
        """Return the seeds of an arm whose weights equal those of some checkpoint of the reference, of any seed."""
        theirs = {sha256 for (name, _), sha256 in self.weights.items() if name == self.reference}
        return tuple(sorted(seed for (name, seed), sha256 in self.weights.items() if name == arm and sha256 in theirs))

    @property
    def safety(self) -> tuple[str, ...]:
        """The suites that measure safety: all that do not measure capability."""
        return tuple(suite for suite in self.suites if suite not in self.capability)


def comparison_of(spec: RunSpec, records: pd.DataFrame, provenance: Mapping[str, Any]) -> Comparison:
    """Return the comparison that a complete spec declares, plus arms, policies and suites found only in the records."""
    recorded_policies = list(records["policy"].unique())
    references = spec.evaluate.references
    policies = tuple(dict.fromkeys([*_served_as(spec, recorded_policies), *sorted(recorded_policies)]))
    trained = tuple(dict.fromkeys(arm for arm, _ in spec.arms if arm != BASE_ARM))
    recorded = sorted(records["arm"].unique())
    reference = spec.gate.reference or BASE_ARM
    checkpoints = [(arm, seed) for arm, seed in spec.arms if arm != BASE_ARM]
    # the seeds of the candidates, as a reference of one seed may be compared with all; else those of the reference
    candidate_seeds = dict.fromkeys(seed for arm, seed in checkpoints if arm != reference)
    seeds = tuple(candidate_seeds or dict.fromkeys(seed for _, seed in checkpoints))
    candidates = tuple(arm for arm in (trained or recorded) if arm not in (reference, BASE_ARM))
    suites = tuple(dict.fromkeys([*spec.evaluate.suites, *sorted(records["suite"].unique())]))
    limits = (*spec.gate.margins, *spec.gate.ratios)  # also of facets that no item has, so that the gap is reported
    facets = tuple(dict.fromkeys([*facet_metrics(records), *(name for name in limits if name not in suites)]))
    lengths = {suite: _lengths(spec, records, suite) for suite in suites}
    engines, kinds = condition_names(references), provenance.get("suite_kinds", {})
    return Comparison(
        mode="training" if candidates else "serving",
        model=spec.model,
        reference=reference,
        candidates=candidates,
        arms=tuple(dict.fromkeys([reference, *trained, *recorded])),
        seeds=seeds or tuple(sorted(map(int, records.loc[records["arm"] == reference, "train_seed"].unique()))),
        policies=policies,
        suites=suites,
        facets=facets,
        contexts=tuple(sorted({length for suite_lengths in lengths.values() for length in suite_lengths})),
        lengths={**lengths, **{facet: lengths[facet_of(facet)[0]] for facet in facets}},
        capability=tuple(suite for suite in suites if kinds.get(suite) == "capability"),
        trained_under=dict(_trained_under(spec, policies)),
        labels={**short_names([p for p in policies if p not in engines]), **engines},
        planned=tuple(_planned(spec.sized(item_counts(provenance)), policies)),
        unserved=frozenset(_unserved(spec, policies)),
        judges=(judges := _judges(records)),
        rewarded=tuple(suite for suite in suites if _is_rewarded(suite, spec, judges, provenance)),
        references=dict(references),
        looks=dict(_looks(spec, suites, provenance)),
        weights=_weights([(arm, seed) for arm, seed in spec.arms], provenance),
    )


def _weights(pairs: Iterable[tuple[str, int]], provenance: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """Return a hash of the weights of each of these (arm, seed).

    It is the hash of the loaded tensors if they were hashed, else that of the files.
    """
    files = {f"{BASE_ARM}/0": provenance.get("base_sha256"), **table_of(provenance, CHECKPOINTS)}
    # equal files hold equal tensors, so the hash of the tensors of one holds for all
    loaded = {str(files.get(key)): str(sha256) for key, sha256 in table_of(provenance, LOADED).items()}
    stored = {(arm, seed): str(sha256) for arm, seed in pairs if (sha256 := files.get(f"{arm}/{seed}"))}
    return {pair: loaded.get(sha256, sha256) for pair, sha256 in stored.items()}


def _looks(spec: RunSpec, suites: Sequence[str], provenance: Mapping[str, Any]) -> Iterator[tuple[str, Look]]:
    """Yield (suite, last look) of each suite of a run in rounds; nothing for other runs.

    A look is a test between two rounds.
    """
    if spec.evaluate.rounds is None:
        return
    metrics = [metric for metric in spec.gate.margins if not is_well_formed(metric)]
    tests = max(1, len(metrics) * len(spec.gate.primary))
    planned = table_of(table_of(table_of(provenance, LOOKS), PLANNED), "items")
    evaluated = table_of(last_look(provenance) or {}, "items")
    for suite in suites:
        yield suite, Look(tests, suite in planned and planned[suite] == evaluated.get(suite))


def _served_as(spec: RunSpec, recorded: Sequence[str]) -> list[str]:
    """Return the serving policies of the spec, each in the spelling of the records if they spell it differently."""
    conditions = {text for pair in spec.evaluate.references.items() for text in pair}
    ours = [policy for policy in spec.evaluate.policies if policy not in conditions]
    spelled = dict(zip(ours, match_policies(ours, [p for p in recorded if p not in conditions]), strict=True))
    return [spelled.get(policy, policy) for policy in spec.evaluate.policies]


def _trained_under(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
    for arm in () if spec.train is None else spec.train.trained:
        if arm.recipe != DENSE_ARM and arm.policy != DENSE_POLICY:
            yield arm.name, match_policies([arm.policy], policies)[0]


def _judges(records: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    by_suite: dict[str, list[str]] = {}
    for suite, judge in records[["suite", "judge"]].drop_duplicates().itertuples(index=False):
        by_suite.setdefault(str(suite), []).append(str(judge))
    return {suite: tuple(sorted(judges)) for suite, judges in by_suite.items()}


def _judge_name(judge: str) -> str:
    """Return NAME of "NAME:12 hex digits", because two versions of one judge count as one judge."""
    return judge.partition(":")[0]


def _is_rewarded(suite: str, spec: RunSpec, judges: Mapping[str, Sequence[str]], provenance: Mapping[str, Any]) -> bool:
    """Return whether training may have rewarded answers like those of a suite.

    It may have if training used the suite, or if a judge that gave the reward also grades the suite here. If provenance
    does not list the judges of the reward, any judge may have given it. Programmatic graders do not count as judges.
    """
    if spec.train is None:
        return False
    grading = set(map(_judge_name, judges.get(suite, ()))) - {PROGRAMMATIC}
    if REWARD_JUDGES in provenance:
        grading &= set(map(_judge_name, provenance[REWARD_JUDGES].values()))
    return suite in spec.train.suites or bool(grading)


def _lengths(spec: RunSpec, records: pd.DataFrame, suite: str) -> tuple[int, ...]:
    planned = spec.evaluate.contexts_of(suite) if suite in spec.evaluate.suites else ()
    recorded = records.loc[records["suite"] == suite, "context_tokens"].unique()
    return tuple(sorted({*planned, *map(int, recorded)}))


def _planned(spec: RunSpec, policies: Sequence[str]) -> Iterator[PlannedUnit]:
    grid = spec.evaluate
    unserved, served = set(_unserved(spec, policies)), _served_as(spec, policies)
    for suite, suite_spec in grid.suites.items():
        for (arm, seed), policy, context in product(spec.arms, served, grid.contexts_of(suite)):
            if (arm, policy) in unserved:
                continue
            items = suite_spec.items if isinstance(suite_spec.items, int) else 0  # not known before the pilot is done
            yield PlannedUnit(arm, seed, policy, suite, context, items * grid.samples_of(suite))


def _unserved(spec: RunSpec, policies: Sequence[str]) -> Iterator[tuple[str, str]]:
    grid = spec.evaluate.policies
    spelled = dict(zip(grid, _served_as(spec, policies), strict=True))
    for arm in dict.fromkeys(arm for arm, _ in spec.arms):
        yield from ((arm, spelled[policy]) for policy in grid if policy not in spec.served(arm))


# --- what makes a whole run INVALID ----------------------------------------------------------------------------------


def run_reasons(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Yield every reason why the run as a whole is INVALID."""
    records = data.records
    if comparison.reference not in set(records["arm"].unique()):
        yield Reason(ReasonCode.REFERENCE, f"the reference arm {comparison.reference!r} has no records")
    duplicates = sum("duplicate of" in problem.reason for problem in data.problems)
    if duplicates:
        yield Reason(ReasonCode.DUPLICATE, f"{duplicates} records are duplicates; the first of each was kept")
    yield from part_reasons(data, comparison)


def part_reasons(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Yield the reasons why a run, or a part of one, is INVALID: records are missing, or contradict provenance."""
    yield from _incomplete(data, comparison)
    yield from _conflicts(data.records)
    yield from _differing_hashes(data)
    if ENDPOINT not in data.provenance:  # the weights behind an endpoint are unknown
        yield from _unpinned(data, comparison)
    yield from _other_inputs(data)


def _incomplete(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    counts = {index: int(rows) for index, rows in data.records.groupby(UNIT, observed=True).size().items()}
    recorded = {unit: counts.get(tuple(unit[:5]), 0) for unit in comparison.planned}
    absent = [unit for unit, rows in recorded.items() if rows == 0]
    short = [unit for unit, rows in recorded.items() if 0 < rows != unit.rows]
    gaps = []
    if absent:
        names = [f"{u.arm} seed {u.seed} @ {comparison.label(u.policy)}, {u.suite}" for u in absent]
        gaps.append(f"planned units missing: {len(absent)} of {len(comparison.planned)} ({some_of(names)})")
    if data.incomplete:
        gaps.append(f"units not sealed: {len(data.incomplete)} ({some_of(data.incomplete)})")
    if short:
        names = [
            f"{recorded[u]} of {u.rows} rows in {u.arm} seed {u.seed} @ {comparison.label(u.policy)}, {u.suite}"
            for u in short
        ]
        missing = sum(abs(unit.rows - recorded[unit]) for unit in short)
        gaps.append(f"rows missing or too many: {missing} ({some_of(names)})")
    if gaps:
        yield Reason(ReasonCode.INCOMPLETE, f"resume this run first, it is incomplete: {'; '.join(gaps)}")


def some_of(names: Iterable[str]) -> str:
    """Return the first names and the number of further ones, separated by semicolons because names may have commas."""
    return join_names(names, between="; ", last="; and ")


def _conflicts(records: pd.DataFrame) -> Iterator[Reason]:
    """Yield a reason against deciding the run if records of one checkpoint, policy or suite contradict each other.

    All records of a checkpoint must have the same hash of weights, those of a policy the same hash, and those of a
    suite the same version and judge.
    """
    # other outcomes were not graded by the suite's judge
    judged = records.loc[records["outcome"].isin([Outcome.DESIRED.value, Outcome.UNDESIRED.value]), ["suite", "judge"]]
    for table, by, column, nouns in (
        (records, ["arm", "train_seed"], "checkpoint", "weights"),
        (records, ["policy"], "policy_hash", "policy hashes"),
        (records, ["suite"], "suite_version", "suite versions"),
        (judged, ["suite"], "judge", "judges"),
    ):
        several = table.groupby(by, observed=True)[column].nunique()
        names = [" seed ".join(map(str, i)) if isinstance(i, tuple) else str(i) for i in several[several > 1].index]
        if names:
            yield Reason(ReasonCode.HASH, f"records have several {nouns} for {some_of(names)}")


def _differing_hashes(data: RunData) -> Iterator[Reason]:
    """Yield a reason against deciding the run if policies or suites have other hashes than provenance lists.

    There is also a reason if provenance lists no hash of them, or does not list the kind of a suite (safety or
    capability), which the gate needs.
    """
    kinds = table_of(data.provenance, "suite_kinds")
    if unknown := [suite for suite in map(str, data.records["suite"].unique()) if suite not in kinds]:
        yield Reason(ReasonCode.HASH, f"provenance does not list the kind of suite {some_of(unknown)}")
    for table, name, column in (("policies", "policy", "policy_hash"), ("suite_versions", "suite", "suite_version")):
        listed = table_of(data.provenance, table)
        recorded = data.records.groupby(name, observed=True)[column].unique()
        by_name = {str(key): set(values) for key, values in recorded.items()}
        if name == "policy" and ENDPOINT in data.provenance:  # the policy behind an endpoint is unknown
            continue
        # an earlier version may have spelled a policy differently: then some policy of that hash must be listed
        respelled = set(listed.values()) if name == "policy" else set()
        differing = [
            key
            for key, hashes in by_name.items()
            if hashes != {listed.get(key)} and (key in listed or not hashes <= respelled)
        ]
        if differing:
            yield Reason(
                ReasonCode.HASH, f"{column} of the records is not what provenance lists for {some_of(differing)}"
            )


def _unpinned(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Yield a reason against deciding the run if checkpoints have other weights than provenance says.

    The reason names these checkpoints.
    """
    listed = table_of(data.provenance, "checkpoints")
    pinned = table_of(data.provenance, "reference_sha256")
    differing, unpinned = [], []
    weights = data.records.groupby(["arm", "train_seed"], observed=True)["checkpoint"].unique()
    for index, several in weights.items():
        arm, seed = cast(tuple[str, int], index)
        recorded = set(several)
        sha256 = listed.get(f"{arm}/{seed}")
        if sha256 is None and arm == BASE_ARM:  # a base arm that is listed is the warm start of its seed
            sha256 = data.provenance.get("base_sha256")
        if recorded != {sha256}:
            differing.append(f"{arm} seed {seed}")
        if arm == comparison.reference and recorded != {pinned.get(str(seed))}:
            unpinned.append(f"{arm} seed {seed}")
    remedy = "evaluate those units again, or resume the run to finish it"
    if differing:
        yield Reason(
            ReasonCode.REF_HASH, f"provenance lists other weights, or none, for {some_of(differing)}: {remedy}"
        )
    if unpinned:
        yield Reason(
            ReasonCode.REF_HASH, f"the reference is not the one that provenance pins, {some_of(unpinned)}: {remedy}"
        )


def _other_inputs(data: RunData) -> Iterator[Reason]:
    """Yield a reason against deciding the run if it evaluated other inputs than provenance lists.

    Inputs are public rows, plug-ins and model files.
    """
    listed = inputs_sha256(data.provenance.get(INPUTS))
    if differing := [unit for unit, sha256 in data.inputs.items() if sha256 != listed]:
        yield Reason(
            ReasonCode.INPUTS,
            f"{len(differing)} units were evaluated from another spec, rows, plug-ins or model files than provenance "
            f"lists ({some_of(differing)}): delete them and their seals, and resume the run",
        )
