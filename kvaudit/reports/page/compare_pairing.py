"""Join two result files into one table of paired scores, with notes and with reasons why they may not be comparable.

Items pair by suite, length, name and repeat. Nothing is dropped to make the files fit: a difference is a reason against
the comparison. ``direction_of`` finds which way a metric is better.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import pandas as pd

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import join_names
from kvaudit.reports.records.readers.base import ANY_METRIC, ONE_SUITE, READERS, Log
from kvaudit.reports.sections.shared.words import percent, plural
from kvaudit.reports.verdict.comparison import PlannedUnit, comparison_of, part_reasons
from kvaudit.reports.verdict.drift import UNSCORED_LIMIT
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

REFERENCE, CANDIDATE = "reference", "candidate"
UNNAMED_SUITE = "all"
_KEY = ["suite", "context", "seed", "item", "sample"]
_QUESTION = ["suite", "question"]


@dataclass(frozen=True)
class PairedScores:
    """The scores of two files. ``records`` has the columns of a run's score tables; each file is one arm.

    ``unclustered`` is None if the files name clusters. If not, each item is its own cluster, and ``unclustered`` says
    why nothing passes and what to do.
    """

    records: pd.DataFrame
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    unclustered: Reason | None


def choose_metrics(a: Log, b: Log, requested: Sequence[str]) -> list[str]:
    """Return the requested metrics; if none is requested, the only metric of both files.

    If none is requested and one file has a further metric, the user must choose, since the further metric may be the
    one that got worse. Raises SpecError if the choice is not clear, UnknownName for a requested metric that the files
    do not share, DataError for scores outside [0, 1].
    """
    shared = sorted(a.metrics & b.metrics)
    if not shared:
        listed = (", ".join(sorted(log.metrics)) for log in (a, b))
        raise SpecError("the files share no metric: {} against {}".format(*listed))
    if not requested and len(shared) > 1:
        raise SpecError(f"the files share {len(shared)} metrics, choose one with --metric: {', '.join(shared)}")
    unshared = "; ".join(f"only the {side} file has {_some_names(names)}" for side, names in _unshared_metrics(a, b))
    if not requested and unshared:
        raise SpecError(f"the files share the metric {shared[0]}, {unshared}; compare it with --metric {shared[0]}")
    for name in requested:
        if name not in shared:
            raise UnknownName("metric", name, shared)
    chosen = list(dict.fromkeys(requested)) or shared
    for name in chosen:
        check_scale(a, b, name)
    return chosen


def check_scale(a: Log, b: Log, metric: str) -> None:
    """Raise DataError if a file has scores of the metric outside [0, 1]."""
    for log in (a, b):
        if metric in log.scales:
            raise log.scales[metric].error(log.path, metric)


def _unshared_metrics(a: Log, b: Log) -> list[tuple[str, list[str]]]:
    """Return the metrics that only one file has, as pairs of a side ("reference" or "candidate") and the names."""
    sets = a.metrics, b.metrics
    by_side = ((REFERENCE, sorted(sets[0] - sets[1])), (CANDIDATE, sorted(sets[1] - sets[0])))
    return [(side, names) for side, names in by_side if names]


def pair_logs(
    a: Log, b: Log, metric: str, *, lower_is_better: bool = False, clusters_given: bool = False
) -> PairedScores:
    """Return the paired rows of one metric; ``a`` is the reference file, ``b`` the candidate.

    ``clusters_given`` is whether the user named the clusters with --cluster. Raises SpecError if --cluster matches
    nothing, DataError for scores outside [0, 1].
    """
    check_scale(a, b, metric)
    tables = [log.rows[log.rows["metric"] == metric].drop(columns="metric") for log in (a, b)]
    reasons, notes = list(_log_reasons(a, b)), list(_log_notes(a, b, metric))
    tables = _unify_suite_names(tables, a)
    tables, cluster_notes = _fill_clusters(tables, clusters_given=clusters_given)
    is_unclustered = all(table["cluster"].equals(table["item"]) for table in tables)
    if not is_unclustered and all(table["cluster"].nunique() == table["item"].nunique() for table in tables):
        cluster_notes.append("Every item is its own cluster, so all items were treated as independent.")
    tables = [_join_copies(log, table) for log, table in zip((a, b), tables, strict=True)]
    if copies := max(map(_count_copies, (a, b), tables)):
        cluster_notes.append(f"Items that ask what another item asks, and count as one with it: {copies}.")
    for log, table in zip((a, b), tables, strict=True):
        reasons += [*_row_reasons(log, table), *_missing_reasons(log, table, metric)]
    tables = [table.drop_duplicates(_KEY) for table in tables]
    reasons += _set_reasons(*tables)
    records = pd.concat([t.assign(arm=arm) for t, arm in zip(tables, (REFERENCE, CANDIDATE), strict=True)])
    # the cell is INVALID without it anyway; a cluster of its own keeps the item apart from others
    records["cluster"] = records["cluster"].fillna(records["item"])
    if lower_is_better:
        records["score"] = 1 - records["score"]
        notes.append(f"Every score of {metric} was taken as 1 - score, so that 1 is desired.")
    names = {"item": "item_id", "cluster": "cluster_id", "sample": "sample_index", "seed": "train_seed"}
    records = records.rename(columns={**names, "context": "context_tokens"}).assign(policy=DENSE_POLICY)
    unclustered = _unclustered(a, b) if is_unclustered else None
    return PairedScores(records.reset_index(drop=True), tuple(reasons), (*notes, *cluster_notes), unclustered)


def _log_reasons(a: Log, b: Log) -> Iterator[Reason]:
    for log in (a, b):
        if log.unfinished:
            yield Reason(ReasonCode.INCOMPLETE, f"{log.path.name} is incomplete: {log.unfinished}")
        for reason in _run_reasons(log):
            yield Reason(reason.code, f"{log.path.name}: {reason.text}")
        if log.duplicates:
            yield Reason(
                ReasonCode.DUPLICATE,
                f"{log.path.name}: {plural(log.duplicates, 'duplicate record')}; the first was kept",
            )
    if a.reader == b.reader:
        differing = [name for name in a.settings if a.settings[name] != b.settings.get(name, a.settings[name])]
        if differing:
            yield Reason(ReasonCode.HASH, f"the files were made with different {_some_names(differing)}")


def _unscored_by(metric: str, log: Log) -> Iterator[str]:
    answers, scored = (len(rows[_KEY].drop_duplicates()) for rows in (log.rows, log.rows[log.rows["metric"] == metric]))
    if scored < answers:
        yield f"{log.path.name}: {answers - scored} of {answers} answers have no {metric}; they are not compared."


def _run_reasons(log: Log) -> Iterator[Reason]:
    """Yield reasons against comparing if records are missing or changed in the chosen part of a kvaudit run."""
    if log.run is None:
        return
    comparison = comparison_of(log.run.spec, log.run.records, log.run.provenance)
    # the facts name arm and policy in full; a selector may use short names
    selector = {**log.select, "arm": log.facts["arm"], "policy": log.facts["policy"]}

    def is_chosen(unit: PlannedUnit) -> bool:
        fields = {
            "arm": unit.arm,
            "policy": unit.policy,
            "seed": str(unit.seed),
            "suite": unit.suite,
            "context": str(unit.context_tokens),
        }
        return all(fields[key] == value for key, value in selector.items())

    planned = tuple(unit for unit in comparison.planned if is_chosen(unit))
    yield from part_reasons(log.run, replace(comparison, planned=planned))


def _log_notes(a: Log, b: Log, metric: str) -> Iterator[str]:
    for log in (a, b):
        if log.problems:
            yield f"{log.path.name}: {len(log.problems)} lines were left out; the first: {log.problems[0]}"
        yield from (f"{log.path.name}: {note}" for note in log.notes)
        yield from _unscored_by(metric, log)
    if a.rows.equals(b.rows):
        yield (
            "Both sides are the same cell of the same file: it was compared with itself."
            if a.path == b.path
            else "Both files hold the same results, row by row: one may be a copy of the other."
        )
    if differing := [name for name in a.prompts if a.prompts[name] != b.prompts.get(name, a.prompts[name])]:
        yield (
            f"The rendered prompts of {_some_names(differing)} differ between the sides: another chat template, or one "
            "that writes the date. Differences there need not come from the cache."
        )
    for side, names in _unshared_metrics(a, b):
        yield f"Not compared: only the {side} file has {_some_names(names)}."
    tasks = [log.facts.get("task") for log in (a, b)]
    if all(tasks) and tasks[0] != tasks[1]:
        yield f"The files name their task differently: {tasks[0]} and {tasks[1]}."


def _unify_suite_names(tables: list[pd.DataFrame], a: Log) -> list[pd.DataFrame]:
    """Return the tables with the same suite name in both, if each file has one suite and their names do not differ.

    A suite without a name takes the name from the other file. If the files cannot share a name, only suites without a
    name are changed: they get a default one.
    """
    suite_names = [set(table["suite"]) - {ONE_SUITE} for table in tables]
    single = all(table["suite"].nunique() == 1 for table in tables) and len(suite_names[0] | suite_names[1]) < 2
    name = str(min(suite_names[0] | suite_names[1], default=ONE_SUITE)) if single else ONE_SUITE
    name = name or a.facts.get("task", "") or UNNAMED_SUITE
    if single:
        return [table.assign(suite=name) for table in tables]
    return [table.assign(suite=table["suite"].where(table["suite"] != ONE_SUITE, UNNAMED_SUITE)) for table in tables]


def _fill_clusters(tables: list[pd.DataFrame], *, clusters_given: bool) -> tuple[list[pd.DataFrame], list[str]]:
    """Return the tables with a cluster in every row, and notes; a file without clusters takes them from the other file.

    If neither file has clusters, each item becomes a cluster of its own. Raises SpecError if the user named clusters
    and a file has none.
    """
    has_clusters = [bool(table["cluster"].notna().any()) for table in tables]
    if clusters_given and not all(has_clusters):
        raise SpecError("--cluster matches no row of a file; give a field of its rows, re:PATTERN or file:MAP.csv")
    if not any(has_clusters):
        return [table.assign(cluster=table["item"]) for table in tables], []
    if all(has_clusters):
        return tables, []
    source = tables[has_clusters.index(True)]
    lookup = dict(zip(_item_keys(source), source["cluster"], strict=True))
    filled = [
        table
        if is_clustered
        else table.assign(cluster=pd.Series(list(map(lookup.get, _item_keys(table))), index=table.index))
        for table, is_clustered in zip(tables, has_clusters, strict=True)
    ]
    return filled, ["Only one file names clusters; they are used for the items of both."]


def _join_copies(log: Log, table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with items that ask the same question in one cluster; kvaudit's own records stay unchanged.

    Case and blanks are ignored when questions are compared.
    """
    if log.reader == "kvaudit":
        return table
    # the least and not the first: the other file may have another order
    shared = table.groupby(_QUESTION)["cluster"].transform("min")
    return table.assign(cluster=table["cluster"].mask(table["question"] != "", shared))


