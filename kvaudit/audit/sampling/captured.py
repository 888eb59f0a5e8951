"""Decode steps on a GPU: captured once as a CUDA graph and replayed, which saves launching every kernel.

A step of a model of 28 layers is some thousand small kernels, and starting them one by one takes longer than computing
them. A graph starts all of them at once. It is captured again when an address or a shape changes: when rows leave or
join, or when a growing cache has used the slots it was given.

``KVAUDIT_STEP`` selects how steps are computed: ``auto`` (``compiled`` on a GPU, else ``eager``), ``eager`` (one
operator after the other), ``fixed`` (steps of fixed shapes, not captured), ``graph`` (captured), ``compiled``
(captured, with the small operators of each layer fused by torch.compile).
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
_UNREPLAYED_STEPS = 64  # steps without a replay, after which a note says so


def step_mode(device: torch.device) -> str:
    """Return how decode steps on ``device`` are computed, such as "compiled".

    The environment variable KVAUDIT_STEP decides this. Raises SpecError if it has an invalid value.
    """
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise SpecError(f"{VARIABLE}={mode!r}, wanted one of {', '.join(MODES)}; correct or unset it")
    on_gpu = device.type == "cuda"
    if mode == "auto":
        return "compiled" if on_gpu else "eager"
    return mode if on_gpu or mode in {"eager", "fixed"} else "fixed"


@cache
def _can_compile(device: torch.device) -> bool:
    """Return whether torch.compile, which needs triton and a C compiler, works here; print a note if not."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # compilers can raise anything
        line = str(error).strip().partition("\n")[0]
        note_once(f"layers are not fused by torch.compile ({line}); decode steps are slower")
        return False
    return True


class CapturedStep(NamedTuple):
    """A decode step captured as a CUDA graph: calling ``replay`` computes it and overwrites ``logits`` [B, V]."""

    replay: Callable[[], None]
    logits: Tensor


def capture_graph(run: Callable[[], Tensor], device: torch.device) -> CapturedStep:
    """Capture the kernels that ``run`` starts as a CUDA graph of ``device``; nothing is computed yet.

    ``run`` takes no arguments and returns the logits [B, V] of a step. Raises RunError if it cannot be captured.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    collects = gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream(device))
    gc.disable()  # no memory may be freed during a capture
    try:
        with torch.cuda.stream(stream):  # also makes its device the current one
            # an error of another thread does not concern this capture
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
    """Return the memory address of a weight; if it consists of several tensors, return Python's ``id`` of it."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # the weight consists of several tensors
        return id(weight)


def _why_not_replayed(model: Any) -> str | None:
    """Return why replaying a captured CUDA graph would skip a part of the model; None if it would not.

    The reason is text for the end of a message. Hooks, for example, are Python code, which a CUDA graph does not call.
    """
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own let inputs require gradients; those of this project look after other caches
            if not str(getattr(hook, "__module__", None)).startswith(("transformers.", "kvaudit.")):
                return "hooks of the model, which are called at every step"
    return None


