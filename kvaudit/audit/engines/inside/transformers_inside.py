"""transformers in a worker process: stock ``generate`` on a batch padded on the left, with token ids.

A logits processor chooses the tokens and leaves ``generate`` a single candidate per row, so that every row samples with
its own generator, by transformers' own temperature and top_p.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

_NUMBERS = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_CACHE = ("backend", *_NUMBERS)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Load the model of a folder; return its description and a function that answers requests (rows).

    A cache is made as a trial, so that wrong settings raise an error now.
    """
    settings = dict(setup["settings"])
    torch.set_num_threads(setup["threads"])
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    dtype, attention = settings.pop("dtype"), settings.pop("attn_implementation")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}, expected {', '.join(_DTYPES)}")
    kind, options = settings.pop("cache"), {name: settings.pop(name) for name in _CACHE if name in settings}
    if settings:
        raise ValueError(
            f"unknown settings of a quantized cache: {', '.join(sorted(settings))}; it has {', '.join(_CACHE)}"
        )
    device = setup["device"]
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"the model is on {device}, but torch {torch.__version__} of this Python finds no GPU")
    options = {name: int(value) if name in _NUMBERS else value for name, value in options.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        setup["folder"], dtype=_DTYPES[dtype], attn_implementation=attention, local_files_only=True
    )
    model = model.to(device).eval()
    cache = _make_cache(kind, options, model)
    description = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "cache": type(cache).__name__,
        "layer": _describe_layers(cache),
        **({} if device == "cpu" else {"device": torch.cuda.get_device_name(device)}),
        "dtype": str(model.dtype),
        "attention": str(model.config._attn_implementation),
        "threads": str(torch.get_num_threads()),
        "decoding": "generate, a batch padded on the left; a prompt is read by itself before it is coded",
    }
    arguments = {"cache_implementation": kind, **({"cache_config": options} if options else {})}
    at_once = setup["at_once"]

    def answer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        batches = [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
        return [reply for batch in batches for reply in _answer(model, arguments, batch)]

    return description, answer


def _make_cache(kind: str, options: dict[str, Any], model: Any) -> Any:
    if kind == "quantized":
        return transformers.QuantizedCache(config=model.config, **options)
    if kind == "dynamic" and not options:
        return transformers.DynamicCache(config=model.config)
    if kind == "static" and not options:
        return transformers.StaticCache(config=model.config, max_cache_len=1)  # generate makes one of the right length
    raise ValueError(f"cache {kind!r} with {options}, expected dynamic or static without options, or quantized")


def _describe_layers(cache: Any) -> str:
    """Describe the cache's layers: the names of their classes, and the first layer's options with its defaults."""
    options = {name: value for name, value in vars(cache.layers[0]).items() if name in _CACHE} if cache.layers else {}
    return " ".join([*{type(layer).__name__ for layer in cache.layers}, *(f"{k}={v}" for k, v in options.items())])


def _answer(model: Any, arguments: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    longest = max(len(row["ids"]) for row in rows)
    # both [B, T], padded on the left, so that the next token of each row is in the last column
    ids = torch.tensor([[0] * (longest - len(row["ids"])) + row["ids"] for row in rows]).to(model.device)
    mask = torch.tensor([[0] * (longest - len(row["ids"])) + [1] * len(row["ids"]) for row in rows]).to(model.device)
    sampler = _Sampler(rows)
    config = transformers.GenerationConfig(
        max_new_tokens=max(row["max_tokens"] for row in rows),
        eos_token_id=sorted({stop for row in rows for stop in row["stops"]}) or None,
        pad_token_id=0,
        do_sample=False,
        disable_compile=True,  # a static cache would be compiled for every batch shape
        **arguments,
    )
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's own would fill in missing values
    with torch.no_grad():
        model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[sampler])
    return sampler.replies()


class _Sampler:
    """A logits processor that chooses each row's next token and sums the log-probs at the row's temperature."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._ids: list[list[int]] = [[] for _ in rows]
        self._logprobs = [0.0] * len(rows)
        self._done = [False] * len(rows)
        self._generators = [torch.Generator().manual_seed(row["seed"] % 2**63) for row in rows]

    def __call__(self, _: Any, scores: Any) -> Any:
        scores = scores.double()  # [B, V]
        best = scores.argmax(-1)
        logprob = scores.log_softmax(-1).gather(1, best[:, None])[:, 0]
        is_finite = torch.isfinite(scores).all(-1)
        # one transfer from the device for all rows
        values = torch.stack([best.double(), logprob, is_finite.double()], 1).tolist()
        tokens = [self._next(n, row, scores[n : n + 1], *values[n]) for n, row in enumerate(self._rows)]
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, torch.tensor(tokens).to(only.device)[:, None], 0.0)

    def _next(self, n: int, row: dict[str, Any], scores: Any, best: float, logprob: float, is_finite: float) -> int:
        """Return the next token of row ``n``; record the token and its log-prob.

        At temperature 0 the token is ``best``, the most likely one, and its log-prob is ``logprob``. At any other
        temperature it is drawn from ``scores``, the row's logits. Raises ValueError if ``is_finite`` is 0 (a logit is
        not finite).
        """
        if self._done[n]:
            # generate ends once every row has an end token
            return row["stops"][0] if row["stops"] else 0
        if not is_finite:
            raise ValueError("its logits are not finite")
        token = int(best)
        if row["temperature"] > 0:
            scores = TemperatureLogitsWarper(row["temperature"])(None, scores.cpu())  # the generator is on the CPU
            kept = TopPLogitsWarper(row["top_p"])(None, scores) if row["top_p"] < 1 else scores
            token = int(torch.multinomial(kept.softmax(-1), 1, generator=self._generators[n]))
            logprob = float(scores.log_softmax(-1)[0, token])
        self._logprobs[n] += logprob
        self._ids[n].append(token)
        self._done[n] = token in row["stops"] or len(self._ids[n]) == row["max_tokens"]
        return token

    def replies(self) -> list[dict[str, Any]]:
        return [
            {"ids": ids, "finish": "stop" if ids[-1] in row["stops"] else "length", "logprob": logprob}
            for ids, row, logprob in zip(self._ids, self._rows, self._logprobs, strict=True)
        ]
