"""What the benchmarks run on: a random Llama of moderate size, and the embedded model when it is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import DataError


@dataclass
class Served:
    """A model as the sampler wants it, with no stop token, so that every run draws as many tokens as asked."""

    name: str
    model: Any
    max_positions: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    chat: Any = field(default_factory=lambda: SimpleNamespace(stop_ids=frozenset()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype


def random_llama(
    width: int,
    layers: int,
    attention: str = ATTENTION_NAME,
    *,
    vocabulary: int = 4096,
    positions: int = 4096,
    spread: float = 0.02,
) -> Served:
    """Random weights of standard deviation ``spread``, the same for the same arguments; 8 heads over 4 KV heads."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=int(width * 2.75),
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        initializer_range=spread,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return Served(f"random Llama, width {width} x {layers} layers", LlamaForCausalLM(config).eval(), positions)


def embedded() -> Iterator[Served]:
    """The model that ships with the package, or nothing where it is missing."""
    try:
        loaded = load_model()
    except DataError as error:
        print(f"embedded model left out: {error}")
        return
    loaded.model.generation_config.eos_token_id = None  # neither side stops early
    yield Served("embedded", loaded.model, loaded.max_positions)
