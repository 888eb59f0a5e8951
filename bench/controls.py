"""Is the gate right on real answers whose true drift is known? No drift (A/A) must not FAIL, a planted loss must.

    python -m bench.controls [FOLDER]

Takes about 4 minutes; results: docs/results/controls.md. FOLDER (default runs/controls) keeps the sampled answers for
the next call. Every verdict is the one that ``kvaudit gate`` gives. Exits with 3 if a control fails.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

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
from kvaudit.core.provenance import INPUTS, inputs_sha256
from kvaudit.core.records import Item, Outcome, Record
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.core.spec_evaluate import SuiteSpec
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import decide_run, write_report
from kvaudit.reports.sections.churn import BothSides, gated_sides
from kvaudit.reports.verdict.sizes import Design, pass_chance
from kvaudit.reports.verdict.verdict import Decision, Status, Verdict
from kvaudit.suites.base import SUITES, Suite

SUITE_NAMES = ("refusal", "agent", "math")
CONTEXT, MARGIN = 192, 5.0  # tokens, pp: those of examples/quickstart.yaml
DENSE = "none"
SERVED = "snapkv:budget=96,window=16,interval=8"
RUINOUS = "streaming:budget=16,sink=4"
BASE, RERUN = "base", "rerun"
Change = Callable[[Record], Record]
Spoil = Callable[[float], float]
ALPHA = 0.05
Rng = np.random.Generator
CellOf = tuple[str, str]  # suite, policy
SPOILT_SHARE = 0.1
TOO_FEW = 4  # templates: with k that differ no sign-flip p-value is below 1/2^k, and 1/16 is above .05
MISSED = 3
MOST_LISTED = 20  # templates of a cell


# --- runs whose true drift is known ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How many answers are sampled and how many verdicts are drawn."""

    items: int = 144  # of each suite, as in examples/quickstart.yaml
    reruns: int = 12
    splits: int = 200  # verdicts of each kind


def spec_of(size: Size, policies: Sequence[str]) -> RunSpec:
    """Return the spec of the embedded model before any training, asked at temperature 1."""
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
    """An evaluator of the same items with other sampling seeds and batches, in reverse order."""

    def __init__(self, model: LoadedModel, spec: RunSpec, number: int) -> None:
        super().__init__(model, spec, Batches())
        self._number = number

    def _play_batch(
        self, sampler: Sampler, suite: Suite, batch: Sequence[Item], prompts: Sequence[ChatTokens] | None = None
    ) -> list[GradedRow]:
        seeds = [derive_seed("rerun", self._number, suite.name, item.item_id) for item in batch]
        pairs, decoding = [(suite, item) for item in batch], Decoding(suite.max_new_tokens, temperature=1.0)
        return play(sampler, pairs, decoding, seeds, prompts=prompts)

    def _make_batches(self, suite: Suite, items: Sequence[Item]) -> list[list[Item]]:
        return super()._make_batches(suite, items)[::-1]

    @property
    def _batch_tokens(self) -> int:
        return self._spec.evaluate.batch_tokens // (2 + self._number % 3)


def rerun_arm(number: int) -> str:
    """Return the arm's name under which a rerun's records are stored."""
    return f"{RERUN}-{number:02d}"


