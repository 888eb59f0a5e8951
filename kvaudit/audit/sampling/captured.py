"""Decode steps on a GPU: captured once as a CUDA graph and replayed, since the host cannot start kernels fast enough.

A step of a model of 28 layers is some thousand small kernels, and starting them takes longer than computing them. A
graph starts all of them at once. It is captured anew when an address or a shape changes: rows leave or join, or a
growing cache has used the slots it was given.

``KVAUDIT_STEP`` picks how steps are computed: ``auto`` (``compiled`` on a GPU, else ``eager``), ``eager`` (one operator
after the other), ``fixed`` (steps of fixed shapes, not captured), ``graph`` (captured), ``compiled`` (captured, of
layers whose small operators torch.compile has fused).
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvaudit.audit.cache import attention
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.fixed_step import FixedStep, why_not_fixed
from kvaudit.audit.cache.tensors import fusing, is_fusing
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import note_once

VARIABLE = "KVAUDIT_STEP"
MODES = ("auto", "eager", "fixed", "graph", "compiled")
MAX_GRAPHS = 4  # captured at once: a step that grows and one that replaces, with a spare of each
FEWEST_STEPS = 8  # expected, for a capture to pay
_RESTLESS = 64  # steps without a replay, after which that is said


def step_mode(device: torch.device) -> str:
    """Return how steps on ``device`` are computed; raises SpecError for a bad value of the variable."""
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise SpecError(f"{VARIABLE}={mode!r}, wanted one of {', '.join(MODES)}; correct or unset it")
    on_gpu = device.type == "cuda"
    if mode == "auto":
        return "compiled" if on_gpu else "eager"
    return mode if on_gpu or mode in {"eager", "fixed"} else "fixed"


@cache
def _can_compile(device: torch.device) -> bool:
    """Whether torch.compile works on ``device``, tried once; it needs triton and a C compiler. Say it if not."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # whatever compilers raise
        line = str(error).strip().partition("\n")[0]
        note_once(f"layers are not fused by torch.compile ({line}); decode steps are slower")
        return False
    return True


class CapturedStep(NamedTuple):
    """A captured step: ``replay`` computes it, and overwrites ``logits`` [B, V]."""

    replay: Callable[[], None]
    logits: Tensor


def capture_graph(run: Callable[[], Tensor], device: torch.device) -> CapturedStep:
    """Capture ``run`` as a CUDA graph of ``device``, which computes nothing yet.

    Raises RunError if the device will not.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    collects = gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream(device))
    gc.disable()  # what it frees must not be freed in the middle of a capture
    try:
        with torch.cuda.stream(stream):  # which makes its device the current one
            # an error of another thread is none of this capture
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                logits = run()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        raise RunError(str(error).strip().partition("\n")[0]) from error
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)
    return CapturedStep(graph.replay, logits)


def _address(weight: Tensor) -> int:
    try:
        return weight.data_ptr()
    except RuntimeError:  # of several tensors
        return id(weight)


def _why_not_replayed(model: Any) -> str | None:
    """Return what of a model a replay would leave out, as the end of a sentence; None for nothing."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own let inputs require gradients; those of this project look after other caches
            if not str(getattr(hook, "__module__", None)).startswith(("transformers.", "kvaudit.")):
                return "hooks of the model, which are called at every step"
    return None


