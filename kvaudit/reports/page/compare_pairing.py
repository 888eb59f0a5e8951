"""Two result files -> one table of scores, with every reason why they cannot be compared and what must be said.

Items pair by suite, length, name and repeat. Nothing is dropped to make two files fit: a difference is a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import join_names
from kvaudit.reports.records.readers.base import ANY_METRIC, ONE_SUITE, Log
from kvaudit.reports.sections.shared.words import percent
from kvaudit.reports.verdict.comparison import PlannedUnit, comparison_of, part_reasons
from kvaudit.reports.verdict.drift import UNSCORED_LIMIT
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

REFERENCE, CANDIDATE = "reference", "candidate"
UNNAMED_SUITE = "all"
_KEY = ["suite", "context", "seed", "item", "sample"]


@dataclass(frozen=True)
class PairedScores:
    """``records`` has the columns that the score panels of a run's report are made of, one arm per file.

    ``unclustered`` says what to do where no cluster is named and every item stands for itself.
    """

    records: pd.DataFrame
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    unclustered: Reason | None


def shared_metrics(a: Log, b: Log) -> list[str]:
    """The metrics that both files score, sorted."""
    return sorted(a.metrics & b.metrics)


def choose_metrics(a: Log, b: Log, asked: Sequence[str]) -> list[str]:
    """The asked metrics, or the only one; raises SpecError or UnknownName with those that are known.

    A metric that one file alone has is never passed over unasked: it may be the one that was lost. DataError for one
    on another scale.
    """
    known = shared_metrics(a, b)
    if not known:
        own = (", ".join(sorted(log.metrics)) for log in (a, b))
        raise SpecError("the files share no metric: {} against {}".format(*own))
    if not asked and len(known) > 1:
        raise SpecError(f"the files hold {len(known)} metrics, choose one with --metric: {', '.join(known)}")
    lonely = "; ".join(f"only the {side} file has {_some(names)}" for side, names in _unshared(a, b))
    if not asked and lonely:
        raise SpecError(f"the files share the metric {known[0]}, {lonely}; compare the one with --metric {known[0]}")
    for name in asked:
        if name not in known:
            raise UnknownName("metric", name, known)
    chosen = list(dict.fromkeys(asked)) or known
    for name in chosen:
        check_scale(a, b, name)
    return chosen


def check_scale(a: Log, b: Log, metric: str) -> None:
    """Raise DataError where a file has scores of the metric outside [0, 1]."""
    for log in (a, b):
        if metric in log.scales:
            raise log.scales[metric].error(log.path, metric)


def _unshared(a: Log, b: Log) -> list[tuple[str, list[str]]]:
    """Side and metrics that it alone has."""
    own = a.metrics, b.metrics
    found = ((REFERENCE, sorted(own[0] - own[1])), (CANDIDATE, sorted(own[1] - own[0])))
    return [(side, names) for side, names in found if names]


def pair_logs(
    a: Log, b: Log, metric: str, *, lower_is_better: bool = False, own_clusters: bool = False
) -> PairedScores:
    """The rows of one metric of both files. ``own_clusters``: the files were told where their clusters are.

    Raises DataError for scores on another scale, SpecError for clusters that are not where they were said to be.
    """
    check_scale(a, b, metric)
    tables = [log.rows[log.rows["metric"] == metric].drop(columns="metric") for log in (a, b)]
    reasons, notes = list(_broken_logs(a, b)), list(_log_notes(a, b, metric))
    tables = _one_suite(tables, a)
    tables, said = _clustered(tables, own_clusters=own_clusters)
    alone = all(table["cluster"].equals(table["item"]) for table in tables)
    if not alone and all(table["cluster"].nunique() == table["item"].nunique() for table in tables):
        said.append("Every item has a cluster of its own, so all were taken for independent of each other.")
    for log, table in zip((a, b), tables, strict=True):
        reasons += [*_row_reasons(log, table), *_missing(log, table, metric)]
    tables = [table.drop_duplicates(_KEY) for table in tables]
    reasons += _set_reasons(*tables)
    both = pd.concat([t.assign(arm=arm) for t, arm in zip(tables, (REFERENCE, CANDIDATE), strict=True)])
    both["cluster"] = both["cluster"].fillna(both["item"])  # INVALID already, and no part of another cluster
    if lower_is_better:
        both["score"] = 1 - both["score"]
        notes.append(f"Every score of {metric} was taken as 1 - score, so that 1 is desired.")
    names = {"item": "item_id", "cluster": "cluster_id", "sample": "sample_index", "seed": "train_seed"}
    records = both.rename(columns={**names, "context": "context_tokens"}).assign(policy=DENSE_POLICY)
    unclustered = _unclustered(a, b) if alone else None
    return PairedScores(records.reset_index(drop=True), tuple(reasons), (*notes, *said), unclustered)


def _broken_logs(a: Log, b: Log) -> Iterator[Reason]:
    for log in (a, b):
        if log.unfinished:
            yield Reason(ReasonCode.INCOMPLETE, f"{log.path.name} is not whole: {log.unfinished}")
        for reason in _run_reasons(log):
            yield Reason(reason.code, f"{log.path.name}: {reason.text}")
        if log.duplicates:
            yield Reason(
                ReasonCode.DUPLICATE, f"{log.path.name}: {log.duplicates} records stand twice; the first was kept"
            )
    if a.reader == b.reader:
        differing = [name for name in a.settings if a.settings[name] != b.settings.get(name, a.settings[name])]
        if differing:
            yield Reason(ReasonCode.HASH, f"the files were made with other {_some(differing)}")


def _without(log: Log, metric: str) -> Iterator[str]:
    """Answers that the file has, but not under this metric."""
    every, own = (len(rows[_KEY].drop_duplicates()) for rows in (log.rows, log.rows[log.rows["metric"] == metric]))
    if own < every:
        yield f"{log.path.name}: {every - own} of {every} answers have no {metric}; they are not compared."


def _run_reasons(log: Log) -> Iterator[Reason]:
    """What is not whole, or not what it says, in the part of a run that was chosen."""
    if log.run is None:
        return
    comparison = comparison_of(log.run.spec, log.run.records, log.run.provenance)
    # one arm under one policy, which a selector may name in short
    wanted = {**log.select, "arm": log.facts["arm"], "policy": log.facts["policy"]}

    def is_chosen(unit: PlannedUnit) -> bool:
        own = {
            "arm": unit.arm,
            "policy": unit.policy,
            "seed": str(unit.seed),
            "suite": unit.suite,
            "context": str(unit.context_tokens),
        }
        return all(own[key] == value for key, value in wanted.items())

    planned = tuple(unit for unit in comparison.planned if is_chosen(unit))
    yield from part_reasons(log.run, replace(comparison, planned=planned))


def _log_notes(a: Log, b: Log, metric: str) -> Iterator[str]:
    for log in (a, b):
        if log.problems:
            yield f"{log.path.name}: {len(log.problems)} lines were kept out; the first: {log.problems[0]}"
        yield from (f"{log.path.name}: {note}" for note in log.notes)
        yield from _without(log, metric)
    if a.path == b.path and a.rows.equals(b.rows):
        yield "Both sides are the same file and the same cell: nothing was compared with anything else."
    if other := [name for name in a.prompts if a.prompts[name] != b.prompts.get(name, a.prompts[name])]:
        yield (
            f"The rendered prompts of {_some(other)} differ between the sides: another chat template, or one that "
            "writes the date. What differs need not come from the cache."
        )
    for side, names in _unshared(a, b):
        yield f"Not compared: only the {side} file has {_some(names)}."
    tasks = [log.facts.get("task") for log in (a, b)]
    if all(tasks) and tasks[0] != tasks[1]:
        yield f"The files name their task differently: {tasks[0]} and {tasks[1]}."


def _one_suite(tables: list[pd.DataFrame], a: Log) -> list[pd.DataFrame]:
    """Files that hold one suite each are about the same one, unless both name it and by other names."""
    named = [set(table["suite"]) - {ONE_SUITE} for table in tables]
    single = all(table["suite"].nunique() == 1 for table in tables) and len(named[0] | named[1]) < 2
    name = str(min(named[0] | named[1], default=ONE_SUITE)) if single else ONE_SUITE
    name = name or a.facts.get("task", "") or UNNAMED_SUITE
    if single:
        return [table.assign(suite=name) for table in tables]
    return [table.assign(suite=table["suite"].where(table["suite"] != ONE_SUITE, UNNAMED_SUITE)) for table in tables]


def _clustered(tables: list[pd.DataFrame], *, own_clusters: bool) -> tuple[list[pd.DataFrame], list[str]]:
    """Clusters for every row: the file's, the other file's, or each item by itself."""
    has = [bool(table["cluster"].notna().any()) for table in tables]
    if own_clusters and not all(has):
        raise SpecError("--cluster names nothing in any row of a file; give a field of its rows, re: or file:")
    if not any(has):
        return [table.assign(cluster=table["item"]) for table in tables], []
    if all(has):
        return tables, []
    known = tables[has.index(True)]
    lookup = dict(zip(_places(known), known["cluster"], strict=True))
    filled = [
        table if own else table.assign(cluster=pd.Series(list(map(lookup.get, _places(table))), index=table.index))
        for table, own in zip(tables, has, strict=True)
    ]
    return filled, ["Only one file names clusters; its own are used for the items of the other."]


def _unclustered(a: Log, b: Log) -> Reason:
    """What to do where nothing says which items belong together; fields that both files have are proposed."""
    fields = [name for name in a.shared_fields if name in b.shared_fields]
    where = f"such as {_some(fields)}" if fields else "a field of the rows, re:PATTERN of item names or file:MAP.csv"
    return Reason(
        ReasonCode.NO_CLUSTERS,
        f"no cluster is named, so nothing passes: give --cluster what items share ({where}), or say "
        "--items-are-independent",
    )


def _places(table: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(table["suite"], table["item"], strict=True))


def _row_reasons(log: Log, table: pd.DataFrame) -> Iterator[Reason]:
    homeless = int(table["cluster"].isna().sum())
    if homeless:
        yield Reason(ReasonCode.CLUSTER_IDS, f"{log.path.name}: {homeless} of {len(table)} rows have no cluster")
    twice = table.duplicated(_KEY)
    if twice.any():
        lines = [f"line {line}" if line else str(item) for line, item in table.loc[twice, ["line", "item"]].to_numpy()]
        yield Reason(
            ReasonCode.DUPLICATE,
            f"{log.path.name}: {len(lines)} rows stand twice ({_some(lines)}); the first of each was kept. Repeats "
            "need a sample or epoch column",
        )


def _missing(log: Log, table: pd.DataFrame, metric: str) -> Iterator[Reason]:
    """Too many answers that cannot be read, with those that have no score: what both files lack is missing too."""
    refused = log.kept_out.get(metric, 0) + log.kept_out.get(ANY_METRIC, 0)
    missing, total = refused + int(table["score"].isna().sum()), refused + len(table)
    if refused and missing > UNSCORED_LIMIT * total:
        yield Reason(
            ReasonCode.MISSING,
            f"{log.path.name}: {missing} of {total} answers were kept out or have no score ({percent(missing / total)}"
            "); the limit is 1 %",
        )


def _set_reasons(a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Reason]:
    """Items that only one file has, and items that ask something else under the same name."""
    where = ["suite", "context", "item"]
    sides = [set(map(tuple, table[where].to_numpy())) for table in (a, b)]
    common = sides[0] & sides[1]
    if not common:
        yield Reason(ReasonCode.NO_COMMON_ITEM, "the files have no item in common; compare two logs of the same task")
        return
    for own, other, name in ((sides[0], sides[1], REFERENCE), (sides[1], sides[0], CANDIDATE)):
        lonely = sorted(str(item) for _, _, item in own - other)
        if lonely:
            yield Reason(ReasonCode.ITEMS, f"{len(lonely)} items are only in the {name} file ({_some(lonely)})")
    asked = [table[table["fingerprint"] != ""].groupby(where)["fingerprint"].agg(frozenset) for table in (a, b)]
    shared = asked[0].index.intersection(asked[1].index)
    changed = [str(index[2]) for index in shared if asked[0][index] != asked[1][index]]
    if changed:
        yield Reason(
            ReasonCode.HASH, f"{len(changed)} items have another question, prompt or answer key ({_some(changed)})"
        )


def _some(names: Sequence[str]) -> str:
    return join_names(str(name)[:80] for name in names)