def sample(folder: Path, size: Size) -> RunFolder:
    """Evaluate the base model under every policy, then its reruns; continues an interrupted folder."""
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
    """Write a run folder with some arms' records, each under one or more names; ``change`` edits those of RERUN."""
    size = Size(items=next(iter(source.spec.evaluate.suites.values())).items)
    run = open_run(target, spec_of(size, policies), resume=False)
    pairs = [(old, new) for old, names in arms.items() for new in names]
    inputs = inputs_sha256(run.provenance().get(INPUTS))
    for old, new in pairs:
        for policy in served_policies(run.spec):
            for suite in SUITE_NAMES:
                files = UnitFiles.of(source.records, Unit(old, 0, policy, suite, CONTEXT))
                rows = map(Record.from_json, files.records.read_text(encoding="utf-8").splitlines())
                copies = [replace(row, arm=new) for row in rows]
                if change is not None and new == RERUN:
                    copies = [change(row) for row in copies]
                _seal(UnitFiles.of(run.records, Unit(new, 0, policy, suite, CONTEXT)), copies, inputs)
    weights = source.provenance()["base_sha256"]
    kinds = {suite: SUITES.get(suite).kind for suite in SUITE_NAMES}
    hashes = {policy.canonical: policy.hash for policy in served_policies(run.spec)}
    versions = {suite: SUITES.get(suite).version for suite in SUITE_NAMES}
    run.note(base_sha256=weights, reference_sha256={"0": weights}, suite_kinds=kinds)
    run.note(policies=hashes, suite_versions=versions)
    run.note(checkpoints={f"{new}/0": weights for _, new in pairs if new != BASE})
    return target


def flip_label(score: float) -> float:
    """Return the opposite label."""
    return 1.0 - score


def break_label(score: float) -> float:  # noqa: ARG001
    """Return 0, the score of every answer of a broken template."""
    return 0.0


def spoil_templates(templates: frozenset[str], spoil: Spoil) -> Change:
    """Return a change that applies ``spoil`` to every label of these templates."""

    def change(row: Record) -> Record:
        if row.cluster_id not in templates or row.score is None or spoil(row.score) == row.score:
            return row
        outcome = Outcome.UNDESIRED if row.score else Outcome.DESIRED
        return replace(row, score=spoil(row.score), outcome=outcome)

    return change


def _seal(files: UnitFiles, rows: Sequence[Record], inputs: str | None) -> None:
    text = "".join(row.to_json() + "\n" for row in rows).encode()
    files.records.write_bytes(text)
    seal = {"records": len(rows), "sha256": hashlib.sha256(text).hexdigest(), "checkpoint": rows[0].checkpoint}
    seal["inputs"] = inputs
    write_json(files.seal, seal)


# --- verdicts on random parts of them --------------------------------------------------------------------------------


def pair_arms(data: RunData, first: str, second: str) -> RunData:
    """Return a run with two arms as reference and candidate; the same arm twice gives an exact copy."""
    arms = data.records["arm"].astype(str)
    parts = [data.records[arms == arm].assign(arm=name) for arm, name in ((first, BASE), (second, RERUN))]
    return with_rows(data, pd.concat(parts, ignore_index=True))


def with_rows(data: RunData, rows: pd.DataFrame) -> RunData:
    """Return the run with other rows, and a spec that declares as many items as they hold."""
    rows = rows[rows["policy"].isin(data.spec.evaluate.policies)]
    items = rows.groupby("suite", observed=True)["item_id"].nunique()
    suites = {str(suite): SuiteSpec(items=int(n)) for suite, n in items.items()}
    evaluate = data.spec.evaluate.model_copy(update={"suites": suites})
    spec = data.spec.model_copy(update={"evaluate": evaluate})
    return replace(data, records=rows.reset_index(drop=True), spec=spec)


def templates_of(data: RunData) -> dict[str, list[str]]:
    """Return the sorted templates of each suite."""
    groups = data.records.groupby("suite", observed=True)["cluster_id"]
    return {str(suite): sorted(map(str, templates.unique())) for suite, templates in groups}


def random_templates(data: RunData, rng: Rng, share: float) -> frozenset[str]:
    """Return a random share of every suite's templates, rounded up."""
    chosen = [
        rng.choice(templates, size=math.ceil(share * len(templates)), replace=False)
        for templates in templates_of(data).values()
    ]
    return frozenset(str(name) for names in chosen for name in names)


def draw_halves(data: RunData, arms: Sequence[str], draws: int, rng: Rng) -> Iterator[RunData]:
    """Yield pairs of runs of one checkpoint, each restricted to a random half of the templates."""
    for _ in range(draws):
        pair = _random_pair(data, arms, rng)
        yield with_rows(pair, pair.records[pair.records["cluster_id"].isin(random_templates(data, rng, 0.5))])


