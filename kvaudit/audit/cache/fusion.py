"""Functions of many small operators, which torch.compile can fuse into a few kernels where steps are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Switch:
    """Whether functions are fused now."""

    on = False


def fusable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let ``fusing`` replace a function of tensors by its compiled form, which computes the same to rounding."""
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _Switch.on:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        result: Result = compiled[0](*args, **kwargs)
        return result

    return call


@contextmanager
def fusing() -> Iterator[None]:
    """Fuse functions inside the context."""
    before, _Switch.on = _Switch.on, True
    try:
        yield
    finally:
        _Switch.on = before
