"""llama.cpp in a worker process, by llama-cpp-python: several sequences in one batch, with token ids.

    [{"ids": [...], "max_tokens": 24, "keep": FILE, ...}, ...]
                            -> [{"ids", "finish", "logprob", "logprobs", "weights": sha256}, ...]
    [{"push": FILE.gguf}]   -> [{"sha256": of the file that is loaded now}]

Every sequence has its own part of the cache (``kv_unified`` is off). Keys and values are written into the cache before
anything attends to them, so prompts are read with quantised keys and values too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections import deque
from typing import Any

import llama_cpp as lib
import numpy as np

# the types that its own tools accept for a cache; the library lacks a constant for bf16
_KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
_FLASH = {"true": "ENABLED", "false": "DISABLED", "auto": "AUTO"}
_CELL_STEP = 1024  # cells by which the cache of a sequence grows
_WARNING, _CONTINUED = 3, 5  # log levels
_LAST = 4  # lines with warnings that an error quotes
_FACTS = {  # patterns in its log
    "type_k": r"K \((\w+)\)",
    "type_v": r"V \((\w+)\)",
    "KV cache": r"llama_kv_cache: size = +(.*)",
    "K rotated": r"attn_rot_k = (\d)",
    "V rotated": r"attn_rot_v = (\d)",
    **{name: rf"llama_context: {name} += +(\S+)" for name in ("flash_attn", "n_ctx", "n_ctx_seq", "n_seq_max")},
    **{name: rf"llama_context: {name} += +(\S+)" for name in ("n_batch", "n_ubatch", "kv_unified")},
    "weights are": r"file type += +(.*)",
}


def start(setup: dict[str, Any]) -> tuple[dict[str, str], Any]:
    """Load the model; return its description and a function that answers requests (rows).

    A first context is made at once, since llama.cpp reports the settings that it resolved only in the log of that step.
    Raises ValueError if the cache types in the log are not those of the settings.
    """
    engine = _LoadedEngine(setup)
    engine.make_room(1)
    types, facts = {name: setup["settings"][name] for name in ("type_k", "type_v")}, engine.log.facts()
    if types != {name: facts.get(name) for name in types}:
        raise ValueError(f"the cache types should be {types}, the log says: {facts.get('KV cache', 'nothing')}")
    description = {
        "version": f"llama_cpp_python {lib.__version__}",
        "system": lib.llama_print_system_info().decode(errors="replace"),
        **facts,
        "threads": str(engine.context_params.n_threads),
        "decoding": "greedy takes the largest logit; draws are of its temp, top_p, dist; several sequences at once",
    }
    return description, engine.answer


class _Log:
    """The log of llama.cpp: warnings and errors go to stderr; all lines are searched for facts (resolved settings)."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=4000)
        self._warnings: deque[str] = deque(maxlen=_LAST)
        self._level = 0
        self._callback = lib.llama_log_callback(self._take)  # an attribute, so that it lives as long as it is called
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, raw: bytes, _: Any) -> None:
        text = raw.decode(errors="replace")
        self._level = self._level if level == _CONTINUED else level
        self._lines.append(text)
        if self._level >= _WARNING:
            self._warnings.append(text)
            sys.stderr.write(text)

    def facts(self) -> dict[str, str]:
        text = "".join(self._lines)
        return {name: matches[-1].strip() for name, form in _FACTS.items() if (matches := re.findall(form, text))}

    def warnings(self) -> str:
        return " / ".join(line.strip() for line in self._warnings if line.strip())


