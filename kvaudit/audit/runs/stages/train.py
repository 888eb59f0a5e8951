"""The training stage: trains every arm with every seed, from the warm start (or base model) of that seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvaudit.audit.engines import Condition
from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.engine_slot import check_engine_unchanged
from kvaudit.audit.runs.folder import check_inputs_unchanged
from kvaudit.audit.runs.models import Pair, trained_pairs
from kvaudit.audit.runs.progress import Part
from kvaudit.audit.runs.recipe import recipe_of
from kvaudit.audit.runs.stages.base import RunContext, Stage, explain_full_memory
from kvaudit.audit.training.checkpoint import TELEMETRY, TelemetryLog, drop_state
from kvaudit.audit.training.config import StartConfig, TrainConfig
from kvaudit.audit.training.engine_rollouts import EngineUse
from kvaudit.audit.training.grpo import Progress, train
from kvaudit.audit.training.rewards.base import RewardConfig, parse_reward
from kvaudit.audit.training.sft import warm_start
from kvaudit.audit.training.validation import EarlyStop, read_mark
from kvaudit.core.alarms import active_alarms
from kvaudit.core.files import write_json
from kvaudit.core.provenance import CHECKPOINTS, RECIPE, REWARD, REWARD_JUDGES, STOPPED
from kvaudit.core.spec_train import BASE_ARM, TrainSpec

_MEMORY_SETTINGS = "train.rollout_rows, train.microbatch_tokens"


class TrainStage(Stage):
    """Trains every unfinished checkpoint (an arm and seed), warm starts by supervised examples first."""

    def parts(self) -> Iterator[Part]:
        yield from map(self._part, trained_pairs(self.context.spec))

    @property
    def is_done(self) -> bool:
        return all(map(self.context.models.is_trained, trained_pairs(self.context.spec)))

    def work(self) -> RunContext:
        context = self.context
        section, models = context.spec.train, context.models
        if section is None:
            return context
        if not self.is_done:
            self._write_recipe(section)
        self._train_all(context.spec.starts, models.is_trained)
        if section.stops:
            # first every arm to its own end, then all arms of a seed to the step of the earliest alarm
            self._train_all(section.pairs, self._has_stopped)
            self._note_stops(section)
        self._train_all(section.pairs, models.is_trained)
        digests = {f"{pair[0]}/{pair[1]}": models.trained_sha256(pair) for pair in trained_pairs(context.spec)}
        context.run.note(**{CHECKPOINTS: digests})
        return context

    def _train_all(self, pairs: Sequence[Pair], is_done: Callable[[Pair], bool]) -> None:
        context, bar, printed_alarms = self.context, self.context.bar, set[tuple[str, str]]()
        if not all(map(is_done, pairs)):
            context.models.base()

        def work(pair: Pair, claim: Claim) -> None:
            bar.claim([pair])
            bar.resume(pair, self._answers_on_disk(pair))

            def report(done: int, _: int, row: Mapping[str, Any]) -> None:
                claim.check()
                for bound in active_alarms(row):
                    if (pair[0], bound.name) not in printed_alarms:  # printed once; telemetry has every step
                        printed_alarms.add((pair[0], bound.name))
                        context.print_line(f"alarm: {pair[0]} seed {pair[1]}, step {done}: {bound.sentence}")
                bar.count(pair, done * self._answers_per_step(pair))
                bar.show(self._step_text(pair, done, row))

            self._train_one(pair, report)

        def finish(pair: Pair) -> None:
            if context.models.is_trained(pair):
                bar.count(pair, self._steps(pair) * self._answers_per_step(pair))
                drop_state(context.run.checkpoint(*pair))

        work_on_units(
            pairs,
            is_done=is_done,
            # next to the folder, which holds files of the training only
            lock=lambda pair: context.run.checkpoint(*pair).with_name(f"seed-{pair[1]}.lock"),
            work=work,
            on_done=finish,
            on_wait=context.print_line,
            takeover=context.takeover,
        )
        bar.claim(())

    def _train_one(self, pair: Pair, report: Progress) -> None:
        context, (arm, seed) = self.context, pair
        section, out = context.spec.train, context.run.checkpoint(*pair)
        assert section is not None
        with explain_full_memory(f"{arm} seed {seed}", _MEMORY_SETTINGS):
            if arm == BASE_ARM:
                warm_start(StartConfig.of(section, seed), context.models.base(), out, report)
                return
            stop = section.watch if section.stops else None
            early_stop = None if stop is None else EarlyStop(stop, section.steps, out, self._arm_folders(seed))
            config = TrainConfig.of(section, arm, seed)
            self._check_reward_unchanged(config.reward_config)
            start = context.models.start(seed)
            engine = EngineUse() if config.rollouts is None else self._engine_use(config.rollouts)
            train(config, start, out, report, run_folder=context.run.path, early_stop=early_stop, engine=engine)

    def _engine_use(self, rollouts: str) -> EngineUse:
        def check_unchanged(condition: Condition, description: Mapping[str, str]) -> None:
            check_engine_unchanged(
                self.context.run, f"rollouts of {condition.canonical}", condition.engine, description
            )

        return EngineUse(self.context.spec.engine(rollouts), check_unchanged)

    def _arm_folders(self, seed: int) -> list[Path]:
        section = self.context.spec.train
        return [] if section is None else [self.context.run.checkpoint(arm.name, seed) for arm in section.trained]

    def _has_stopped(self, pair: Pair) -> bool:
        """Return whether an arm and seed is finished, or has stopped early and waits for the seed's other arms."""
        return self.context.models.is_trained(pair) or read_mark(self.context.run.checkpoint(*pair)) is not None

    def _note_stops(self, section: TrainSpec) -> None:
        """Store and print at which step all arms of a seed end early, and which alarm was the cause."""
        for seed in section.seeds:
            marks = {folder.parent.name: read_mark(folder) for folder in self._arm_folders(seed)}
            step = min((mark.step for mark in marks.values() if mark is not None), default=section.steps)
            if step < section.steps:
                first = {arm: mark.alarm for arm, mark in marks.items() if mark and mark.step == step and mark.alarm}
                alarms = ", ".join(f"{arm} rang {alarm}" for arm, alarm in first.items())
                text = f"at step {step} of {section.steps}: {alarms}"
                self.context.run.note(**{STOPPED: {str(seed): text}})
                self.context.print_line(f"all arms of seed {seed} end {text}")

    def _write_recipe(self, section: TrainSpec) -> None:
        """Write the recipe (how the checkpoints are trained) into the run folder before training begins."""
        models, path = self.context.models, self.context.run.path / RECIPE
        model = models.base()
        self._check_reward_unchanged(parse_reward(section.reward, section.suites))
        if not path.exists():
            write_json(path, recipe_of(self.context.spec, section, model, models.batches))

    def _check_reward_unchanged(self, reward: RewardConfig) -> None:
        """Store the reward's judges and hashes of its input files; raise RunError if earlier steps had other files."""
        if not reward.uses_grade_only:
            check_inputs_unchanged(self.context.run, REWARD, reward.inputs)
        self.context.run.note(**{REWARD_JUDGES: reward.judges})

    # the progress bar

    def _part(self, pair: Pair) -> Part:
        size = self._steps(pair) * self._answers_per_step(pair)
        models = self.context.models
        return Part(pair, size, lambda: size if models.is_trained(pair) else self._answers_on_disk(pair))

    def _steps(self, pair: Pair) -> int:
        section = self.context.spec.train
        assert section is not None
        return section.sft.steps if pair[0] == BASE_ARM and section.sft is not None else section.steps

    def _answers_per_step(self, pair: Pair) -> int:
        """Return how many answers a training step counts as: its rollouts, or in a warm start its examples."""
        section = self.context.spec.train
        assert section is not None
        if pair[0] == BASE_ARM and section.sft is not None:
            return section.sft.prompts_per_step
        return section.prompts_per_step * section.group

    def _answers_on_disk(self, pair: Pair) -> int:
        log = TelemetryLog(self.context.run.checkpoint(*pair) / TELEMETRY)
        return log.count * self._answers_per_step(pair)

    def _step_text(self, pair: Pair, done: int, row: Mapping[str, Any]) -> str:
        reward = row.get("reward_mean")
        work = "warm start" if pair[0] == BASE_ARM else f"training {pair[0]}"
        text = f"{work} seed {pair[1]}, step {done} of {self._steps(pair)}"
        return text if reward is None else f"{text}, reward {reward:.2f}"
