"""Validation every k steps on held-out items, without compression and under the run's policy; and early stopping.

Validation has no effect on training: no draw, gradient or weight depends on it. An alarm that stops one arm stops all
arms of its seed, at the earliest step at which any of them stopped, so the end does not depend on which process trains
which arm when. A stopped arm leaves a mark and its states; once all arms have marks, each is cut back to that step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.audit.policies import Dense, Policy, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.batch import TrainingItem, collect
from kvaudit.audit.training.checkpoint import guarded
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.learner import pass_logprobs
from kvaudit.audit.training.mismatch import mismatch_panel
from kvaudit.audit.training.telemetry import TelemetryRow
from kvaudit.core.alarms import alarm_key
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.records import Outcome
from kvaudit.core.spec_train import ValidationSpec
from kvaudit.suites.base import SUITES, CountTokens

MARK = "halt.json"  # in an arm's folder
_MISMATCH = ("overlap_p5", "k3_kl")  # of the panel of the compressed sampler against the dense pass


def is_validated(spec: ValidationSpec, done: int, steps: int) -> bool:
    """Return whether a run validates after ``done`` of its ``steps`` steps; True after the last."""
    return done % spec.every == 0 or done == steps


class Validation:
    """The validation of a run on held-out items; ``trained_on`` are the questions on which the run trains."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ValidationSpec,
        model: LoadedModel,
        trained_on: Sequence[Sequence[TrainingItem]],
    ) -> None:
        self._config, self._spec, self._model = config, spec, model
        self._questions = held_out(config, spec, model.chat.count_tokens, trained_on)

    def is_due(self, done: int) -> bool:
        """Return whether to validate after ``done`` steps."""
        return is_validated(self._spec, done, self._config.steps)

    def numbers(self) -> TelemetryRow:
        """Return the validation numbers of the learner's current weights, under keys ``validation/*``."""
        policy = parse_policy(self._config.policy)
        row = self._scores("dense", self._answers(Dense()))
        if policy == Dense():
            return row
        rows = self._answers(policy)
        # in every arm, the gap between the compressed sampler and the dense pass of the same weights
        rollouts, scores = [graded.rollout for graded in rows], [graded.grade.score for graded in rows]
        batch = collect(rollouts, scores, 1, self._model.device)
        dense = pass_logprobs(self._model.model, batch, "dense", self._config)  # nats [B, R]
        # the numbers below do not depend on advantages, so rewards are passed in their place
        panel = mismatch_panel(batch.sampler_logprobs, dense, batch.sampled, batch.rewards[:, None])
        mismatch = {f"validation/{name}": panel[f"mismatch/{name}"] for name in _MISMATCH}
        return row | self._scores("compressed", rows) | mismatch

    def _answers(self, policy: Policy) -> list[GradedRow]:
        """Sample one answer per item, with the same random numbers at every step."""
        config, sampler = self._config, Sampler(self._model, policy)
        decoding = Decoding(max(suite.answer_tokens for suite, _ in self._questions), temperature=config.temperature)
        at_once = config.rollout_rows or config.prompts_per_step * config.group
        # "watch", the section's name in a spec, is part of the seed: renaming it would change the draws
        seeds = [derive_seed("watch", config.seed, item.suite, item.item_id) for _, item in self._questions]
        return play(sampler, self._questions, decoding, seeds, at_once=at_once)

    def _scores(self, view: str, rows: Sequence[GradedRow]) -> TelemetryRow:
        """Return each suite's mean score (None: nothing graded), and the share of degenerate or truncated answers.

        The keys are ``validation/VIEW/...``; ``view`` says how the model was served, uncompressed or under the policy.
        """
        row: TelemetryRow = {}
        for name in self._config.validation_suites:
            grades = [graded.grade for graded in rows if graded.item.suite == name]
            scores = [grade.score for grade in grades if grade.score is not None]
            row[f"validation/{view}/{name}"] = sum(scores) / len(scores) if scores else None
        lost = sum(graded.grade.outcome in (Outcome.DEGENERATE, Outcome.TRUNCATED) for graded in rows)
        return row | {f"validation/{view}/degenerate": lost / len(rows)}


def held_out(
    config: TrainConfig, spec: ValidationSpec, count: CountTokens, trained_on: Sequence[Sequence[TrainingItem]]
) -> list[TrainingItem]:
    """Return validation items: items of the training split that are not in ``trained_on``.

    Raises SpecError for a suite without such items.
    """
    # compared by message, because ids of two draws are unrelated
    trained_messages = {item.messages for step in trained_on for _, item in step}
    questions: list[TrainingItem] = []
    for name in config.validation_suites:
        suite, seed = SUITES.get(name)(), derive_seed("watch", config.seed, name) % 2**31
        items = suite.items("train", suite.item_count("train", spec.items, seed), seed, config.context_tokens, count)
        fresh = [(suite, item) for item in items if item.messages not in trained_messages]
        if not fresh:
            raise SpecError(f"train.watch: the run trains on every item of suite {name}; name other suites to watch")
        questions += fresh
    return questions


class Mark(NamedTuple):
    """The mark of a stopped arm: the step at which it stopped, and the alarm that stopped it.

    ``alarm`` is None if the arm was finished, or stopped because another arm had.
    """

    step: int
    alarm: str | None


class EarlyStop:
    """The object that decides when the arm in ``folder`` stops early; all arms of a seed end at the same step.

    ``arms`` are the folders of all arms of the seed, including this one.
    """

    def __init__(self, spec: ValidationSpec, steps: int, folder: Path, arms: Sequence[Path]) -> None:
        self._spec, self._steps, self._folder, self._arms = spec, steps, folder, arms

    @property
    def step(self) -> int | None:
        """The step at which all arms of the seed end; None while one of them still trains."""
        marks = [mark for mark in map(read_mark, self._arms) if mark is not None]
        # an arm that still trains may stop earlier
        return min(mark.step for mark in marks) if len(marks) == len(self._arms) else None

    def is_due(self, done: int) -> bool:
        """Return whether ``done`` is a step after which the arms may end.

        The state after such a step must be kept: if another arm stops there, this arm's checkpoint is made from it too.
        """
        return is_validated(self._spec, done, self._steps)

    def ends(self, done: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the arm stops after ``done`` steps, and mark it if so; ``rows`` is its telemetry so far.

        It stops at an alarm, at its last step, and as soon as it is as far as an arm that has stopped.
        """
        if done == 0 or not self.is_due(done):
            return False
        alarm = next((name for name in self._spec.stop_on if self._is_raised(name, rows)), None)
        others = [mark.step for mark in map(read_mark, self._arms) if mark is not None]
        # if another arm stopped earlier, the seed ends there or before: no need to train further
        if alarm is None and done < self._steps and min(others, default=done + 1) > done:
            return False
        with guarded(self._folder):
            write_json(self._folder / MARK, Mark(done, alarm)._asdict())
        return True

    def _is_raised(self, name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the alarm was raised in each of the last ``patience`` steps."""
        last = rows[-self._spec.patience :]
        return len(last) == self._spec.patience and all(row[alarm_key(name)] == 1 for row in last)


def read_mark(folder: Path) -> Mark | None:
    """Return the mark (step and alarm) of a stopped arm, None while it trains; raise DataError for a damaged mark."""
    path = folder / MARK
    if not path.exists():
        return None
    row = read_json(path)
    step, alarm = row.get("step"), row.get("alarm")
    if type(step) is not int or step < 1 or not (alarm is None or isinstance(alarm, str)):
        raise DataError(f"{str(path)!r} has no valid step and alarm; delete {str(folder)!r} to train again")
    return Mark(step, alarm)