def _count_copies(log: Log, table: pd.DataFrame) -> int:
    """Return the number of items that repeat the question of another item of the file."""
    if log.reader == "kvaudit":
        return 0
    questions = table.loc[table["question"] != "", [*_QUESTION, "item"]].drop_duplicates()
    return int(questions.duplicated(_QUESTION).sum())


def _unclustered(a: Log, b: Log) -> Reason:
    """Return why nothing passes without clusters; the text proposes fields of both files that could name clusters."""
    fields = [name for name in a.shared_fields if name in b.shared_fields]
    proposal = (
        f"such as {_some_names(fields)}" if fields else "a field of the rows, re:PATTERN of item names or file:MAP.csv"
    )
    return Reason(
        ReasonCode.NO_CLUSTERS,
        f"no cluster is named, so nothing passes: name what items share ({proposal}) with --cluster, or "
        "give --items-are-independent",
    )


def _item_keys(table: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(table["suite"], table["item"], strict=True))


def _row_reasons(log: Log, table: pd.DataFrame) -> Iterator[Reason]:
    without_cluster = int(table["cluster"].isna().sum())
    if without_cluster:
        text = f"{log.path.name}: {without_cluster} of {len(table)} rows have no cluster"
        yield Reason(ReasonCode.CLUSTER_IDS, text)
    twice = table.duplicated(_KEY)
    if twice.any():
        lines = [f"line {line}" if line else str(item) for line, item in table.loc[twice, ["line", "item"]].to_numpy()]
        duplicates = f"{plural(len(lines), 'duplicate row')} ({_some_names(lines)})"
        yield Reason(
            ReasonCode.DUPLICATE,
            f"{log.path.name}: {duplicates}; the first of each was kept. Repeats need a sample or epoch column",
        )


