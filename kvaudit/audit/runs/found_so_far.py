"""Lost and gained answers against the reference while a run goes on: counted from disk, not tested."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.units import PILOT_FOLDER, ROUNDS_FOLDER, Row, Unit, UnitFiles
from kvaudit.core.policy_names import compressed_policies, condition_names, reference_of, short_names
from kvaudit.core.spec import RunSpec


class _Compared(NamedTuple):
    """A named side of the comparison, and pairs of its units with the units that they are compared with."""

    name: str
    pairs: Sequence[tuple[Unit, Unit]]


class _Answers:
    """The scores of a unit of the run in ``folder``; ``update`` reads the complete lines added since the last call."""

    def __init__(self, folder: Path, unit: Unit) -> None:
        self._folder, self._unit = folder, unit
        self._read: dict[Path, int] = {}
        self.scores: dict[Row, float | None] = {}

    def update(self) -> None:
        # every round has a folder of its own
        places = (self._folder / PILOT_FOLDER, self._folder / "records", *self._folder.glob(f"{ROUNDS_FOLDER}/*"))
        for path in (UnitFiles.of(place, self._unit).records for place in places):
            begin = self._read.setdefault(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    whole, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            self._read[path] += len(whole) + len(newline)
            for line in whole.splitlines():
                row = json.loads(line)
                self.scores[row["item_id"], row["sample_index"]] = row["score"]


class FoundSoFar:
    """Compares the reference under every policy with the uncompressed reference, and the other arms with it.

    ``folder`` is the run's.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder

    @cached_property
    def _sides(self) -> list[_Compared]:
        return list(_sides(self._spec))

    @cached_property
    def _rows(self) -> dict[Unit, int]:
        units = dict.fromkeys(unit for side in self._sides for pair in side.pairs for unit in pair)
        return {unit: _rows(self._spec, unit) for unit in units}

    @cached_property
    def _answers(self) -> dict[Unit, _Answers]:
        return {unit: _Answers(self._folder, unit) for unit in self._rows}

    def lines(self) -> list[str]:
        """Return a line for every side with answers: ``int8: no loss so far in 40 of 720 answers``."""
        for unit, answers in self._answers.items():
            is_complete = 0 < self._rows[unit] <= len(answers.scores)
            if not is_complete:
                answers.update()
        return [line for side in self._sides if (line := self._line(side)) is not None]

    def _line(self, side: _Compared) -> str | None:
        lost = gained = compared = 0
        for unit, against in side.pairs:
            ours, theirs = self._answers[unit].scores, self._answers[against].scores
            for row in ours.keys() & theirs.keys():
                now, before = ours[row], theirs[row]
                if now is not None and before is not None:
                    compared += 1
                    lost += now < before
                    gained += now > before
        if not compared:
            return None
        changes = (f"{lost} lost" if lost else "no loss") + (f", {gained} gained" if gained else "")
        rows = [self._rows[unit] for unit, _ in side.pairs]
        total = f" of {sum(rows)}" if all(rows) else ""  # unknown before the pilot for ``all`` and ``auto``
        return f"{side.name}: {changes} so far in {compared}{total} answers"


def policy_labels(spec: RunSpec) -> dict[str, str]:
    """Return short names for the policies and conditions of a grid."""
    policies = spec.evaluate.policies
    return {**short_names(policies), **condition_names(spec.evaluate.references)}


def _sides(spec: RunSpec) -> Iterator[_Compared]:
    units = {(u.arm, u.seed, u.policy.canonical, u.suite, u.context_tokens): u for u in grid(spec)}
    if spec.gate.reference is None:
        return
    reference, references, names = spec.gate.reference, spec.evaluate.references, policy_labels(spec)
    for policy in compressed_policies(spec.evaluate.policies, references):
        plain = reference_of(policy, references)
        yield _Compared(names[policy], list(_pairs(units, (reference, policy), (reference, plain))))
    plain_policies = [policy for policy in spec.evaluate.policies if reference_of(policy, references) == policy]
    others = dict.fromkeys(arm for arm, _ in spec.arms if arm != reference)
    for arm, plain in ((arm, plain_policies[0]) for arm in others if plain_policies):
        yield _Compared(f"{arm} against {reference}", list(_pairs(units, (arm, plain), (reference, plain))))


def _pairs(
    units: Mapping[tuple[str, int, str, str, int], Unit], ours: tuple[str, str], theirs: tuple[str, str]
) -> Iterator[tuple[Unit, Unit]]:
    """Yield the units of two sides in pairs with the same seed, suite and length."""
    for (arm, seed, policy, suite, context), unit in units.items():
        against = units.get((theirs[0], seed, theirs[1], suite, context))
        if (arm, policy) == ours and against is not None:
            yield unit, against


def _rows(spec: RunSpec, unit: Unit) -> int:
    items = spec.evaluate.suites[unit.suite].items
    return items * spec.evaluate.samples_of(unit.suite) if isinstance(items, int) else 0
