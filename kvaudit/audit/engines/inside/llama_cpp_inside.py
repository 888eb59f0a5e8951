"""llama.cpp as a worker holds it: by llama-cpp-python, several sequences in one batch, token ids in and out.

    [{"ids": [...], "most": 24, "keep": FILE, ...}, ...] -> [{"ids", "finish", "logprob", "logprobs", "weights"}, ...]
    [{"push": FILE.gguf}]                                -> [{"sha256": of the file that is held from here on}]

Every sequence has a part of the cache of its own (``kv_unified`` is off). Keys and values are written into the cache
before anything attends to them, so a prompt too reads what was coded.
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

# the numbers of the types that its own tools take for a cache; the library names all of them but bf16
_KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
_FLASH = {"true": "ENABLED", "false": "DISABLED", "auto": "AUTO"}
_CELLS = 1024  # by which the part of a sequence grows
_WARNING, _CONTINUED = 3, 5  # levels of its log
_LAST = 4  # lines that are kept to say why it refused
_SAID = {
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
    """The model of a file under the settings, with a first context, which says what it made of them."""
    held = _Held(setup)
    held.make_room(1)
    asked, made = {name: setup["settings"][name] for name in ("type_k", "type_v")}, held.log.found()
    if asked != {name: made.get(name) for name in asked}:
        raise ValueError(f"the cache was to be of {asked}, and is: {made.get('KV cache', 'nothing that it says')}")
    description = {
        "version": f"llama_cpp_python {lib.__version__}",
        "system": lib.llama_print_system_info().decode(errors="replace"),
        **made,
        "threads": str(held.context_params.n_threads),
        "decoding": "greedy takes the largest logit; draws are of its temp, top_p, dist; several sequences at once",
    }
    return description, held.answer


class _Log:
    """What the library writes: on stderr from warnings up, and kept as far as it says how it works."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=4000)
        self._worst: deque[str] = deque(maxlen=_LAST)
        self._level = 0
        self._callback = lib.llama_log_callback(self._take)  # held, or it is gone while the library calls it
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, raw: bytes, _: Any) -> None:
        text = raw.decode(errors="replace")
        self._level = self._level if level == _CONTINUED else level
        self._lines.append(text)
        if self._level >= _WARNING:
            self._worst.append(text)
            sys.stderr.write(text)

    def found(self) -> dict[str, str]:
        text = "".join(self._lines)
        return {name: found[-1].strip() for name, form in _SAID.items() if (found := re.findall(form, text))}

    def worst(self) -> str:
        return " / ".join(line.strip() for line in self._worst if line.strip())