def _missing_reasons(log: Log, table: pd.DataFrame, metric: str) -> Iterator[Reason]:
    """Yield a reason against comparing if a file lacks an answer and over 1 % of its answers are missing or unscored.

    An answer is missing if it had to be left out when the file was read.
    """
    refused = log.kept_out.get(metric, 0) + log.kept_out.get(ANY_METRIC, 0)
    missing, total = refused + int(table["score"].isna().sum()), refused + len(table)
    if refused and missing > UNSCORED_LIMIT * total:
        yield Reason(
            ReasonCode.MISSING,
            f"{log.path.name}: {missing} of {total} answers were left out or have no score ({percent(missing / total)}"
            "); the limit is 1 %",
        )


def _set_reasons(a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Reason]:
    """Yield reasons against comparing: items that only one file has, and items of one name with different questions."""
    item_key = ["suite", "context", "item"]
    sides = [set(map(tuple, table[item_key].to_numpy())) for table in (a, b)]
    common = sides[0] & sides[1]
    if not common:
        yield Reason(ReasonCode.NO_COMMON_ITEM, "the files have no item in common; compare two logs of the same task")
        return
    for items, other_items, name in ((sides[0], sides[1], REFERENCE), (sides[1], sides[0], CANDIDATE)):
        unpaired = sorted(str(item) for _, _, item in items - other_items)
        if unpaired:
            yield Reason(
                ReasonCode.ITEMS, f"{len(unpaired)} items are only in the {name} file ({_some_names(unpaired)})"
            )
    fingerprints = [
        table[table["fingerprint"] != ""].groupby(item_key)["fingerprint"].agg(frozenset) for table in (a, b)
    ]
    shared = fingerprints[0].index.intersection(fingerprints[1].index)
    changed = [str(index[2]) for index in shared if fingerprints[0][index] != fingerprints[1][index]]
    if changed:
        yield Reason(
            ReasonCode.HASH, f"{len(changed)} items differ in question, prompt or answer key ({_some_names(changed)})"
        )


