"""Read a run folder: its records as a DataFrame, its spec, provenance and telemetry. Every file is checked.

A finished unit whose bytes do not match its seal is an error. An unreadable line is reported, counted and skipped;
``run_reasons`` decides whether that matters. Other files that may lie in the same folder:

RUN/scan.json                      written by ``kvaudit scan --json``
RUN/answers.json                   accepted by ``kvaudit questionnaire --check``
RUN/recipe.json                    written by the run when its training began (``kvaudit.core.provenance``)
RUN/floor/again/<unit>.jsonl       an engine's answers to the same requests in the same order
RUN/floor/shuffled/<unit>.jsonl    the same requests in another order; records and seals as in the run's own grid
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files, read_json, read_text
from kvaudit.core.provenance import (
    ANYWAY,
    INPUTS,
    ORIGIN,
    PILOT,
    PROVENANCE,
    RECIPE,
    check_sealed,
    item_counts,
    last_look,
    read_provenance,
    read_recipe,
    seal_path,
)
from kvaudit.core.records import Message, Record
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.core.text import one_line
from kvaudit.reports.records.rows import Columns, Panel, Problem, count_distinct, panels, read_unit

MAX_PROBLEMS = 1000  # that are listed
LAST_STEP, LARGEST = 10**9, 1e100  # of telemetry, so that it can be plotted
SCAN, ANSWERS = "scan.json", "answers.json"
_EVIDENCE: dict[str, tuple[str, str, type]] = {
    SCAN: ("kvaudit.scan", "found", list),
    ANSWERS: ("kvaudit.answers", "answers", dict),
}
_EVIDENCE_VERSION = 1
LARGEST_EVIDENCE = 10_000_000  # bytes: a scan of a large repository, or the largest questionnaire
_SEED_FOLDER = re.compile(r"seed-(-?[0-9]+)")


@dataclass(frozen=True)
class Evidence:
    """The content of three optional files of a run folder; None for one that is missing."""

    scan: Mapping[str, Any] | None = None  # of configurations, written by ``kvaudit scan --json``
    answers: Mapping[str, Any] | None = None  # a vendor's, to the questionnaire
    recipe: Mapping[str, Any] | None = None  # of the training; checked against its hashes


@dataclass(frozen=True)
class RunData:
    """The content of a run folder as a report reads it: records, spec, provenance, telemetry and problems.

    ``records`` has a row per graded sample; ``file`` and ``line`` name its record.
    """

    run: Path
    records: pd.DataFrame
    spec: RunSpec  # as the run wrote it, with all defaults
    provenance: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    checkpoints: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # the provenance of each
    evidence: Evidence = field(default_factory=Evidence)
    problems: tuple[Problem, ...] = ()
    incomplete: tuple[str, ...] = ()  # units without a seal
    inputs: Mapping[str, Any] = field(default_factory=dict)  # sealed unit -> sha256 of the run's inputs in its seal

    @cached_property
    def panels(self) -> dict[tuple[str, int], Panel]:
        """The score tables by (suite or SUITE.FACET, context length in tokens)."""
        return panels(self.records)

    @cached_property
    def floor(self) -> RepeatedAnswers:
        """The answers of engines to requests asked a second time.

        Raises DataError for files that do not fit the run's records.
        """
        return read_floor(self.run, self.records)

    def records_at(self, places: Iterable[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], Record]]:
        """Yield ((file, line), complete record) for each of these places, read from disk file by file."""
        lines_by_file: dict[str, set[int]] = {}
        for file, line in places:
            lines_by_file.setdefault(file, set()).add(line)
        for file, lines in lines_by_file.items():
            for number, raw in islice(_numbered_lines(self.run / "records" / file), max(lines)):
                if number in lines:
                    yield (file, number), Record.from_json(raw.decode())

    def transcripts(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], tuple[Message, ...]]:
        """Return the transcripts by (file, line), read from disk; ``records`` does not contain them."""
        return {place: record.transcript for place, record in self.records_at(places)}


def load_run(run: Path) -> RunData:
    """Read a run folder.

    Raises DataError if spec, provenance or sealed units are missing or changed, and if there are no records.
    """
    problems: list[Problem] = []
    _check_exists(run / PROVENANCE)
    provenance = read_provenance(run)
    spec = _load_spec(run / "spec.yaml", provenance)
    if last_look(provenance) is not None:  # leave out the suites in which the pilot found nothing to lose
        spec = spec.sized({suite: 0 for suite, number in item_counts(provenance).items() if number == 0})
    units = plain_files(run / "records", "*.jsonl")
    _check_files(run / "records", units)
    columns = Columns()
    seals = {unit.name: check_seal(unit, _read_unit(unit, columns, problems)) for unit in units}
    if not columns.rows:
        raise _no_records(run, provenance)
    frame = _without_duplicates(columns.frame(), problems)
    incomplete = tuple(name for name, seal in seals.items() if seal is None)
    inputs = {name: seal.get(INPUTS) for name, seal in seals.items() if seal is not None}
    telemetry, checkpoints = _telemetry(run, problems), _checkpoints(run, problems)
    evidence = read_evidence(run)
    return RunData(run, frame, spec, provenance, telemetry, checkpoints, evidence, tuple(problems), incomplete, inputs)


def _no_records(run: Path, provenance: Mapping[str, Any]) -> DataError:
    resume = f"kvaudit run SPEC --out {run} --resume"
    if PILOT in provenance and ANYWAY not in provenance:
        remedy = f"its pilot may have found nothing to lose: {resume} reports that, and --anyway continues"
    else:
        remedy = f"evaluate first: {resume}, or the check that began it"
    return DataError(f"no records in {str(run / 'records')!r}; {remedy}")


def problem_lines(data: RunData) -> Iterator[str]:
    """Yield one line for each problem in the files of a run; no problem stops the report."""
    for problem in data.problems[:MAX_PROBLEMS]:
        place = f"{problem.file}:{problem.line}" if problem.line else problem.file
        yield f"{place}: {problem.reason}"
    if len(data.problems) > MAX_PROBLEMS:
        yield f"and {len(data.problems) - MAX_PROBLEMS} more problems in the files"
    for unit in data.incomplete:
        yield f"{unit}: not finished (no seal); resume the run to complete it"


def _load_spec(path: Path, provenance: Mapping[str, Any]) -> RunSpec:
    """Return the spec; raises DataError if it changed after the run began.

    Margins must be declared before the run.
    """
    _check_exists(path)
    text = read_text(path, "spec")
    _check_spec(path, "spec_file_sha256", hashlib.sha256(text.encode()).hexdigest(), provenance)
    spec = parse_spec(text, "spec.yaml")
    _check_spec(path, "spec_sha256", spec.sha256, provenance)
    return spec


def _check_spec(path: Path, key: str, digest: str, provenance: Mapping[str, Any]) -> None:
    if digest != provenance.get(key):
        raise DataError(
            f"{str(path)!r}: spec.yaml was changed after the run began (sha256 {digest[:12]}, {key} in "
            f"provenance.json is {str(provenance.get(key))[:12]}); put the first one back, or start another run "
            "with --out"
        )


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing; give the folder of a run (kvaudit run SPEC --out DIR)")


def _check_files(folder: Path, units: list[Path]) -> None:
    seals = {seal_path(unit) for unit in units}
    for seal in plain_files(folder, "*.done.json"):
        if seal not in seals:
            raise DataError(
                f"record file of {str(seal)!r} is missing; evaluate that unit again (delete the seal, resume)"
            )


def _read_unit(unit: Path, columns: Columns, problems: list[Problem]) -> str:
    try:
        return read_unit(unit, columns, problems)
    except OSError as error:
        raise DataError(f"record file {str(unit)!r} cannot be read ({error.strerror}); make it readable") from None


def check_seal(unit: Path, digest: str) -> dict[str, Any] | None:
    """Return the seal of a record file, None if it has none.

    The seal is a file beside it that is written when the record file is finished. Raises DataError if the seal has
    another sha256 than ``digest``.
    """
    if not seal_path(unit).is_file():
        return None
    seal = read_json(seal_path(unit))
    check_sealed(unit, digest, seal)
    return seal


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as handle:
        yield from enumerate(handle, start=1)


def _without_duplicates(frame: pd.DataFrame, problems: list[Problem]) -> pd.DataFrame:
    is_duplicate = frame.duplicated(ANSWER_COLUMNS, keep="first")
    for file, line in frame.loc[is_duplicate, ["file", "line"]].itertuples(index=False):
        problems.append(Problem(str(file), int(line), "duplicate of an earlier record of the same item and sample"))
    return frame.loc[~is_duplicate].reset_index(drop=True) if is_duplicate.any() else frame  # avoids a large copy


def _checkpoints(run: Path, problems: list[Problem]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return by (arm, seed) the provenance of every finished checkpoint; an unreadable one is noted as a problem."""
    provenance = {}
    for checkpoint, path in _checkpoint_files(run, ORIGIN, PROVENANCE):
        try:
            provenance[checkpoint] = read_json(path)
        except DataError as error:
            problems.append(Problem(str(path.relative_to(run)), 0, one_line(error)))
    return provenance


