"""The phases of a run: train the arms, evaluate the grid, write the report. Each goes on where it stopped."""

from __future__ import annotations

import gc
import os
import shlex
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from kvaudit.audit.cache.layers import describe_governed_layers
from kvaudit.audit.engines import Condition
from kvaudit.audit.policies import POLICIES, parse_policy
from kvaudit.audit.runs.claims import Claim, Claims, ClaimedUnits, work_on_units, work_on_groups
from kvaudit.audit.runs.engine_slot import (
    FIRST_TOKENS,
    EngineSlot,
    OnFirstAnswer,
    check_engine_unchanged,
    try_out_engines,
)
from kvaudit.audit.runs.evaluate import (
    Batches,
    Evaluator,
    suite_as_asked,
    check_contexts,
    check_engines,
    check_reward,
    check_training,
    grid,
    selecting_policies,
    served_policies,
    cache_policies,
)
from kvaudit.audit.runs.batches import floor_folders, floor_rows, floor_units
from kvaudit.audit.runs.folder import SPEC, RunFolder, make_folder, noted_value, utc_now, versions_line
from kvaudit.audit.runs.found_so_far import FoundSoFar, policy_labels
from kvaudit.audit.runs.launchers.base import Job
from kvaudit.audit.runs.launchers.local import idle_cores
from kvaudit.audit.runs.pilot import (
    check_measurable,
    found_by,
    layout_of,
    most_items,
    pilot_lines,
    pilot_units,
    suites_left_out,
    with_kept_gate,
)
from kvaudit.audit.runs.progress import RunBar, print_line
from kvaudit.audit.runs.ranks import check_ranks, start_ranks
from kvaudit.audit.runs.recipe import joined_recipe, recipe_of, refusal_set, take_over
from kvaudit.audit.runs.stages.rounds import (
    ROUNDS_FOLDER,
    RowsPlan,
    look_lines,
    next_round,
    plan_lines,
    join_rounds,
    rows_plan,
    gate_statuses,
)
from kvaudit.audit.runs.units import PILOT_FOLDER, REFUSED, Unit, UnitFiles, reopen_refused, sealed_records
from kvaudit.audit.sampling.checkpoints import check_comparable, load_comparable, load_model_or_adapter
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.model import LoadedModel, load_model, locate
from kvaudit.audit.sampling.packing import has_packable_weights
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.training.adapters import load_trained_adapter
from kvaudit.audit.training.checkpoint import drop_state
from kvaudit.audit.training.config import StartConfig, TrainConfig
from kvaudit.audit.training.engine_rollouts import EngineUse, check_rollout_engine, try_rollout_engine
from kvaudit.audit.training.files import TELEMETRY, TelemetryLog
from kvaudit.audit.training.footprint import check_memory
from kvaudit.audit.training.grpo import TrainingRun, train
from kvaudit.audit.training.ranks import ALONE, RankGroup, keep_on_cpu
from kvaudit.audit.training.rewards.base import RewardConfig, parse_reward
from kvaudit.audit.training.sft import warm_start
from kvaudit.audit.training.validation import EarlyStop, read_mark
from kvaudit.core.alarms import active_alarms
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.facets import facet_of
from kvaudit.core.files import mutex, read_json, write_json
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.provenance import (
    ANYWAY,
    CHECKPOINTS,
    ENDED,
    INPUTS,
    JUDGED,
    LOOKS,
    MODEL,
    PILOT,
    PILOT_RESULT,
    PLANNED,
    PLUGINS,
    RECIPE,
    REWARD,
    REWARD_JUDGES,
    ROWS,
    STOPPED,
    VERSIONS_USED,
    Digests,
    all_looks,
    check_checkpoints,
    check_inputs,
    inputs_sha256,
    pilot_items,
    table_of,
)
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_evaluate import Rounds
from kvaudit.core.spec_train import BASE_ARM, TrainSpec
from kvaudit.core.text import inline, length_label
from kvaudit.suites.base import SUITES
from kvaudit.suites.sources import collect_file_hashes

Pair = tuple[str, int]  # arm, seed
BarPart = tuple[Hashable, float, float]  # name, answers in all, answers that are done
_TRAINING_KNOBS = "train.rollout_rows, train.microbatch_tokens"
_PHASES = {
    "pilot": "first questions",  # to see whether a suite has anything to lose
    "evaluate": "asking",
    "floor": "asking again",  # what an engine changes by itself
}


class Prepared(NamedTuple):
    """The model before training, the items made with its tokenizer, and the sha256 of the files of public rows."""

    model: LoadedModel
    batches: Batches
    rows: Digests


