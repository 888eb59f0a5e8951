"""Functions of many small operators, which torch.compile can fuse into a few kernels where steps are captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Switch(threading.local):
    """Whether functions are fused now, in each thread."""

    on = False


_switch = _Switch()


def is_fusing() -> bool:
    """Tell whether this thread is inside ``fusing``."""
    return _switch.on


def fusable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let ``fusing`` replace a function of tensors by its compiled form, which computes the same to rounding."""
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _switch.on:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        result: Result = compiled[0](*args, **kwargs)
        return result

    return call


@contextmanager
def fusing() -> Iterator[None]:
    """Fuse functions inside the context, in this thread alone."""
    before, _switch.on = _switch.on, True
    try:
        yield
    finally:
        _switch.on = before