class StepRunner:
    """Computes the decode steps of one cache, where possible by replaying steps captured as CUDA graphs.

    The rows of ``cache`` must stay the same; make another runner when rows leave or join.
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
        """Return a runner for the steps of ``cache``; None if they have to be computed one operator after the other."""
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
        """Drop all captured steps (CUDA graphs) if they no longer fit the model.

        They no longer fit if the weights have moved in memory, or if training mode or autocast has changed.
        """
        if self._graphs and self._describe_model() != self._model_state:
            self._graphs.clear()
            self._run_before.clear()

    def _describe_model(self) -> Hashable:
        """Return the state of the model on which captured steps depend.

        It consists of the addresses of the weights, training mode and autocast.
        """
        device = self.cache.device.type
        modes = (self._model.training, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return (*modes, *map(_address, self._weights))

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], room: int, pinned: Tensor | None = None) -> Tensor:
        """Feed one token per row (-1 = none) and return the next logits [B, V].

        ``room`` is about how many more steps will follow. If these are too few, capturing the step as a CUDA graph
        would not pay and is left out. ``pinned`` bool [B, 1] marks tokens that must never be evicted.
        """
        key = self._step.prepare(tokens, room, pinned)
        captured = self._graphs.get(key)
        if captured is None and key in self._run_before and room >= FEWEST_STEPS and self._mode != "fixed":
            captured = self._capture(key)
        if captured is None:
            logits = self._run()
            self._run_before.append(key)
            self._note_missing_replays(room)
        else:
            captured.replay()
            logits, self._since_replay = captured.logits, 0
        self._step.finish()
        return logits

    def _run(self) -> Tensor:
        with fused_layers(self._model) if self._mode == "compiled" else nullcontext():
            return self._step.run(self._forward)

    def _forward(self, ids: Tensor, positions: Tensor, step: FixedStep) -> Tensor:
        """Return the logits [B, V] that follow the tokens ``ids`` [B, 1].

        ``positions`` [B, 1] are the tokens' positions in their rows. Attention reads the cache through ``step``.
        """
        # attention through a cache ignores the mask, but without one transformers would read positions to make one
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
        """Capture the step as a CUDA graph without computing it, and keep the graph under ``key``.

        Returns None if the step cannot be captured.
        """
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

    def _note_missing_replays(self, room: int) -> None:
        """Count a step that was not replayed from a CUDA graph; after many such steps in a row, print a note once.

        The step is not counted if ``room``, the number of steps that will follow, is too small for a capture.
        """
        if self._mode == "fixed" or room < FEWEST_STEPS:  # nothing would be captured in any case
            return
        self._since_replay += 1
        if self._since_replay == _UNREPLAYED_STEPS:
            note_once(f"no decode step of {_UNREPLAYED_STEPS} could be replayed: batch or cache changed at every step")


@contextmanager
def fused_layers(model: Any) -> Iterator[None]:
    """Let torch.compile fuse the operators of the model's layers inside the context; the model stays unchanged.

    All layers of a class share one compiled function. Attention is left out, since it goes through the cache. Another
    thread that runs the model meanwhile computes its layers unfused; one that calls this function too has to wait.
    """
    with _FUSING:
        layers = [
            layer for layer in getattr(attention.find_decoder(model), "layers", None) or () if _has_own_forward(layer)
        ]
        original = [vars(layer).get("forward") for layer in layers]
        AttentionInterface.register(attention.ATTENTION_NAME, attention.skip_compile(attention.attention))
        try:
            for layer in layers:
                layer.forward = partial(_call_layer, _compile_forward(type(layer)), layer, layer.forward)
            with fusing(), warnings.catch_warnings():
                # advice to the author of the model, such as to multiply in TensorFloat32
                warnings.filterwarnings("ignore", module=r"torch\._(inductor|dynamo)\.")
                yield
        finally:
            for layer, forward in zip(layers, original, strict=True):
                vars(layer).pop("forward", None)
                if forward is not None:
                    layer.forward = forward
            AttentionInterface.register(attention.ATTENTION_NAME, attention.attention)


_FUSING = threading.RLock()
_fused_forwards: dict[type, Callable[..., Any]] = {}


def _has_own_forward(layer: Any) -> bool:
    """Return whether a layer runs the ``forward`` that its class defines.

    This is False if ``forward`` was replaced on the layer, but a wrapper for gradient checkpointing is no replacement.
    """
    forward = vars(layer).get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func.__module__.startswith("kvaudit."))


def _call_layer(fused: Callable[..., Any], layer: Any, unfused: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fused(layer, *args, **kwargs) if is_fusing() else unfused(*args, **kwargs)


def _compile_forward(kind: type) -> Callable[..., Any]:
    if kind not in _fused_forwards:
        _fused_forwards[kind] = torch.compile(kind.forward)  # type: ignore[attr-defined]
    return _fused_forwards[kind]
