"""kvaudit's own records: one record file, or a run folder; selectors choose arm, seed, policy, suite and length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError, SpecError, UnknownName
from kvaudit.core.policy_names import match_policies
from kvaudit.core.provenance import ENDPOINT, ENDPOINT_REQUESTS, INPUTS, PROMPTS, ROWS, prompt_unit, table_of
from kvaudit.core.records import READABLE_FORMATS, Outcome, Record, Role
from kvaudit.core.text import at_length, inline, join_names
from kvaudit.reports.records.load import RunData, check_seal, load_run
from kvaudit.reports.records.readers.base import (
    ClusterRule,
    Log,
    OffScaleScores,
    Problems,
    Reader,
    Request,
    Row,
    fingerprint_of,
    first_objects,
)
from kvaudit.reports.records.rows import FACET_COLUMNS, Columns, Problem, read_unit

Fingerprints = npt.NDArray[np.object_]  # [rows] of text
METRIC = "score"
SELECTORS = {"arm": "arm", "seed": "train_seed", "policy": "policy", "suite": "suite", "context": "context_tokens"}
SINGLE = ("arm", "policy")  # a log has one of each


class Records(Reader):
    """Records as `kvaudit run` writes them."""

    name = "kvaudit"
    reads = "kvaudit run folder or record file"
    has_direction = True

    def recognises(self, path: Path) -> bool:
        """Return whether a folder has records, or lines have a record's keys."""
        if path.is_dir():
            return (path / "records").is_dir()
        keys = {"format", "item_id", "cluster_id", "arm", "policy"}
        return any(keys <= set(row) and row["format"] in READABLE_FORMATS for row in first_objects(path))

    def read(self, path: Path, request: Request) -> Log:
        """Return the log of the selected records, which are of one arm under one policy."""
        data = load_run(path) if path.is_dir() else None
        frame, problems = _read_file(path) if data is None else (data.records, data.problems)
        files = set(frame["file"].astype(str))
        frame = _select_rows(path, frame, request.select)
        units = set(frame["file"].astype(str))
        unsealed = sorted(units & set(() if data is None else data.incomplete))
        skipped = list(_skipped_problems(files, units, problems))
        return Log(
            path,
            self.name,
            _rows(frame, _questions(frame, path), request.cluster),
            tuple(f"{p.file}:{p.line}: {p.reason}" if p.line else f"{p.file}: {p.reason}" for p in problems),
            settings=_settings(frame) | ({} if data is None else _decoding(data, set(frame["suite"].astype(str)))),
            facts={key: ", ".join(sorted(map(str, set(frame[SELECTORS[key]])))) for key in (*SINGLE, "seed")},
            unfinished=f"unit {unsealed[0]} is not sealed; resume the run" if unsealed else "",
            duplicates=sum(p.file in units and _is_duplicate(p) for p in problems),
            kept_out={METRIC: len(skipped)},
            scales=_off_scale_scores(skipped),
            prompts={} if data is None else _prompts(data, frame),
            run=None if data is None else replace(data, records=frame, incomplete=()),
            select=request.select,
        )


def _is_duplicate(problem: Problem) -> bool:
    return "duplicate of" in problem.reason


