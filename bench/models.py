"""The models that the other benchmarks run on: a random Llama, the embedded model, or a folder. No benchmark itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.sampling.model import EMBEDDED, DtypeName, load_model
from kvaudit.core.errors import DataError


@dataclass
class Served:
    """A model as the sampler takes it, without stop tokens, so that every run samples as many tokens as asked."""

    name: str
    model: Any
    max_positions: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    chat: Any = field(default_factory=lambda: SimpleNamespace(stop_ids=frozenset()))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
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
    """Return a Llama of random weights with standard deviation ``spread``, always the same; 8 heads over 4 KV heads."""
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
    """Yield the model that ships with the package, or nothing if it is missing."""
    try:
        yield load_served(EMBEDDED)
    except DataError as error:
        print(f"embedded model left out: {error}")


def load_served(folder: str, dtype: DtypeName = "float32", device: str = "cpu") -> Served:
    """Load a model in Hugging Face format; raises DataError if it cannot be read."""
    loaded = load_model(folder, dtype=dtype, device=device)
    loaded.model.generation_config.eos_token_id = None  # a peer's generate must not stop early
    return Served(Path(folder).name, loaded.model, loaded.max_positions, loaded.device)
