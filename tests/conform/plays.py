"""Random configurations for the simulator: a model family, a policy with every field drawn, and what rows are told.

Everything is plain data, so that a failing play is reproduced from what is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

import kvaudit.audit.cache.attention
from conform import simulator, world
from conform.rules import RULES, drawn_part

Draw = Callable[[st.SearchStrategy[Any]], Any]
Fields = dict[str, Any]
SHARED_FIELDS = {"budget", "sink", "window", "interval", "phase", "chunk", "pin"}

WORDS = 151
SIZES = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, max_position_embeddings=512, initializer_range=0.3)
GQA = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, **SIZES)
MIXED = ["sliding_attention", "full_attention", "full_attention"]
FAMILIES = {
    "llama": LlamaConfig(**GQA | {"num_hidden_layers": 3}),
    "llama-mha": LlamaConfig(**GQA | {"num_attention_heads": 2}),
    "llama-mqa": LlamaConfig(**GQA | {"num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**GQA),
    "qwen2-hybrid": Qwen2Config(sliding_window=6, use_sliding_window=True, layer_types=MIXED[:2], **GQA),
    "qwen3": Qwen3Config(head_dim=8, **GQA),
    "mistral": MistralConfig(sliding_window=None, **GQA),
    "gemma3": Gemma3TextConfig(sliding_window=7, layer_types=MIXED, head_dim=8, **GQA | {"num_hidden_layers": 3}),
    "phi": PhiConfig(partial_rotary_factor=0.5, **GQA),
    "gpt2": GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_head=2,
        n_layer=2,
        n_positions=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
UNTURNED = {"gpt2"}  # families of learned positions


@cache
def served(family: str) -> SimpleNamespace:
    """The product's model, as the sampler wants it."""
    stop_ids = frozenset({7})
    return SimpleNamespace(
        model=_model(family, kvaudit.audit.cache.attention.ATTENTION_NAME),
        chat=SimpleNamespace(stop_ids=stop_ids),
        device=torch.device("cpu"),
        max_positions=512,
    )


@cache
def simulated(family: str) -> Any:
    """The same weights, with the simulator's attention."""
    return _model(family, simulator.NAME)


