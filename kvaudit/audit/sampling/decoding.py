"""Sampling settings, the draw of the next token, and the results of a turn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.policies.draws import uniforms
from kvaudit.core.errors import SpecError


@dataclass(frozen=True)
class Decoding:
    """Sampling settings; ``temperature`` 0 is greedy, ``top_p`` 1 keeps the whole distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise SpecError(
                f"decoding {self}: expected max_new_tokens >= 1, temperature >= 0 (0 is greedy), 0 < top_p <= 1"
            )


@dataclass(frozen=True)
class Completion:
    """A sampled answer; ``ids`` are its tokens, with the stop token if one was sampled.

    ``logprobs`` are nats at the sampling temperature (at 1 if greedy), under the full distribution before top-p.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # "stop" | "length"


class AnswerScore(NamedTuple):
    """The score of a given answer: its log-probs (nats, temperature 1), and whether greedy decoding would give it."""

    logprobs: tuple[float, ...]
    greedy: bool


def draw(logits: Tensor, seeds: Tensor, index: Tensor, decoding: Decoding) -> tuple[list[int], list[float]]:
    """Sample one token per row from logits [B, V]; return tokens and their log-probs in nats.

    The random number of a row depends on its seed in ``seeds`` [B] and on ``index`` [B] only. ``index`` numbers the
    draws that use the same seed.
    """
    wide = logits.double()  # so that rounding rarely changes the token drawn
    if decoding.temperature not in (0, 1):
        wide = wide / decoding.temperature
    logprobs = wide.log_softmax(-1)  # [B, V] nats
    if decoding.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        probabilities = nucleus(logprobs.exp(), decoding.top_p)
        cumulative = probabilities.cumsum(-1)  # [B, V]
        threshold = uniforms(seeds, index)[:, None] * cumulative[:, -1:]  # the sum is not exactly 1
        # right=True never draws a token of probability 0; the clamp catches a threshold that rounds up to the sum
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    # one read for both, since every read waits for the device; a double holds any token number
    ids, nats = torch.stack([tokens.double(), logprobs.gather(1, tokens[:, None])[:, 0]]).tolist()
    return [int(token) for token in ids], nats


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return probabilities [B, V] with all tokens set to 0 except the most likely ones, the nucleus (Holtzman 2020).

    The nucleus is the smallest set of tokens whose probabilities add up to at least ``top_p``.
    """
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)  # [B, V], most likely first
    outside = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p stays
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))
