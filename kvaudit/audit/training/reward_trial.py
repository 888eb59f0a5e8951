"""A reward pays for ideal answers before anything is trained, so that what fails on every answer fails at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.exchange import Exchange
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.rewards.base import RewardConfig, check_scores
from kvaudit.audit.training.sft import gold_rollout
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item
from kvaudit.suites.base import Suite


def check_reward_tells(paying: RewardConfig, questions: Sequence[tuple[Suite, Item]], model: LoadedModel) -> None:
    """Raise what a reward would raise in the first step, and SpecError where it can tell nothing of any ideal answer.

    Suites without gold answers are left out, as are all where the chat template opens a thought, which gold lacks.
    """
    if model.chat.opens_thought:
        return
    paid = [(suite, item) for suite, item in questions if suite.name in paying.reward_suites]
    played = [_ideal(model, suite, item) for suite, item in paid if type(suite).gold is not Suite.gold]
    if paying.uses_grade_only or not played:
        return
    scores = check_scores(paying.reward, paying.reward.rewards(played), len(played))
    # one that can be told will do: some ideal answers are hard to read
    if not any(score is not None for score in scores):
        raise SpecError(
            f"reward {paying.reward.label} cannot tell what the ideal answer to any of {len(played)} questions earns; "
            "see that it replies as it is asked to, or take another reward"
        )


def _ideal(model: LoadedModel, suite: Suite, item: Item) -> GradedRow:
    """An item's conversation with the answers that its suite wants, as if they had been drawn."""
    exchange, rollout = Exchange(suite, item, thinks=False), gold_rollout(model, suite, item)
    for answer in suite.gold(item):
        if exchange.open:
            exchange.add(exchange.step(answer, "stop"))
    return GradedRow(
        item=item,
        transcript=exchange.transcript,
        grade=exchange.grade(),
        rollout=rollout,
        finish_reason=exchange.finish,
        prompt_tokens=rollout.prompt_length,
        new_tokens=int(rollout.sampled.sum()),
    )
