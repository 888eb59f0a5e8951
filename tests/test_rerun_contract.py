"""Every measure of the registry, or those of ``--measure-file``: what is served again comes out as it was recorded.

A measure is tried on a small finished run. Nobody has changed anything there, so nothing may differ; and under other
weights everything that says so must.
"""

from __future__ import annotations

import copy
import hashlib
import random
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from test_cli import kvaudit

from kvaudit.audit.rerun.measure import MEASURES, Measure, run_measure
from kvaudit.audit.rerun.mismatch import Mismatch
from kvaudit.audit.rerun.shade import Explain, Shade
from kvaudit.audit.rerun.verify import Verify
from kvaudit.audit.runs.folder import RunFolder, existing_run
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError

SPEC = """\
name: again
model: {model}
train:
  arms: [dense]
  seeds: [1]
  policy: none
  suites: [refusal]
  context_tokens: 450
  steps: 1
  prompts_per_step: 1
  group: 2
  save_every: 1
  ledger_every: 1
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{refusal: {{items: 2}}}}
  context_tokens: [450]
  samples: 2
  temperature: 1.0
"""
HOSTILE = "again\x1b[31m\u202e"  # a folder's name
AnyMeasure = Measure[Any, Any, Any]
Check = Callable[[type[AnyMeasure], Path], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried" in metafunc.fixturenames:
        file = metafunc.config.getoption("measure_file")
        metafunc.parametrize("tried", sorted(MEASURES.all() if file is None else MEASURES.load_file(file)))


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "spec.yaml").write_text(SPEC.format(model=tiny_folder))
    code, out, err = kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, out + err
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / HOSTILE)


def texts(measure: AnyMeasure, found: Sequence[Any]) -> list[str]:
    """Everything that a measure prints of what it found."""
    lines = measure.lines(found)
    return [text for line in lines for text in ([line] if isinstance(line, str) else sum(line.rows, line.headers))]


class Tried(NamedTuple):
    """A measure, what it found in a run that nobody changed, and whether the run's files are as they were."""

    measure: AnyMeasure
    found: Sequence[Any]
    is_untouched: bool


_TRIED: dict[type[AnyMeasure], Tried] = {}


def tried_on(kind: type[AnyMeasure], run: Path) -> Tried:
    """What the measure found when it was tried for the first time."""
    if kind not in _TRIED:
        before, measure = digests(run), kind.trial(existing_run(run))
        found = run_measure(measure)
        _TRIED[kind] = Tried(measure, found, digests(run).items() >= before.items())
    return _TRIED[kind]


def digests(run: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()}


def other_weights(model: LoadedModel) -> LoadedModel:
    """A model of the same name and shape that has learnt something else."""
    changed = copy.deepcopy(model.model)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.5)
    return replace(model, model=changed)


def check_every_recorded_item_comes_back_once(kind: type[AnyMeasure], run: Path) -> None:
    measure = kind.trial(existing_run(run))
    units = measure.units()
    assert units
    for unit in units:
        assert sum(map(len, measure.serve(unit, measure.model(unit)))) == measure.size(unit) > 0


def check_what_nobody_changed_does_not_differ(kind: type[AnyMeasure], run: Path) -> None:
    measure, found, _ = tried_on(kind, run)
    assert found
    assert not any(measure.differs(total) for _, total in found)


def check_other_weights_differ_or_are_refused(kind: type[AnyMeasure], run: Path) -> None:
    measure = kind.trial(existing_run(run))
    given = measure.model
    measure.model = lambda unit: other_weights(given(unit))  # type: ignore[method-assign]
    try:
        found = run_measure(measure)
    except DataError:
        return
    assert any(measure.differs(total) for _, total in found)


def check_twice_is_the_same_and_says_something(kind: type[AnyMeasure], run: Path) -> None:
    whole = shutil.copytree(run, run.with_name("whole"))
    found = []
    for _ in range(2):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        measure = kind.trial(existing_run(run))
        found.append(texts(measure, run_measure(measure)))
    assert found[0] == found[1] != []


def check_nothing_recorded_is_written_to(kind: type[AnyMeasure], run: Path) -> None:
    assert tried_on(kind, run).is_untouched