def draw_swaps(data: RunData, arms: Sequence[str], draws: int, rng: Rng) -> Iterator[RunData]:
    """Yield pairs of runs of one checkpoint, swapped in a random half of the templates."""
    for _ in range(draws):
        pair = _random_pair(data, arms, rng)
        is_swapped = pair.records["cluster_id"].isin(random_templates(data, rng, 0.5))
        other = pair.records["arm"].map({BASE: RERUN, RERUN: BASE})
        yield with_rows(pair, pair.records.assign(arm=pair.records["arm"].where(~is_swapped, other)))


def spoil_candidate(pair: RunData, templates: frozenset[str], spoil: Spoil) -> RunData:
    """Return the pair with ``spoil`` applied to the candidate's scores of these templates."""
    is_spoilt = pair.records["cluster_id"].isin(templates) & (pair.records["arm"] == RERUN)
    score = pair.records["score"]
    return with_rows(pair, pair.records.assign(score=score.where(~is_spoilt, score.map(spoil))))


def draw_losses(
    data: RunData, arms: Sequence[str], draws: int, rng: Rng, *, share: float, spoil: Spoil, copy: bool
) -> Iterator[RunData]:
    """Yield pairs whose candidate, an exact copy or another run, is spoilt in a random ``share`` of the templates."""
    for _ in range(draws):
        arm = str(rng.choice(arms))
        yield spoil_candidate(
            pair_arms(data, arm, arm) if copy else _random_pair(data, arms, rng),
            random_templates(data, rng, share),
            spoil,
        )


def _random_pair(data: RunData, arms: Sequence[str], rng: Rng) -> RunData:
    first, second = rng.choice(arms, size=2, replace=False)
    return pair_arms(data, str(first), str(second))


@dataclass(frozen=True)
class StatusShares:
    """How often each status occurred: of whole verdicts, and of each gated cell."""

    verdicts: Counter[Status]
    cells: dict[CellOf, Counter[Status]]

    @property
    def draws(self) -> int:
        """The number of verdicts."""
        return self.verdicts.total()

    @property
    def fail(self) -> float:
        """The share of verdicts that are FAIL."""
        return self.verdicts[Status.FAIL] / self.draws


def status_shares(runs: Iterable[RunData]) -> StatusShares:
    """Count the verdicts of many runs."""
    counts = StatusShares(Counter(), {})
    for data in runs:
        verdict = decide_run(data).verdict
        counts.verdicts[verdict.status] += 1
        for d in gated_cells(verdict):
            counts.cells.setdefault((d.suite, d.policy), Counter())[d.status] += 1
    return counts


def gated_cells(verdict: Verdict) -> list[Decision]:
    """Return the cells that enter the verdict."""
    return [d for d in verdict.decisions if d.gated]


def fail_limit(draws: int) -> float:
    """Return the largest acceptable share of FAIL in ``draws`` A/A verdicts: three standard errors above ALPHA."""
    return ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / draws)