class _Held:
    """A model and its context, as large as a batch needs it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        settings = dict(setup["settings"])
        _set_environment("GGML_NO_BACKTRACE", "1")  # its last words are why it ended, and not a debugger's
        _set_environment("LLAMA_ATTN_ROT_DISABLE", settings.pop("LLAMA_ATTN_ROT_DISABLE", None))
        lib.llama_backend_init()
        self.log = _Log()
        self._model_params = lib.llama_model_default_params()
        self.context_params = _context_params(settings, setup)
        for name in [name for name in settings if hasattr(self._model_params, name)]:
            _set(self._model_params, name, settings.pop(name))
        if settings:
            raise ValueError(f"no field of llama_context_params or llama_model_params: {', '.join(sorted(settings))}")
        self._vocabulary, self._named = setup["vocabulary"], bool(self.context_params.n_ctx)
        self._model, self._context, self._cells, self._held = None, None, 0, ""
        self._load(setup["file"])

    def _load(self, path: str) -> None:
        """Hold the model of a file instead of what was held; the cache is made anew by who needs it."""
        if self._context is not None:
            lib.llama_free(self._context)
        if self._model is not None:
            lib.llama_model_free(self._model)
        self._context, self._cells, self._held = None, 0, ""
        self._model = lib.llama_model_load_from_file(path.encode(), self._model_params)
        if not self._model:
            raise ValueError(f"the file is not loaded: {self.log.worst()}")
        tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        if tokens != self._vocabulary:
            raise ValueError(f"the file has {tokens} tokens, the model has {self._vocabulary}")

    def _push(self, path: str) -> str:
        """Hold the model of a file, of which the sha256 is returned: it is mapped, so that what is read is the file."""
        self._load(path)
        with open(path, "rb") as file:
            self._held = hashlib.file_digest(file, "sha256").hexdigest()
        return self._held

    def make_room(self, tokens: int) -> None:
        """An empty cache with room for so many tokens of each sequence, or as large as ``n_ctx`` says."""
        # in steps, so that few batches make another context
        cells = self._cells if self._named else -(-tokens // _CELLS) * _CELLS
        if self._context is None or cells != self._cells:
            if self._context is not None:
                lib.llama_free(self._context)
            if not self._named:
                self.context_params.n_ctx = cells * self.context_params.n_seq_max
            self._context, self._cells = lib.llama_init_from_model(self._model, self.context_params), cells
            if not self._context:
                raise ValueError(f"no context under these settings: {self.log.worst()}")
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The replies to some rows, as many at once as there are sequences; who is done makes room for the next."""
        if len(rows) == 1 and "push" in rows[0]:
            return [{"sha256": self._push(rows[0]["push"])}]
        longest = max(len(row["ids"]) + row["most"] for row in rows)
        self.make_room(longest)
        if longest > lib.llama_n_ctx_seq(self._context):
            raise ValueError(f"a request takes {longest} tokens, n_ctx_seq is {lib.llama_n_ctx_seq(self._context)}")
        memory = lib.llama_get_memory(self._context)
        waiting, running = deque(range(len(rows))), dict[int, _Answer]()
        replies: list[Any] = [None] * len(rows)
        kept = dict[str, Any]()
        while waiting or running:
            for seat in set(range(self.context_params.n_seq_max)) - set(running) if waiting else ():
                if waiting:
                    running[seat] = _Answer(waiting[0], rows[waiting.popleft()])
            for seat, at in self._decoded(running):
                answer = running[seat]
                answer.take(self._context, at, self._logits(at))
                if answer.finish:
                    if rows[answer.index].get("keep"):
                        kept[f"{answer.index}.state"] = self._state(seat)
                    replies[answer.index] = answer.reply() | {"weights": self._held}
                    del running[seat]
                    lib.llama_memory_seq_rm(memory, seat, -1, -1)
        for path in {row["keep"] for row in rows if row.get("keep")}:
            np.savez(path, **kept)
        return replies

    def _state(self, seat: int) -> Any:
        """What its cache holds of a sequence, uint8, as the library itself saves it."""
        size = lib.llama_state_seq_get_size(self._context, seat)
        found = np.empty(size, np.uint8)
        place = found.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if lib.llama_state_seq_get_data(self._context, place, size, seat) != size:
            raise ValueError("it does not give away what its cache holds")
        return found

    def _decoded(self, running: dict[int, _Answer]) -> list[tuple[int, int]]:
        """Feed what is due, as far as a batch holds it: who has a token to come now, and where its logits are."""
        most, ready = lib.llama_n_batch(self._context), list[tuple[int, int]]()
        batch = lib.llama_batch_init(most, 0, 1)
        try:
            # the fewest tokens first: rows that draw wait for no prompt
            for seat, answer in sorted(running.items(), key=lambda pair: len(pair[1].due)):
                now = answer.due[: most - batch.n_tokens]
                answer.due = answer.due[len(now) :]
                for token in now:
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.logits[at] = token, answer.seen, 0
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, seat
                    batch.n_tokens, answer.seen = at + 1, answer.seen + 1
                if now and not answer.due:
                    # logits are computed where they are asked for alone
                    batch.logits[batch.n_tokens - 1] = 1
                    ready.append((seat, batch.n_tokens - 1))
            status = lib.llama_decode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if status:
            raise ValueError(f"llama_decode gives {status}: {self.log.worst()}")
        return ready

    def _logits(self, at: int) -> Any:
        found = lib.llama_get_logits_ith(self._context, at)
        if not found:
            raise ValueError("it gives no logits under these settings")
        return np.ctypeslib.as_array(found, (self._vocabulary,)).astype(np.float64)  # [V]


