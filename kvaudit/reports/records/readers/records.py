"""This project's records: one record file, or a run folder; selectors pick the arm, seed, policy, suite and length."""

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
from kvaudit.core.provenance import ENDPOINT_REQUESTS, INPUTS, PROMPTS, ROWS, table_of, prompt_unit
from kvaudit.core.records import READABLE_FORMATS, Message, Outcome, Record, Role
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
SINGLE = ("arm", "policy")  # two of these in one file would be two files


class Records(Reader):
    """Records as `kvaudit run` writes them."""

    name = "kvaudit"
    reads = "kvaudit run folder or record file"
    has_direction = True

    def recognises(self, path: Path) -> bool:
        """A folder with records, or lines with a record's keys."""
        if path.is_dir():
            return (path / "records").is_dir()
        keys = {"format", "item_id", "cluster_id", "arm", "policy"}
        return any(keys <= set(row) and row["format"] in READABLE_FORMATS for row in first_objects(path))

    def read(self, path: Path, request: Request) -> Log:
        """Rows of one arm under one policy."""
        data = load_run(path) if path.is_dir() else None
        frame, problems = _file(path) if data is None else (data.records, data.problems)
        files = set(frame["file"].astype(str))
        frame = _selected(path, frame, request.select)
        units = set(frame["file"].astype(str))
        unsealed = sorted(units & set(() if data is None else data.incomplete))
        kept_out = list(_kept_out(files, units, problems))
        return Log(
            path,
            self.name,
            _rows(frame, _questions(frame, path), request.cluster),
            tuple(f"{p.file}:{p.line}: {p.reason}" if p.line else f"{p.file}: {p.reason}" for p in problems),
            settings=_settings(frame) | ({} if data is None else _decoding(data, set(frame["suite"].astype(str)))),
            facts={key: ", ".join(sorted(map(str, set(frame[SELECTORS[key]])))) for key in (*SINGLE, "seed")},
            unfinished=f"unit {unsealed[0]} is not sealed; resume the run" if unsealed else "",
            duplicates=sum(p.file in units and _twice(p) for p in problems),
            kept_out={METRIC: len(kept_out)},
            scales=_scales(kept_out),
            prompts={} if data is None else _prompts(data, frame),
            run=None if data is None else replace(data, records=frame, incomplete=()),
            select=request.select,
        )


def _twice(problem: Problem) -> bool:
    return "duplicate of" in problem.reason


def _kept_out(files: set[str], units: set[str], problems: Iterable[Problem]) -> Iterator[Problem]:
    """Lines of the chosen ``units``, and of files without one readable record: nothing says whose those were."""
    for problem in problems:
        known = problem.file in files or "/" in problem.file  # telemetry has a folder
        if problem.line and not _twice(problem) and (problem.file in units or not known):
            yield problem


def _scales(problems: Iterable[Problem]) -> dict[str, OffScaleScores]:
    found = Problems()
    for problem in problems:
        if problem.score is not None:
            found.outside(problem.score, f"{problem.file}:{problem.line}", METRIC)
    return found.scales


def _decoding(data: RunData, suites: set[str]) -> dict[str, str]:
    """How answers were drawn; a probe says besides what it asked of an endpoint."""
    grid = data.spec.evaluate
    found = {"temperature": str(grid.temperature), "top_p": str(grid.top_p), "think": str(grid.written().get("think"))}
    parts = {suite: part for suite, part in grid.suites.items() if suite in suites}
    longest = {f"max_new_tokens of suite {suite}": str(part.max_new_tokens) for suite, part in parts.items()}
    rows = table_of(table_of(data.provenance, INPUTS), ROWS)
    found |= {f"rows {name}": str(sha256) for name, sha256 in rows.items()}
    return {**found, **longest, **table_of(data.provenance, ENDPOINT_REQUESTS)}


def _prompts(data: RunData, frame: pd.DataFrame) -> dict[str, str]:
    """The sha256 of the rendered prompts of the cells that were chosen, by suite and length."""
    known, found = table_of(data.provenance, PROMPTS), dict[str, str]()
    cells = frame[["arm", "train_seed", "suite", "context_tokens", "policy"]].drop_duplicates()
    for arm, seed, suite, context, policy in cells.itertuples(index=False):
        if digest := known.get(prompt_unit(str(arm), int(seed), str(suite), int(context), str(policy))):
            found[f"{suite} {at_length(int(context))}"] = str(digest)
    return found


