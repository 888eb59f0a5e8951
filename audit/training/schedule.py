"""Which items a step trains on: a function of (seed, step) alone, so every arm sees the same ones in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from audit.core.records import Item
from audit.policies.draws import derive_seed
from audit.training.config import TrainConfig
from suites.base import SUITES, CountTokens, Suite

Question = tuple[Suite, Item]


def slots(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """``count`` pairs (suite index, ordinal in the suite); after any n of them each suite is within 1 of its share."""
    taken = [0] * len(shares)
    order = []
    for slot in range(1, count + 1):
        behind = max(range(len(shares)), key=lambda index: (shares[index] * slot - taken[index], -index))
        order.append((behind, taken[behind]))
        taken[behind] += 1
    return order


def training_items(config: TrainConfig, count_tokens: CountTokens) -> list[list[Question]]:
    """The questions of every step, from the train split of the configured suites."""
    suites = [SUITES.get(name)() for name in config.suites]
    order = slots(config.shares, config.steps * config.prompts_per_step)
    pools = []
    for index, suite in enumerate(suites):
        wanted = sum(1 for chosen, _ in order if chosen == index)
        seed = derive_seed("items", config.seed, suite.name) % 2**31
        pools.append(suite.items("train", wanted, seed, config.context_tokens, count_tokens) if wanted else [])
    questions = [(suites[index], pools[index][ordinal]) for index, ordinal in order]
    per_step = config.prompts_per_step
    return [questions[start : start + per_step] for start in range(0, len(questions), per_step)]


def row_seeds(config: TrainConfig, step: int) -> list[int]:
    """One sampling seed per rollout of a step, the same in every arm."""
    rows = config.prompts_per_step * config.group
    return [derive_seed("rollout", config.seed, step, row) for row in range(rows)]
