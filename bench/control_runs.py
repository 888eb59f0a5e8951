"""Runs whose true drift is known: one checkpoint sampled again and again, and copies of its records spoilt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from rich.console import Console

from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.evaluate import Batches, Evaluator, served_policies
from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.prepare import prepare_run
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.chat import ChatTokens
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.files import write_json
from kvaudit.core.records import Item, Outcome, Record
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.suites.base import SUITES, Suite

SUITE_NAMES = ("refusal", "agent", "math")
CONTEXT, MARGIN = 192, 5.0  # tokens, pp: those of examples/quickstart.yaml
DENSE = "none"
SERVED = "snapkv:budget=96,window=16,interval=8"
RUINOUS = "streaming:budget=16,sink=4"
BASE, AGAIN = "base", "rerun"
Change = Callable[[Record], Record]
Spoil = Callable[[float], float]


@dataclass(frozen=True)
class Size:
    """How much is sampled and drawn."""

    items: int = 144  # of each suite, as in examples/quickstart.yaml
    reruns: int = 12
    splits: int = 200  # verdicts of each kind


def spec_of(size: Size, policies: Sequence[str]) -> RunSpec:
    """The embedded model before any training, asked at temperature 1."""
    table = {
        "name": "controls",
        "evaluate": {
            "policies": list(policies),
            "suites": {suite: {"items": size.items} for suite in SUITE_NAMES},
            "context_tokens": [CONTEXT],
            "temperature": 1.0,
            "batch_tokens": 24576,
        },
        "gate": {"primary": list(policies), "margins": dict.fromkeys(SUITE_NAMES, MARGIN), "estimands": ["alike"]},
    }
    return parse_spec(yaml.safe_dump(table), "controls", NAMES)


class Rerun(Evaluator):
    """Evaluates the same items once more: other sampling seeds, other batches, in the other order."""

    def __init__(self, model: LoadedModel, spec: RunSpec, number: int) -> None:
        super().__init__(model, spec, Batches())
        self._number = number

    def _play_batch(
        self, sampler: Sampler, suite: Suite, batch: Sequence[Item], prompts: Sequence[ChatTokens] | None = None
    ) -> list[GradedRow]:
        seeds = [derive_seed("rerun", self._number, suite.name, item.item_id) for item in batch]
        asked, decoding = [(suite, item) for item in batch], Decoding(suite.max_new_tokens, temperature=1.0)
        return play(sampler, asked, decoding, seeds, prompts=prompts)

    def _make_batches(self, suite: Suite, items: Sequence[Item]) -> list[list[Item]]:
        return super()._make_batches(suite, items)[::-1]

    @property
    def _batch_tokens(self) -> int:
        return self._spec.evaluate.batch_tokens // (2 + self._number % 3)


def rerun_arm(number: int) -> str:
    """The name under which a rerun's records lie."""
    return f"{AGAIN}-{number:02d}"


def sample(folder: Path, size: Size) -> RunFolder:
    """The reference under every policy by the ordinary pipeline, then its reruns; goes on where it stopped."""
    spec = spec_of(size, (DENSE, SERVED, RUINOUS))
    run = open_run(folder, spec, resume=True)
    prepared = prepare_run(spec)
    Pipeline(run, Console(), 1, prepared).work_on("evaluate")
    for number in range(size.reruns):
        evaluator = Rerun(prepared.model, spec, number)
        for policy in served_policies(spec)[:2]:
            for suite in SUITE_NAMES:
                unit = Unit(rerun_arm(number), 0, policy, suite, CONTEXT)
                if not UnitFiles.of(run.records, unit).seal.exists():
                    evaluator.answer_units([unit], run, lambda *_: None)
        run.note(checkpoints={f"{rerun_arm(number)}/0": prepared.model.sha256})
    return run


def copy_run(
    source: RunFolder,
    target: Path,
    arms: Mapping[str, Sequence[str]],
    policies: Sequence[str],
    change: Change | None = None,
) -> Path:
    """A run folder with the records of some arms, each under one or more names; ``change`` spoils those of AGAIN."""
    size = Size(items=next(iter(source.spec.evaluate.suites.values())).items)
    run, known = open_run(target, spec_of(size, policies), resume=False), source.provenance()
    pairs = [(old, new) for old, names in arms.items() for new in names]
    for old, new in pairs:
        for policy in served_policies(run.spec):
            for suite in SUITE_NAMES:
                theirs = UnitFiles.of(source.records, Unit(old, 0, policy, suite, CONTEXT))
                rows = map(Record.from_json, theirs.records.read_text(encoding="utf-8").splitlines())
                named = [replace(row, arm=new) for row in rows]
                if change is not None and new == AGAIN:
                    named = [change(row) for row in named]
                _seal(UnitFiles.of(run.records, Unit(new, 0, policy, suite, CONTEXT)), named)
    weights = known["base_sha256"]
    kinds = {suite: SUITES.get(suite).kind for suite in SUITE_NAMES}
    run.note(base_sha256=weights, reference_sha256={"0": weights}, suite_kinds=kinds)
    run.note(checkpoints={f"{new}/0": weights for _, new in pairs if new != BASE})
    return target


def flip(score: float) -> float:
    """The opposite label."""
    return 1.0 - score


def break_down(score: float) -> float:  # noqa: ARG001
    """A template that broke gets nothing right."""
    return 0.0


def spoil_templates(templates: frozenset[str], spoil: Spoil) -> Change:
    """What ``spoil`` makes of every label of these templates."""

    def change(row: Record) -> Record:
        if row.cluster_id not in templates or row.score is None or spoil(row.score) == row.score:
            return row
        outcome = Outcome.UNDESIRED if row.score else Outcome.DESIRED
        return replace(row, score=spoil(row.score), outcome=outcome)

    return change


def _seal(files: UnitFiles, rows: Sequence[Record]) -> None:
    text = "".join(row.to_json() + "\n" for row in rows).encode()
    files.records.write_bytes(text)
    seal = {"records": len(rows), "sha256": hashlib.sha256(text).hexdigest(), "checkpoint": rows[0].checkpoint}
    write_json(files.seal, seal)
