"""Run folder -> records as a DataFrame, with the spec, provenance and telemetry beside them; nothing is trusted.

A finished unit whose bytes are not the ones that were sealed is an error. A line that cannot be read is named, counted
and kept out; whether its absence matters is for ``run_reasons`` to say. Beside it lies what others declare:

RUN/scan.json      as ``kvaudit scan --json`` writes it
RUN/answers.json   as ``kvaudit questionnaire --check`` accepts it
RUN/recipe.json    as the run wrote it when its training began (``kvaudit.core.provenance``)
"""

from __future__ import annotations

import hashlib
import json
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
    check_sealed,
    item_counts,
    last_look,
    read_provenance,
    seal_path,
)
from kvaudit.core.provenance import RECIPE, read_recipe
from kvaudit.core.records import Message, Record
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.core.text import one_line
from kvaudit.reports.records.floor import RepeatedAnswers, read_floor
from kvaudit.reports.records.rows import Columns, Panel, Problem, panels, read_unit

_KEY = ["suite", "context_tokens", "arm", "train_seed", "policy", "item_id", "sample_index"]  # one row each
MAX_PROBLEMS = 1000  # that are named
LAST_STEP, LARGEST = 10**9, 1e100  # of telemetry: what a curve can be drawn of
SCAN, ANSWERS = "scan.json", "answers.json"
_EVIDENCE: dict[str, tuple[str, str, type]] = {
    SCAN: ("kvaudit.scan", "found", list),
    ANSWERS: ("kvaudit.answers", "answers", dict),
}
_EVIDENCE_VERSION = 1
LARGEST_EVIDENCE = 10_000_000  # bytes: scans of large repositories, and all that a questionnaire takes


@dataclass(frozen=True)
class Evidence:
    """The files as they stand, None where there is none."""

    scan: Mapping[str, Any] | None = None
    answers: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] | None = None  # what the run itself wrote, held to its own hashes


@dataclass(frozen=True)
class RunData:
    """What a report is made of. ``records`` has one row per graded sample, ``file`` and ``line`` say where it stood."""

    run: Path
    records: pd.DataFrame
    spec: RunSpec  # complete, as the run wrote it
    provenance: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    checkpoints: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # what each says of itself
    evidence: Evidence = field(default_factory=Evidence)  # what others say of the stack
    problems: tuple[Problem, ...] = ()
    incomplete: tuple[str, ...] = ()  # units without a seal
    inputs: Mapping[str, Any] = field(default_factory=dict)  # sealed unit -> what its seal says of the run's inputs

    @cached_property
    def panels(self) -> dict[tuple[str, int], Panel]:
        """The score table of every (suite, context), made once."""
        return panels(self.records)

    @cached_property
    def floor(self) -> RepeatedAnswers:
        """What engines were asked again beside the grid; raises DataError for files that do not fit."""
        return read_floor(self.run, self.records)

    def records_at(self, places: Iterable[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], Record]]:
        """The whole records that stand at (file, line), read again from disk, file by file."""
        wanted: dict[str, set[int]] = {}
        for file, line in places:
            wanted.setdefault(file, set()).add(line)
        for file, lines in wanted.items():
            # no further than the last line that is asked for
            for number, raw in islice(_lines(self.run / "records" / file), max(lines)):
                if number in lines:
                    yield (file, number), Record.from_json(raw.decode())

    def transcripts(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], tuple[Message, ...]]:
        """The transcripts that stand at (file, line); the frame does not hold them."""
        return {place: record.transcript for place, record in self.records_at(places)}


def load_run(run: Path) -> RunData:
    """Read a run folder.

    Raises DataError for a missing folder, spec or provenance, no records, and a spec or sealed unit that changed.
    """
    run = Path(run)
    problems: list[Problem] = []
    _check_there(run / PROVENANCE)
    provenance = read_provenance(run)
    spec = _spec(run / "spec.yaml", provenance)
    if last_look(provenance) is not None:  # without what the pilot found to have nothing to lose
        spec = spec.sized({suite: 0 for suite, number in item_counts(provenance).items() if number == 0})
    units = plain_files(run / "records", "*.jsonl")
    _check_files(run / "records", units)
    columns = Columns()
    seals = {unit.name: check_seal(unit, _read(unit, columns, problems)) for unit in units}
    if not columns.rows:
        stopped = PILOT in provenance and ANYWAY not in provenance
        raise DataError(
            f"no records in {str(run / 'records')!r}; "
            + ("its pilot may have found nothing to lose: " if stopped else "evaluate first: ")
            + f"kvaudit run SPEC --out {run} --resume"
            + (" says so, and --anyway goes on" if stopped else ", or the check that began it")
        )
    frame = _without_duplicates(columns.frame(), problems)
    incomplete = tuple(name for name, seal in seals.items() if seal is None)
    inputs = {name: seal.get(INPUTS) for name, seal in seals.items() if seal is not None}
    telemetry, checkpoints = _telemetry(run, problems), _checkpoints(run, problems)
    found = tuple(problems)
    return RunData(run, frame, spec, provenance, telemetry, checkpoints, read_evidence(run), found, incomplete, inputs)


