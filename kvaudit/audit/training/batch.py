"""What a step is made of: its questions and seeds, its rollouts as padded tensors, and their microbatches.

Questions and seeds are a function of (seed, step) alone, so every arm meets the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.training.losses.base import BatchRewards, overlong_penalty
from kvaudit.audit.training.config import AnyConfig, TrainConfig
from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item
from kvaudit.suites.base import SUITES, CountTokens, Suite

TrainingItem = tuple[Suite, Item]


def suite_shares(config: AnyConfig) -> tuple[float, ...]:
    """Share of prompts per suite, which add up to 1; without weights equal ones."""
    weights = config.weights or (1.0,) * len(config.suites)
    return tuple(weight / sum(weights) for weight in weights)


def deal_slots(parts: Sequence[float], count: int) -> list[tuple[int, int]]:
    """``count`` pairs (suite index, ordinal in the suite); after any n of them each suite is within 1 of its share."""
    taken = [0] * len(parts)  # how many questions each suite has so far
    order = []
    for slot in range(1, count + 1):
        # the suite that lags its share most; the earlier one of two that lag alike
        late = max(range(len(parts)), key=lambda index: (parts[index] * slot - taken[index], -index))
        order.append((late, taken[late]))
        taken[late] += 1
    return order


def training_items(config: AnyConfig, count_tokens: CountTokens, draw: str = "items") -> list[list[TrainingItem]]:
    """The questions of every step, from the train split of the configured suites; another ``draw`` gives others."""
    suites = [SUITES.get(name)() for name in config.suites]
    order = deal_slots(suite_shares(config), config.steps * config.prompts_per_step)
    pools = []
    for index, suite in enumerate(suites):
        wanted = sum(1 for chosen, _ in order if chosen == index)
        # the arm is no part of the seed, here and below: arms are paired by what they are asked
        seed = derive_seed(draw, config.seed, suite.name) % 2**31
        held = suite.item_count("train", wanted, seed)
        items = suite.items("train", held, seed, config.context_tokens, count_tokens) if wanted else []
        pools.append([items[number % held] for number in range(wanted)])  # rows that have an end come again
        if any(map(suite.options, pools[-1])):
            raise SpecError(
                f"suite {suite.name} gives the answers to choose from, which no rollout draws; leave it out"
            )
    questions = [(suites[index], pools[index][ordinal]) for index, ordinal in order]
    per_step = config.prompts_per_step
    return [questions[start : start + per_step] for start in range(0, len(questions), per_step)]


def row_seeds(config: TrainConfig, step: int, attempt: int = 0) -> list[int]:
    """One sampling seed per rollout of a step, the same in every arm; others for every further attempt at it."""
    rows = config.prompts_per_step * config.group
    again = (attempt,) if attempt else ()
    return [derive_seed("rollout", config.seed, step, row, *again) for row in range(rows)]


@dataclass(frozen=True)
class Batch:
    """B rollouts, groups of one prompt consecutive; R is the longest suffix, right padded.

    ``sampler_logprobs`` float32 [B, R], nats; ``sampled`` bool [B, R]; ``mask`` the sampled
    tokens of graded rollouts; ``rewards`` [B], 0 where not ``graded`` [B]; ``earned`` bool [B], graded rows of groups
    that earned anything. ``host_sampled`` and ``host_mask`` are the same two on the host, which need not be waited for.
    """

    rollouts: tuple[Rollout, ...]
    group: int
    sampler_logprobs: Tensor
    sampled: Tensor
    mask: Tensor
    rewards: Tensor
    graded: Tensor
    earned: Tensor
    host_sampled: Tensor
    host_mask: Tensor

    def of(self, rows: Sequence[int]) -> Batch:
        """Some of its groups, or rows of one of them, as a batch of their own; columns stay."""
        index = list(rows)
        assert len(index) <= self.group or len(index) % self.group == 0, (len(index), self.group)
        names, hosts = (
            ("sampler_logprobs", "sampled", "mask", "rewards", "graded", "earned"),
            ("host_sampled", "host_mask"),
        )
        there = upload(torch.tensor(index), self.mask.device)
        tensors = {name: getattr(self, name)[there] for name in names} | {
            name: getattr(self, name)[index] for name in hosts
        }
        return Batch(tuple(self.rollouts[row] for row in index), min(self.group, len(index)), **tensors)

    def spread(self, values: Tensor) -> Tensor:
        """Values [n] of the sampled tokens, in row-major order, as [B, R] with gradient; 0 elsewhere."""
        at = upload(self.host_sampled.nonzero(), values.device).unbind(1)
        return values.new_zeros(self.sampled.shape).index_put(at, values)

    def counted(self, values: Tensor) -> Tensor:
        """Of values [n] of the sampled tokens those of graded rollouts."""
        return values[upload(self.host_mask[self.host_sampled].nonzero()[:, 0], values.device)]

    @property
    def idle(self) -> Batch:
        """Its shortest row as a batch in which nothing was sampled, so that nothing is learned from it."""
        row = min(range(len(self.rollouts)), key=lambda n: len(self.rollouts[n].ids))
        own, nothing, unsaid = self.of([row]), torch.zeros_like(self.sampled[:1]), torch.zeros_like(self.host_mask[:1])
        read = self.rollouts[row].engine_turns[0]
        quiet = replace(read, sampled=torch.zeros_like(read.sampled))
        return replace(own, rollouts=(quiet,), sampled=nothing, mask=nothing, host_sampled=unsaid, host_mask=unsaid)

    @property
    def learner_tokens(self) -> int:
        """Tokens of one shared-prompt pass: each prompt once, and every suffix."""
        prompts = sum(rollout.prompt_length for rollout in self.rollouts[:: self.group])
        return prompts + sum(len(rollout.ids) - rollout.prompt_length for rollout in self.rollouts)


def collect(rollouts: Sequence[Rollout], scores: Sequence[float | None], group: int, device: torch.device) -> Batch:
    """Pad a step's rollouts; a score of None is not graded and takes no part in the gradient."""
    rows, width = len(rollouts), max(len(rollout.ids) - rollout.prompt_length for rollout in rollouts)  # B and R
    logprobs, sampled = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        # the suffix: sampled turns and what tools said between them
        start, length = rollout.prompt_length, len(rollout.ids) - rollout.prompt_length
        logprobs[row, :length] = rollout.sampler_logprobs[start:]
        sampled[row, :length] = rollout.sampled[start:]
    graded = torch.tensor([score is not None for score in scores])
    # 0 stands for no reward too, since a tensor holds no None: whoever reads rewards reads ``graded`` beside them
    rewards = torch.tensor([0.0 if score is None else score for score in scores])
    return Batch(
        rollouts=tuple(rollouts),
        group=group,
        sampler_logprobs=logprobs.to(device),
        sampled=sampled.to(device),
        mask=(sampled & graded[:, None]).to(device),
        rewards=rewards.to(device),
        graded=graded.to(device),
        earned=earned_groups(rewards, graded, group).to(device),
        host_sampled=sampled,
        host_mask=sampled & graded[:, None],
    )


