"""Judging: the stored transcripts of a run, graded again into another run folder.

Items are made again from the run's spec, and every stored opening must be the item's. What was said stays as it is;
outcome, score, facets and judge are made again by the suites and the detector of degenerate answers as they are now.
The run that is judged is never written to. A judge may decide what suites leave to one, in place of their phrase rules.

    provenance.json    judged: {"from": name, "records": sha256, "suite_versions": those before, "judge": {...}, ...}
    <unit>.done.json   judged: {"from": sha256 of the records that were judged, "by": {...}}, changed: {...}
    answers-*.jsonl    what the judge said, by hash of the question (``core.remembered``)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit import __version__
from kvaudit.audit.judges.base import CachedGrader, Judge
from kvaudit.audit.runs.claims import Claim
from kvaudit.audit.runs.folder import SPEC, RunFolder, check_folder, make_folder
from kvaudit.audit.runs.regrading import Regrading
from kvaudit.audit.runs.stored import StoredUnit
from kvaudit.audit.sampling.exchange import grade_by_judge, grade_transcript, with_harm
from kvaudit.core.errors import RunError
from kvaudit.core.files import PARTIAL, mutex, read_json, write_json, write_whole
from kvaudit.core.judge_answers import Judgement, Question
from kvaudit.core.provenance import JUDGED, ORIGIN, PROVENANCE, RECIPE, Digests, check_checkpoints, seal_path
from kvaudit.core.records import Grade, Item, Record
from kvaudit.suites.base import SUITES, Suite

_COUNTS = ("answers", "scores", "outcomes", "judged", "unsure", "failed")
AGREEMENT = ((True, True), (True, False), (False, True), (False, False))  # desired before, and now
_COPIED = {  # what a report shows besides records, and under which name it goes along
    "scan.json": "scan.json",
    "answers.json": "answers.json",
    RECIPE: RECIPE,
    "checkpoints/*/seed-*/telemetry.jsonl": "telemetry.jsonl",
    f"checkpoints/*/seed-*/{PROVENANCE}": ORIGIN,  # under its own name it would say that the weights are here
    f"checkpoints/*/seed-*/{ORIGIN}": ORIGIN,
}


def judged_folder(run: Path, judge: Judge) -> Path:
    """Where a run's answers lie as a judge grades them, unless told otherwise."""
    return run / "judged" / judge.folder


class SuiteChange(NamedTuple):
    """What judging changed in one suite."""

    suite: str
    versions: str  # before -> now
    answers: int
    scores: int
    outcomes: int
    judged: int  # by a judge, those that it failed on included
    unsure: int
    failed: int