def _model(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = deepcopy(FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention).eval()
    world.exact_norms(model)
    return model


# --- policies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One policy of a request: an evictor, ``none`` if there is none, and perhaps a codec, as plain fields."""

    evictor: Fields
    codec: Fields | None

    @property
    def text(self) -> str:
        named = [fields for fields in (self.evictor, self.codec) if fields is not None]
        alone = self.codec is not None and self.evictor["name"] == "none"
        return "+".join(spec(fields) for fields in (named[1:] if alone else named))


def spec(fields: Fields) -> str:
    """A policy as users write it, every field named."""
    own = {name: value for name, value in fields.items() if name != "name" and fields["name"] != "none"}
    text = ",".join(f"{name}={str(value).lower()}" for name, value in own.items())
    return f"{fields['name']}:{text}" if text else str(fields["name"])


def evictor(draw: Draw, name: str) -> Fields:
    """Every field of an evicting policy; ``window=-1`` of a rule means half of the budget."""
    shared = {
        "sink": (0, 0, 1, 3),
        "window": (0, 1, 4),
        "interval": (1, 1, 2, 3, 7),
        "phase": ("both", "both", "both", "prefill", "decode"),
        "chunk": (1000, 16, 5, 3),
    }
    fields = {name: draw(st.sampled_from(values)) for name, values in {**shared, **RULES[name].draws}.items()}
    budget = draw(st.integers(9, 18))
    window = budget // 2 if fields["window"] == -1 else fields["window"]
    return {"name": name, "budget": budget, **fields, "window": window}


def codec(draw: Draw, name: str) -> Fields:
    """Every field of a quantising policy."""
    drawn = {field: draw(st.sampled_from(values)) for field, values in RULES[name].draws.items()}
    return RULES[name].fitting({"name": name, **drawn})


def part(draw: Draw, name: str, *, composed: bool) -> Part:
    """The named policy alone, or an evictor and a codec of which it is one."""
    evictors = [known for known, rule in RULES.items() if rule.rank]
    codecs = [known for known, rule in RULES.items() if rule.code]
    if name in codecs:
        own = codec(draw, name)
        kept = evictor(draw, draw(st.sampled_from(evictors))) if composed else None
        if kept is None:
            own["chunk"] = draw(st.sampled_from((1000, 16, 5, 3)))
        return Part(_exact(kept or {"name": "none", "chunk": own["chunk"]}, own), own)
    if name == "none":
        return Part({"name": "none", "chunk": 1024}, None)
    if RULES[name].select is not None:
        return Part({**codec(draw, name), "chunk": draw(st.sampled_from((1000, 16, 5, 3)))}, None)
    own = codec(draw, draw(st.sampled_from(codecs))) if composed else None
    return Part(_exact(evictor(draw, name), own), own)


def _exact(fields: Fields, codec: Fields | None) -> Fields:
    """Positions counted inside the cache go with exact keys only."""
    return {**fields, "reposition": False} if codec and fields.get("reposition") else fields


# --- what is played -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Play:
    """What both kinds of play share. ``pins`` are positions in each prompt; a request draws one of ``parts``."""

    family: str
    parts: tuple[Part, ...]
    weights: tuple[int, ...]  # the parts' shares of requests
    seeds: tuple[int, ...]
    text: int  # what the tokens are made from
    pins: tuple[frozenset[int], ...]

    def tokens(self, row: int, count: int) -> list[int]:
        """What a row or prompt is given in all: no token twice, whose first layer's keys would be of equal length."""
        return [int(token) for token in np.random.default_rng((self.text, row)).permutation(range(8, WORDS))[:count]]

    @property
    def policy(self) -> str:
        """The policy string that the product is given."""
        shares = ["" if weight == 1 else f"@{weight}" for weight in self.weights]
        return "|".join(part.text + share for part, share in zip(self.parts, shares, strict=True))

    def request(self, row: int, group: int = 1) -> simulator.Request:
        """What the simulator is given for a row."""
        own = self.parts[drawn_part(self.weights, self.seeds[row])]
        shared = self.seeds[row - row % group] if len(self.parts) == 1 else self.seeds[row]
        return simulator.Request(own.evictor, own.codec, self.seeds[row], shared)

    @property
    def replayable(self) -> bool:
        """Whether every part keeps the positions that tokens were computed at."""
        return not any(part.evictor.get("reposition") for part in self.parts)


@dataclass(frozen=True)
class Conversation(Play):
    """Prompts to groups of rows, then turns: each row's limit of drawn tokens (0: it sits out) and a message to it.

    ``leaving``: a row may leave the batch after its last answer, and is told nothing from then on. ``late``: the last
    prompt's rows join the others once those have drawn so many tokens, or are through with their first turn; None: all
    begin together.
    """

    lengths: tuple[int, ...]
    group: int
    turns: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    temperature: float = 1.0
    marked: int = 0  # tokens at the head of every message that are pinned
    leaving: bool = False
    late: int | None = None

    @property
    def rows(self) -> range:
        """The numbers of the rows."""
        return range(len(self.seeds))


@dataclass(frozen=True)
class Forwards(Play):
    """Calls of the model with a public cache: per call the mask of its columns, [B][Q]."""

    masks: tuple[tuple[tuple[bool, ...], ...], ...]


@st.composite
def plays(draw: Draw, name: str) -> Play:
    """A play of the named policy, ``mixture`` for several."""
    kind = draw(st.sampled_from((conversation, forwards))) if name != "mixture" else conversation
    some = st.lists(st.sampled_from(sorted(RULES)), min_size=2, max_size=3, unique=True)
    names = draw(some) if name == "mixture" else [name]
    parts = tuple(part(draw, own, composed=draw(st.sampled_from((False, False, True)))) for own in names)
    rotary = any(RULES[own.evictor["name"]].rotary or own.evictor.get("reposition") for own in parts)
    family = draw(st.sampled_from([name for name in FAMILIES if not (rotary and name in UNTURNED)]))
    return kind(draw, family, tuple(_skipping(draw, family, own) for own in parts))


def _skipping(draw: Draw, family: str, own: Part) -> Part:
    """A codec alone may leave some of the layers that it governs as they are."""
    config = FAMILIES[family].to_dict()
    kinds = config.get("layer_types") or ["full_attention"] * (config.get("num_hidden_layers") or config["n_layer"])
    governed = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
    if own.codec is None or own.evictor["name"] != "none" or len(governed) < 2:
        return own
    skipped = draw(st.sampled_from(("", "", str(governed[0]), str(governed[-1]))))
    return Part(own.evictor, {**own.codec, "skip_layers": skipped} if skipped else own.codec)


def conversation(draw: Draw, family: str, parts: tuple[Part, ...]) -> Conversation:
    lengths = draw(st.lists(st.integers(1, 26), min_size=1, max_size=2))
    group = draw(st.sampled_from((1, 1, 2, 3) if len(lengths) == 1 else (1, 1, 2)))
    rows = len(lengths) * group
    limits, messages = (st.tuples(*[st.integers(0, most)] * rows) for most in (8, 9))
    turns = draw(st.lists(st.tuples(limits, messages), min_size=1, max_size=3))
    if not any(map(sum, (turn[0] for turn in turns))):
        turns[0] = ((5,) * rows, turns[0][1])
    parts, pins, marked = _pinned(draw, family, parts, lengths, later=len(turns))
    seeds, text = draw(st.tuples(*[st.integers(0, 99)] * rows)), draw(st.integers(0, 999))
    warm = draw(st.sampled_from((1.0, 1.0, 0.7)))
    weights = tuple(draw(st.sampled_from((1, 1, 2, 4))) for _ in parts) if len(parts) > 1 else (1,)
    leaving, told = draw(st.booleans()), tuple(turns)
    late = draw(st.sampled_from((None, 0, 1, 2, 4))) if len(lengths) > 1 else None
    return Conversation(
        family, parts, weights, seeds, text, pins, tuple(lengths), group, told, warm, marked, leaving, late
    )


def forwards(draw: Draw, family: str, parts: tuple[Part, ...]) -> Forwards:
    rows, flags = draw(st.integers(1, 3)), st.sampled_from((True, True, True, False))
    prompts = [_first_mask(draw) for _ in range(rows)]
    width = max(map(len, prompts))
    masks = [tuple((False,) * (width - len(prompt)) + prompt for prompt in prompts)]
    for size in draw(st.lists(st.sampled_from((1, 1, 1, 1, 2, 6)), min_size=2, max_size=10)):
        masks.append(draw(st.tuples(*[st.tuples(*[flags] * size)] * rows)))
    parts, pins, _ = _pinned(draw, family, parts, [sum(mask) for mask in masks[0]], later=0)
    seeds = [draw(st.integers(0, 99))] * rows
    rising = tuple(seed + n for n, seed in enumerate(seeds))
    return Forwards(family, parts, (1,), rising, draw(st.integers(0, 999)), pins, tuple(masks))


def _first_mask(draw: Draw) -> tuple[bool, ...]:
    """A prompt of 1 to 26 tokens, bare, padded on the right, or with holes; the batch pads the left."""
    length, kind = draw(st.integers(1, 26)), draw(st.sampled_from(("bare", "right", "holes")))
    if kind == "bare":
        return (True,) * length
    if kind == "right":
        return (True,) * length + (False,) * draw(st.integers(0, 6))
    return (*draw(st.lists(st.booleans(), min_size=length, max_size=length)), True)


def _pinned(
    draw: Draw, family: str, parts: tuple[Part, ...], lengths: list[int], *, later: int
) -> tuple[tuple[Part, ...], tuple[frozenset[int], ...], int]:
    """Pin some tokens of every prompt, and one of each of ``later`` messages, as far as the smallest layer has room."""
    evicting = [own for own in parts if RULES[own.evictor["name"]].rank and not own.evictor.get("reposition")]
    room = min((_room(family, own.evictor) for own in evicting), default=0)
    if len(evicting) < len(parts) or room < 1 or not draw(st.booleans()):
        return parts, (frozenset(),) * len(lengths), 0
    parts = tuple(Part({**own.evictor, "pin": "system"}, own.codec) for own in parts)
    marked = int(0 < later < room)
    positions = [st.sets(st.integers(0, length - 1), max_size=min(3, room - marked * later)) for length in lengths]
    return parts, tuple(frozenset(draw(some)) for some in positions), marked


def _room(family: str, policy: Fields) -> int:
    """Entries beside sink and window in the layer that has the fewest."""
    layers = simulator.own_windows(FAMILIES[family]).count(None)
    budgets = [RULES[policy["name"]].layer_budget(policy, depth, layers, 2**30) for depth in range(layers)]
    return min(budgets) - policy["sink"] - policy["window"]
