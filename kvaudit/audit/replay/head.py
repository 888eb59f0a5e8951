"""A model's head by itself: last hidden states are kept in place of logits, which it makes of them a few at a time.

Logits are most of what a learner's pass holds: those of 32,768 tokens at a vocabulary of 152K are 20 GB in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.core.errors import RunError


class LogitsHead:
    """What a model's own forward makes of last hidden states: the projection, and any scale or cap behind it."""

    def __init__(self, model: Any) -> None:
        self._model, self._taken = model, list[Any]()
        self._kind: Any = None  # of what the decoder returns

    def take(self, output: Any) -> None:
        """Remember what the decoder returned last."""
        self._kind, self._taken = type(output), [output.last_hidden_state]

    def states(self) -> Tensor:
        """Last hidden states [B, Q, D] of the watched forward, given once; RunError where the decoder was not asked."""
        if not self._taken:
            raise RunError(
                f"{type(self._model).__name__} does not ask its decoder as causal models do; its logits cannot be made "
                "a few at a time"
            )
        found: Tensor = self._taken.pop()  # held by nobody else from here on
        return found

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [n, V] of last hidden states [n, D], through the model's forward with the decoder standing still."""
        answer = self._kind(last_hidden_state=states[None])
        # any ids will do: the decoder does not read them
        ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        decoder, asked = find_decoder(self._model), list[bool]()

        def stand(*_: Any, **__: Any) -> Any:
            asked.append(True)
            return answer

        own = vars(decoder).get("forward")  # set by libraries that wrap a module; otherwise it is the class's
        decoder.forward = stand
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            if own is None:
                del decoder.forward
            else:
                decoder.forward = own
        assert asked, "the logits are of other states"
        return logits


@contextmanager
def capture_states(model: Any) -> Iterator[LogitsHead]:
    """Inside, the states of the last forward are those of the head that is given."""
    head = LogitsHead(model)
    handle = find_decoder(model).register_forward_hook(lambda _, __, output: head.take(output))
    try:
        yield head
    finally:
        handle.remove()