class Judging(Regrading[Question, Judgement]):
    """One process's work on judging a run; without a judge the suites grade alone.

    Raises DataError where one of its checkpoints is not as it was finished, RunError where ``out`` holds something else
    than this run judged. ``plugins``: file name -> sha256, of the suites that grade now.
    """

    stage = "judge"

    def __init__(
        self, run: RunFolder, out: Path, console: Console, plugins: Digests, judge: Judge | None = None
    ) -> None:
        check_checkpoints(run.path)
        super().__init__(run, console)
        self._plugins, self._by = plugins, judge
        self._out = RunFolder(out, run.spec)
        _ = self._items  # a tokenizer that is not there is missed before a folder is made
        self._open()

    @cached_property
    def answers(self) -> CachedGrader[Question, Judgement] | None:
        return None if self._by is None else CachedGrader(self._by, self._out.path)

    def work(self) -> list[SuiteChange]:
        """Judge every unit that is not judged yet; returns what changed, by suite."""
        self.grade_units()
        found = []
        for suite, results in self.results_by_suite().items():
            parts = [body["changed"] for _, body in results]
            versions = f"{', '.join(sorted({part['was'] for part in parts}))} -> {SUITES.get(suite).version}"
            found.append(SuiteChange(suite, versions, *(sum(part.get(key, 0) for part in parts) for key in _COUNTS)))
        return found

    def agreement(self) -> dict[str, list[int]]:
        """By suite, in how many answers the judge and the one before it say the same (``AGREEMENT``)."""
        found: dict[str, list[int]] = {}
        for unit in self.units:
            pairs = read_json(self.place(unit))["changed"].get("pairs", [])
            if any(pairs):
                total = found.get(unit.suite, [0] * len(AGREEMENT))
                found[unit.suite] = [have + more for have, more in zip(total, pairs, strict=True)]
        return found

    def place(self, unit: StoredUnit) -> Path:
        return seal_path(self._out.records / unit.records.name)

    def lock(self, unit: StoredUnit) -> Path:
        return self._out.records / unit.records.with_suffix(".lock").name

    def is_current(self, unit: StoredUnit, result: Mapping[str, Any]) -> bool:
        return bool(result.get(JUDGED) == self._identity(unit))

    def failed(self, result: Mapping[str, Any]) -> bool:
        return bool(result.get("changed", {}).get("failed", 0))

    def write(self, unit: StoredUnit, mine: Claim) -> None:
        """Write a unit's records beside their place, a line at a time, and seal them."""
        seal = self.place(unit)
        place = self._out.records / unit.records.name
        partial = place.with_name(place.name + PARTIAL)
        digest, counted = hashlib.sha256(), Counter[str]()
        pairs = Counter[tuple[bool, bool]]()
        with partial.open("wb") as file:
            for old, new in self._regraded(unit):
                line = (new.to_json() + "\n").encode()
                digest.update(line)
                file.write(line)
                counted.update(_counted(old, new, self._by))
                if self._by is not None and new.judge == self._by.label and None not in (old.score, new.score):
                    pairs[_desired(old), _desired(new)] += 1
            file.flush()
            os.fsync(file.fileno())
        mine.check()
        seal.unlink(missing_ok=True)  # of an older judgement: never beside records that are not its own
        os.replace(partial, place)
        changed = {"was": unit.version, **{name: counted[name] for name in _COUNTS}}
        if self._by is not None:
            changed["pairs"] = [pairs[key] for key in AGREEMENT]
        written = {"records": counted["answers"], "sha256": digest.hexdigest(), JUDGED: self._identity(unit)}
        write_json(seal, {**unit.seal, **written, "changed": changed})

    def _regraded(self, unit: StoredUnit) -> Iterator[tuple[Record, Record]]:
        """Every record of a unit as it was, and as it is judged now."""
        for answer, readings in self.graded(unit):
            suite, item = answer.asked()
            grade, sure = self._grade(answer.record, suite, item, readings)
            yield answer.record, answer.record.with_grade(suite.version, item, grade, unsure=not sure)

    def _grade(self, old: Record, suite: Suite, item: Item, readings: list[Judgement | None]) -> tuple[Grade, bool]:
        """The grade of an answer by what the judge says of it, and whether it is sure of that."""
        reading = readings[0] if readings else None
        if self._by is None or not readings:
            grade = grade_transcript(suite, item, old.transcript, old.finish_reason)
        else:
            refused = None if reading is None else reading.refused
            grade = grade_by_judge(suite, item, old.transcript, refused=refused, judge=self._by.label)
        if self._by is not None and self._by.grades_harm:
            grade = with_harm(grade, suite, item, reading.unsafe if reading else None)
        return grade, reading is None or reading.sure

    def _open(self) -> None:
        """Make the folder, or hold what is there to this run; bring what a report shows besides records up to date."""
        run, out = self._run, self._out
        provenance = run.provenance()
        if out.path.resolve() == run.path.resolve():
            raise RunError(f"{str(out.path)!r} is the run that is to be judged; give another --out")
        if check_folder(out.path, out.spec, resume=True):
            held = out.provenance()
            # a run is known by the moment at which it was started
            if JUDGED not in held or held.get("started") != provenance.get("started"):
                raise RunError(
                    f"{str(out.path)!r} holds another run than {str(run.path)!r} judged again; give another --out"
                )
        make_folder(out.records)
        with mutex(out.path / ".provenance.lock"):
            write_json(out.path / PROVENANCE, self._judged(provenance))
            for pattern, name in _COPIED.items():
                for path in run.path.glob(pattern):
                    place = out.path / path.relative_to(run.path).with_name(name)
                    make_folder(place.parent)
                    shutil.copyfile(path, place.with_name(place.name + PARTIAL))
                    os.replace(place.with_name(place.name + PARTIAL), place)
            # last: a folder that holds a spec has all the rest
            write_whole(out.path / SPEC, (run.path / SPEC).read_text(encoding="utf-8"))

    def _judged(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """The provenance of the judged run: that of the run, and what it was judged from and by."""
        names = self._run.spec.evaluate.suites
        held = {unit.records.name: unit.sha256 for unit in self.units}
        judged = {
            "from": self._run.path.resolve().name,
            "records": hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest(),
            "suite_versions": {unit.suite: unit.version for unit in self.units},
            "kvaudit": __version__,
            "plug-ins": dict(self._plugins),
        }
        if self._by is not None:
            judged["judge"] = {"name": self._by.name, "sha256": self._by.identity}
        return {**provenance, "suite_versions": {name: SUITES.get(name).version for name in names}, JUDGED: judged}

    def _identity(self, unit: StoredUnit) -> dict[str, Any]:
        """What was judged by what: a unit that was finished under the same is not judged again."""
        by = {"suite": SUITES.get(unit.suite).version, "kvaudit": __version__, "plug-ins": dict(self._plugins)}
        judge = {} if self._by is None else {"judge": self._by.identity}
        return {"from": unit.sha256, "by": {**by, **judge}}


def _counted(old: Record, new: Record, judge: Judge | None) -> dict[str, int]:
    judged = judge is not None and new.judge == judge.label
    return {
        "answers": 1,
        "scores": old.score != new.score,
        "outcomes": old.outcome is not new.outcome,
        "judged": judged,
        "unsure": new.unsure,
        "failed": judged and new.score is None,
    }


def _desired(record: Record) -> bool:
    return record.score is not None and record.score >= 0.5