def _skipped_problems(files: set[str], units: set[str], problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems of unreadable lines that may have been selected records.

    These are the lines in files of selected records (``units``). Lines in files that hold no readable record at all
    (those not in ``files``) are included, since their arm and policy are unknown.
    """
    for problem in problems:
        has_cell = problem.file in files or "/" in problem.file  # the name of a telemetry file has a folder
        if problem.line and not _is_duplicate(problem) and (problem.file in units or not has_cell):
            yield problem


def _off_scale_scores(problems: Iterable[Problem]) -> dict[str, OffScaleScores]:
    collected = Problems()
    for problem in problems:
        if problem.score is not None:
            collected.add_off_scale(problem.score, f"{problem.file}:{problem.line}", METRIC)
    return collected.scales


def _decoding(data: RunData, suites: set[str]) -> dict[str, str]:
    """Return the settings of sampling and the hashes of public rows, which two compared logs must share.

    For a probe of an endpoint the settings of its requests are added. If the probe does not list the decoding of a
    suite, that setting is "not recorded".
    """
    grid = data.spec.evaluate
    settings = {"temperature": str(grid.temperature), "top_p": str(grid.top_p)}
    settings["think"] = str(grid.written().get("think"))
    rows = table_of(table_of(data.provenance, INPUTS), ROWS)
    settings |= {f"rows {name}": str(sha256) for name, sha256 in rows.items()}
    chosen = {suite: section for suite, section in grid.suites.items() if suite in suites}
    settings |= {f"max_new_tokens of suite {suite}": str(s.max_new_tokens) for suite, s in chosen.items()}
    if ENDPOINT in data.provenance:
        settings |= dict.fromkeys((f"decoding of {suite}" for suite in suites), "not recorded")
    return {**settings, **table_of(data.provenance, ENDPOINT_REQUESTS)}


def _prompts(data: RunData, frame: pd.DataFrame) -> dict[str, str]:
    """Return the sha256 of the selected cells' prompts, as rendered for the model, by name of suite and length."""
    all_digests, digests = table_of(data.provenance, PROMPTS), dict[str, str]()
    cells = frame[["arm", "train_seed", "suite", "context_tokens", "policy"]].drop_duplicates()
    for arm, seed, suite, context, policy in cells.itertuples(index=False):
        if digest := all_digests.get(prompt_unit(str(arm), int(seed), str(suite), int(context), str(policy))):
            digests[f"{suite} {at_length(int(context))}"] = str(digest)
    return digests


def _questions(frame: pd.DataFrame, path: Path) -> Fingerprints:
    """Return a fingerprint of every row's messages up to the first answer, read from disk file by file."""
    fingerprints = np.full(len(frame), "", dtype=object)
    files, lines = frame["file"].astype(str).to_numpy(), frame["line"].to_numpy()
    for name in np.unique(files):
        row_of_line = {int(lines[row]): int(row) for row in np.flatnonzero(files == name)}
        file = path / "records" / name if path.is_dir() else path
        with file.open("rb") as handle:
            for number, raw in enumerate(handle, start=1):
                if number in row_of_line:
                    transcript = Record.from_json(raw.decode()).transcript
                    question = itertools.takewhile(lambda message: message.role is not Role.ASSISTANT, transcript)
                    fingerprint = fingerprint_of([[message.role.value, message.content] for message in question])
                    fingerprints[row_of_line[number]] = fingerprint
    return fingerprints


def _read_file(path: Path) -> tuple[pd.DataFrame, tuple[Problem, ...]]:
    columns, problems = Columns(), list[Problem]()
    check_seal(path, read_unit(path, columns, problems))
    if not columns.rows:
        for scale in _off_scale_scores(problems).values():
            raise scale.error(path, METRIC)
        raise DataError(f"{str(path)!r} holds no record; first problem: line {problems[0].line}: {problems[0].reason}")
    return columns.frame(), tuple(problems)


def _select_rows(path: Path, frame: pd.DataFrame, select: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows that match every selector.

    Raises SpecError if there are none, or rows of several arms or policies.
    """
    for key, text in select.items():
        if key not in SELECTORS:
            raise UnknownName("selector", key, SELECTORS)
        present = sorted(map(str, set(frame[SELECTORS[key]])))
        value = match_policies([text], present)[0] if key == "policy" else text
        if value not in present:
            raise SpecError(f"{str(path)!r} has no {key} {text!r}; it has {_join(present)}")
        frame = frame[frame[SELECTORS[key]].astype(str) == value]
    for key in SINGLE:
        present = sorted(map(str, set(frame[SELECTORS[key]])))
        if len(present) > 1:
            raise SpecError(f"{str(path)!r} holds several: choose one with {key}=..., it has {_join(present)}")
    if frame.empty:
        raise SpecError(f"{str(path)!r} has no record that matches all selectors; leave one out")
    return frame


def _join(names: list[str]) -> str:
    return join_names(map(inline, names), 12, between="; ", last="; and ")


def _rows(frame: pd.DataFrame, questions: Fingerprints, cluster: ClusterRule | None) -> pd.DataFrame:
    items = frame["item_id"].astype(str).to_numpy(dtype=object)
    clusters = frame["cluster_id"].astype(str).to_numpy(dtype=object)
    if cluster is not None:
        fields = frame[["cluster_id", "suite_version", *SELECTORS.values()]].astype(str)
        rows = (dict(zip(fields.columns, row, strict=True)) for row in fields.itertuples(index=False))
        clusters = np.array([cluster(row, item) for row, item in zip(rows, items, strict=True)], dtype=object)
    columns = {
        "item": items,
        "metric": METRIC,
        "score": frame["score"].to_numpy(dtype=np.float64),
        "cluster": clusters,
        "sample": frame["sample_index"].to_numpy(),
        "suite": frame["suite"].astype(str).to_numpy(dtype=object),
        "context": frame["context_tokens"].to_numpy(),
        "seed": frame["train_seed"].to_numpy(),
        "fingerprint": questions,
        "question": questions,
        "line": frame["line"].to_numpy(),
    }
    facets = {name: frame[name].to_numpy() for name in FACET_COLUMNS.values() if frame[name].notna().any()}
    return pd.DataFrame({**{name: columns[name] for name in Row._fields}, **facets})


def _settings(frame: pd.DataFrame) -> dict[str, str]:
    """Return the version and the judges of every suite, which two compared logs must share.

    A suite has no judge if every answer was degenerate or truncated.
    """
    judged = frame[frame["outcome"].astype(str).isin([Outcome.DESIRED.value, Outcome.UNDESIRED.value])]
    settings = {}
    for suite in sorted(set(frame["suite"].astype(str))):
        versions = set(frame.loc[frame["suite"] == suite, "suite_version"])
        settings[f"version of suite {suite}"] = ", ".join(sorted(map(str, versions)))
        if judges := sorted(map(str, set(judged.loc[judged["suite"] == suite, "judge"]))):
            settings[f"judge of suite {suite}"] = ", ".join(judges)
    return settings