class StepRunner:
    """Computes the decode steps of one cache, by replays of captured steps where that is possible.

    ``cache`` must keep its rows; make another runner when rows leave or join.
    """

    def __init__(self, model: Any, cache: EvictingCache, mode: str) -> None:
        self.cache, self.rows = cache, len(cache.seen)
        self._model, self._mode = model, mode
        self._step = FixedStep(cache)
        self._graphs: dict[Hashable, CapturedStep] = {}
        self._run_before = deque[Hashable](maxlen=MAX_GRAPHS)  # keys of the last steps that were not captured
        self._since_replay = 0
        self._weights: list[Tensor] = list(chain(model.parameters(), model.buffers()))
        self._model_state: Hashable = None  # when the captured steps were

    @staticmethod
    def for_cache(model: Any, cache: EvictingCache, device: torch.device) -> StepRunner | None:
        """Return a runner, or None if steps are to be computed one operator after the other."""
        mode = step_mode(device)
        if mode == "eager":
            return None
        shared = "weights that several processes share" if hasattr(model, "unshard") else None
        reason = shared or why_not_fixed(cache) or _why_not_replayed(model)
        if reason is None:
            return StepRunner(model, cache, "graph" if mode == "compiled" and not _can_compile(device) else mode)
        if mode != "fixed":
            note_once(f"decode steps are not captured as CUDA graphs: {reason}; they are computed one by one, slower")
        return None

    def begin_turn(self) -> None:
        """Forget captured steps if the model's weights lie elsewhere by now, or it computes in another way."""
        if self._graphs and self._describe_model() != self._model_state:
            self._graphs.clear()
            self._run_before.clear()

    def _describe_model(self) -> Hashable:
        """Return what captured steps bake in of a model: the addresses of its weights, and modes that it reads."""
        device = self.cache.device.type
        modes = (self._model.training, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return (*modes, *map(_address, self._weights))

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], room: int, pinned: Tensor | None = None) -> Tensor:
        """Feed one token per row (-1 = none) and return the next logits [B, V]; some ``room`` more are expected."""
        key = self._step.prepare(tokens, room, pinned)
        captured = self._graphs.get(key)
        if captured is None and key in self._run_before and room >= FEWEST_STEPS and self._mode != "fixed":
            captured = self._capture(key)
        if captured is None:
            logits = self._run()
            self._run_before.append(key)
            self._note_restless(room)
        else:
            captured.replay()
            logits, self._since_replay = captured.logits, 0
        self._step.finish()
        return logits

    def _run(self) -> Tensor:
        with self._fused():
            return self._step.run(self._forward)

    def _forward(self, ids: Tensor, positions: Tensor, step: FixedStep) -> Tensor:
        """Return the logits [B, V] after tokens [B, 1] at positions [B, 1]."""
        # attention through a cache takes no mask; transformers makes none, by reading positions, where one is given
        unused = torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=unused,
            use_cache=False,
            kv=step,
            logits_to_keep=1,
        )
        step.settle()
        logits: Tensor = output.logits[:, -1]
        return logits

    def _capture(self, key: Hashable) -> CapturedStep | None:
        """Return the captured step, which was not computed yet; None if it cannot be captured."""
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if not self._graphs:
            self._model_state = self._describe_model()
        try:
            self._graphs[key] = captured = capture_graph(self._run, self.cache.device)
        except RunError as error:
            self._mode = "fixed"
            note_once(f"decode steps are not captured as CUDA graphs ({error}); they are computed one by one, slower")
            return None
        return captured

    def _note_restless(self, room: int) -> None:
        if self._mode == "fixed" or room < FEWEST_STEPS:  # nothing is captured, whatever stays the same
            return
        self._since_replay += 1
        if self._since_replay == _RESTLESS:
            note_once(f"no decode step of {_RESTLESS} could be replayed: batch or cache changed at every step")

    def _fused(self) -> Any:
        return fused_layers(self._model) if self._mode == "compiled" else nullcontext()


@contextmanager
def fused_layers(model: Any) -> Iterator[None]:
    """Let torch.compile fuse the operators of the model's layers inside the context; the model itself is unchanged.

    All layers of a class share one compiled function. Attention is left out: it goes through the cache. Other threads
    that use the model compute its layers as they are, or wait here.
    """
    with _FUSING:
        layers = [layer for layer in getattr(attention.find_decoder(model), "layers", None) or () if _is_own(layer)]
        own = [vars(layer).get("forward") for layer in layers]
        AttentionInterface.register(attention.ATTENTION_NAME, attention.skip_compile(attention.attention))
        try:
            for layer in layers:
                layer.forward = partial(_forward_fused, _fused_forward(type(layer)), layer, layer.forward)
            with fusing(), warnings.catch_warnings():
                # advice to whoever wrote the model, such as to multiply in TensorFloat32
                warnings.filterwarnings("ignore", module=r"torch\._(inductor|dynamo)\.")
                yield
        finally:
            for layer, forward in zip(layers, own, strict=True):
                vars(layer).pop("forward", None)
                if forward is not None:
                    layer.forward = forward
            AttentionInterface.register(attention.ATTENTION_NAME, attention.attention)


_FUSING = threading.RLock()
_fused_forwards: dict[type, Callable[..., Any]] = {}


def _is_own(layer: Any) -> bool:
    """Whether a layer computes what its class does: nothing replaced its forward but the checkpointing of gradients."""
    forward = vars(layer).get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func.__module__.startswith("kvaudit."))


def _forward_fused(fused: Callable[..., Any], layer: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fused(layer, *args, **kwargs) if is_fusing() else own(*args, **kwargs)


def _fused_forward(kind: type) -> Callable[..., Any]:
    if kind not in _fused_forwards:
        _fused_forwards[kind] = torch.compile(kind.forward)  # type: ignore[attr-defined]
    return _fused_forwards[kind]
