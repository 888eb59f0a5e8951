"""Judging as a stage of its own: the stored transcripts of a run, graded again into another run folder.

Nothing is sampled and no weights are loaded. Items are made again from the run's spec, and every stored opening must
be the item's. What was said stays as it is; outcome, score, facets and judge are made again by the suites and the
detector of degenerate answers as they are now. The run that is judged is never written to.

A judge (``audit.judges``) may decide what suites leave to one, in place of their phrase rules. It sees questions alone.
What it failed to answer is unscored, and asked again when judging goes on.

    provenance.json    judged: {"from": name, "records": sha256, "suite_versions": those before, "judge": {...}, ...}
    <unit>.done.json   judged: {"from": sha256 of the records that were judged, "by": {...}}, changed: {...}
    answers-*.jsonl    what the judge said, by hash of the question (``audit.judges.remembered``)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from audit import __version__
from audit.core.errors import DataError, RunError
from audit.core.files import PARTIAL, mutex, read_json, write_json, write_whole
from audit.core.inputs import ROWS, TABLE, Digests, check_same
from audit.core.intact import check_checkpoints, check_sealed, seal_of
from audit.core.provenance import JUDGED, ORIGIN, PROVENANCE
from audit.core.questions import Question
from audit.core.records import FORMAT, Grade, Item, Record, Role
from audit.judges.base import Judge, question_key, refuse_own_rows
from audit.judges.remembered import Remembered
from audit.runs.claims import Claim, work_through
from audit.runs.evaluate import asked_suite, evaluation_items
from audit.runs.folder import SPEC, RunFolder, check_folder, make_folder
from audit.runs.probe.plan import counter
from audit.runs.progress import Meter
from audit.sampling.exchange import graded, question_of, settled
from audit.sampling.model import load_chat
from suites.base import SUITES, CountTokens, Suite
from suites.sources import watched

_COUNTS = ("answers", "scores", "outcomes", "judged", "failed")
AGREEMENT = ((True, True), (True, False), (False, True), (False, False))  # desired before, and now
_BESIDE = {  # what a report shows besides records, and under which name it goes along
    "displacement.json": "displacement.json",
    "scan.json": "scan.json",
    "answers.json": "answers.json",
    "checkpoints/*/seed-*/telemetry.jsonl": "telemetry.jsonl",
    f"checkpoints/*/seed-*/{PROVENANCE}": ORIGIN,  # under its own name it would say that the weights are here
    f"checkpoints/*/seed-*/{ORIGIN}": ORIGIN,
}


@dataclass(frozen=True)
class StoredUnit:
    """A finished unit of the run that is judged; ``sha256`` is what its seal says of its records."""

    records: Path
    seal: Mapping[str, Any]
    suite: str
    context_tokens: int
    version: str  # of the suite that graded it before

    @property
    def sha256(self) -> str:
        return str(self.seal.get("sha256"))


class Asked(NamedTuple):
    """A suite, its items by id, and the judge that settles what the suite leaves to one."""

    suite: Suite
    items: Mapping[str, Item]
    judge: Remembered | None = None


class Change(NamedTuple):
    """What judging changed in one suite."""

    suite: str
    versions: str  # before -> now
    answers: int
    scores: int
    outcomes: int
    judged: int  # by a judge, those that it failed on included
    failed: int


class Judging:
    """One process's work on judging a run; several may share it.

    Raises DataError where the run or one of its checkpoints is not as it was finished, RunError where ``out`` holds
    something else than this run judged. ``plugins``: file name -> sha256, of the suites that grade now.
    """

    def __init__(
        self, run: RunFolder, out: Path, console: Console, plugins: Digests, judge: Judge | None = None
    ) -> None:
        check_checkpoints(run.path)
        self._run, self._console, self._plugins, self._by = run, console, plugins, judge
        self._tried: set[Path] = set()  # units of this process: what failed in them is left to the next one
        self.units, self.unfinished = stored_units(run)
        self._out = RunFolder(out, run.spec)
        self._asked: tuple[tuple[str, int], Asked] | None = None
        self._count = _count_of(run)
        self._open()
        self._judge_of = None if judge is None else Remembered(judge, out)

    def work(self) -> list[Change]:
        """Judge every unit that is not judged yet; returns what changed, by suite."""
        rows, done = sum(map(_rows, self.units)), sum(map(_rows, filter(self._is_judged, self.units)))
        with Meter(self._console, "judge", rows, done) as meter:
            before = 0

            def finished(unit: StoredUnit) -> None:
                nonlocal before
                before += _rows(unit)
                meter.at(before, f"{unit.suite} {unit.context_tokens}")

            work_through(
                self.units,
                done=self._is_judged,
                lock=lambda unit: self._out.records / unit.records.with_suffix(".lock").name,
                work=self._judge,
                finished=finished,
                waiting=lambda text: self._console.print(text, markup=False, highlight=False, soft_wrap=True),
            )
        return self._changes()

    def _open(self) -> None:
        """Make the folder, or hold what is there to this run; bring what a report shows besides records up to date."""
        run, out = self._run, self._out
        told = run.provenance()
        if out.path.resolve() == run.path.resolve():
            raise RunError(f"{str(out.path)!r} is the run that is to be judged; give another --out")
        if check_folder(out.path, out.spec, resume=True):
            held = out.provenance()
            if JUDGED not in held or held.get("started") != told.get("started"):
                raise RunError(
                    f"{str(out.path)!r} holds another run than {str(run.path)!r} judged again; give another --out"
                )
        make_folder(out.records)
        with mutex(out.path / ".provenance.lock"):
            write_json(out.path / PROVENANCE, self._story(told))
            for pattern, name in _BESIDE.items():
                for path in run.path.glob(pattern):
                    _copy(path, out.path / path.relative_to(run.path).with_name(name))
            write_whole(out.path / SPEC, (run.path / SPEC).read_text(encoding="utf-8"))

    def _story(self, told: Mapping[str, Any]) -> dict[str, Any]:
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
        return {**told, "suite_versions": {name: SUITES.get(name).version for name in names}, JUDGED: judged}

    def _seal(self, unit: StoredUnit) -> Path:
        return seal_of(self._out.records / unit.records.name)

    def _stamp(self, unit: StoredUnit) -> dict[str, Any]:
        """What was judged by what: a unit that was finished under the same is not judged again."""
        by = {"suite": SUITES.get(unit.suite).version, "kvaudit": __version__, "plug-ins": dict(self._plugins)}
        judge = {} if self._by is None else {"judge": self._by.identity}
        return {"from": unit.sha256, "by": {**by, **judge}}

    def _is_judged(self, unit: StoredUnit) -> bool:
        if not self._seal(unit).exists():
            return False
        seal = read_json(self._seal(unit))
        failed = seal.get("changed", {}).get("failed", 0)
        return seal.get(JUDGED) == self._stamp(unit) and (not failed or unit.records in self._tried)

    def _judge(self, unit: StoredUnit, mine: Claim) -> None:
        """Write a unit's records beside their place, a line at a time, and seal them."""
        with unit.records.open("rb") as file:
            check_sealed(unit.records, hashlib.file_digest(file, "sha256").hexdigest(), unit.seal)
        asked, seal = self._asked_of(unit), self._seal(unit)
        place = self._out.records / unit.records.name
        partial = place.with_name(place.name + PARTIAL)
        digest, counted = hashlib.sha256(), Counter[str]()
        pairs = Counter[tuple[bool, bool]]()
        with partial.open("wb") as file:
            for old, new in regraded(unit, asked):
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
        self._tried.add(unit.records)
        changed = {"was": unit.version, **{name: counted[name] for name in _COUNTS}}
        if self._by is not None:
            changed["pairs"] = [pairs[key] for key in AGREEMENT]
        written = {"records": counted["answers"], "sha256": digest.hexdigest(), JUDGED: self._stamp(unit)}
        write_json(seal, {**unit.seal, **written, "changed": changed})

    def _asked_of(self, unit: StoredUnit) -> Asked:
        """The items of a unit; those of one suite and length are in memory at a time."""
        key = (unit.suite, unit.context_tokens)
        if self._asked is None or self._asked[0] != key:
            suite = asked_suite(self._run.spec, unit.suite)
            with watched() as rows:
                items = evaluation_items(self._run.spec, suite, unit.context_tokens, self._count)
            self._hold(rows)
            self._asked = key, Asked(suite, {item.item_id: item for item in items}, self._judge_of)
        return self._asked[1]

    def _hold(self, rows: Digests) -> None:
        """Refuse other public rows than those the run noted: the right answers stand there, not in the transcript."""
        noted = self._run.provenance().get(TABLE)
        if noted is not None:  # a run of an earlier version noted none
            then = noted.get(ROWS, {})
            check_same(ROWS, {name: then[name] for name in rows if name in then}, rows)

    def agreement(self) -> dict[str, list[int]]:
        """By suite, in how many answers the judge and the one before it say the same (``AGREEMENT``)."""
        found: dict[str, list[int]] = {}
        for unit in self.units:
            pairs = read_json(self._seal(unit))["changed"].get("pairs", [])
            if any(pairs):
                total = found.get(unit.suite, [0] * len(AGREEMENT))
                found[unit.suite] = [have + more for have, more in zip(total, pairs, strict=True)]
        return found

    def _changes(self) -> list[Change]:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for unit in self.units:
            found.setdefault(unit.suite, []).append(read_json(self._seal(unit))["changed"])
        return [
            Change(
                suite,
                f"{', '.join(sorted({part['was'] for part in parts}))} -> {SUITES.get(suite).version}",
                *(sum(part.get(key, 0) for part in parts) for key in _COUNTS),
            )
            for suite, parts in found.items()
        ]