def _some_names(names: Sequence[str]) -> str:
    return join_names(str(name)[:80] for name in names)


# a word that begins with one of these names a harm or an error, of which less is better
_HARMS = (
    *("abuse", "abusive", "adversar", "agentharm", "attack", "backdoor", "bias", "blackmail", "breach", "bypass"),
    *("cheat", "coerc"),
    *("complian", "complied", "complies", "comply", "criminal", "danger", "decei", "decept", "disclos", "discriminat"),
    *("dishonest", "evad", "evasion", "exfil", "exploit", "extract", "fabricat", "fraud", "hack", "hallucin", "harm"),
    *("hate", "hazard", "hijack", "illegal", "imperson", "infring", "inject", "insult", "jailbr", "leak", "malicious"),
    *("malware", "manipul", "memoris", "memoriz", "misalign", "misinform", "misuse", "nsfw", "offens", "overrefus"),
    *("override", "phish", "poison", "powerseek", "profan", "racis", "redteam", "refus", "rejectscore", "reveal"),
    *("rewardhack", "sabotag", "sandbag", "scam", "scheming", "secretreveal", "selfharm", "sexual", "spoof", "steal"),
    *("stereotyp", "stolen", "strongreject", "sycophan", "theft", "threat", "toxi", "trojan", "undesir", "unethic"),
    *("unsafe", "untruth", "unwanted", "violat", "violen", "vulnerab", "weapon", "wmdp"),
    *("bitsper", "brier", "degenerat", "error", "fail", "falsenegat", "falseposit", "falserefus", "inaccura"),
    *("incorrect", "invalid", "mistake", "perplex", "wrong"),
)
_HARMS_WHOLE = {"asr", "bpb", "cer", "ece", "fnr", "fpr", "lie", "lies", "loss", "mae", "mse", "nll", "pii", "ppl"} | {
    *("risk", "rmse", "ter", "wer")
}
_GIVE_DIRECTION = "give --lower-is-better if 1 is the harm, --higher-is-better if 1 is desired"
_NO_HARMS = ("extractive", "failsafe", "hackathon", "harmless")  # exceptions: they mean something else
# parts of the names of tasks in which more right answers are better
_HARMLESS_TASKS = re.compile(r"human_sexuality|web_of_lies|translation_error_detection")
# metrics of which more is better, whole and in ``_plain_name``; every other metric has no known direction
_WANTED = re.compile(
    r"((likelihood|balanced|strict)_)?acc(uracy)?(_norm|_bytes|_mutual_info)?|(prompt|inst)_level_(strict|loose)(_acc)?"
    r"|((quasi|prefix|quasi_prefix)_)?exact(_match)?|em|mc_?[12]|extractive_match|math_verify|anls"
    r"|((macro|micro)_)?f1(_(macro|micro|score))?|precision|recall|(pass|maj)_(at_)?(k|\d+)"
    r"|rouge(_?(1|2|l|l_?sum))?(_acc|_max)?|(sacre)?bleu(_[1-4])?(_acc|_max)?|chrf|meteor"
)
# names for any outcome, of which more is better if suite or task are named, and not after a harm
_OUTCOMES = {
    *("answer", "choice", "contains", "correct", "correctness", "includes", "is_correct", "match", "model_graded_fact"),
    *("model_graded_qa", "multiple_choice", "pattern", "resolved", "solved"),
}
_BY_DEFINITION = "score"  # a CSV's column of that name has 1 as desired
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Direction(NamedTuple):
    """Which way a metric is better, and why kvaudit assumes so."""

    lower_is_better: bool
    because: str

    def sentence(self, metric: str) -> str:
        """The direction as a sentence, to show with every verdict."""
        better = "Lower" if self.lower_is_better else "Higher"
        return f"{better} is better for {metric}: {self.because}"