def _questions(frame: pd.DataFrame, path: Path) -> Fingerprints:
    """What was asked in every row, up to the first answer, as a fingerprint; read from disk, file by file."""
    found = np.full(len(frame), "", dtype=object)
    files, lines = frame["file"].astype(str).to_numpy(), frame["line"].to_numpy()
    for name in np.unique(files):
        at = {int(lines[place]): int(place) for place in np.flatnonzero(files == name)}
        file = path / "records" / name if path.is_dir() else path
        with file.open("rb") as handle:
            for number, raw in enumerate(handle, start=1):
                if number in at:
                    said = itertools.takewhile(lambda one: one.role is not Role.ASSISTANT, _transcript(raw))
                    found[at[number]] = fingerprint_of([[one.role.value, one.content] for one in said])
    return found


def _transcript(raw: bytes) -> tuple[Message, ...]:
    return Record.from_json(raw.decode()).transcript


def _file(path: Path) -> tuple[pd.DataFrame, tuple[Problem, ...]]:
    columns, problems = Columns(), list[Problem]()
    check_seal(path, read_unit(path, columns, problems))
    if not columns.rows:
        for scale in _scales(problems).values():
            raise scale.refused(path, METRIC)
        raise DataError(f"{str(path)!r} holds no record; first problem: line {problems[0].line}: {problems[0].reason}")
    return columns.frame(), tuple(problems)


def _selected(path: Path, frame: pd.DataFrame, select: Mapping[str, str]) -> pd.DataFrame:
    """The rows that every selector wants; raises SpecError where none or more than one cell is left."""
    for key, wanted in select.items():
        if key not in SELECTORS:
            raise UnknownName("selector", key, SELECTORS)
        present = sorted(map(str, set(frame[SELECTORS[key]])))
        # a short name stands for the policy that it is the name of
        value = match_policies([wanted], present)[0] if key == "policy" else wanted
        if value not in present:
            raise SpecError(f"{str(path)!r} has no {key} {wanted!r}; it has {_listed(present)}")
        frame = frame[frame[SELECTORS[key]].astype(str) == value]
    for key in SINGLE:
        present = sorted(map(str, set(frame[SELECTORS[key]])))
        if len(present) > 1:
            raise SpecError(f"{str(path)!r} holds several: choose one with {key}=..., it has {_listed(present)}")
    if frame.empty:
        raise SpecError(f"{str(path)!r} has no record that all selectors want; leave one out")
    return frame


def _listed(names: list[str]) -> str:
    return join_names(map(inline, names), 12, between="; ", last="; and ")


def _rows(frame: pd.DataFrame, questions: Fingerprints, cluster: ClusterRule | None) -> pd.DataFrame:
    items = frame["item_id"].astype(str).to_numpy(dtype=object)
    clusters = frame["cluster_id"].astype(str).to_numpy(dtype=object)
    if cluster is not None:
        flat = frame[["cluster_id", "suite_version", *SELECTORS.values()]].astype(str)
        rows = (dict(zip(flat.columns, row, strict=True)) for row in flat.itertuples(index=False))
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
        "line": frame["line"].to_numpy(),
    }
    facets = {name: frame[name].to_numpy() for name in FACET_COLUMNS.values() if frame[name].notna().any()}
    return pd.DataFrame({**{name: columns[name] for name in Row._fields}, **facets})


def _settings(frame: pd.DataFrame) -> dict[str, str]:
    """What both sides must share: the version of every suite and who judged it.

    A suite of which no judge had to speak, since every answer was degenerate or cut, has no judge to differ.
    """
    judged = frame[frame["outcome"].astype(str).isin([Outcome.DESIRED.value, Outcome.UNDESIRED.value])]
    found = {}
    for suite in sorted(set(frame["suite"].astype(str))):
        own = frame[frame["suite"] == suite]
        found[f"version of suite {suite}"] = ", ".join(sorted(map(str, set(own["suite_version"]))))
        if judges := sorted(map(str, set(judged.loc[judged["suite"] == suite, "judge"]))):
            found[f"judge of suite {suite}"] = ", ".join(judges)
    return found