def stored_units(run: RunFolder) -> tuple[list[StoredUnit], list[str]]:
    """The finished units of a run, those of one suite and length together, and the names of the unfinished."""
    found, unfinished = [], []
    for records in sorted(run.records.glob("*.jsonl")):
        if not seal_of(records).exists():
            unfinished.append(records.name)
            continue
        with records.open("rb") as lines:
            first = _record(records, 1, lines.readline())
        if first.suite not in run.spec.evaluate.suites:
            raise DataError(
                f"{str(records)!r} holds suite {first.suite!r}, which the run's spec does not ask for; remove the file "
                "and its seal"
            )
        seal = read_json(seal_of(records))
        found.append(StoredUnit(records, seal, first.suite, first.context_tokens, first.suite_version))
    if not found:
        raise DataError(f"no finished units in {str(run.records)!r}; nothing is there to judge")
    return sorted(found, key=lambda unit: (unit.suite, unit.context_tokens, unit.records.name)), unfinished


def regraded(unit: StoredUnit, asked: Asked) -> Iterator[tuple[Record, Record]]:
    """Every record of a unit as it was, and as it is judged now."""
    said = {} if asked.judge is None else _said(unit, asked, asked.judge)
    for old, item in _items_of(unit, asked):
        grade = _grade(old, item, asked, said)
        yield (
            old,
            replace(
                old,
                suite_version=asked.suite.version,
                cluster_id=item.cluster_id,
                placement=item.placement,
                outcome=grade.outcome,
                score=grade.score,
                judge=grade.judge,
                facets=grade.facets,
                format=FORMAT,
            ),
        )