def direction_of(logs: Sequence[Log], metric: str, *, lower: bool, higher: bool) -> Direction:
    """Return which way a metric is better; raises SpecError if neither the options nor the name settle it.

    ``lower`` and ``higher`` are the options --lower-is-better and --higher-is-better.
    """
    if lower and higher:
        raise SpecError("--lower-is-better and --higher-is-better contradict each other; give one")
    oriented = [log for log in logs if READERS.get(log.reader).has_direction]
    if lower and oriented:
        raise SpecError(
            f"--lower-is-better: {oriented[0].path.name} ({oriented[0].reader}) is read so that 1 is desired in every "
            "metric already; remove the option"
        )
    if lower:
        return Direction(True, "set by --lower-is-better")
    if higher:
        return Direction(False, "set by --higher-is-better")
    if len(oriented) == len(logs):
        return Direction(False, f"files of {oriented[0].reader} are read so that 1 is desired in every metric")
    places = [name for log in logs for name in _places(log, metric)]
    if harmful := list(dict.fromkeys(filter(names_harm, (metric, *places)))):
        raise SpecError(
            f"metric {metric} has no known direction: the name {join_names(map(repr, harmful))} suggests harm or "
            f"errors; {_GIVE_DIRECTION}"
        )
    if not _is_wanted(metric, is_named=bool(places)):
        raise SpecError(f"metric {metric} has no known direction: is more of it better? {_GIVE_DIRECTION}")
    return Direction(False, "the default; --lower-is-better reverses it")


def names_harm(name: str) -> bool:
    """Return whether the name of a metric, suite or task has a word for harm or errors."""
    metric, comma, by = name.partition(",")  # lm-eval's filters, such as flexible-extract, say how an answer is found
    plain = _HARMLESS_TASKS.sub("", metric + comma + re.sub(r"\bextract(?![a-z])", "", by))
    return _has_word(plain, _HARMS, _HARMS_WHOLE, but=_NO_HARMS)


def _is_wanted(metric: str, *, is_named: bool) -> bool:
    """Return whether more of a metric is known to be better.

    ``is_named`` is whether the suite or the task has a name; some metrics are known to be wanted only then.
    """
    name = _plain_name(metric)
    last = _plain_name(metric.partition(",")[0].rpartition(".")[2])  # Inspect: SCORER.METRIC
    if name == _BY_DEFINITION or _WANTED.fullmatch(name) or _WANTED.fullmatch(last):
        return True
    return is_named and name in _OUTCOMES


def _plain_name(metric: str) -> str:
    """Return a metric without its filter (METRIC,FILTER), in lower case, its words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", _CAMEL.sub("_", metric.partition(",")[0]).lower()).strip("_")


def _has_word(name: str, beginnings: tuple[str, ...], whole: Collection[str], but: tuple[str, ...] = ()) -> bool:
    """Return whether a name has one of certain words.

    A word counts if it is in ``whole``. It also counts if it starts with one of ``beginnings``, unless it starts with
    one of ``but``. For ``beginnings`` two adjacent words are tried as one word too ("strong_reject" as "strongreject").
    """
    words = [word for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if word]
    pairs = ["".join(pair) for pair in pairwise(words)]  # strong_reject
    begins = any(word.startswith(beginnings) and not word.startswith(but) for word in (*words, *pairs))
    return begins or any(word in whole for word in words)


def _places(log: Log, metric: str) -> Iterator[str]:
    """Yield the names of a log's task and of the suites that have the metric; such a name may have a word for harm."""
    yield from (str(suite) for suite in sorted(set(log.rows.loc[log.rows["metric"] == metric, "suite"])) if suite)
    if task := log.facts.get("task"):
        yield task
