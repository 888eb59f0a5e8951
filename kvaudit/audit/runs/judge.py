"""Judging: grade the stored answers of a run again, into another run folder.

Items are made again from the run's spec, and every stored transcript must begin with its item's messages. Answers stay
as they are; outcome, score, facets and judge come from today's suites and detector of degenerate answers. Where a suite
allows it, a judge decides in place of the suite's phrase rules. The original run is never written to.

    provenance.json    judged: {"from": name, "records": sha256, "suite_versions": those before, "judge": {...}, ...}
    <unit>.done.json   judged: {"from": sha256 of the records that were judged, "by": {...}}, changed: {...}
    answers-*.jsonl    the judge's replies, by hash of the question (``core.judge_answers``)

Units (files of records) are locked, so several processes may share the work. A judge is asked all questions of a unit
before any record of the unit is written; its replies are stored at once, so that a kill loses little. An answer on
which the judge failed is unscored, and the next process asks about it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvaudit import __version__
from kvaudit.audit.judges.base import CachedGrader, Judge, StoredAnswer
from kvaudit.audit.runs.claims import Claim
from kvaudit.audit.runs.folder import SPEC, RunFolder, check_folder, make_folder
from kvaudit.audit.runs.stored import Items, StoredUnit, item_of, read_records, stored_units, work_on_stored
from kvaudit.audit.sampling.exchange import grade_by_judge, grade_transcript, with_harm
from kvaudit.core.errors import RunError
from kvaudit.core.files import PARTIAL, mutex, read_json, write_json, write_whole
from kvaudit.core.judge_answers import Judgement, Question
from kvaudit.core.provenance import (
    JUDGED,
    LABELLED,
    ORIGIN,
    PROVENANCE,
    RECIPE,
    Digests,
    check_checkpoints,
    seal_path,
)
from kvaudit.core.records import Grade, Item, Record
from kvaudit.suites.base import SUITES, Suite

AGREEMENT = ((True, True), (True, False), (False, True), (False, False))  # desired by the old grade, by the new one
_COPIED = {  # files that a report shows besides records -> their names in the judged run
    "scan.json": "scan.json",
    "answers.json": "answers.json",
    RECIPE: RECIPE,
    "checkpoints/*/seed-*/telemetry.jsonl": "telemetry.jsonl",
    f"checkpoints/*/seed-*/{PROVENANCE}": ORIGIN,  # its own name would mean that the weights are there
    f"checkpoints/*/seed-*/{ORIGIN}": ORIGIN,
}


def judged_folder(run: Path, judge: Judge) -> Path:
    """Return the default folder for a run's answers as graded by ``judge``."""
    return run / "judged" / judge.folder


class SuiteChange(NamedTuple):
    """How many answers of a suite were graded again, and in how many the score, outcome or another part changed."""

    suite: str
    versions: str  # before -> now
    answers: int
    scores: int
    outcomes: int
    judged: int  # by a judge, including those that it failed on
    unsure: int
    failed: int


_COUNTS = SuiteChange._fields[2:]


