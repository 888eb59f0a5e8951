"""The ranks of one training unit: processes that share its batch and its optimiser and take every step together.

The first has the claims, the folder and the telemetry, and decides; the others do what it calls (``everywhere``). What
they exchange is read as data alone (``_unpacked``), since whoever reaches the port may write to it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from pathlib import PurePath
from typing import Any, Protocol, TypeVar, cast

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

    def share(self, count: int) -> range:
        """Which of ``count`` things are this rank's: as many as any other's, or one more or less."""
        # rounding down at both ends leaves no gap and no overlap
        return range(count * self.number // self.count, count * (self.number + 1) // self.count)

    def dealt(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """A rank for every name, the largest first, each to whoever has least."""
        loads, found = [0] * self.count, dict[str, int]()
        # by name among equals: all ranks must deal alike without asking
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            found[name] = loads.index(min(loads))
            loads[found[name]] += sizes[name]
        return found

    def gathered(self, own: T) -> list[T]:
        """Every rank's object, in their order."""
        if self.count == 1:
            return [own]
        mine = _packed(own)
        with self._together():
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
            with self._together():
                dist.all_reduce(tensor)
        return tensor

    def sum_at(self, rank: int, tensor: Tensor) -> None:
        """Make a tensor the sum of all ranks' in one of them; elsewhere it may hold anything then."""
        if self.count > 1:
            with self._together():
                dist.reduce(tensor, rank)

    def spread(self, rank: int, tensor: Tensor) -> None:
        """Make a tensor what it is in one of the ranks."""
        if self.count > 1:
            with self._together():
                dist.broadcast(tensor, rank)

    def collected(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the first rank the named tensors of all, those of the others on the CPU; elsewhere its own."""
        # a receiver has to know shape and dtype before the bytes come
        forms = self.gathered({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
        found = dict(own)
        for rank, form in enumerate(forms[1:], start=1):
            for name, (shape, dtype) in form.items():
                with self._together():
                    if self.number == rank:
                        dist.send(own[name].cpu(), 0)
                    elif self.number == 0:
                        found[name] = torch.empty(shape, dtype=dtype)
                        dist.recv(found[name], rank)
        return found

    def tell(self, word: object) -> None:
        """Say something to the other ranks; nothing where this is not the first."""
        if self.number == 0 and self.count > 1:
            packed = _packed(word)
            with self._together():
                # the length first: whoever listens must have room for the rest
                dist.broadcast(torch.tensor([len(packed)]), 0)
                dist.broadcast(packed, 0)

    def heard(self) -> Any:
        """What the first rank says next."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._together():
            dist.broadcast(size, 0)
            packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, 0)
        return _unpacked(packed)

    @contextmanager
    def unit(self, name: object) -> Iterator[None]:
        """Tell the others what is worked on, and afterwards that it is done."""
        self.tell(name)
        yield
        self.tell(None)

    def obey(self, run: object) -> None:
        """Call of ``run`` what the first rank calls of its own, until its unit is done."""
        while (called := self.heard()) is not None:
            name, arguments = called
            if name not in _EVERYWHERE:
                raise RunError(f"the first rank calls {inline(str(name))!r}, which is nothing that ranks share")
            getattr(run, name)(*arguments)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the transport, which has no class of its own for it
            what = self._why() or f"another rank was lost ({inline(str(error).partition(chr(10))[0])})"
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


class HasRanks(Protocol):
    """What has methods that are called in all ranks."""

    @property
    def ranks(self) -> RankGroup: ...


def everywhere(method: Method) -> Method:
    """A method that all ranks enter where the first one calls it, with the same arguments."""
    _EVERYWHERE.add(method.__name__)  # at import, so that every rank knows the same names

    @wraps(method)
    def called(self: HasRanks, *arguments: Any) -> Any:
        self.ranks.tell((method.__name__, arguments))
        return method(self, *arguments)

    return cast("Method", called)
