"""Other stacks' rollouts against the learner's dense pass: the mismatch panel of a file, whoever sampled it.

The file is read twice. First everything is checked that needs no model, and rewards are added up by group; then a few
rollouts at a time are passed through the model. So memory is that of those few, and of one number pair per group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.replay.recorded import beyond
from kvaudit.audit.replay.stacks import Imported, imported
from kvaudit.audit.runs.verify import PASS_TOKENS
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.batch import microbatches
from kvaudit.audit.training.learner import read_tokens
from kvaudit.audit.training.mismatch import MismatchPanel, alarms
from kvaudit.core.alarms import Bound
from kvaudit.core.errors import DataError, SpecError

_AT_ONCE = 16 * PASS_TOKENS  # padded tokens that are held


@dataclass
class Survey:
    """What a file holds: counts, its longest rollout and highest id with their places, and what lines declare."""

    path: Path
    rollouts: int = 0
    tokens: int = 0  # sampled
    longest: tuple[int, str] = (0, "")
    highest: tuple[int, str] = (0, "")
    stacks: set[str] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    tokenizers: dict[str, str] = field(default_factory=dict)  # hash -> place
    rewards: dict[str, tuple[float, int]] = field(default_factory=dict)  # group -> sum, count
    undrawn: list[str] = field(default_factory=list)  # places of rollouts without a drawn token, which are skipped

    def add(self, row: Imported) -> None:
        """Count a rollout."""
        self.rollouts += 1
        self.tokens += int(row.rollout.sampled.sum())
        self.longest = max(self.longest, (len(row.rollout.ids), row.place), key=lambda found: found[0])
        self.highest = max(self.highest, (int(row.rollout.ids.max()), row.place), key=lambda found: found[0])
        self.stacks.add(row.stack)
        if row.temperature is not None:
            self.temperatures.add(row.temperature)
        if row.tokenizer_sha256 is not None:
            self.tokenizers.setdefault(row.tokenizer_sha256, row.place)
        if row.group is not None and row.reward is not None:
            total, count = self.rewards.get(row.group, (0.0, 0))
            self.rewards[row.group] = (total + row.reward, count + 1)


@dataclass(frozen=True)
class Mismatch:
    """The panel of a file, at one temperature, and the declared bounds that it passes."""

    temperature: float
    panel: dict[str, float | None]
    alarms: list[Bound]


def survey(path: Path) -> Survey:
    """Read a whole file once.

    Raises DataError at the first rollout that is none, where there are none, or where most hold no drawn token.
    """
    found = Survey(path)
    for row in imported(path, found.undrawn):
        found.add(row)
    if len(found.undrawn) > found.rollouts:
        raise DataError(
            f"{str(path)!r}: {len(found.undrawn)} of {found.rollouts + len(found.undrawn)} rollouts hold no token that "
            f"was drawn, {found.undrawn[0]} first; see that the mask is 1 where the model drew, or leave them out"
        )
    if not found.rollouts:
        raise DataError(f"{str(path)!r} holds no rollout; write one a line, see docs/rollout-files.md")
    return found


def measure(model: LoadedModel, found: Survey, *, temperature: float | None = None) -> Mismatch:
    """Pass every rollout densely; raises DataError where the model cannot have sampled them.

    ``temperature`` replaces the recorded one.
    """
    _check_model(model, found)
    heat, panel = _temperature(found, temperature), MismatchPanel()
    for rows in _handfuls(imported(found.path)):
        rollouts = [_dense(row.rollout, model.model.config) for row in rows]
        sampler = _padded([r.sampler_logprobs[r.prompt_length :] for r in rollouts])
        sampled = _padded([r.sampled[r.prompt_length :] for r in rollouts])
        # greedy draws are recorded with the log-probs of temperature 1
        learner = _learner(model.model, rollouts, sampled, heat or 1.0)
        panel.add(sampler, learner, sampled, _padded([_advantages(row, found) for row in rows]))
    numbers = panel.numbers()
    return Mismatch(heat, numbers, alarms(numbers))


def tokenizer_sha256(tokenizer: Any) -> str:
    """What a file may declare: sha256 of the vocabulary as sorted pairs of token and id."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _check_model(model: LoadedModel, found: Survey) -> None:
    (tokens, longest), (highest, strange) = found.longest, found.highest
    for place, fault in (
        (longest, beyond(tokens, 0, 0, model.model.config, model.max_positions)),
        (strange, beyond(0, 0, highest, model.model.config, model.max_positions)),
    ):
        if fault:
            raise DataError(f"{str(found.path)!r}, {place} {fault}")
    own = tokenizer_sha256(model.chat.tokenizer) if found.tokenizers else ""
    for declared, place in found.tokenizers.items():
        if declared != own:
            raise DataError(
                f"{str(found.path)!r}, {place} has tokens of a vocabulary of sha256 {declared[:12]}, that of model "
                f"{model.name!r} is {own[:12]}; give the model that sampled it"
            )


def _temperature(found: Survey, asked: float | None) -> float:
    if asked is not None:
        return asked
    if len(found.temperatures) > 1:
        known = ", ".join(f"{value:g}" for value in sorted(found.temperatures))
        raise SpecError(f"{str(found.path)!r} was sampled at several temperatures ({known}); give a file of each")
    return next(iter(found.temperatures), 1.0)


def _handfuls(rows: Iterator[Imported]) -> Iterator[list[Imported]]:
    """As many at a time as fit ``_AT_ONCE`` padded tokens, one at least."""
    held: list[Imported] = []
    longest = 0
    for row in rows:
        wider = max(longest, len(row.rollout.ids))
        if held and (len(held) + 1) * wider > _AT_ONCE:
            yield held
            held, wider = [], len(row.rollout.ids)
        held.append(row)
        longest = wider
    if held:
        yield held


def _dense(rollout: Rollout, config: Any) -> Rollout:
    """The rollout with the ledger of a dense cache of this model, which takes no memory."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    never = torch.full((1, 1, 1), NEVER, dtype=torch.int32).expand(layers, kv_heads(config), len(rollout.ids))
    return replace(rollout, evicted_at=never)


@torch.no_grad()
def _learner(model: Any, rollouts: list[Rollout], sampled: Tensor, temperature: float) -> Tensor:
    """Log-probs [B, R] of the sampled tokens under the dense pass, nats; 0 elsewhere."""
    result = torch.zeros(sampled.shape)
    for rows in microbatches(rollouts, 1, PASS_TOKENS):
        read = read_tokens(model, [rollouts[row] for row in rows], 1, "dense", temperature)
        result[rows] = torch.zeros(sampled[rows].shape).masked_scatter(sampled[rows], read.logprobs.float().cpu())
    return result


def _advantages(row: Imported, found: Survey) -> Tensor:
    """Of every token behind the prompt; NaN where neither an advantage is known nor a group to compare rewards in."""
    length = len(row.rollout.ids) - row.rollout.prompt_length
    if row.advantages is not None:
        return row.advantages
    if row.reward is None or row.group is None:
        return torch.full((length,), math.nan, dtype=torch.float64)
    total, count = found.rewards[row.group]
    return torch.full((length,), row.reward - total / count, dtype=torch.float64)


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