def _checkpoint_files(run: Path, *names: str) -> Iterator[tuple[tuple[str, int], Path]]:
    """Yield (arm, seed) and path of each file with one of these names in the checkpoint folders."""
    for path in sorted(chain.from_iterable((run / "checkpoints").glob(f"*/seed-*/{name}") for name in names)):
        if seed := _SEED_FOLDER.fullmatch(path.parent.name):
            yield (path.parent.parent.name, int(seed[1])), path


def _telemetry(run: Path, problems: list[Problem]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the telemetry of every training run by (arm, seed), one row per step.

    If a step has several lines, as after a resume, the last counts.
    """
    files = _checkpoint_files(run, "telemetry.jsonl")
    return {checkpoint: _steps(path, str(path.relative_to(run)), problems) for checkpoint, path in files}


def _steps(path: Path, name: str, problems: list[Problem]) -> list[dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for number, raw in _numbered_lines(path):
        try:
            row = json.loads(raw)
            steps[_step(row)] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(Problem(name, number, f"telemetry line is unreadable: {one_line(error)}"))
    return [steps[step] for step in sorted(steps)]


def _step(row: Mapping[str, Any]) -> int:
    """Return the step of a telemetry row; raises ValueError if its numbers cannot be plotted."""
    step = row["step"]
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise ValueError(f"step is {str(step)[:40]}, wanted a whole number from 0 to {LAST_STEP}")
    # "not <=" instead of ">", which is false for NaN
    bad = [key for key, value in row.items() if isinstance(value, int | float) and not abs(value) <= LARGEST]
    if bad:
        raise ValueError(f"{bad[0][:40]} is not a number from {-LARGEST:g} to {LARGEST:g}")
    return step


# --- declared evidence -----------------------------------------------------------------------------------------------


def read_evidence(run: Path) -> Evidence:
    """Return what optional files of a run folder hold: a scan, a vendor's answers and the training recipe.

    Each is None if its file is missing. Raises DataError if a file has another format.
    """
    recipe = read_recipe(run / RECIPE) if (run / RECIPE).exists() else None
    return Evidence(_evidence(run / SCAN), _evidence(run / ANSWERS), recipe)


def _evidence(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    file_format, table, kind = _EVIDENCE[path.name]
    try:
        content = json.loads(read_text(path, "evidence file", LARGEST_EVIDENCE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); write it again or remove it") from None
    is_evidence = isinstance(content, dict) and content.get("format") == file_format
    is_evidence = is_evidence and content.get("version") == _EVIDENCE_VERSION
    if not is_evidence or not isinstance(content.get(table), kind):  # a file without findings is not a clean result
        raise DataError(
            f"{str(path)!r} is not of format {file_format} version {_EVIDENCE_VERSION}; write it again or remove it"
        )
    return dict(content)


# --- the repeated answers of engines ---------------------------------------------------------------------------------


FLOOR_FOLDER, SAME_ORDER, SHUFFLED = "floor", "again", "shuffled"
ORDERS = (SAME_ORDER, SHUFFLED)
ANSWER_COLUMNS = ["arm", "train_seed", "policy", "suite", "context_tokens", "item_id", "sample_index"]
# column -> the columns that must determine it
_DETERMINED = {"checkpoint": ["arm", "train_seed"], "suite_version": ["suite"], "policy_hash": ["policy"]}


@dataclass(frozen=True)
class RepeatedAnswers:
    """The answers of engines to requests asked a second time.

    ``records`` holds them by the order in which the requests were sent, "again" (the same) or "shuffled".
    ``unfinished`` are record files without a seal, the mark of a finished one.
    """

    records: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unfinished: tuple[str, ...] = ()


def read_floor(run: Path, records: pd.DataFrame) -> RepeatedAnswers:
    """Return the answers of engines to repeated requests.

    Raises DataError if files changed, or have other checkpoints than the run's ``records``.
    """
    problems, unfinished = list[Problem](), list[str]()
    folders = [run / FLOOR_FOLDER / order for order in ORDERS]
    frames = {folder.name: _read_units(folder, records, problems, unfinished) for folder in folders}
    unique = {order: frame.drop_duplicates(ANSWER_COLUMNS) for order, frame in frames.items() if frame is not None}
    return RepeatedAnswers(unique, tuple(problems), tuple(unfinished))


def _read_units(
    folder: Path, records: pd.DataFrame, problems: list[Problem], unfinished: list[str]
) -> pd.DataFrame | None:
    """Return the records of a folder's finished units; None if it has none.

    A unit is one file of records. Unreadable lines are added to ``problems``, the names of unfinished units to
    ``unfinished``. Raises DataError if the files changed, or have other checkpoints, suite versions or policies than
    the run.
    """
    columns = Columns()
    for unit in plain_files(folder, "*.jsonl"):
        if seal_path(unit).is_file():
            check_sealed(unit, _read_unit(unit, columns, problems), read_json(seal_path(unit)))
        else:
            unfinished.append(f"{folder.name}/{unit.name}")
    if not columns.rows:
        return None
    frame = columns.frame()
    for column, by in _DETERMINED.items():
        # counted over both tables, so that a checkpoint of another run is a second value
        if (count_distinct((records, frame), column, by) > 1).any():
            raise DataError(
                f"records in {str(folder)!r} have another {column} than those of the run; delete the folder and resume "
                "the run to ask again"
            )
    return frame