def batch_rewards(batch: Batch, values: Tensor | None, config: TrainConfig, allowed: Tensor) -> BatchRewards:
    """What a loss makes advantages of: rewards, with the cost of length where the configuration has one.

    ``allowed`` [B] or [] are the most tokens that each rollout can sample.
    """
    rewards = batch.rewards
    if config.overlong:
        rewards = rewards + overlong_penalty(batch.mask.sum(dim=1), allowed, config.overlong)
    critic = config.critic
    return BatchRewards(rewards, batch.graded, batch.mask, batch.group, values, critic.discount, critic.trace)


def earned_groups(rewards: Tensor, graded: Tensor, group: int) -> Tensor:
    """Graded rows of groups that earned anything, bool [B]."""
    earned = ((rewards > 0) & graded).view(-1, group).any(dim=1, keepdim=True)  # [B / group, 1]
    return (earned & graded.view(-1, group)).reshape(-1)


def split_halves(
    batch: Batch, limit: int, ranks: RankGroup = ALONE, *, whole: bool = False
) -> tuple[list[list[list[int]]], list[int]]:
    """A rank's microbatches of the first and of the second half of a batch's groups, and how many passes each takes.

    The gradient is taken half by half, so that the two can be compared; of one group there is one half. Ranks pass in
    step, so there are as many passes as the rank that has most microbatches needs.
    """
    group, rows = batch.group, len(batch.rollouts)
    middle = rows // group // 2 * group  # rows of the first half, whole groups
    parts = [range(middle), range(middle, rows)] if middle else [range(rows)]
    of_ranks = [ranks.share(rows // group, number) for number in range(ranks.count)]
    found, passes = [], []
    for part in parts:
        split = []
        for own in of_ranks:
            # what of this half is that rank's, perhaps nothing
            its = range(max(part.start, own.start * group), min(part.stop, own.stop * group))
            chosen = batch.rollouts[its.start : its.stop] if its else ()
            micros = microbatches(chosen, group, limit, whole=whole, apart=ranks.count > 1)
            split.append([[its[row] for row in micro] for micro in micros])
        found.append(split[ranks.number])
        passes.append(max(map(len, split)))
    return found, passes


@dataclass(frozen=True)
class GradientStep:
    """The rows of one gradient step, and the microbatches that are this rank's, by halves of the groups.

    ``passes`` are how many all ranks take together in each half: one with fewer microbatches makes up for them.
    """

    rows: list[int]
    halves: list[list[list[int]]]
    passes: list[int]

    @property
    def microbatches(self) -> list[list[int]]:
        """Those of all halves."""
        return [micro for half in self.halves for micro in half]


def gradient_steps(batch: Batch, config: TrainConfig, step: int, ranks: RankGroup = ALONE) -> list[GradientStep]:
    """Every gradient step on a batch, and what of each is a rank's.

    ``minibatches`` deal the groups out anew in each pass over the batch, by a draw of (seed, step, pass) alone; with
    one, every gradient step is on all of them.
    """
    groups = len(batch.rollouts) // batch.group
    assert groups % config.minibatches == 0, (groups, config.minibatches)
    steps = []
    for turn in range(config.updates_per_batch):
        for own in _dealt(groups, config.minibatches, derive_seed("minibatch", config.seed, step, turn)):
            rows = [index * batch.group + member for index in own for member in range(batch.group)]
            parts, passes = split_halves(batch.of(rows), config.microbatch_tokens, ranks, whole=config.whole_groups)
            named = [[[rows[row] for row in micro] for micro in part] for part in parts]
            steps.append(GradientStep(rows, named, passes))
    return steps


def _dealt(groups: int, parts: int, seed: int) -> list[list[int]]:
    """Groups in equal parts, in their own order where there is one."""
    draw = torch.Generator().manual_seed(seed)
    order = list(range(groups)) if parts == 1 else torch.randperm(groups, generator=draw).tolist()
    return [order[part * groups // parts : (part + 1) * groups // parts] for part in range(parts)]


def microbatches(
    rollouts: Sequence[Rollout], group: int, limit: int, *, whole: bool = False, apart: bool = False
) -> list[list[int]]:
    """Rows of each microbatch: whole groups, like lengths together, ``limit`` padded tokens at most.

    A group that alone has more is split, each part with the prompt, down to single rows; it makes a microbatch of its
    own where it must stay ``whole``. What was stored or chosen in different ways is in different ones. ``apart``: rows
    of a group do not share the pass over their prompt.
    """
    sizes = [_group_size(rollouts[start : start + group], apart=apart) for start in range(0, len(rollouts), group)]
    kinds = _kinds(rollouts, group)
    split: list[list[int]] = []
    taken, prompt, suffix, kind = 0, 0, 0, -1  # groups, tokens, tokens, and a kind that no group has
    # by size, so that little is padded; the index breaks ties, so that a batch splits in one way
    for index in sorted(range(len(sizes)), key=lambda index: (kinds[index], sizes[index], index)):
        wider = max(prompt, sizes[index][0]), max(suffix, sizes[index][1])
        # every group is padded to the widest prompt and suffix of its microbatch
        if kinds[index] != kind or (taken + 1) * (wider[0] + group * wider[1]) > limit:
            split.append([])
            taken, wider, kind = 0, sizes[index], kinds[index]
        split[-1].extend(range(index * group, (index + 1) * group))
        taken, (prompt, suffix) = taken + 1, wider
    return split if whole else [part for rows in split for part in _parts(rollouts, rows, group, limit, apart=apart)]


def _kinds(rollouts: Sequence[Rollout], group: int) -> list[int]:
    """A number for each group, the same where one pass can replay them: one codec, and one way of choosing keys.

    Those of as many turns too, each of which may be a row of a pass.
    """
    leaders = rollouts[::group]
    turns = [
        max(len(r.engine_turns) for r in rollouts[start : start + group]) for start in range(0, len(rollouts), group)
    ]
    chose = [None if r.selection is None else (r.selection.unit, r.selection.layers) for r in leaders]
    several = len(set(chose) - {None}) > 1  # without a choice a row goes with any
    found = [(r.codec, way if several else None, own) for r, way, own in zip(leaders, chose, turns, strict=True)]
    order = list(dict.fromkeys(found))
    return [order.index(kind) for kind in found]


def _parts(rollouts: Sequence[Rollout], rows: list[int], group: int, limit: int, *, apart: bool) -> list[list[int]]:
    """A microbatch of one group in parts that fit; of several groups as it is, since those fit."""
    if len(rows) > group:
        return [rows]
    prompt, suffix = _group_size([rollouts[row] for row in rows], apart=apart)
    # rows that fit beside the prompt; one goes through whatever the limit says
    most = max((limit - prompt) // suffix, 1)
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _group_size(members: Sequence[Rollout], *, apart: bool) -> tuple[int, int]:
    turns = max(len(rollout.engine_turns) for rollout in members)
    # what was read in turns may be replayed so, each a row of its own with all that came before it
    prompt = 0 if apart or turns > 1 else members[0].prompt_length
    return prompt, turns * (max(len(rollout.ids) for rollout in members) - prompt)