def planned_pass_rates(data: RunData, arms: Sequence[str]) -> dict[CellOf, float]:
    """Return P(PASS) of each cell without drift on all templates, as ``kvaudit plan`` would estimate it."""
    table = data.records.assign(arm=data.records["arm"].astype(str)).pivot_table(
        index=["suite", "policy", "item_id"], columns="arm", values="score", observed=True
    )
    squares = table[list(arms)].diff(axis=1).iloc[:, 1:].pow(2).mean(axis=1).groupby(["suite", "policy"], observed=True)
    templates = {suite: len(names) for suite, names in templates_of(data).items()}

    def pass_rate(suite: str, differs: float, items: int) -> float:
        size = Design(MARGIN / 100, max(differs, 1e-9), templates[suite], items // templates[suite], correlation=0.0)
        return pass_chance(size)

    return {
        (str(suite), str(policy)): pass_rate(str(suite), float(values.mean()), len(values))
        for (suite, policy), values in squares
        if values.notna().all()
    }


# --- controls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellOnDisk:
    """A gated cell of a run on disk, its templates that lost something (worst first), and its spoilt templates."""

    cell: str
    decision: Decision
    listed: tuple[str, ...]
    spoilt: tuple[str, ...]

    @property
    def leading(self) -> int:
        """The number of spoilt templates among the first len(spoilt) of the listed ones."""
        return len(set(self.listed[: len(self.spoilt)]) & set(self.spoilt))


@dataclass(frozen=True)
class Control:
    """One control: what it requires and what was reached."""

    control: str
    required: str
    reached: str
    ok: bool


def run_controls(folder: Path, size: Size, seed: int = 0) -> list[Control]:
    """Sample what is missing, take every verdict, print the shares as they come, and return the controls."""
    rng = np.random.default_rng(seed)
    run = sample(folder / "sampled", size)
    both, arms = (DENSE, SERVED), {BASE: (BASE,), rerun_arm(0): (RERUN,)}
    whole = load_run(copy_run(run, _emptied(folder / "whole"), arms, both))
    print_cells("A/A on disk: the first run against its first rerun", cells_on_disk(whole.run, frozenset()))
    data = replace(load_run(run.path), spec=whole.spec, provenance=whole.provenance)
    names = [BASE, *(rerun_arm(number) for number in range(size.reruns))]
    checks = []
    for title, runs in (
        ("A/A, random half of the templates", draw_halves(data, names, size.splits, rng)),
        ("A/A, all templates, a random half swapped", draw_swaps(data, names, size.splits, rng)),
    ):
        result = status_shares(runs)
        print_shares(title, result, planned_pass_rates(data, names))
        limit = fail_limit(result.draws)
        checks.append(
            Control(title, f"FAIL <= {limit:.3f}", f"{result.fail:.3f} of {result.draws}", result.fail <= limit)
        )
    checks += _check_spoilt(data, names, size, rng)
    checks += _check_on_disk(run, folder, data, rng)
    return checks


def _check_spoilt(data: RunData, names: Sequence[str], size: Size, rng: np.random.Generator) -> list[Control]:
    """Check random losses in many draws.

    Only a copy has no other difference that could hide the loss. A flipped label also turns wrong answers into right
    ones, so FAIL is required of broken templates alone.
    """
    checks = []
    for title, spoil, copy in (
        ("a tenth of the templates of a copy broken", break_label, True),
        ("labels flipped in a tenth of the templates of a copy (shown)", flip_label, True),
        ("a tenth of the templates of another run broken (shown)", break_label, False),
        ("labels flipped in a tenth of the templates of another run (shown)", flip_label, False),
    ):
        result = status_shares(draw_losses(data, names, size.splits, rng, share=SPOILT_SHARE, spoil=spoil, copy=copy))
        print_shares(title, result, {})
        if copy and spoil is break_label:
            checks.append(Control(title, "FAIL 1", f"{result.fail:.3f} of {result.draws}", result.fail == 1))
    return checks


def _check_on_disk(run: RunFolder, folder: Path, data: RunData, rng: np.random.Generator) -> list[Control]:
    """Check run folders as a user has them: the report names failing cells and the templates with the loss."""
    twins, both = {BASE: (BASE, RERUN)}, (DENSE, SERVED)
    chosen = random_templates(data, rng, SPOILT_SHARE)
    few = frozenset(name for names in templates_of(data).values() for name in names[:TOO_FEW])
    rows = {}
    for name, templates in (("broken", chosen), ("few", few)):
        change = spoil_templates(templates, break_label)
        rows[name] = cells_on_disk(copy_run(run, _emptied(folder / name), twins, both, change), templates)
        print_cells(f"{len(templates)} templates of a copy broken, on disk", rows[name])
    starved = cells_on_disk(copy_run(run, _emptied(folder / "starved"), {BASE: (BASE,)}, (DENSE, RUINOUS)), frozenset())
    print_cells("the reference at a ruinous budget, on disk", starved)
    broken, short = _failed(rows["broken"]), _failed(rows["few"])
    exact = all(set(row.listed) <= set(row.spoilt) for row in broken)
    failing = ", ".join(
        f"{row.cell} ({row.leading} of {len(row.spoilt)} broken templates lead its table)" for row in broken
    )
    dead = _failed(starved)
    return [
        Control(
            "broken templates, on disk", "FAIL, only they are listed", failing or "no FAIL", bool(broken) and exact
        ),
        Control(f"{TOO_FEW} broken templates of every suite", "no cell FAILs", f"{len(short)} FAIL", not short),
        Control(
            f"served under {RUINOUS}",
            "every suite FAILs",
            ", ".join(row.cell for row in dead) or "no FAIL",
            len(dead) == len(starved),
        ),
    ]


def _failed(rows: Sequence[CellOnDisk]) -> list[CellOnDisk]:
    return [row for row in rows if row.decision.status is Status.FAIL]


def cells_on_disk(run: Path, spoilt: frozenset[str]) -> list[CellOnDisk]:
    """Write the report of a run and return its gated cells with their losing templates."""
    report = write_report(run)
    lost = {(d.suite, d.policy): losing_templates(both) for d, both in gated_sides(report, load_run(run).panels)}
    rows = []
    for d in gated_cells(report.verdict):
        listed = lost.get((d.suite, d.policy), ())
        of_suite = tuple(sorted(name for name in spoilt if name.startswith(f"{d.suite}-")))
        rows.append(CellOnDisk(f"{d.suite} {report.comparison.labels[d.policy]}", d, listed, of_suite))
    return rows


def losing_templates(both: BothSides) -> tuple[str, ...]:
    """Return the templates that lost something, worst first."""
    lost = Counter[str]()
    for template, difference in zip(both.templates, both.difference, strict=True):
        lost[template] += max(0.0, -float(difference))
    return tuple(template for template, loss in lost.most_common(MOST_LISTED) if loss > 0)


def _emptied(folder: Path) -> Path:
    """Return a folder's path after deleting the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def print_shares(title: str, result: StatusShares, planned: dict[tuple[str, str], float]) -> None:
    """Print the shares of the verdict, then those of each cell."""
    print(f"{title}: {_shares(result.verdicts, result.draws)}")
    for (suite, policy), statuses in sorted(result.cells.items()):
        plan = f"; planned on all templates: PASS {planned[suite, policy]:.3f}" if planned else ""
        print(f"  {suite}, {policy.partition(',')[0]}: {_shares(statuses, result.draws)}{plan}")


def _shares(counts: dict[Status, int], draws: int) -> str:
    return ", ".join(f"{status} {count / draws:.3f}" for status, count in sorted(counts.items()))


def print_cells(title: str, rows: Sequence[CellOnDisk]) -> None:
    print(title)
    for row in rows:
        d, effect = row.decision, row.decision.effect
        bounds = [] if effect is None else [effect.estimate, effect.lower, effect.upper]
        numbers = " ".join(f"{100 * value:+.1f}" for value in bounds)
        top = f"; {row.leading} of {len(row.spoilt)} broken templates lead the table" if row.spoilt else ""
        print(f"  {row.cell}: {d.status}; drift, bounds in pp: {numbers}; max-T p {d.pvalue_drop:.4f}{top}")


def main() -> None:
    started = time.process_time()
    disable_progress_bar()
    checks = run_controls(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/controls"), Size())
    print("control | required | reached | ok")
    for check in checks:
        print(f"{check.control} | {check.required} | {check.reached} | {'yes' if check.ok else 'NO'}")
    print(f"{time.process_time() - started:.0f} s of CPU")
    sys.exit(0 if all(check.ok for check in checks) else MISSED)


if __name__ == "__main__":
    main()