class _LoadedEngine:
    """A model and its context (llama.cpp's cache and buffers), which grows to fit the largest batch."""

    def __init__(self, setup: dict[str, Any]) -> None:
        settings = dict(setup["settings"])
        _set_environment("GGML_NO_BACKTRACE", "1")  # a debugger's output would hide its last error
        _set_environment("LLAMA_ATTN_ROT_DISABLE", settings.pop("LLAMA_ATTN_ROT_DISABLE", None))
        lib.llama_backend_init()
        self.log = _Log()
        self._model_params = lib.llama_model_default_params()
        self.context_params = _context_params(settings, setup)
        for name in [name for name in settings if hasattr(self._model_params, name)]:
            _set_field(self._model_params, name, settings.pop(name))
        if settings:
            raise ValueError(f"no field of llama_context_params or llama_model_params: {', '.join(sorted(settings))}")
        self._vocabulary, self._has_fixed_size = setup["vocabulary"], bool(self.context_params.n_ctx)
        self._model, self._context, self._cells, self._sha256 = None, None, 0, ""
        self._load(setup["file"])

    def _load(self, path: str) -> None:
        """Load a GGUF file in place of the current model, and free the old context; ``make_room`` makes a new one."""
        if self._context is not None:
            lib.llama_free(self._context)
        if self._model is not None:
            lib.llama_model_free(self._model)
        self._context, self._cells, self._sha256 = None, 0, ""
        self._model = lib.llama_model_load_from_file(path.encode(), self._model_params)
        if not self._model:
            raise ValueError(f"the file cannot be loaded: {self.log.warnings()}")
        tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        if tokens != self._vocabulary:
            raise ValueError(f"the file has {tokens} tokens, the model has {self._vocabulary}")

    def _push(self, path: str) -> str:
        """Load a GGUF file and return its sha256; the file is memory-mapped, so the model reads exactly these bytes."""
        self._load(path)
        with open(path, "rb") as file:
            self._sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return self._sha256

    def make_room(self, tokens: int) -> None:
        """Empty the cache, and enlarge it to hold ``tokens`` tokens per sequence unless ``n_ctx`` fixes its size."""
        # in steps, so that few batches need a new context
        cells = self._cells if self._has_fixed_size else -(-tokens // _CELL_STEP) * _CELL_STEP
        if self._context is None or cells != self._cells:
            if self._context is not None:
                lib.llama_free(self._context)
            if not self._has_fixed_size:
                self.context_params.n_ctx = cells * self.context_params.n_seq_max
            self._context, self._cells = lib.llama_init_from_model(self._model, self.context_params), cells
            if not self._context:
                raise ValueError(f"no context can be made with these settings: {self.log.warnings()}")
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests (rows); or load new weights, if the only row is ``{"push": FILE}``.

        ``n_seq_max`` requests run at a time; each that finishes makes room for the next.
        """
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"])}]
        longest = max(len(row["ids"]) + row["max_tokens"] for row in rows)
        self.make_room(longest)
        if longest > lib.llama_n_ctx_seq(self._context):
            raise ValueError(f"a request takes {longest} tokens, n_ctx_seq is {lib.llama_n_ctx_seq(self._context)}")
        memory = lib.llama_get_memory(self._context)
        waiting, running = deque(range(len(rows))), dict[int, _Row]()  # running: sequence -> row
        replies: list[Any] = [None] * len(rows)
        states = dict[str, Any]()
        while waiting or running:
            for sequence in set(range(self.context_params.n_seq_max)) - set(running) if waiting else ():
                if waiting:
                    running[sequence] = _Row(waiting[0], rows[waiting.popleft()])
            for sequence, at in self._decode(running):
                row = running[sequence]
                row.take(self._context, at, self._logits(at))
                if row.finish:
                    if rows[row.index].get("keep"):
                        states[f"{row.index}.state"] = self._state(sequence)
                    replies[row.index] = row.reply() | {"weights": self._sha256}
                    del running[sequence]
                    lib.llama_memory_seq_rm(memory, sequence, -1, -1)
        for path in {row["keep"] for row in rows if row.get("keep")}:
            np.savez(path, **states)
        return replies

    def _state(self, sequence: int) -> Any:
        size = lib.llama_state_seq_get_size(self._context, sequence)
        state = np.empty(size, np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if lib.llama_state_seq_get_data(self._context, pointer, size, sequence) != size:
            raise ValueError("the state of its cache cannot be read")
        return state

    def _decode(self, running: dict[int, _Row]) -> list[tuple[int, int]]:
        """Compute a batch of tokens; return the sequences that need a next token, each with the index of its logits."""
        limit, ready = lib.llama_n_batch(self._context), list[tuple[int, int]]()
        batch = lib.llama_batch_init(limit, 0, 1)
        try:
            # the fewest tokens first, so that drawing rows do not wait for prompts
            for sequence, row in sorted(running.items(), key=lambda pair: len(pair[1].pending)):
                tokens = row.pending[: limit - batch.n_tokens]
                row.pending = row.pending[len(tokens) :]
                for token in tokens:
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.logits[at] = token, row.fed, 0
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                    batch.n_tokens, row.fed = at + 1, row.fed + 1
                if tokens and not row.pending:
                    # logits are computed only where this flag is set
                    batch.logits[batch.n_tokens - 1] = 1
                    ready.append((sequence, batch.n_tokens - 1))
            status = lib.llama_decode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if status:
            raise ValueError(f"llama_decode returned {status}: {self.log.warnings()}")
        return ready

    def _logits(self, at: int) -> Any:
        pointer = lib.llama_get_logits_ith(self._context, at)
        if not pointer:
            raise ValueError("it computes no logits with these settings")
        return np.ctypeslib.as_array(pointer, (self._vocabulary,)).astype(np.float64)  # [V]


class _Row:
    """A request that is being answered: ``pending`` tokens are still to be computed, ``fed`` tokens have been."""

    def __init__(self, index: int, request: dict[str, Any]) -> None:
        self.index, self.pending, self.fed, self.finish = index, list(request["ids"]), 0, ""
        self._request, self._ids, self._logprobs = request, list[int](), list[float]()
        self._sampler = _make_sampler(request) if request["temperature"] > 0 else None

    def take(self, context: Any, at: int, logits: Any) -> None:
        """Sample the next token from ``logits``; append it and its log-prob, and set ``finish`` if it is the last.

        The log-prob is that at the request's temperature, before top_p. ``at`` is the index of these logits in the
        context.
        """
        if not np.isfinite(logits).all():
            raise ValueError("its logits are not finite")
        # less the largest, so that no exponential overflows
        scaled = logits - logits.max()
        if self._sampler is None:
            token = int(logits.argmax())
        else:
            token = lib.llama_sampler_sample(self._sampler, context, at)
            scaled = scaled / self._request["temperature"]
        self._logprobs.append(float(scaled[token] - np.log(np.exp(scaled).sum())))
        self._ids.append(token)
        self.pending = [token]
        if token in self._request["stops"]:
            self.finish = "stop"
        elif len(self._ids) == self._request["max_tokens"]:
            self.finish = "length"

    def reply(self) -> dict[str, Any]:
        if self._sampler is not None:
            lib.llama_sampler_free(self._sampler)
        total = 0.0
        for logprob in self._logprobs:  # sum() rounds differently since Python 3.12
            total += logprob
        return {"ids": self._ids, "finish": self.finish, "logprob": total, "logprobs": self._logprobs}


def _make_sampler(request: dict[str, Any]) -> Any:
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(request["temperature"]))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(request["top_p"], 1))
    seed = request["seed"] % lib.LLAMA_DEFAULT_SEED  # this number itself means a random seed
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
    return chain


def _context_params(settings: dict[str, str], setup: dict[str, Any]) -> Any:
    """Return the parameters of a llama.cpp context: the defaults, changed by ``settings``.

    Every setting that is used here is removed from ``settings``.
    """
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 0, setup["at_once"]
    params.n_threads = params.n_threads_batch = setup["threads"]
    for name in ("type_k", "type_v"):
        setattr(params, name, _kv_type(name, settings.pop(name)))
    flash = settings.pop("flash_attn")
    if flash not in _FLASH:
        raise ValueError(f"flash_attn is {flash!r}, expected {', '.join(_FLASH)}")
    params.flash_attn_type = getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{_FLASH[flash]}")
    for name in [name for name in settings if hasattr(params, name)]:
        _set_field(params, name, settings.pop(name))
    return params


def _kv_type(name: str, text: str) -> int:
    """Return the number that llama.cpp gives a cache type such as "q8_0", for the setting ``name``.

    Raises ValueError for a type in which llama.cpp cannot keep its cache, since llama.cpp would accept any number.
    """
    if text not in _KV_TYPES:
        raise ValueError(f"{name} is {text!r}, expected {', '.join(_KV_TYPES)}")
    return int(vars(lib).get(f"GGML_TYPE_{text.upper()}", _KV_TYPES[text]))


def _set_field(params: Any, name: str, text: str) -> None:
    kind = dict(params._fields_)[name]
    parsers: dict[Any, Any] = {ctypes.c_bool: {"true": True, "false": False}.__getitem__, ctypes.c_float: float}
    parsers |= dict.fromkeys((ctypes.c_int32, ctypes.c_uint32, ctypes.c_int, ctypes.c_size_t), int)
    if kind not in parsers:
        raise ValueError(f"{name} cannot be set by text")
    try:
        value = parsers[kind](text)
        setattr(params, name, value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {text!r}, expected a value of type {kind.__name__}") from None
    if kind is not ctypes.c_float and getattr(params, name) != value:
        raise ValueError(f"{name} is {text}, out of range for type {kind.__name__}")


def _set_environment(name: str, value: str | None) -> None:
    """Set a variable that the library reads, or remove it if the value is None."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
