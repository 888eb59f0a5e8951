"""What ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same as a break between two graphs: a cache counts on the host, and its sizes are others at every step."""
    whole: Callable[Arguments, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return whole
