"""The ranks of one training unit: processes that share its weights and its batch and take every step together.

The first has the claims, the folder and the telemetry, and decides; the others do what it calls (``on_all_ranks``). In a
step they say two things to each other, what each has sampled and measured; all else are tensors. It is read as data
alone (``_unpacked``), since whoever reaches the port may write to it; torch's exchange of objects would unpickle it.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from pathlib import PurePath
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from kvaudit.audit.policies import Policy
from kvaudit.core.errors import RunError
from kvaudit.core.text import inline

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class RankGroup:
    """This process's ``number`` among ``count`` that have met; ``why`` says which was lost, where somebody knows."""

    def __init__(self, number: int = 0, count: int = 1, why: Callable[[], str] = str) -> None:
        self.number, self.count, self._why = number, count, why
        self._unit: object = None  # what is worked on, until the others know

    def share(self, count: int, number: int | None = None) -> range:
        """Which of ``count`` things are this rank's, or another's: as many as any other's, or one more or less."""
        rank = self.number if number is None else number
        # rounding down at both ends leaves no gap and no overlap
        return range(count * rank // self.count, count * (rank + 1) // self.count)

    def gathered(self, own: T) -> list[T]:
        """Every rank's object, in their order."""
        if self.count == 1:
            return [own]
        mine = _packed(own)
        with self.together():
            sizes = torch.zeros(self.count, dtype=torch.int64)  # bytes of every rank's object
            sizes[self.number] = len(mine)
            dist.all_reduce(sizes)
            # all_gather wants one length of all
            padded = torch.cat([mine, mine.new_zeros(int(sizes.max()) - len(mine))])
            parts = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(parts, padded)
        packed = [part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]
        return [own if rank == self.number else _unpacked(packed[rank]) for rank in range(self.count)]

    def summed(self, tensor: Tensor) -> Tensor:
        """The tensor itself, which becomes the sum of all ranks'."""
        if self.count > 1:
            with self.together():
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, word: object) -> None:
        """Say something to the other ranks; nothing where this is not the first."""
        if self.number == 0 and self.count > 1:
            packed = _packed(word)
            with self.together():
                # the length first: whoever listens must have room for the rest
                dist.broadcast(torch.tensor([len(packed)]), 0)
                dist.broadcast(packed, 0)

    def heard(self) -> Any:
        """What the first rank says next."""
        size = torch.zeros(1, dtype=torch.int64)
        with self.together():
            dist.broadcast(size, 0)
            packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, 0)
        return _unpacked(packed)

    @contextmanager
    def unit(self, name: object) -> Iterator[None]:
        """What is worked on in here; the others are told when it has ``begun``, and when it is done."""
        self._unit = name
        yield
        if self._unit is None:
            self.broadcast(None)
        self._unit = None

    def begun(self) -> None:
        """Tell the others what is worked on: from here on they take part."""
        self.broadcast(self._unit)
        self._unit = None

    def follow_rank0(self, run: object) -> None:
        """Call of ``run`` what the first rank calls of its own, until its unit is done."""
        while (called := self.heard()) is not None:
            name, arguments = called
            if name not in _EVERYWHERE:
                raise RunError(f"the first rank calls {inline(str(name))!r}, which is nothing that ranks share")
            getattr(run, name)(*arguments)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around whatever exchanges something: RunError where another rank was lost."""
        try:
            yield
        except RuntimeError as error:
            # NCCL has a class for an exchange that failed, and gloo says by its files where it was
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            # without the place in gloo's own files
            line = inline(re.sub(r"^\[[^]]*\]:? *", "", str(error)).partition("\n")[0])
            what = self._why() or f"another rank was lost or hangs ({line})"
            raise RunError(f"{what}; what is saved stays: go on with --resume") from None


def _packed(thing: object) -> Tensor:
    """As bytes [n]. By torch, not by pickle alone: views of one storage stand in it once, and uint16 comes back."""
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    """Plain values, tensors and data classes that this process has; RunError for anything else, which is not made."""
    file = io.BytesIO(packed.numpy().tobytes())
    try:
        # reads names only; nothing is imported or made for them
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        file.seek(0)
        with torch.serialization.safe_globals([found for name in named if (found := _data_class(name))]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, ValueError, RuntimeError):
        raise RunError("another rank sent what is no data and was not read; start all ranks from one install") from None


def _data_class(name: str) -> type | None:
    """A data class, named tuple, enum or path by its full name, where it is imported already and holds data alone."""
    module, _, own = name.rpartition(".")
    found = vars(sys.modules[module]).get(own) if module in sys.modules else None
    if not isinstance(found, type):
        return None
    ours = module.partition(".")[0] == "kvaudit" or issubclass(found, Policy)
    data = is_dataclass(found) or issubclass(found, tuple | Enum)
    return found if issubclass(found, PurePath) or (ours and data) else None


ALONE = RankGroup()
_EVERYWHERE: set[str] = set()  # names of what the first rank may call in the others


def on_all_ranks(method: Method) -> Method:
    """A method of what has ``ranks``, which all of them enter where the first one calls it, with its arguments."""
    _EVERYWHERE.add(method.__name__)  # at import, so that every rank knows the same names

    @wraps(method)
    def called(self: Any, *arguments: Any) -> Any:
        with self.ranks.together():  # weights and gradients are exchanged deep inside
            self.ranks.broadcast((method.__name__, arguments))
            return method(self, *arguments)

    return cast("Method", called)
