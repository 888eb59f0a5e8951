"""Gold answers (written by the suites) in training: the warm start before any arm, and a trial of the reward.

The warm start is a checkpoint of arm ``base`` that all arms of a seed share. Its loss is the mean of -log p over the
answers' tokens, including ends of turns, under the dense pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.conversations import GradedRow, check_fits
from kvaudit.audit.sampling.exchange import Exchange
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import trainable_copy
from kvaudit.audit.training.batch import microbatches, training_items
from kvaudit.audit.training.checkpoint import CheckpointFolder, Position, drop_state
from kvaudit.audit.training.config import StartConfig
from kvaudit.audit.training.learner import read_tokens
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.rewards.base import RewardConfig, check_scores
from kvaudit.audit.training.rollouts import dense_rollout
from kvaudit.audit.training.telemetry import Clock, TelemetryRow
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item, Message, Role
from kvaudit.core.tool_forms.text import read_calls
from kvaudit.suites.base import Suite


def warm_start(
    config: StartConfig, model: LoadedModel, out: Path, progress: Callable[[int, int, TelemetryRow], None]
) -> Path:
    """Train a copy of ``model`` on gold (ideal) answers; write and return the checkpoint folder ``out``.

    Resumes, reports and raises like ``grpo.train``; also raises SpecError if gold answers do not fit the model or its
    chat template.
    """
    folder = CheckpointFolder(out, config, model.sha256)
    if folder.finished:
        drop_state(out)
        return out
    learner = trainable_copy(model, config.adapter, config.seed, checkpointing=config.gradient_checkpointing)
    optimiser = Optimiser(
        learner.model,
        learning_rate=config.sft.learning_rate,
        warmup_steps=config.sft.warmup_steps,
        max_grad_norm=config.max_grad_norm,
    )
    questions = training_items(config, model.chat.count_tokens, draw="gold")
    position = folder.resume(optimiser)
    while position.step < config.steps:
        done = position.step + 1
        rollouts = [gold_rollout(model, *question) for question in questions[position.step]]
        row = {"step": done, **_step(learner.model, optimiser, rollouts, config.microbatch_tokens)}
        folder.telemetry.append(row)
        position = Position(done, optimiser.updates, folder.telemetry.size)
        if done % config.save_every == 0 or done == config.steps:
            folder.save_state(position, optimiser.tensors())
        progress(done, config.steps, row)
    folder.finish(learner, position)
    return out


def _step(model: Any, optimiser: Optimiser, rollouts: Sequence[Rollout], limit: int) -> TelemetryRow:
    clock, tokens, total = Clock(), sum(int(rollout.sampled.sum()) for rollout in rollouts), 0.0
    # groups of one: no two transcripts share a prompt
    for rows in microbatches(rollouts, 1, limit):
        read = read_tokens(model, [rollouts[row] for row in rows], 1, "dense", 1.0)
        loss = -read.logprobs.sum() / tokens  # nats per gold token of the whole step, so microbatches add up
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimiser.step().norm
    clock.lap("learner")
    row: TelemetryRow = {"loss": total, "grad_norm": norm, "update_skipped": norm is None, "gold_tokens": tokens}
    return row | {"learner_tokens": sum(len(rollout.ids) for rollout in rollouts)} | clock.laps


def gold_rollout(model: LoadedModel, suite: Suite, item: Item) -> Rollout:
    """Return an item's conversation with gold (ideal) answers, as if the model had sampled them without eviction.

    Raises SpecError for a suite without gold answers, or if they do not fit the model or its chat template.
    """
    if type(suite).gold is Suite.gold:
        raise SpecError(f"suite {suite.name} has no gold answers for train.sft; remove sft, or the suite")
    if model.chat.opens_thought:
        raise SpecError(
            "train.sft: the chat template begins every answer with a thought, which gold answers lack; turn that off "
            "by an option of the template (chat:), or remove sft"
        )
    turns = list(_gold_turns(model, suite, item))
    ids = [token for turn, _ in turns for token in turn]
    # True at the assistant's tokens, which get the gradient
    sampled = [is_answer for turn, is_answer in turns for _ in turn]
    if len(ids) > model.max_positions:
        raise SpecError(
            f"suite {suite.name} item {item.item_id}: its gold transcript has {len(ids)} tokens, the model "
            f"{model.max_positions} positions; lower context_tokens"
        )
    no_logprobs = torch.zeros(len(ids))
    return dense_rollout(model.model.config, torch.tensor(ids), len(turns[0][0]), torch.tensor(sampled), no_logprobs)


def _gold_turns(model: LoadedModel, suite: Suite, item: Item) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield (token ids, whether the assistant wrote them) for each turn of an item's conversation with gold answers."""
    chat, transcript = model.chat, item.messages
    prompt = chat.prompt(transcript, (), item.tools).ids
    check_fits(model, suite, item, len(prompt))
    yield prompt, False
    for answer in suite.gold(item):
        calls = read_calls(answer, item.tools).calls if item.tools else ()
        # in the model's own form where it has one
        text = (chat.call_text(transcript, calls, item.tools) if calls else None) or answer
        ids = (*chat.encode(text), chat.end_of_turn)
        yield ids, True
        transcript = (*transcript, Message(Role.ASSISTANT, text, calls))
        reply = suite.step(item, transcript)
        if reply is None:
            return
        transcript = (*transcript, *reply)
        yield chat.continuation(ids, reply, calls=calls, tools=item.tools).ids, False


def check_reward_on_gold(config: RewardConfig, questions: Sequence[tuple[Suite, Item]], model: LoadedModel) -> None:
    """Score gold answers (the suites' ideal answers) before training, to notice a reward that always fails.

    Raises SpecError if the reward is None for every gold answer, and any error of the reward. Skips suites without gold
    answers, and chat templates that open a thought, since gold answers have none.
    """
    if model.chat.opens_thought:
        return
    scored = [(suite, item) for suite, item in questions if suite.name in config.reward_suites]
    rows = [_gold_row(model, suite, item) for suite, item in scored if type(suite).gold is not Suite.gold]
    if not rows:
        return
    scores = check_scores(config.reward, config.reward.rewards(rows), len(rows))
    # a single score suffices: some gold answers are hard to read
    if not any(score is not None for score in scores):
        raise SpecError(
            f"reward {config.reward.label} gives no score for the gold answer to any of {len(rows)} questions; check "
            "that it replies in the expected form, or use another reward"
        )


def _gold_row(model: LoadedModel, suite: Suite, item: Item) -> GradedRow:
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