def prepare_run(spec: RunSpec, *, trains: bool = True, heard: OnFirstAnswer | None = None) -> Prepared:
    """Load the base model and make the items; raises what is wrong with a spec before any folder is claimed for it.

    ``trains``: whether anything is left to train, which takes memory that an evaluation does not. ``heard`` is told the
    beginning of a first answer under every way of serving.
    """
    disable_progress_bar()
    model = load_model_or_adapter(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    check_contexts(spec, model)
    for arm, part in spec.checkpoints.items():
        for seed in part.seeds:
            check_comparable(str(spec.external_source(arm, seed)), model)
    batches: Batches = {}
    with collect_file_hashes() as rows:
        check_training(spec, model)
        if spec.train is not None and trains:
            check_ranks(spec.train.ranks, model.device)
            check_memory(spec.train, model)
            check_rollout_engine(spec.train, model, spec.engine(spec.train.rollouts or ""))
            check_reward(spec.train, model)
        Evaluator(model, spec, batches).prepare()
    check_engines(spec, batches)
    if spec.train is not None and trains:
        try_rollout_engine(spec.train, model, spec.engine(spec.train.rollouts or ""))
    item = next((item for parts in batches.values() for part in parts for item in part), None)
    conditions = [way for way in served_policies(spec) if isinstance(way, Condition)]
    if item is not None:
        if heard is not None:
            first_answers(model, spec, item, heard)  # before weights are converted, which may take minutes
        try_out_engines(conditions, model, spec, item, heard)
    return Prepared(model, batches, rows)


def first_answers(model: LoadedModel, spec: RunSpec, item: Item, heard: OnFirstAnswer) -> None:
    """Have our own cache begin an answer under each of its policies, and uncompressed where an engine serves all."""
    for policy in cache_policies(spec) or [parse_policy(DENSE_POLICY)]:
        suite = suite_as_asked(spec, item.suite)
        (played,) = play(Sampler(model, policy), [(suite, item)], Decoding(FIRST_TOKENS, temperature=0.0), [0])
        heard(policy.canonical, item, played.transcript[len(item.messages)].content)


class Pipeline:
    """One process's work on a run folder; several may work on the same one.

    Without ``prepared`` the model is loaded when something is left to do. ``takeover``: see ``Claims``. ``others`` is
    the command, without its threads, by which another rank of a training unit is started. ``processes`` work on the run
    on this machine. ``asks_refused``: what a server refused is asked anew.
    Raises DataError where a checkpoint that was finished is no longer whole, RunError where the run was started with
    other ``plugins`` (file name -> sha256).
    """

    def __init__(
        self,
        run: RunFolder,
        console: Console,
        threads: int | None = None,
        prepared: Prepared | None = None,
        plugins: Digests | None = None,
        *,
        takeover: bool = False,
        others: Sequence[str] = (),
        processes: int = 1,
        asks_refused: bool = False,
    ) -> None:
        if JUDGED in run.provenance():
            raise RunError(
                f"{str(run.path)!r} holds the answers of another run, judged again; go on with that run, "
                "then judge it again"
            )
        check_checkpoints(run.path)
        self._run, self._console, self._takeover = run, console, takeover
        self._spec = run.spec.sized(pilot_items(run.provenance()))
        _check_versions(run, self._spec)
        self._hold(PLUGINS, plugins or {})
        self._base: LoadedModel | None = None
        self._evaluator: tuple[Pair, Evaluator] | None = None
        self._slot = EngineSlot(run, self._spec, self._say, self._starting)
        self._processes, self._asks_refused = processes, asks_refused
        self._bar: RunBar | None = None
        self._ended: str | None = None  # why no further round is asked
        self._mine: Pair | None = None  # what this process trains
        self._held = set[Unit]()  # what it answers
        self._prepared, self._others, self._ranks = prepared, others, ALONE
        self._batches: Batches = {} if prepared is None else prepared.batches
        threads = threads or run.provenance().get("threads")  # as it was begun: rounding can depend on their number
        if threads is None and "OMP_NUM_THREADS" not in os.environ:
            threads = idle_cores()  # two threads on a busy core are several times slower than one
        torch.set_num_threads(threads or torch.get_num_threads())
        disable_progress_bar()  # of loading and saving: the phases have their own
        run.note(
            threads=run.provenance().get("threads", torch.get_num_threads()),  # what it was begun with
            policies={policy.canonical: policy.hash for policy in served_policies(self._spec)},
            known_policies=sorted(POLICIES.all()),
            selecting_policies=selecting_policies(self._spec),
            suite_kinds={name: SUITES.get(name).kind for name in self._spec.evaluate.suites},
            suite_versions={name: SUITES.get(name).version for name in self._spec.evaluate.suites},
        )

    def work_on(self, *names: str) -> None:
        """Take the run through these stages, by default all of them."""
        for name in names or STAGES:
            STAGES[name].work(self)

    @property
    def is_done(self) -> bool:
        """Whether all of it is, whoever did it."""
        return all(stage.is_done(self) for stage in STAGES.values())

    def check_done(self) -> None:
        """Raise RunError where something is left and no worker is."""
        if not self.is_done:
            untrained = sum(not self._is_trained(pair) for pair in self._made)
            raise RunError(
                f"no worker is left, but {untrained} checkpoints and {len(self._unsealed())} units are; what is "
                f"written stays: see {self._run.path / 'logs'}, mend what ended them and go on with --resume"
            )

    @property
    def is_trained(self) -> bool:
        """Whether every checkpoint is, whoever trained it."""
        return all(map(self._is_trained, self._made))

    @property
    def is_piloted(self) -> bool:
        """Whether the pilot has said what it found, or there is none.

        A run of an earlier version is past it: what it has sealed would be answered twice.
        """
        is_open = any(not isinstance(part.items, int) for part in self._spec.evaluate.suites.values())
        is_past = not is_open and any(map(self._is_sealed, grid(self._spec)))
        return PILOT in self._run.provenance() or is_past or not (is_open or self._pilot_units())

    @property
    def is_evaluated(self) -> bool:
        """Whether every unit of the grid is sealed, and every one of the floor; of rounds, whether they have ended."""
        if self._spec.evaluate.rounds is not None:
            return ENDED in table_of(self._run.provenance(), LOOKS)
        return not self._unsealed()

    def _unsealed(self) -> list[Unit]:
        units = grid(self._spec)
        floors = floor_folders(self._run.path) if self._spec.evaluate.floor else ()
        asked = [(self._run.records, unit) for unit in units]
        asked += [(folder, unit) for folder in floors for unit in floor_units(units)]
        return [unit for folder, unit in asked if not UnitFiles.of(folder, unit).seal.exists()]

    def train(self) -> None:
        """Train every arm with every seed that has no finished checkpoint yet, each from the warm start of its seed."""
        section = self._spec.train
        if section is None:
            return
        starts, any_left = list(self._spec.starts), not self.is_trained
        if any_left:
            self._write_recipe(section)
        if section.sft is not None:
            self._train_all(starts, section.sft.steps)
        # what another rank does, with logs of its own beside those of workers that have ranks too
        arguments = [*self._others, "--threads", str(torch.get_num_threads())]
        logs = self._run.path / "logs" / f"ranks-{os.getpid()}"
        job = Job(arguments, logs, Path.cwd(), any_gpu=self._spec.device in ("auto", "cuda"))
        with start_ranks(section.ranks, job, self._say, any_left=any_left) as self._ranks:
            if section.stops:
                # first every arm to its own end, then each of a seed to where the earliest alarm ends them all
                self._train_all(list(section.pairs), section.steps, self._has_ended)
                self._note_stops(section)
            self._train_all(list(section.pairs), section.steps)
        digests = {f"{arm}/{seed}": self._trained_sha256((arm, seed)) for arm, seed in self._made}
        self._run.note(**{CHECKPOINTS: digests})

    def follow(self, ranks: RankGroup) -> None:
        """Be one of the other ranks of whatever the first one trains."""
        section = self._spec.train
        assert section is not None
        spec, known = self._spec, noted_value(self._run, "base_sha256")
        self._base = load_model_or_adapter(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
        if self._base.sha256 != known:
            raise RunError(
                f"the first rank has base weights {known[:12]}, rank {ranks.number} {self._base.sha256[:12]}"
            )
        while (pair := ranks.receive()) is not None:
            start = self._start(pair[1])
            with _enough_memory(f"{pair[0]} seed {pair[1]}", _TRAINING_KNOBS), keep_on_cpu(start, ranks):
                engine = EngineUse() if section.rollouts is None else self._use(section.rollouts)
                run = TrainingRun(TrainConfig.of(section, *pair), start, self._run.path, ranks, engine)
                try:
                    ranks.follow_rank0(run)
                finally:
                    run.close()

    def _train_all(self, pairs: list[Pair], steps: int, done: Callable[[Pair], bool] | None = None) -> None:
        is_done = done or self._is_trained
        if not all(map(is_done, pairs)):
            self._load_base()
        with self._one_bar(lambda: self._training_parts(pairs)) as bar:
            rung: set[tuple[str, str]] = set()  # arm and alarm: said once, telemetry has every step

            def work(pair: Pair, claim: Claim) -> None:
                self._mine = pair
                bar.known(pair, self._trained_answers(pair))

                def progress(done: int, row: Mapping[str, Any]) -> None:
                    claim.check()
                    for bound in active_alarms(row):
                        if (pair[0], bound.name) not in rung:
                            rung.add((pair[0], bound.name))
                            self._say(f"alarm: {pair[0]} seed {pair[1]}, step {done}: {bound.sentence}")
                    bar.worked(pair, done * self._step_answers(pair), _training_line(pair, done, steps, row))

                self._train_one(pair, progress)

            def finished_one(pair: Pair) -> None:
                if self._is_trained(pair):
                    bar.count(pair, steps * self._step_answers(pair))
                    drop_state(self._run.checkpoint(*pair))

            work_on_units(
                pairs,
                done=is_done,
                # beside the folder, which must stay the training's own
                lock=lambda pair: self._run.checkpoint(*pair).with_name(f"seed-{pair[1]}.lock"),
                work=work,
                finished=finished_one,
                waiting=self._say,
                takeover=self._takeover,
            )
        self._mine = None

    # --- what there is to do, in answers: the parts of the bar, each with its size and what is done of it ----------

    @contextmanager
    def under_one_bar(self) -> Iterator[None]:
        """Have all stages share one bar."""
        with self._one_bar(self._all_parts):
            yield

    @contextmanager
    def _one_bar(self, parts: Callable[[], Iterable[BarPart]]) -> Iterator[RunBar]:
        """The bar of the whole run, or where there is none, one of some parts."""
        if self._bar is not None:
            self._expect(parts())
            yield self._bar
            return
        found = FoundSoFar(self._spec, self._run.path).lines
        with RunBar(self._console, found, self._look) as bar:
            self._bar = bar
            try:
                self._expect(parts())
                yield bar
            finally:
                self._bar = None

    def _expect(self, parts: Iterable[BarPart]) -> None:
        assert self._bar is not None
        for part in parts:
            self._bar.expect(*part)

    def _all_parts(self) -> Iterator[BarPart]:
        yield from self._training_parts(self._made)
        units = grid(self._spec)
        if PILOT not in self._run.provenance() and not any(map(self._is_sealed, units)):
            yield from self._unit_parts("pilot", self._pilot_units(), self._run.path / PILOT_FOLDER)
        if self._spec.evaluate.rounds is not None:
            return  # nobody knows how many rounds there will be
        yield from self._unit_parts("evaluate", units, self._run.records)
        for folder in floor_folders(self._run.path) if self._spec.evaluate.floor else ():
            yield from self._unit_parts("floor", floor_units(units), folder)

    def _training_parts(self, pairs: Sequence[Pair]) -> Iterator[BarPart]:
        section = self._spec.train
        if section is None:
            return
        for pair in pairs:
            start = section.sft if pair[0] == BASE_ARM else None
            steps = section.steps if start is None else start.steps
            size = steps * self._step_answers(pair)
            yield pair, size, size if self._is_trained(pair) else self._trained_answers(pair)

    def _step_answers(self, pair: Pair) -> int:
        """The answers of a step of training: its rollouts, or the examples of a warm start."""
        section = self._spec.train
        assert section is not None
        if pair[0] == BASE_ARM and section.sft is not None:
            return section.sft.prompts_per_step
        return section.prompts_per_step * section.group

    def _trained_answers(self, pair: Pair) -> int:
        """Those of the steps that a checkpoint has on disk so far, whoever trains it."""
        return TelemetryLog(self._run.checkpoint(*pair) / TELEMETRY).count * self._step_answers(pair)

    def _unit_parts(
        self, phase: str, units: Sequence[Unit], folder: Path, asked: Mapping[str, range] | None = None
    ) -> Iterator[BarPart]:
        """The units of a phase; of the grid's the pilot has answered some rows, which are not answered again.

        ``asked`` are the rows of a round.
        """
        if asked is not None:
            yield from (((folder, unit), len(asked[unit.suite]), 0) for unit in units)
            return
        piloted = set(self._pilot_units(units)) if phase == "evaluate" else set[Unit]()
        for unit in units:
            rows = self._piloted(unit) if phase == "pilot" else self._rows(unit)
            rows = min(rows, floor_rows(self._spec, unit)) if phase == "floor" else rows  # to within a batch
            rows = max(1, rows - self._piloted(unit)) if unit in piloted else rows
            yield (folder, unit), rows, rows if UnitFiles.of(folder, unit).seal.exists() else 0

    def _look(self) -> None:
        """Count what other processes have done of what this one is not at."""
        assert self._bar is not None
        for name in self._bar.open_parts:
            if name == self._mine:
                continue
            if name in self._made:
                self._bar.count(name, self._trained_answers(name))
            elif isinstance(name, tuple) and isinstance(name[-1], Unit) and name[-1] not in self._held:
                folder, unit = name
                files = UnitFiles.of(folder, unit)
                share = 1.0 if files.seal.exists() else min(1.0, _lines_in(files.records) / max(1, self._rows(unit)))
                self._bar.count(name, share * self._bar.size(name))

    @contextmanager
    def _starting(self, condition: Condition) -> Iterator[None]:
        if self._bar is not None:
            self._bar.show(f"starting {condition.engine}")
        yield

    def _pilot_units(self, known: Sequence[Unit] | None = None) -> list[Unit]:
        return pilot_units(with_kept_gate(self._spec, self._run.provenance()), known)

    def pilot(self) -> None:
        """Have the reference answer first what its pilot asks, and say what that shows.

        Raises NotMeasurable where a suite has nothing to lose, unless the run is to go on anyway.
        """
        if not self.is_piloted:
            units, folder = self._pilot_units(), self._run.path / PILOT_FOLDER
            make_folder(folder)
            self._serve("pilot", units, folder)
            # another process may have noted it meanwhile
            if PILOT not in self._run.provenance():
                self._run.keep(PILOT, PILOT_RESULT, self._found(units))
        self._take_sizes()

    def check_pilot(self) -> None:
        """Raise NotMeasurable as ``pilot`` does, where it is done."""
        provenance = self._run.provenance()
        if PILOT in provenance and ANYWAY not in provenance:
            check_measurable(with_kept_gate(self._spec, provenance), provenance[PILOT][PILOT_RESULT])

    def _take_sizes(self) -> None:
        provenance = self._run.provenance()
        if PILOT not in provenance:
            return
        found = provenance[PILOT][PILOT_RESULT]
        for line in pilot_lines(found):
            self._say(line)
        for suite in found["items"]:  # a round until now
            for key in [key for key in self._batches if key[0] == suite]:
                del self._batches[key]
        self._evaluator, self._spec = None, self._spec.sized(found["items"])
        self.check_pilot()

    def _found(self, units: Sequence[Unit]) -> dict[str, Any]:
        """What the pilot's sealed answers say; raises DataError where they are not what was sealed."""
        count = self._load_base().chat.count_tokens
        folder = self._run.path / PILOT_FOLDER
        answers = {}
        for unit in units:
            identity = unit.identity(self._sha256_of((unit.arm, unit.seed)))
            answers[unit] = list(sealed_records(UnitFiles.of(folder, unit), identity).values())
        open_ = [name for name, part in self._spec.evaluate.suites.items() if not isinstance(part.items, int)]
        layouts = {name: layout_of(self._spec, name, count) for name in open_}
        most = {name: most_items(self._spec, name, layouts[name], count) for name in open_}
        return found_by(with_kept_gate(self._spec, self._run.provenance()), answers, layouts, most)

    def evaluate(self) -> None:
        """Write and seal the records of every unit of the grid; engines answer the first items twice more.

        Raises RunError where nobody has said how many items to ask.
        """
        open_ = [name for name, part in self._spec.evaluate.suites.items() if not isinstance(part.items, int)]
        if open_:
            raise RunError(f"how many items of {', '.join(open_)} to ask follows from the pilot, which was not run")
        units = grid(self._spec)
        if self._spec.evaluate.rounds is not None:
            was_whole, units = self._ask_in_rounds(self._spec.evaluate.rounds)
        else:
            if self._asks_refused:
                self._open_refused(units)
            was_whole = self._serve("evaluate", units, self._run.records)
        self._say_refused(units)
        floored = floor_units(units) if self._spec.evaluate.floor else []
        for folder in floor_folders(self._run.path) if floored else ():
            make_folder(folder)
            self._serve("floor", floored, folder)
        if self._ended is not None:
            self._run.keep(LOOKS, ENDED, self._ended)
        declared = {arm: part.recipe.model_dump() for arm, part in self._spec.checkpoints.items()}
        if declared:
            self._run.note(declared=declared)
        reference = {str(s): self._sha256_of((a, s)) for a, s in self._spec.arms if a == self._spec.gate.reference}
        # where nothing was left to do the run has not finished anew: a card that was made of it still says what it says
        before_this = self._run.provenance().get("finished") if was_whole else None
        self._run.note(reference_sha256=reference, finished=before_this or utc_now())

    def _ask_in_rounds(self, rounds: Rounds) -> tuple[bool, list[Unit]]:
        """Ask round after round until a look ends it; whether nothing was asked now, and the units that were."""
        plan = self._rows_plan(rounds)
        units = [unit for unit in grid(self._spec) if unit.suite in plan.items]
        was_whole = True
        while True:
            looks = all_looks(self._run.provenance())
            if looks and "words" not in looks[-1]:  # a round that was asked, and not yet looked at
                self._look_at(units, len(looks), looks[-1])
                continue
            rows = next_round(plan, looks, rounds.minutes, rounds.first)
            if isinstance(rows, str):
                self._ended = rows
                if self._bar is not None:
                    self._bar.restart("what is asked again")
                return was_whole, units
            was_whole = False
            self._ask_round(units, len(looks) + 1, rows, table_of(looks[-1], "items") if looks else {})

    def _open_refused(self, units: Sequence[Unit]) -> None:
        """Open the finished units in which a server refused rows, but those that another process is at."""
        for unit in units:
            files = UnitFiles.of(self._run.records, unit)
            with Claims(takeover=self._takeover).claim(files.lock) as mine:
                if mine is not None and files.seal.exists():
                    reopen_refused(files, unit.identity(self._sha256_of((unit.arm, unit.seed))))

    def _say_refused(self, units: Sequence[Unit]) -> None:
        """Say how many answers a server refused, and how they are asked anew; those of rounds never are."""
        seals = [UnitFiles.of(self._run.records, unit).seal for unit in units if isinstance(unit.policy, Condition)]
        refused = sum(int(read_json(seal).get(REFUSED, 0)) for seal in seals if seal.exists())
        if refused:
            path = self._run.path
            words = shlex.join(["kvaudit", "run", str(path / SPEC), "--out", str(path), "--resume", "--ask-refused"])
            how = "" if self._spec.evaluate.rounds is not None else f"; ask them anew: {words}"
            self._say(f"{refused} answers were refused by a server and are unscored{how}")

    def _rows_plan(self, rounds: Rounds) -> RowsPlan:
        """What may be asked at the most, as the first process noted it."""
        provenance = self._run.provenance()
        if (known := RowsPlan.of(provenance)) is not None:
            return known
        found = provenance[PILOT][PILOT_RESULT]
        self._check_own_clusters()
        left_out = suites_left_out(found)
        seconds = self._seconds_a_row()
        gated = {facet_of(metric)[0] for metric in self._spec.gate.margins}
        plan = rows_plan(found["items"], seconds, left_out, rounds.minutes, rounds.first, gated)
        if not gated & plan.items.keys():  # nothing can be measured, which the records of these suites are to show
            plan = rows_plan(found["items"], seconds, {}, 0.0, rounds.first, gated)
        self._run.keep(LOOKS, PLANNED, plan.written())
        kept = RowsPlan.of(self._run.provenance())
        assert kept is not None
        for line in plan_lines(kept, self._spec):
            self._say(line)
        return kept

    def _check_own_clusters(self) -> None:
        """Raise SpecError for a suite whose rows share clusters, of which a look could hold a part."""
        count = self._load_base().chat.count_tokens
        for name in self._spec.evaluate.suites:
            rows = layout_of(self._spec, name, count)
            if len({row.cluster for row in rows}) < len(rows):
                raise SpecError(
                    f"suite {name} asks several rows of a template, and evaluate.rounds wants rows that share none: "
                    "take harm, benign or injection, or leave rounds out"
                )

    def _seconds_a_row(self) -> dict[str, float]:
        """What the pilot's rows took, by suite, on all ways of serving together."""
        spent, rows = dict[str, float](), dict[str, int]()
        for unit in self._pilot_units():
            identity = unit.identity(self._sha256_of((unit.arm, unit.seed)))
            answered = sealed_records(UnitFiles.of(self._run.path / PILOT_FOLDER, unit), identity).values()
            spent[unit.suite] = spent.get(unit.suite, 0.0) + sum(row.seconds for row in answered)
            rows[unit.suite] = rows.get(unit.suite, 0) + len(answered)
        ways = len(self._spec.evaluate.policies)
        return {suite: ways * seconds / max(1, rows[suite]) for suite, seconds in spent.items()}

    def _ask_round(
        self, units: Sequence[Unit], number: int, rows: Mapping[str, range], asked: Mapping[str, int]
    ) -> None:
        folder = self._run.path / ROUNDS_FOLDER / str(number)
        make_folder(folder)
        own = [unit for unit in units if unit.suite in rows]
        begun = time.monotonic()
        if self._bar is not None:
            self._bar.restart(f"round {number}")
        self._serve("evaluate", own, folder, rows)
        look = {
            "items": {**asked, **{suite: part.stop for suite, part in rows.items()}},
            "seconds": round(time.monotonic() - begun, 3),
        }
        self._run.keep(LOOKS, str(number), look)

    def _look_at(self, units: Sequence[Unit], number: int, look: Mapping[str, Any]) -> None:
        """Put the records together, have the gate look at them, and note what it says; one process does it for all."""
        with mutex(self._run.path / ".looks.lock"):
            if "words" in all_looks(self._run.provenance())[number - 1]:
                return
            join_rounds(self._run.path, units, number)
            words = gate_statuses(self._run.path)
            self._run.note(**{LOOKS: {str(number): {**look, "words": words}}})
        self._say(list(look_lines(self._run.provenance()))[-1])

    def _serve(self, phase: str, units: Sequence[Unit], folder: Path, rows: Mapping[str, range] | None = None) -> bool:
        """Serve what is not sealed in ``folder``, of a round its ``rows`` by suite; whether all of it was."""
        files = {unit: UnitFiles.of(folder, unit) for unit in units}

        def is_sealed(unit: Unit) -> bool:
            return files[unit].seal.exists()

        was_whole = all(map(is_sealed, units))
        if not was_whole:
            self._load_base()
        with self._one_bar(lambda: self._unit_parts(phase, units, folder, rows)) as bar:

            def finished(unit: Unit) -> None:
                bar.count((folder, unit), bar.size((folder, unit)))

            def work(held: ClaimedUnits[Unit]) -> None:
                first, begun = held.units[0], set[Unit]()
                self._held = set(held.units)

                def progress(unit: Unit, done: int, of: int) -> None:
                    held.claim(unit).check()
                    name, size = (folder, unit), bar.size((folder, unit))
                    if unit in begun:
                        bar.worked(name, size * done / max(1, of), self._unit_line(unit, phase))
                    else:  # what lies there already was not answered now
                        begun.add(unit)
                        bar.known(name, size * done / max(1, of))

                with _enough_memory(self._unit_line(first, phase), "evaluate.batch_tokens"):
                    evaluator = self._evaluator_of((first.arm, first.seed))
                    evaluator.answer_units(held.units, self._run, progress, held.keeps, folder=folder, rows=rows)

            with self._slot:  # no engine outlives the phase that it answers in
                work_on_groups(
                    # units of a group stand side by side in what is asked, which grouping goes by
                    [list(group) for _, group in groupby(units, lambda unit: unit.together)],
                    done=is_sealed,
                    lock=lambda unit: files[unit].lock,
                    work=work,
                    finished=finished,
                    waiting=self._say,
                    takeover=self._takeover,
                )
            self._held = set()
        return was_whole

    def _train_one(self, pair: Pair, report: Any) -> None:
        section, out = self._spec.train, self._run.checkpoint(*pair)
        assert section is not None

        def progress(done: int, _: int, row: Mapping[str, Any]) -> None:
            report(done, row)

        with _enough_memory(f"{pair[0]} seed {pair[1]}", _TRAINING_KNOBS):
            if pair[0] == BASE_ARM:
                warm_start(StartConfig.of(section, pair[1]), self._load_base(), out, progress)
            else:
                stop = section.watch if section.stops else None
                early_stop = None if stop is None else EarlyStop(stop, section.steps, out, self._arms_of(pair[1]))
                config = TrainConfig.of(section, *pair)
                self._hold_reward(config.reward_config)
                start = self._start(pair[1])
                engine = EngineUse() if config.rollouts is None else self._use(config.rollouts)
                with self._ranks.unit(pair), keep_on_cpu(start, self._ranks):
                    train(
                        *(config, start, out, progress),
                        run_folder=self._run.path,
                        early_stop=early_stop,
                        ranks=self._ranks,
                        engine=engine,
                    )

    def _use(self, rollouts: str) -> EngineUse:
        """How the engine that draws is run; what it says it is stands in the run's provenance."""

        def hold(condition: Condition, about: Mapping[str, str]) -> None:
            check_engine_unchanged(self._run, f"rollouts of {condition.canonical}", condition.engine, about)

        return EngineUse(self._spec.engine(rollouts), hold)

    def _arms_of(self, seed: int) -> list[Path]:
        section = self._spec.train
        return [] if section is None else [self._run.checkpoint(arm.name, seed) for arm in section.trained]

    def _note_stops(self, section: TrainSpec) -> None:
        """Note and say where the arms of a seed end before their last step, and whose alarm that was."""
        for seed in section.seeds:
            marks = {folder.parent.name: read_mark(folder) for folder in self._arms_of(seed)}
            step = min((mark.step for mark in marks.values() if mark is not None), default=section.steps)
            if step < section.steps:
                first = {arm: mark.alarm for arm, mark in marks.items() if mark and mark.step == step and mark.alarm}
                rang = ", ".join(f"{arm} rang {alarm}" for arm, alarm in first.items())
                text = f"at step {step} of {section.steps}: {rang}"
                self._run.note(**{STOPPED: {str(seed): text}})
                self._say(f"all arms of seed {seed} end {text}")

    def _start(self, seed: int) -> LoadedModel:
        """What the arms of a seed begin from: the model, or its warm start."""
        section = self._spec.train
        if section is None or section.sft is None:
            return self._load_base()
        self._trained_sha256((BASE_ARM, seed))
        folder = self._run.checkpoint(BASE_ARM, seed)
        if section.adapter is not None:
            return load_trained_adapter(self._load_base(), section.adapter, folder)
        return load_model(str(folder), dtype=self._spec.dtype, device=self._spec.device, chat=self._spec.chat)

    def _load_base(self) -> LoadedModel:
        """The model before training; it must be the one that the run was started with."""
        if self._base is None:
            model, batches, rows = self._prepared or prepare_run(self._spec, trains=not self.is_trained)
            self._batches.update(batches)
            known = self._run.provenance().get("base_sha256")
            if known not in (None, model.sha256):
                raise RunError(
                    f"the run was started with base weights {known[:12]}, {model.name!r} now has {model.sha256[:12]}; "
                    "give another --out"
                )
            self._hold(ROWS, rows)
            self._hold(MODEL, model.files)
            layout = ", large products packed" if has_packable_weights(model) else ""  # which rounds otherwise
            self._run.keep(VERSIONS_USED, versions_line() + layout, utc_now())
            self._run.note(base_sha256=model.sha256, device=str(model.device), dtype=str(model.dtype))
            self._run.note(chat=model.chat.to_json())
            if model.name != self._spec.model:  # a variable tells the reader of a report too little, a path too much
                folder = Path(model.name)
                self._run.note(model=folder.resolve().name if folder.is_dir() else model.name)
            threads, workers = torch.get_num_threads(), self._processes
            sharing = f"{workers} process{'es' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}"
            self._say(f"model: {model.name} ({model.sha256[:12]}) on {model.device}, {sharing}")
            if text := describe_governed_layers(model.model.config):
                self._say(f"cache: {text}")
            for text in model.chat.role_notes():
                self._say(f"chat: {text}")
            self._base = model
        return self._base

    def _evaluator_of(self, pair: Pair) -> Evaluator:
        if self._evaluator is None or self._evaluator[0] != pair:
            self._evaluator = None  # lets go of the last checkpoint's weights before the next are loaded
            gc.collect()  # hooks and bound methods of some models hold these in a circle
            model = self._checkpoint(pair)
            inputs = inputs_sha256(noted_value(self._run, INPUTS))
            self._evaluator = (pair, Evaluator(model, self._spec, self._batches, inputs, self._slot))
        return self._evaluator[1]

    def _hold(self, kind: str, now: Digests) -> None:
        """Note inputs of one kind where the run has none noted yet, and refuse others than the noted ones."""
        check_inputs(kind, self._run.keep(INPUTS, kind, dict(now)), now)

    def _write_recipe(self, section: TrainSpec) -> None:
        """Leave what the checkpoints are made of beside them, as it is when training begins."""
        model, path = self._load_base(), self._run.path / RECIPE
        self._hold_reward(parse_reward(section.reward, section.suites))
        if not path.exists():
            write_json(path, recipe_of(self._spec, section, model, self._batches))

    def _hold_reward(self, paying: RewardConfig) -> None:
        """Note what pays and by whose word; what was rewarded before must have been by the same."""
        if not paying.uses_grade_only:
            self._hold(REWARD, paying.inputs)
        self._run.note(**{REWARD_JUDGES: paying.judges})

    def _checkpoint(self, pair: Pair) -> LoadedModel:
        if pair[0] == BASE_ARM and pair not in self._spec.starts:
            return self._load_base()
        if (external := self._spec.external_source(*pair)) is not None:
            return self._external(pair, external)
        self._trained_sha256(pair)
        spec, folder = self._spec, str(self._run.checkpoint(*pair))
        return load_comparable(folder, self._load_base(), dtype=spec.dtype, device=spec.device, chat=spec.chat)

    def _external(self, pair: Pair, name: str) -> LoadedModel:
        """A checkpoint that was trained elsewhere; it must be the one that the run met first under this name."""
        spec = self._spec
        model = load_comparable(name, self._load_base(), dtype=spec.dtype, device=spec.device, chat=spec.chat)
        known = self._run.keep(CHECKPOINTS, f"{pair[0]}/{pair[1]}", model.sha256)
        if known != model.sha256:
            raise RunError(
                f"checkpoint {name!r} has weights {model.sha256[:12]}, the run met it with {known[:12]}; put those "
                "back, or give another --out"
            )
        # before its first answer is sealed: a run that has all answers no longer needs the folder
        take_over(locate(name), self._run.checkpoint(*pair))
        if self._spec.train is None and not (self._run.path / RECIPE).exists():
            joined = joined_recipe(self._run, refusal_set(self._spec, self._batches))
            if joined is not None:  # where each of the checkpoints says what it is made of
                write_json(self._run.path / RECIPE, joined)
        return model

    def _sha256_of(self, pair: Pair) -> str:
        if pair[0] == BASE_ARM and pair not in self._spec.starts:
            return str(noted_value(self._run, "base_sha256"))
        if pair[0] in self._spec.checkpoints:
            return str(noted_value(self._run, CHECKPOINTS, f"{pair[0]}/{pair[1]}"))
        return self._trained_sha256(pair)

    def _trained_sha256(self, pair: Pair) -> str:
        path = self._run.checkpoint(*pair)
        if not self._is_trained(pair):
            raise DataError(
                f"checkpoint {str(path)!r} is missing or unfinished; train it first: kvaudit run --only train SPEC"
            )
        return str(read_json(path / "provenance.json")["sha256"])

    @property
    def _made(self) -> list[Pair]:
        """Every checkpoint that the run trains, warm starts first."""
        section = self._spec.train
        return [*self._spec.starts, *(() if section is None else section.pairs)]

    def _has_ended(self, pair: Pair) -> bool:
        return self._is_trained(pair) or read_mark(self._run.checkpoint(*pair)) is not None

    def _is_trained(self, pair: Pair) -> bool:
        return (self._run.checkpoint(*pair) / "provenance.json").exists()

    def _is_sealed(self, unit: Unit) -> bool:
        return UnitFiles.of(self._run.records, unit).seal.exists()

    def _rows(self, unit: Unit) -> int:
        """Rows of a unit of the grid; until the pilot has said how many items are asked, those of a round."""
        items = self._spec.evaluate.suites[unit.suite].items
        if not isinstance(items, int):
            batches = self._batches.get((unit.suite, unit.context_tokens))
            items = self._spec.evaluate.pilot_size if batches is None else sum(map(len, batches))
        return items * self._spec.evaluate.samples_of(unit.suite)

    def _piloted(self, unit: Unit) -> int:
        """Rows of a unit of the pilot, to within a few: only the suite knows how many twins a template has."""
        part, items = self._spec.evaluate, self._spec.evaluate.suites[unit.suite].items
        least = min(items, part.pilot_size) if isinstance(items, int) else part.pilot_size
        return least * part.samples_of(unit.suite)

    @cached_property
    def _labels(self) -> dict[str, str]:
        return policy_labels(self._spec)

    def _unit_line(self, unit: Unit, phase: str) -> str:
        """``agent under snapkv 96``, with what else tells a unit of this run from others."""
        text = f"{unit.suite} under {self._labels.get(unit.policy.canonical, unit.policy.canonical)}"
        text += f", {length_label(unit.context_tokens)}" if len(self._spec.evaluate.contexts_of(unit.suite)) > 1 else ""
        text += f", {unit.arm} seed {unit.seed}" if len(self._spec.arms) > 1 else ""
        return f"{_PHASES[phase]}: {text}"

    def _say(self, text: str) -> None:
        print_line(self._console, text)


class Stage(NamedTuple):
    """A part of a run that goes on where it stopped: its ``work``, and whether it ``is_done``, whoever did it.

    Once it is done, its work writes nothing more, and no stage touches what an earlier one wrote.
    """

    work: Callable[[Pipeline], None]
    is_done: Callable[[Pipeline], bool]


STAGES = {
    "train": Stage(lambda pipeline: pipeline.train(), lambda pipeline: pipeline.is_trained),
    "pilot": Stage(lambda pipeline: pipeline.pilot(), lambda pipeline: pipeline.is_piloted),
    "evaluate": Stage(lambda pipeline: pipeline.evaluate(), lambda pipeline: pipeline.is_evaluated),
}  # in this order


def _check_versions(run: RunFolder, spec: RunSpec) -> None:
    """Raise RunError for a run that asks suites of another version: its records and new ones are of two questions."""
    begun = run.provenance().get("suite_versions", {})
    for name in spec.evaluate.suites:
        if begun.get(name, now := SUITES.get(name).version) != now:
            raise RunError(
                f"{str(run.path)!r} was begun with version {begun[name]} of suite {name}, which is version {now} here; "
                "gate and report read it as it is, to go on give another --out"
            )


@contextmanager
def _enough_memory(work: str, less: str) -> Iterator[None]:
    """Raise RunError where a GPU has too little memory, which no other worker's need be short of."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = inline(str(error).partition(". ")[0])
        raise RunError(
            f"the GPU's memory is too small for {work} ({said}); what is written stays: go on with it on a larger "
            f"GPU, or begin another run with less: {less}"
        ) from None


def _training_line(pair: Pair, done: int, steps: int, row: Mapping[str, Any]) -> str:
    reward = row.get("reward_mean")
    what = "warm start" if pair[0] == BASE_ARM else f"training {pair[0]}"
    return f"{what} seed {pair[1]}, step {done} of {steps}" + ("" if reward is None else f", reward {reward:.2f}")


def _lines_in(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
