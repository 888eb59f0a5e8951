"""Validation every k steps on held-out items, uncompressed and under the policy that the run names, in every arm.

Nothing of it reaches the training: no draw, no gradient and no weight depends on whether it takes place.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.audit.policies import Dense, Policy, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.training.batch import TrainingItem, collect
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.mismatch import mismatch_panel
from kvaudit.audit.training.telemetry import TelemetryRow
from kvaudit.audit.training.token_logprobs import pass_logprobs
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Outcome
from kvaudit.core.spec_train import ValidationSpec
from kvaudit.suites.base import SUITES, CountTokens

_MISMATCH = ("overlap_p5", "k3_kl")  # of the panel, compressed sampler against the dense pass


class Validation:
    """Asks a run's held-out items of its learner; ``trained_on`` are the questions that the run trains on."""

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
        """Whether it takes place after so many steps."""
        return done % self._spec.every == 0 or done == self._config.steps  # the last always, whatever the interval

    def numbers(self) -> TelemetryRow:
        """``validation/*`` of the learner as it is."""
        named = parse_policy(self._config.policy)
        row = self._scores("dense", self._answers(Dense()))
        if named == Dense():
            return row
        played = self._answers(named)
        # how far the compressed sampler is from the dense pass of the same weights, whatever the arm learns from
        batch = collect([one.rollout for one in played], [one.grade.score for one in played], 1, self._model.device)
        dense = pass_logprobs(self._model.model, batch, "dense", self._config)  # nats [B, R]
        # rewards stand in for advantages, of which no number below is asked
        panel = mismatch_panel(batch.sampler_logprobs, dense, batch.sampled, batch.rewards[:, None])
        mismatch = {f"validation/{name}": panel[f"mismatch/{name}"] for name in _MISMATCH}
        return row | self._scores("compressed", played) | mismatch

    def _answers(self, policy: Policy) -> list[GradedRow]:
        """One answer to each item, by the same uniform numbers at every step; as many at once as training samples."""
        config, sampler = self._config, Sampler(self._model, policy)
        decoding = Decoding(max(suite.answer_tokens for suite, _ in self._questions), temperature=config.temperature)
        at_once = config.rollout_rows or config.prompts_per_step * config.group
        # "watch" is the section's name in a spec: another word here would be other draws
        seeds = [derive_seed("watch", config.seed, item.suite, item.item_id) for _, item in self._questions]
        return play(sampler, self._questions, decoding, seeds, at_once=at_once)

    def _scores(self, view: str, played: Sequence[GradedRow]) -> TelemetryRow:
        """The mean score of every suite by its own grader, None where nothing was graded, and what lost its form."""
        row: TelemetryRow = {}
        for name in self._config.validation_suites:
            scores = [one.grade.score for one in played if one.item.suite == name and one.grade.score is not None]
            row[f"validation/{view}/{name}"] = sum(scores) / len(scores) if scores else None
        lost = sum(one.grade.outcome in (Outcome.DEGENERATE, Outcome.TRUNCATED) for one in played)
        return row | {f"validation/{view}/degenerate": lost / len(played)}


def held_out(
    config: TrainConfig, spec: ValidationSpec, count: CountTokens, trained_on: Sequence[Sequence[TrainingItem]]
) -> list[TrainingItem]:
    """Items of the training split that the run does not train on: what evaluation asks is kept for the end.

    Raises SpecError for a suite of which none is left.
    """
    # by what is asked: ids of two draws say nothing of that
    known = {item.messages for step in trained_on for _, item in step}
    questions: list[TrainingItem] = []
    for name in config.validation_suites:
        suite, seed = SUITES.get(name)(), derive_seed("watch", config.seed, name) % 2**31
        items = suite.items("train", suite.item_count("train", spec.items, seed), seed, config.context_tokens, count)
        own = [(suite, item) for item in items if item.messages not in known]
        if not own:
            raise SpecError(f"train.watch: the run trains on every item of suite {name}; name other suites to watch")
        questions += own
    return questions
