"""The warm start: supervised steps on gold answers, so that a model earns something before any arm begins.

All arms of a seed begin from the same start, which is a checkpoint of arm ``base``: claimed, resumed and hashed as any.
The loss is the mean of -log p over the answers' tokens, the end of every turn included, under the dense pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.conversations import check_fits
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import trainable_copy
from kvaudit.audit.training.batch import microbatches, training_items
from kvaudit.audit.training.checkpoint import CheckpointFolder, Position, drop_state
from kvaudit.audit.training.config import StartConfig
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.rollouts import dense_rollout
from kvaudit.audit.training.telemetry import Clock, TelemetryRow
from kvaudit.audit.training.token_logprobs import read_tokens
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.base import Suite


def warm_start(
    config: StartConfig, model: LoadedModel, out: Path, progress: Callable[[int, int, TelemetryRow], None]
) -> Path:
    """Take the supervised steps from ``model``, which stays as it is, into the checkpoint folder ``out``.

    Resumes, reports and raises as ``grpo.train`` does; SpecError besides for what cannot be shown to the model.
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
        shown = [gold_rollout(model, *question) for question in questions[position.step]]
        row = {"step": done, **_step(learner.model, optimiser, shown, config.microbatch_tokens)}
        folder.telemetry.append(row)
        position = Position(done, optimiser.updates, folder.telemetry.size)
        if done % config.save_every == 0 or done == config.steps:
            folder.save_state(position, optimiser.tensors())
        progress(done, config.steps, row)
    folder.finish(learner, position)
    return out


def _step(model: Any, optimiser: Optimiser, shown: Sequence[Rollout], limit: int) -> TelemetryRow:
    clock, tokens, total = Clock(), sum(int(rollout.sampled.sum()) for rollout in shown), 0.0
    # groups of one: no two transcripts share a prompt
    for rows in microbatches(shown, 1, limit):
        read = read_tokens(model, [shown[row] for row in rows], 1, "dense", 1.0)
        loss = -read.logprobs.sum() / tokens  # nats per gold token of the whole step, so microbatches add up
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimiser.step().norm
    clock.lap("learner")
    row: TelemetryRow = {"loss": total, "grad_norm": norm, "update_skipped": norm is None, "gold_tokens": tokens}
    return row | {"learner_tokens": sum(len(rollout.ids) for rollout in shown)} | clock.laps


def gold_rollout(model: LoadedModel, suite: Suite, item: Item) -> Rollout:
    """An item's conversation when the assistant answers as the suite wants, as if it had been drawn, nothing evicted.

    Raises SpecError for a suite without gold answers, and where they do not fit the model or its chat template.
    """
    if type(suite).gold is Suite.gold:
        raise SpecError(f"suite {suite.name} has no gold answers to start from; leave train.sft out, or the suite")
    if model.chat.opens_thought:
        raise SpecError(
            "train.sft: the chat template begins every answer with a thought, which gold answers lack; turn that off "
            "by an option of the template (chat:), or leave sft out"
        )
    parts = list(_gold_parts(model, suite, item))
    ids = [token for part, _ in parts for token in part]
    # True at the assistant's tokens: those that a gradient is taken on
    learned = [own for part, own in parts for _ in part]
    if len(ids) > model.max_positions:
        raise SpecError(
            f"suite {suite.name} item {item.item_id}: its gold transcript has {len(ids)} tokens, the model "
            f"{model.max_positions} positions; lower context_tokens"
        )
    nobody_drew = torch.zeros(len(ids))
    return dense_rollout(model.model.config, torch.tensor(ids), len(parts[0][0]), torch.tensor(learned), nobody_drew)


def _gold_parts(model: LoadedModel, suite: Suite, item: Item) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The tokens of a gold conversation, turn by turn, and whether they are the assistant's."""
    chat, transcript = model.chat, item.messages
    prompt = chat.prompt(transcript).ids
    check_fits(model, suite, item, len(prompt))
    yield prompt, False
    for answer in suite.gold(item):
        said = (*chat.encode(answer), chat.end_of_turn)
        yield said, True
        transcript = (*transcript, Message(Role.ASSISTANT, answer))
        reply = suite.step(item, transcript)
        if reply is None:
            return
        transcript = (*transcript, *reply)
        yield chat.continuation(said, reply).ids, False