def _said(unit: StoredUnit, asked: Asked, judge: Remembered) -> dict[str, bool | None]:
    """What the judge says of a unit, by the key of the question: asked in bulk, before a record is written."""
    found = (_question(old, item, asked) for old, item in _items_of(unit, asked))
    questions = list({question_key(question): question for question in found if question is not None}.values())
    refuse_own_rows(judge.judge, questions)
    return dict(zip(map(question_key, questions), judge.refused(questions), strict=True))


def _question(old: Record, item: Item, asked: Asked) -> Question | None:
    return question_of(asked.suite, item, old.transcript, old.finish_reason)


def _grade(old: Record, item: Item, asked: Asked, said: Mapping[str, bool | None]) -> Grade:
    question = None if asked.judge is None else _question(old, item, asked)
    if asked.judge is None or question is None:
        return graded(asked.suite, item, old.transcript, old.finish_reason)
    refused = said[question_key(question)]
    return settled(asked.suite, item, old.transcript, refused=refused, judge=asked.judge.judge.label)


def _counted(old: Record, new: Record, judge: Judge | None) -> dict[str, int]:
    """What one answer adds to the counts of a seal."""
    judged = judge is not None and new.judge == judge.label
    return {
        "answers": 1,
        "scores": old.score != new.score,
        "outcomes": old.outcome is not new.outcome,
        "judged": judged,
        "failed": judged and new.score is None,
    }


def _desired(record: Record) -> bool:
    return record.score is not None and record.score >= 0.5


def _items_of(unit: StoredUnit, asked: Asked) -> Iterator[tuple[Record, Item]]:
    """Every record of a unit with the item it answers."""
    with unit.records.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            old = _record(unit.records, number, line)
            yield old, _item_of(old, asked, f"{str(unit.records)!r} line {number}")


def _item_of(record: Record, asked: Asked, where: str) -> Item:
    """The item that a record answers; raises DataError where today's suite asks something else under its name."""
    item = asked.items.get(record.item_id)
    suite = f"suite {asked.suite.name} of version {asked.suite.version}"
    if item is None or record.suite != asked.suite.name:
        raise DataError(
            f"{where}: item {record.item_id!r} of suite {record.suite!r} is none that {suite} asks under the run's "
            f"spec (it was of version {record.suite_version}); judge it with the kvaudit, tokenizer and rows it is from"
        )
    opening, said = record.transcript[: len(item.messages)], record.transcript[len(item.messages) :]
    if opening != item.messages or not said or said[0].role not in (Role.THOUGHT, Role.ASSISTANT):
        raise DataError(
            f"{where}: the transcript does not open with item {record.item_id!r} as {suite} asks it now (it was of "
            f"version {record.suite_version}); judge it with the kvaudit, tokenizer and rows it is from"
        )
    return item


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} line {number}: {error}; delete the unit and evaluate it again") from None


def _count_of(run: RunFolder) -> CountTokens:
    """What counted the tokens of the run's items."""
    return load_chat(_tokenizer_of(run)).count_tokens if run.spec.probe is None else counter(run.spec)[0]


def _tokenizer_of(run: RunFolder) -> str:
    """Where the tokenizer lies that made the run's items: with its own checkpoints, where it keeps some."""
    own = sorted(run.path.glob("checkpoints/*/seed-*/tokenizer.json"))
    return str(own[0].parent) if own else run.spec.model_path


def _rows(unit: StoredUnit) -> int:
    return int(unit.seal.get("records", 0))


def _copy(path: Path, place: Path) -> None:
    make_folder(place.parent)
    partial = place.with_name(place.name + PARTIAL)
    shutil.copyfile(path, partial)
    os.replace(partial, place)
