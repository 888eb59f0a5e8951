"""The questions and seeds of a training step, its rollouts as padded tensors, and its gradient steps' microbatches.

Questions and seeds depend on (seed, step) only, so every arm gets the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.training.config import AnyConfig, TrainConfig
from kvaudit.audit.training.losses.base import BatchRewards, overlong_penalty
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item
from kvaudit.suites.base import SUITES, CountTokens, Suite

TrainingItem = tuple[Suite, Item]


def suite_shares(config: AnyConfig) -> tuple[float, ...]:
    """Return each suite's share of the prompts; shares sum to 1 and are equal if no ``weights`` are configured."""
    weights = config.weights or (1.0,) * len(config.suites)
    return tuple(weight / sum(weights) for weight in weights)


def deal_slots(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Deal ``count`` questions out to suites; return, in order, (index of the suite, number of the question within it).

    ``shares`` has each suite's share of the questions. Among the first n questions, for every n, the number from each
    suite differs from its share of n by at most 1.
    """
    dealt = [0] * len(shares)  # questions per suite so far
    order = []
    for slot in range(1, count + 1):
        # the suite that lags its share most gets the slot; ties go to the earlier suite
        suite = max(range(len(shares)), key=lambda index: (shares[index] * slot - dealt[index], -index))
        order.append((suite, dealt[suite]))
        dealt[suite] += 1
    return order


def training_items(config: AnyConfig, count_tokens: CountTokens, draw: str = "items") -> list[list[TrainingItem]]:
    """Return the (suite, item) questions of every step, drawn from the train split of the configured suites.

    ``draw`` is part of the seed: another text gives another selection.
    """
    suites = [SUITES.get(name)() for name in config.suites]
    order = deal_slots(suite_shares(config), config.steps * config.prompts_per_step)
    pools = []
    for index, suite in enumerate(suites):
        count = sum(1 for suite_index, _ in order if suite_index == index)
        # seeds leave the arm out, here and below: arms are paired by their questions
        seed = derive_seed(draw, config.seed, suite.name) % 2**31
        available = suite.item_count("train", count, seed)
        items = suite.items("train", available, seed, config.context_tokens, count_tokens) if count else []
        pools.append([items[number % available] for number in range(count)])  # a finite suite repeats its rows
        if any(map(suite.options, pools[-1])):
            raise SpecError(
                f"suite {suite.name} scores given answers, so there is nothing to sample; remove it from train.suites"
            )
    questions = [(suites[index], pools[index][ordinal]) for index, ordinal in order]
    per_step = config.prompts_per_step
    return [questions[start : start + per_step] for start in range(0, len(questions), per_step)]


def row_seeds(config: TrainConfig, step: int, attempt: int = 0) -> list[int]:
    """Return one sampling seed per rollout of a step, equal in all arms.

    ``attempt`` is 0, or the number of the round in which groups are sampled again; each round has its own seeds.
    """
    rows = config.prompts_per_step * config.group
    suffix = (attempt,) if attempt else ()
    return [derive_seed("rollout", config.seed, step, row, *suffix) for row in range(rows)]


@dataclass(frozen=True)
class Batch:
    """A batch of B rollouts, ordered by group (the rollouts of one prompt).

    R is the length of the longest rollout without its prompt; shorter ones are padded on the right. ``host_sampled``
    and ``host_mask`` are copies on the CPU, which can be read without waiting for the device.
    """

    rollouts: tuple[Rollout, ...]
    group: int
    sampler_logprobs: Tensor  # float32 [B, R], nats
    sampled: Tensor  # bool [B, R]
    mask: Tensor  # bool [B, R], sampled tokens of graded rollouts
    rewards: Tensor  # [B], 0 if not graded
    graded: Tensor  # bool [B]
    group_earned: Tensor  # bool [B], graded rows of groups with a positive reward
    host_sampled: Tensor
    host_mask: Tensor

    def of(self, rows: Sequence[int]) -> Batch:
        """Return some rows (whole groups, or part of one group) as a batch with the same padded length."""
        rows = list(rows)
        assert len(rows) <= self.group or len(rows) % self.group == 0, (len(rows), self.group)
        index = upload(torch.tensor(rows), self.mask.device)
        return Batch(
            rollouts=tuple(self.rollouts[row] for row in rows),
            group=min(self.group, len(rows)),
            sampler_logprobs=self.sampler_logprobs[index],
            sampled=self.sampled[index],
            mask=self.mask[index],
            rewards=self.rewards[index],
            graded=self.graded[index],
            group_earned=self.group_earned[index],
            host_sampled=self.host_sampled[rows],
            host_mask=self.host_mask[rows],
        )

    def spread(self, values: Tensor) -> Tensor:
        """Return [B, R] with ``values`` [n] at the sampled tokens (row-major order), 0 elsewhere; differentiable."""
        index = upload(self.host_sampled.nonzero(), values.device).unbind(1)
        return values.new_zeros(self.sampled.shape).index_put(index, values)

    def select_graded(self, values: Tensor) -> Tensor:
        """Return those of ``values`` [n], which has one value per sampled token, that belong to graded rollouts."""
        return values[upload(self.host_mask[self.host_sampled].nonzero()[:, 0], values.device)]

    @property
    def learner_tokens(self) -> int:
        """The number of tokens in a pass with shared prompts: each prompt once, and all tokens after the prompts."""
        prompts = sum(rollout.prompt_length for rollout in self.rollouts[:: self.group])
        return prompts + sum(len(rollout.ids) - rollout.prompt_length for rollout in self.rollouts)


def collect(rollouts: Sequence[Rollout], scores: Sequence[float | None], group: int, device: torch.device) -> Batch:
    """Pad a step's rollouts into a batch; ``scores`` are the rewards, None for an ungraded rollout (no gradient)."""
    rows, width = len(rollouts), max(len(rollout.ids) - rollout.prompt_length for rollout in rollouts)  # B and R
    logprobs, sampled = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        # the suffix: sampled turns and tool replies between them
        start, length = rollout.prompt_length, len(rollout.ids) - rollout.prompt_length
        logprobs[row, :length] = rollout.sampler_logprobs[start:]
        sampled[row, :length] = rollout.sampled[start:]
    graded = torch.tensor([score is not None for score in scores])
    # a tensor cannot hold None, so it becomes 0, and ``graded`` marks real rewards
    rewards = torch.tensor([0.0 if score is None else score for score in scores])
    mask = sampled & graded[:, None]
    return Batch(
        rollouts=tuple(rollouts),
        group=group,
        sampler_logprobs=logprobs.to(device),
        sampled=sampled.to(device),
        mask=mask.to(device),
        rewards=rewards.to(device),
        graded=graded.to(device),
        group_earned=earned_groups(rewards, graded, group).to(device),
        host_sampled=sampled,
        host_mask=mask,
    )


def batch_rewards(batch: Batch, values: Tensor | None, config: TrainConfig, limits: Tensor) -> BatchRewards:
    """Return the rewards from which advantages are computed, lowered by the penalty for long rollouts if configured.

    ``values`` [B, R] are the critic's values, None without a critic. ``limits`` [B] or [] are the rollouts' token
    limits.
    """
    rewards = batch.rewards
    if config.overlong:
        rewards = rewards + overlong_penalty(batch.mask.sum(dim=1), limits, config.overlong)
    critic = config.critic
    return BatchRewards(rewards, batch.graded, batch.mask, batch.group, values, critic.discount, critic.trace)


def earned_groups(rewards: Tensor, graded: Tensor, group: int) -> Tensor:
    """Return bool [B]: True for graded rows of groups in which at least one graded reward is positive."""
    earned = ((rewards > 0) & graded).view(-1, group).any(dim=1, keepdim=True)  # [B / group, 1]
    return (earned & graded.view(-1, group)).reshape(-1)


@dataclass(frozen=True)
class GradientStep:
    """One gradient step: the batch rows that it uses, and their microbatches (lists of rows).

    ``halves`` has the microbatches of the first and of the second half of the groups; a single group makes one half.
    Each half gets its own gradient, so that the two gradients can be compared.
    """

    rows: list[int]
    halves: list[list[list[int]]]

    @property
    def microbatches(self) -> list[list[int]]:
        """The microbatches of all halves."""
        return [micro for half in self.halves for micro in half]


def gradient_steps(batch: Batch, config: TrainConfig, step: int) -> list[GradientStep]:
    """Return every gradient step that is taken on a batch, with its microbatches.

    Each of the ``updates_per_batch`` passes over the batch splits its groups into ``minibatches`` at random; the split
    depends on (seed, step, pass) only.
    """
    groups = len(batch.rollouts) // batch.group
    assert groups % config.minibatches == 0, (groups, config.minibatches)
    steps = []
    for batch_pass in range(config.updates_per_batch):
        for minibatch in _deal_groups(
            groups, config.minibatches, derive_seed("minibatch", config.seed, step, batch_pass)
        ):
            rows = [index * batch.group + member for index in minibatch for member in range(batch.group)]
            middle = len(minibatch) // 2 * batch.group
            halves = []
            for half in (rows[:middle], rows[middle:]) if middle else (rows,):
                rollouts = [batch.rollouts[row] for row in half]
                micros = microbatches(rollouts, batch.group, config.microbatch_tokens, whole=config.whole_groups)
                halves.append([[half[n] for n in micro] for micro in micros])
            steps.append(GradientStep(rows, halves))
    return steps


def _deal_groups(groups: int, parts: int, seed: int) -> list[list[int]]:
    """Shuffle the numbers 0 to ``groups`` - 1 and split them into ``parts`` equal parts; one part keeps its order."""
    draw = torch.Generator().manual_seed(seed)
    order = list(range(groups)) if parts == 1 else torch.randperm(groups, generator=draw).tolist()
    return [order[part * groups // parts : (part + 1) * groups // parts] for part in range(parts)]


def microbatches(rollouts: Sequence[Rollout], group: int, limit: int, *, whole: bool = False) -> list[list[int]]:
    """Return the rows of each microbatch: whole groups of similar length, at most ``limit`` tokens with padding.

    A group of more than ``limit`` tokens is split into several microbatches, which read its prompt again; a single row
    is never split. With ``whole`` the group becomes one microbatch instead. Groups that one pass cannot replay together
    (``_group_kinds``) never share a microbatch.
    """
    sizes = [_group_size(rollouts[start : start + group]) for start in range(0, len(rollouts), group)]
    kinds = _group_kinds(rollouts, group)
    split: list[list[int]] = []
    count, prompt, suffix, kind = 0, 0, 0, -1  # of the open microbatch: groups, widest prompt and suffix, kind
    # by size, to pad little; the index breaks ties, so that the split is deterministic
    for index in sorted(range(len(sizes)), key=lambda index: (kinds[index], sizes[index], index)):
        wider = max(prompt, sizes[index][0]), max(suffix, sizes[index][1])
        # every group is padded to the widest prompt and suffix of its microbatch
        if kinds[index] != kind or (count + 1) * (wider[0] + group * wider[1]) > limit:
            split.append([])
            count, wider, kind = 0, sizes[index], kinds[index]
        split[-1].extend(range(index * group, (index + 1) * group))
        count, (prompt, suffix) = count + 1, wider
    return split if whole else [part for rows in split for part in _split_group(rollouts, rows, group, limit)]


def _group_kinds(rollouts: Sequence[Rollout], group: int) -> list[int]:
    """Return a number for each group; groups with equal numbers can share one pass of the learner.

    These groups agree in how keys and values are quantised, in how keys are selected, and in their number of turns.
    """
    leaders = rollouts[::group]
    # each turn may become a row of a pass
    turns = [
        max(len(r.engine_turns) for r in rollouts[start : start + group]) for start in range(0, len(rollouts), group)
    ]
    selections = [None if r.selection is None else (r.selection.unit, r.selection.layers) for r in leaders]
    # rows without a selection can join any selection, unless there are several
    if len(set(selections) - {None}) <= 1:
        selections = [None] * len(leaders)
    keys = [(r.codec, selection, n) for r, selection, n in zip(leaders, selections, turns, strict=True)]
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


def _split_group(rollouts: Sequence[Rollout], rows: list[int], group: int, limit: int) -> list[list[int]]:
    """Split the rows of a group into parts of at most ``limit`` tokens; a single row may exceed the limit.

    If ``rows`` belong to several groups, they stay in one part.
    """
    if len(rows) > group:
        return [rows]
    prompt, suffix = _group_size([rollouts[row] for row in rows])
    # at least one row, even if it exceeds the limit
    count = max((limit - prompt) // suffix, 1)
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def _group_size(members: Sequence[Rollout]) -> tuple[int, int]:
    """Return two token counts of a group: the prompt that its rows share, and the most that a row adds to it.

    If an engine prefilled a conversation again in every turn, the rows share no prompt in the replay (0).
    """
    turns = max(len(rollout.engine_turns) for rollout in members)
    # an answer that an engine read in turns may be replayed in turns, each a row with everything before it
    prompt = 0 if turns > 1 else members[0].prompt_length
    return prompt, turns * (max(len(rollout.ids) for rollout in members) - prompt)