def problem_lines(data: RunData) -> Iterator[str]:
    """What is wrong with the files of a run, a line each; none of it stops a reader."""
    for problem in data.problems[:MAX_PROBLEMS]:
        where = f"{problem.file}:{problem.line}" if problem.line else problem.file
        yield f"{where}: {problem.reason}"
    if len(data.problems) > MAX_PROBLEMS:
        yield f"and {len(data.problems) - MAX_PROBLEMS} more problems in the files"
    for unit in data.incomplete:
        yield f"{unit}: not finished (no seal); resume the run to complete it"
    unheld = [unit for unit, found in data.inputs.items() if found is None]
    if unheld:
        yield (
            f"{len(unheld)} units have a seal without a hash of what they were evaluated from, first {unheld[0]}; "
            "whether rows, plug-ins or model files changed in between is not known"
        )


def _spec(path: Path, provenance: Mapping[str, Any]) -> RunSpec:
    """The spec; margins and the reference are declared before the run, so it must be the one the run began with."""
    _check_there(path)
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


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing; give the folder of a run (kvaudit run SPEC --out DIR)")


def _check_files(folder: Path, units: list[Path]) -> None:
    known = {seal_path(unit) for unit in units}
    for seal in plain_files(folder, "*.done.json"):
        if seal not in known:
            raise DataError(
                f"record file of {str(seal)!r} is missing; evaluate that unit again (delete the seal, resume)"
            )


def _read(unit: Path, columns: Columns, problems: list[Problem]) -> str:
    try:
        return read_unit(unit, columns, problems)
    except OSError as error:
        raise DataError(f"record file {str(unit)!r} cannot be read ({error.strerror}); make it readable") from None


def check_seal(unit: Path, got: str) -> dict[str, Any] | None:
    """The seal beside a record file, None without one; DataError where ``got``, the sha256 of its bytes, is another."""
    if not seal_path(unit).is_file():
        return None
    seal = read_json(seal_path(unit))
    check_sealed(unit, got, seal)
    return seal


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as handle:
        yield from enumerate(handle, start=1)


def _without_duplicates(frame: pd.DataFrame, problems: list[Problem]) -> pd.DataFrame:
    again = frame.duplicated(_KEY, keep="first")
    for file, line in frame.loc[again, ["file", "line"]].itertuples(index=False):
        problems.append(Problem(str(file), int(line), "duplicate of an earlier record of the same item and sample"))
    return frame.loc[~again].reset_index(drop=True) if again.any() else frame  # a copy is as large again


def _checkpoints(run: Path, problems: list[Problem]) -> dict[tuple[str, int], dict[str, Any]]:
    """The provenance of every finished checkpoint, here or with the run that this one was judged from.

    One that cannot be read is a problem, and stays unknown.
    """
    found = {}
    for checkpoint, path in _of_checkpoints(run, ORIGIN, PROVENANCE):
        try:
            found[checkpoint] = read_json(path)
        except DataError as error:
            problems.append(Problem(str(path.relative_to(run)), 0, one_line(error)))
    return found


def _of_checkpoints(run: Path, *names: str) -> Iterator[tuple[tuple[str, int], Path]]:
    """Arm, seed and path of files of such names that lie with the checkpoints."""
    for path in sorted(chain.from_iterable((run / "checkpoints").glob(f"*/seed-*/{name}") for name in names)):
        seed = path.parent.name.removeprefix("seed-")
        if seed.lstrip("-").isdigit():
            yield (path.parent.parent.name, int(seed)), path


def _telemetry(run: Path, problems: list[Problem]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Steps of every training run, the last line of a step counts (a resumed run writes some twice)."""
    files = _of_checkpoints(run, "telemetry.jsonl")
    return {checkpoint: _steps(path, str(path.relative_to(run)), problems) for checkpoint, path in files}


def _steps(path: Path, name: str, problems: list[Problem]) -> list[dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for number, raw in _lines(path):
        try:
            row = json.loads(raw)
            steps[_step(row)] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(Problem(name, number, f"telemetry line is unreadable: {one_line(error)}"))
    return [steps[step] for step in sorted(steps)]


def _step(row: Mapping[str, Any]) -> int:
    """The step of a telemetry row whose numbers can be drawn; raises ValueError otherwise."""
    step = row["step"]
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise ValueError(f"step is {str(step)[:40]}, wanted a whole number from 0 to {LAST_STEP}")
    # not "greater than": NaN is neither
    wild = [key for key, value in row.items() if isinstance(value, int | float) and not abs(value) <= LARGEST]
    if wild:
        raise ValueError(f"{wild[0][:40]} is no number from {-LARGEST:g} to {LARGEST:g}")
    return step


# --- what lies beside the records ------------------------------------------------------------------------------------


def read_evidence(run: Path) -> Evidence:
    """What lies in a run's folder; raises DataError for a file of another kind, which must not pass for none."""
    recipe = read_recipe(run / RECIPE) if (run / RECIPE).exists() else None
    return Evidence(_evidence(run / SCAN), _evidence(run / ANSWERS), recipe)


def _evidence(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    wanted, table, kind = _EVIDENCE[path.name]
    try:
        found = json.loads(read_text(path, "evidence file", LARGEST_EVIDENCE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); write it again or take it away") from None
    right = isinstance(found, dict) and found.get("format") == wanted and found.get("version") == _EVIDENCE_VERSION
    if not right or not isinstance(found.get(table), kind):  # what holds no findings would pass for finding nothing
        raise DataError(
            f"{str(path)!r} is not of format {wanted} version {_EVIDENCE_VERSION}; write it again or take it away"
        )
    return dict(found)