class Judging:
    """Grades the answers of a run again, as one of several processes; without a judge the suites alone grade.

    ``plugins`` maps the files of suites that grade now to their sha256. Raises DataError if a checkpoint or a unit
    differs from its seal. Raises RunError if the judge fails, or if ``out`` holds anything but this run's new grades.
    """

    def __init__(
        self, run: RunFolder, out: Path, console: Console, plugins: Digests, judge: Judge | None = None
    ) -> None:
        check_checkpoints(run.path)
        self._run, self._console, self._plugins, self._judge = run, console, plugins, judge
        self._tried: set[Path] = set()  # units of this process, which leaves their failures to the next one
        self._replacing: dict[str, Any] | None = None  # provenance to write in place of that of another judge
        self.units, self.unfinished = stored_units(run)
        self._out, self._items = RunFolder(out, run.spec), Items(run)
        self._open_folder()

    @cached_property
    def _answers(self) -> CachedGrader[Question, Judgement] | None:
        return None if self._judge is None else CachedGrader(self._judge, self._out.path)

    def work(self) -> list[SuiteChange]:
        """Judge every unit that is not judged yet; return the changes by suite."""
        self._replace_other_judge()
        work_on_stored(
            self.units, "judge", self._console, is_done=self._is_done, lock=self._lock, work=self._judge_unit
        )
        results: dict[str, list[Mapping[str, Any]]] = {}
        for unit in self.units:
            results.setdefault(unit.suite, []).append(read_json(self._seal(unit))["changed"])
        changes = []
        for suite, unit_counts in results.items():
            versions = f"{', '.join(sorted({counts['was'] for counts in unit_counts}))} -> {SUITES.get(suite).version}"
            changes.append(
                SuiteChange(suite, versions, *(sum(counts.get(key, 0) for counts in unit_counts) for key in _COUNTS))
            )
        return changes

    def agreement(self) -> dict[str, list[int]]:
        """Return, by suite, how many answers are desired by [both grades, only the old, only the new, neither]."""
        totals: dict[str, list[int]] = {}
        for unit in self.units:
            pairs = read_json(self._seal(unit))["changed"].get("pairs", [])
            if any(pairs):
                total = totals.get(unit.suite, [0] * len(AGREEMENT))
                totals[unit.suite] = [old + new for old, new in zip(total, pairs, strict=True)]
        return totals

    def _seal(self, unit: StoredUnit) -> Path:
        return seal_path(self._out.records / unit.records.name)

    def _lock(self, unit: StoredUnit) -> Path:
        return self._out.records / unit.records.with_suffix(".lock").name

    def _is_done(self, unit: StoredUnit) -> bool:
        if not self._seal(unit).exists():
            return False
        seal = read_json(self._seal(unit))
        has_failed = bool(seal.get("changed", {}).get("failed", 0))
        return bool(seal.get(JUDGED) == self._identity(unit)) and (not has_failed or unit.records in self._tried)

    def _judge_unit(self, unit: StoredUnit, claim: Claim) -> None:
        """Write a unit's records with new grades to a partial file, then move it into place and seal it."""
        seal = self._seal(unit)
        path = self._out.records / unit.records.name
        partial_file = path.with_name(path.name + PARTIAL)
        digest, counts = hashlib.sha256(), Counter[str]()
        pairs = Counter[tuple[bool, bool]]()
        with partial_file.open("wb") as file:
            for old, new in self._regrade(unit):
                line = (new.to_json() + "\n").encode()
                digest.update(line)
                file.write(line)
                counts.update(_changes(old, new, self._judge))
                if self._judge is not None and new.judge == self._judge.label and None not in (old.score, new.score):
                    pairs[_is_desired(old), _is_desired(new)] += 1
            file.flush()
            os.fsync(file.fileno())
        claim.check()
        seal.unlink(missing_ok=True)  # an older seal does not fit the new records
        os.replace(partial_file, path)
        changed = {"was": unit.version, **{name: counts[name] for name in _COUNTS}}
        if self._judge is not None:
            changed["pairs"] = [pairs[key] for key in AGREEMENT]
        body = {"records": counts["answers"], "sha256": digest.hexdigest(), JUDGED: self._identity(unit)}
        write_json(seal, {**unit.seal, **body, "changed": changed})
        self._tried.add(unit.records)

    def _replace_other_judge(self) -> None:
        """If another judge graded in the folder, store this judge in its provenance and unseal the other's units.

        All questions are asked before that, and the replies stored, so that nothing has changed if this judge fails. A
        unit that kept its seal would count as graded by this judge.
        """
        if self._replacing is None:
            return
        for unit in self.units:
            for _ in self._read_answers(unit):
                pass
        with mutex(self._out.path / ".provenance.lock"):
            for unit in self.units:
                if self._seal(unit).exists() and read_json(self._seal(unit)).get(JUDGED) != self._identity(unit):
                    self._seal(unit).unlink()
            write_json(self._out.path / PROVENANCE, self._replacing)
        self._replacing = None

    def _regrade(self, unit: StoredUnit) -> Iterator[tuple[Record, Record]]:
        """Yield a pair for every record of a unit: the record with its old grade, and with its new one."""
        for answer, readings in self._read_answers(unit):
            suite, item = answer.load_item()
            if suite.played_by:  # its scorers graded what the agent did, which is not kept
                yield answer.record, answer.record
                continue
            grade, is_sure = self._grade(answer.record, suite, item, readings)
            yield answer.record, answer.record.with_grade(suite.version, item, grade, unsure=not is_sure)

    def _read_answers(self, unit: StoredUnit) -> Iterator[tuple[StoredAnswer, list[Judgement | None]]]:
        """Yield every answer of a unit with the judge's replies to its questions; no replies if the judge is not asked.

        A reply is None where the judge failed.
        """
        if self._answers is None:
            yield from ((answer, []) for answer in self._stored_answers(unit))
            return
        judge = self._answers.grader
        questions_by_answer = [judge.questions_of(answer) for answer in self._stored_answers(unit)]
        questions = [question for questions in questions_by_answer for question in questions]
        judge.check_questions(questions)
        readings = iter(self._answers.grades(questions))  # in the order of the questions
        for answer, its_questions in zip(self._stored_answers(unit), questions_by_answer, strict=True):
            yield answer, [next(readings) for _ in its_questions]

    def _stored_answers(self, unit: StoredUnit) -> Iterator[StoredAnswer]:
        """Yield the stored answers of a unit; each makes its suite and item only if they are needed."""

        def suite_and_item(number: int, record: Record) -> tuple[Suite, Item]:
            suite_items = self._items.of(unit)
            return suite_items.suite, item_of(record, suite_items, f"{str(unit.records)!r} line {number}")

        for number, record in enumerate(read_records(unit), start=1):
            yield StoredAnswer(record, partial(suite_and_item, number, record))

    def _grade(self, old: Record, suite: Suite, item: Item, readings: list[Judgement | None]) -> tuple[Grade, bool]:
        """Return (the new grade, whether its grader is sure) for an answer with the record ``old``.

        ``readings`` are the judge's replies. The judge grades if there are any, else the suite does.
        """
        reading = readings[0] if readings else None
        if self._judge is None or not readings:
            grade = grade_transcript(suite, item, old.transcript, old.finish_reason)
        else:
            refused = None if reading is None else reading.refused
            grade = grade_by_judge(suite, item, old.transcript, refused=refused, judge=self._judge.label)
        if self._judge is not None and self._judge.grades_harm:
            grade = with_harm(grade, suite, item, reading.unsafe if reading else None)
        return grade, reading is None or reading.sure

    def _open_folder(self) -> None:
        """Make the output folder, or check that it belongs to this run; copy the run's files that a report reads.

        The records are not copied, since the judge writes them anew.
        """
        run, out = self._run, self._out
        provenance = run.provenance()
        if out.path.resolve() == run.path.resolve():
            raise RunError(f"{str(out.path)!r} is the run that is to be judged; give another --out")
        present: Mapping[str, Any] = {}
        if check_folder(out.path, out.spec, resume=True):
            present = out.provenance()
            # the time of its start identifies a run
            if JUDGED not in present or present.get("started") != provenance.get("started"):
                raise RunError(
                    f"{str(out.path)!r} holds another run than {str(run.path)!r} judged again; give another --out"
                )
        make_folder(out.records)
        with mutex(out.path / ".provenance.lock"):
            judged = self._provenance(provenance, present)
            if present and present[JUDGED].get("judge") != judged[JUDGED].get("judge"):
                self._replacing = judged
            else:
                write_json(out.path / PROVENANCE, judged)
            for pattern, name in _COPIED.items():
                for path in run.path.glob(pattern):
                    copy = out.path / path.relative_to(run.path).with_name(name)
                    make_folder(copy.parent)
                    shutil.copyfile(path, copy.with_name(copy.name + PARTIAL))
                    os.replace(copy.with_name(copy.name + PARTIAL), copy)
            # last, because a folder with a spec must have all the rest
            write_whole(out.path / SPEC, (run.path / SPEC).read_text(encoding="utf-8"))

    def _provenance(self, provenance: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's provenance with an entry ``judged``: which records, suite versions, plug-ins and judge.

        ``present`` is the provenance that the output folder has, if any.
        """
        names = self._run.spec.evaluate.suites
        digests = {unit.records.name: unit.sha256 for unit in self.units}
        judged = {
            "from": self._run.path.resolve().name,
            "records": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
            "suite_versions": {unit.suite: unit.version for unit in self.units},
            "kvaudit": __version__,
            "plug-ins": dict(self._plugins),
        }
        if self._judge is not None:
            judged["judge"] = {"name": self._judge.name, "sha256": self._judge.identity}
        # labels stay with the run whose answers they are of
        provenance = {key: value for key, value in provenance.items() if key != LABELLED}
        if LABELLED in present:
            provenance[LABELLED] = present[LABELLED]
        return {**provenance, "suite_versions": {name: SUITES.get(name).version for name in names}, JUDGED: judged}

    def _identity(self, unit: StoredUnit) -> dict[str, Any]:
        """Return all that a unit's new grades depend on; a unit whose seal stores the same is judged already."""
        by = {"suite": SUITES.get(unit.suite).version, "kvaudit": __version__, "plug-ins": dict(self._plugins)}
        judge = {} if self._judge is None else {"judge": self._judge.identity}
        return {"from": unit.sha256, "by": {**by, **judge}}


def _changes(old: Record, new: Record, judge: Judge | None) -> dict[str, int]:
    """Return 1 or 0 for each of the counts of ``SuiteChange``: what the new grade changed about one answer.

    ``answers`` is always 1; ``scores`` and ``outcomes``: whether they changed; ``judged``: the judge graded it;
    ``unsure``: its grader is not sure; ``failed``: the judge gave no grade.
    """
    is_judged = judge is not None and new.judge == judge.label
    return {
        "answers": 1,
        "scores": old.score != new.score,
        "outcomes": old.outcome is not new.outcome,
        "judged": is_judged,
        "unsure": new.unsure,
        "failed": is_judged and new.score is None,
    }


def _is_desired(record: Record) -> bool:
    return record.score is not None and record.score >= 0.5