class _Answer:
    """A row that is being answered. ``due`` are the tokens that it has yet to be fed, ``seen`` how many it was fed."""

    def __init__(self, index: int, row: dict[str, Any]) -> None:
        self.index, self.due, self.seen, self.finish = index, list(row["ids"]), 0, ""
        self._row, self._ids, self._logprobs = row, list[int](), list[float]()
        self._chain = _chain(row) if row["temperature"] > 0 else None

    def take(self, context: Any, at: int, logits: Any) -> None:
        """Choose the next token; the log-prob is of all tokens at the temperature, as ours."""
        if not np.isfinite(logits).all():
            raise ValueError("its logits are not finite")
        token = int(logits.argmax()) if self._chain is None else lib.llama_sampler_sample(self._chain, context, at)
        # less the largest, so that no exponential overflows
        scaled = logits - logits.max() if self._chain is None else (logits - logits.max()) / self._row["temperature"]
        self._logprobs.append(float(scaled[token] - np.log(np.exp(scaled).sum())))
        self._ids.append(token)
        self.due = [token]
        if token in self._row["stops"]:
            self.finish = "stop"
        elif len(self._ids) == self._row["most"]:
            self.finish = "length"

    def reply(self) -> dict[str, Any]:
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
        whole = 0.0
        for one in self._logprobs:  # in their order: what Python calls a sum is rounded otherwise from 3.12 on
            whole += one
        return {"ids": self._ids, "finish": self.finish, "logprob": whole, "logprobs": self._logprobs}


def _chain(row: dict[str, Any]) -> Any:
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(row["temperature"]))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(row["top_p"], 1))
    seed = row["seed"] % lib.LLAMA_DEFAULT_SEED  # the number itself stands for any seed
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
    return chain


def _context_params(settings: dict[str, str], setup: dict[str, Any]) -> Any:
    """Its own defaults, what we run it by, and the settings that are taken out of ``settings``."""
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 0, setup["at_once"]
    params.n_threads = params.n_threads_batch = setup["threads"]
    for name in ("type_k", "type_v"):
        setattr(params, name, _kv_type(name, settings.pop(name)))
    flash = settings.pop("flash_attn")
    if flash not in _FLASH:
        raise ValueError(f"flash_attn is {flash!r}, wanted {', '.join(_FLASH)}")
    params.flash_attn_type = getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{_FLASH[flash]}")
    for name in [name for name in settings if hasattr(params, name)]:
        _set(params, name, settings.pop(name))
    return params


def _kv_type(name: str, word: str) -> int:
    """The number of a type; any other number it would take too, and compute nonsense or end."""
    if word not in _KV_TYPES:
        raise ValueError(f"{name} is {word!r}, its cache has {', '.join(_KV_TYPES)}")
    known = vars(lib)
    return int(known.get(f"GGML_TYPE_{word.upper()}", _KV_TYPES[word]))


def _set(params: Any, name: str, word: str) -> None:
    kind = dict(params._fields_)[name]
    wanted: dict[Any, Any] = {ctypes.c_bool: {"true": True, "false": False}.__getitem__, ctypes.c_float: float}
    wanted |= dict.fromkeys((ctypes.c_int32, ctypes.c_uint32, ctypes.c_int, ctypes.c_size_t), int)
    if kind not in wanted:
        raise ValueError(f"{name} is nothing that a word can set")
    try:
        value = wanted[kind](word)
        setattr(params, name, value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {word!r}, its field is of type {kind.__name__}") from None
    if kind is not ctypes.c_float and getattr(params, name) != value:
        raise ValueError(f"{name} is {word}, which its field of type {kind.__name__} cannot hold")


def _set_environment(name: str, word: str | None) -> None:
    """A setting that the library reads there; one that lies about in the environment is not ours."""
    os.environ.pop(name, None)
    if word is not None:
        os.environ[name] = word