def check_names_that_are_hostile_are_made_visible(kind: type[AnyMeasure], run: Path) -> None:
    measure, found, _ = tried_on(kind, run)
    labels = [measure.label(unit) for unit in measure.units()]
    for said in (*labels, *texts(measure, found)):
        text = said.replace("\n ", "")  # an answer may have lines, which are indented
        assert not [character for character in text if unicodedata.category(character) in ("Cc", "Cf")], text


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_measure_keeps_the_contract(tried: str, check: Check, run: Path) -> None:
    check(MEASURES.get(tried), run)


class Forgetful(Verify):
    """Leaves a rollout out."""

    def serve(self, unit: Any, model: LoadedModel) -> Iterator[Any]:
        yield from (part[1:] for part in super().serve(unit, model))


class Content(Mismatch):
    """Finds no fault with any weights."""

    def differs(self, total: Any) -> bool:
        return False


class Alarmed(Explain):
    """Finds fault with what is as it was."""

    def differs(self, total: Any) -> bool:
        return True


class Drawn(Verify):
    """Says something else every time."""

    def lines(self, found: Sequence[Any]) -> Iterator[Any]:
        yield str(random.random())


class Scribbling(Shade):
    """Notes in the records what it found."""

    def reduce(self, unit: Any, model: LoadedModel, batches: Iterator[Any]) -> Any:
        with next(self._run.path.glob("records/*.jsonl")).open("a") as file:
            file.write("\n")
        return super().reduce(unit, model, batches)


class Raw(Verify):
    """Prints what a file is called as it is."""

    def lines(self, found: Sequence[Any]) -> Iterator[Any]:
        yield from (unit.source for unit, _ in found)


WRONG: dict[type[AnyMeasure], Check] = {
    Forgetful: check_every_recorded_item_comes_back_once,
    Content: check_other_weights_differ_or_are_refused,
    Alarmed: check_what_nobody_changed_does_not_differ,
    Drawn: check_twice_is_the_same_and_says_something,
    Scribbling: check_nothing_recorded_is_written_to,
    Raw: check_names_that_are_hostile_are_made_visible,
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_measure_that_is_wrong_in_one_way_is_caught(kind: type[AnyMeasure], run: Path) -> None:
    with pytest.raises(AssertionError):
        WRONG[kind](kind, run)


def test_a_measure_in_a_file_of_its_own_is_found_and_held_to_the_contract(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEASURES, "_classes", MEASURES.all())  # which goes when the test ends
    file = tmp_path / "planted.py"
    file.write_text(
        "from kvaudit.audit.rerun.mismatch import Mismatch\n"
        "class Planted(Mismatch):\n"
        "    name = 'planted'\n"
        "    def size(self, unit): return 0\n"
    )
    assert MEASURES.load_file(file) == ["planted"]
    with pytest.raises(AssertionError):
        check_every_recorded_item_comes_back_once(MEASURES.get("planted"), run)


class Adding(Measure[str, list[int], int]):
    """Sums the numbers of two units."""

    name = "adding"

    @classmethod
    def trial(cls, run: RunFolder) -> Adding:
        return cls()

    def units(self) -> list[str]:
        return ["a", "b"]

    def size(self, unit: str) -> int:
        return 3

    def model(self, unit: str) -> Any:
        return None

    def serve(self, unit: str, model: LoadedModel) -> Iterator[list[int]]:
        yield from ([1], [2, 3])

    def reduce(self, unit: str, model: LoadedModel, batches: Iterator[list[int]]) -> int:
        return sum(map(sum, batches))

    def differs(self, total: int) -> bool:
        return total != 6

    def lines(self, found: Sequence[tuple[str, int]]) -> Iterator[str]:
        yield from (f"{unit} {total}" for unit, total in found)


def test_progress_counts_items_or_units() -> None:
    for by_item, line in ((True, "adding 6/6 (100 %)"), (False, "adding 2/2 (100 %)")):
        measure, text = Adding(), StringIO()
        measure.by_item = by_item  # type: ignore[misc]
        assert run_measure(measure, Console(file=text)) == [("a", 6), ("b", 6)]
        assert text.getvalue().startswith(line)
