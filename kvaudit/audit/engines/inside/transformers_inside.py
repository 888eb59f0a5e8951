"""transformers as a worker holds it: stock ``generate`` over a left-padded batch, token ids in and out.

``generate`` takes what our processor of logits leaves it, which is one token: so every row draws with a generator of
its own, by temperature and top_p as transformers has them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

_CACHE = ("backend", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_NUMBERS = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """The model of a folder, and the configuration of its cache, of which one is made to see that it can be."""
    settings = dict(setup["settings"])
    torch.set_num_threads(setup["threads"])
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    dtype, attention = settings.pop("dtype"), settings.pop("attn_implementation")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}, wanted {', '.join(_DTYPES)}")
    kind, cache = settings.pop("cache"), {name: settings.pop(name) for name in _CACHE if name in settings}
    if settings:
        raise ValueError(f"no setting of a quantized cache: {', '.join(sorted(settings))}; it has {', '.join(_CACHE)}")
    device = setup["device"]
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"this Python's torch {torch.__version__} sees no GPU, and the model is on {device}")
    cache = {name: int(value) if name in _NUMBERS else value for name, value in cache.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        setup["folder"], dtype=_DTYPES[dtype], attn_implementation=attention, local_files_only=True
    )
    model = model.to(device).eval()
    made = _made(kind, cache, model)
    description = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "cache": type(made).__name__,
        "layer": _layer(made),
        **({} if device == "cpu" else {"device": torch.cuda.get_device_name(device)}),
        "dtype": str(model.dtype),
        "attention": str(model.config._attn_implementation),
        "threads": str(torch.get_num_threads()),
        "decoding": "generate, a batch padded on the left; a prompt is read by itself before it is coded",
    }
    how = {"cache_implementation": kind, **({"cache_config": cache} if cache else {})}
    most = setup["at_once"]
    return description, lambda rows: [reply for part in _parts(rows, most) for reply in _answered(model, how, part)]


def _parts(rows: list[dict[str, Any]], at_once: int) -> list[list[dict[str, Any]]]:
    return [rows[first : first + at_once] for first in range(0, len(rows), at_once)]


def _made(kind: str, cache: dict[str, Any], model: Any) -> Any:
    if kind == "quantized":
        return transformers.QuantizedCache(config=model.config, **cache)
    if kind == "dynamic" and not cache:
        return transformers.DynamicCache(config=model.config)
    if kind == "static" and not cache:
        return transformers.StaticCache(config=model.config, max_cache_len=1)  # generate makes its own, of its length
    raise ValueError(f"cache {kind!r} with {cache}, wanted dynamic or static alone, or quantized")


def _layer(made: Any) -> str:
    """What a layer of it says it is: the defaults that were taken too."""
    said = {name: value for name, value in vars(made.layers[0]).items() if name in _CACHE} if made.layers else {}
    return " ".join([*{type(layer).__name__ for layer in made.layers}, *(f"{k}={v}" for k, v in said.items())])


def _answered(model: Any, how: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    longest = max(len(row["ids"]) for row in rows)
    # both [B, T], padded on the left, so that every row's next token is in the last column
    ids = torch.tensor([[0] * (longest - len(row["ids"])) + row["ids"] for row in rows]).to(model.device)
    seen = torch.tensor([[0] * (longest - len(row["ids"])) + [1] * len(row["ids"]) for row in rows]).to(model.device)
    chosen = _Chosen(rows)
    config = transformers.GenerationConfig(
        max_new_tokens=max(row["most"] for row in rows),
        eos_token_id=sorted({stop for row in rows for stop in row["stops"]}) or None,
        pad_token_id=0,
        do_sample=False,
        disable_compile=True,  # of a static cache: it would be compiled for every shape of a batch
        **how,
    )
    model.generation_config = transformers.GenerationConfig()  # a checkpoint's own would fill in what is left out
    with torch.no_grad():
        model.generate(ids, attention_mask=seen, generation_config=config, logits_processor=[chosen])
    return chosen.replies()


class _Chosen:
    """Chooses every row's next token, leaves it alone to be taken, and sums its log-prob at the temperature."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._ids: list[list[int]] = [[] for _ in rows]
        self._logprobs = [0.0] * len(rows)
        self._done = [False] * len(rows)
        self._generators = [torch.Generator().manual_seed(row["seed"] % 2**63) for row in rows]

    def __call__(self, _: Any, scores: Any) -> Any:
        scores = scores.double()  # [B, V]
        best = scores.argmax(-1)
        worth = scores.log_softmax(-1).gather(1, best[:, None])[:, 0]
        finite = torch.isfinite(scores).all(-1)
        # one wait for the device, whatever the number of rows
        found = torch.stack([best.double(), worth, finite.double()], 1).tolist()
        chosen = [self._next(n, row, scores[n : n + 1], *found[n]) for n, row in enumerate(self._rows)]
        left = torch.full_like(scores, float("-inf"))
        return left.scatter_(1, torch.tensor(chosen).to(left.device)[:, None], 0.0)

    def _next(self, n: int, row: dict[str, Any], scores: Any, best: float, worth: float, finite: float) -> int:
        """A row's next token; ``best`` is the likeliest, ``worth`` its log-prob."""
        if self._done[n]:
            # generate ends once every row has come to an end token
            return row["stops"][0] if row["stops"] else 0
        if not finite:
            raise ValueError("its logits are not finite")
        token = int(best)
        if row["temperature"] > 0:
            scores = TemperatureLogitsWarper(row["temperature"])(None, scores.cpu())  # where its generator is
            kept = TopPLogitsWarper(row["top_p"])(None, scores) if row["top_p"] < 1 else scores
            token = int(torch.multinomial(kept.softmax(-1), 1, generator=self._generators[n]))
            worth = float(scores.log_softmax(-1)[0, token])
        self._logprobs[n] += worth
        self._ids[n].append(token)
        self._done[n] = token in row["stops"] or len(self._ids[n]) == row["most"]
        return token

    def replies(self) -> list[dict[str, Any]]:
        ended = [ids[-1] in row["stops"] for ids, row in zip(self._ids, self._rows, strict=True)]
        said = zip(self._ids, ended, self._logprobs, strict=True)
        return [{"ids": ids, "finish": "stop" if stop else "length", "logprob": worth} for ids, stop, worth in said]
