"""What makes a whole run INVALID: no reference, rows missing or twice, weights not pinned, inputs that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from audit.core.inputs import TABLE, inputs_sha256
from audit.core.provenance import table_of
from audit.core.records import Outcome
from audit.core.spec_train import BASE_ARM
from reports.drift.comparison import Comparison
from reports.drift.results import Reason
from reports.records.load import RunData

UNIT = ["arm", "train_seed", "policy", "suite", "context_tokens"]
NAMED = 3  # units that a reason spells out


def run_reasons(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Every reason, run-wide."""
    records = data.records
    if comparison.reference not in set(records["arm"]):
        yield Reason("REFERENCE", f"the reference arm {comparison.reference!r} has no records")
    duplicates = sum("duplicate of" in problem.reason for problem in data.problems)
    if duplicates:
        yield Reason("DUPLICATE", f"{duplicates} records stand twice; the first of each was kept")
    yield from _incomplete(data, comparison)
    yield from _conflicts(records)
    yield from _unlisted(data)
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
        names = [f"{u.arm} seed {u.seed} @ {comparison.labels.get(u.policy, u.policy)}, {u.suite}" for u in absent]
        parts.append(f"planned units missing: {len(absent)} of {len(comparison.planned)} ({some(names)})")
    if data.incomplete:
        parts.append(f"units not sealed: {len(data.incomplete)} ({some(data.incomplete)})")
    if short:
        labels = comparison.labels
        names = [
            f"{found[u]} of {u.rows} rows in {u.arm} seed {u.seed} @ {labels.get(u.policy, u.policy)}, {u.suite}"
            for u in short
        ]
        missing = sum(abs(unit.rows - found[unit]) for unit in short)
        parts.append(f"rows missing or too many: {missing} ({some(names)})")
    if parts:
        yield Reason("INCOMPLETE", "; ".join(parts) + ": resume the run to complete it")


def some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    return "; ".join(found[:NAMED]) + (f"; and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _conflicts(records: pd.DataFrame) -> Iterator[Reason]:
    """A name that stands for two things: weights, policy, suite version or judge."""
    # of the rest a suite's judge has said nothing
    judged = records[records["outcome"].isin([Outcome.DESIRED.value, Outcome.UNDESIRED.value])]
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
            yield Reason("HASH", f"{column} of the records is not what provenance lists for {some(strange)}")


def _unpinned(data: RunData, comparison: Comparison) -> Iterator[Reason]:
    """Records whose weights are not exactly those that provenance lists for their arm and seed."""
    listed = table_of(data.provenance, "checkpoints")
    pinned = table_of(data.provenance, "reference_sha256")
    strange, unpinned = [], []
    for (arm, seed), part in data.records.groupby(["arm", "train_seed"], observed=True):
        found = set(part["checkpoint"])
        known = listed.get(f"{arm}/{seed}")
        if known is None and arm == BASE_ARM:  # otherwise it is the warm start of its seed
            known = data.provenance.get("base_sha256")
        if found != {known}:
            strange.append(f"{arm} seed {seed}")
        if arm == comparison.reference and found != {pinned.get(str(seed))}:
            unpinned.append(f"{arm} seed {seed}")
    remedy = "evaluate those units again, or resume the run to finish it"
    if strange:
        yield Reason("REFHASH", f"provenance lists other weights, or none, for {some(strange)}: {remedy}")
    if unpinned:
        yield Reason("REFHASH", f"the reference is not the one that provenance pins, {some(unpinned)}: {remedy}")


def _other_inputs(data: RunData) -> Iterator[Reason]:
    """Units whose seal stands for other public rows, plug-ins or model files than provenance lists."""
    wanted = inputs_sha256(data.provenance.get(TABLE))
    # None: an older seal, which does not say what its unit was evaluated from
    strange = [unit for unit, found in data.inputs.items() if found not in (None, wanted)]
    if strange:
        yield Reason(
            "INPUTS",
            f"{len(strange)} units were evaluated from other rows, plug-ins or model files than provenance lists "
            f"({some(strange)}): delete them and their seals, and resume the run",
        )
