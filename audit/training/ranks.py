"""The ranks of one training unit: processes that share its batch and its optimiser and take every step together.

The first has the claims, the folder and the telemetry, and decides; the others do what it calls (``everywhere``). Ranks
trust each other and the network between them, since they exchange pickled objects.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from audit.core.errors import RunError
from audit.core.text import inline

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class RankGroup:
    """This process's ``number`` among ``count`` that have met; ``why`` says which was lost, where somebody knows."""

    def __init__(self, number: int = 0, count: int = 1, why: Callable[[], str] = str) -> None:
        self.number, self.count, self._why = number, count, why

    def share(self, count: int) -> range:
        """Which of ``count`` things are this rank's: as many as any other's, or one more or less."""
        return range(count * self.number // self.count, count * (self.number + 1) // self.count)

    def dealt(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """A rank for every name, the largest first, each to whoever has least."""
        loads, found = [0] * self.count, dict[str, int]()
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            found[name] = loads.index(min(loads))
            loads[found[name]] += sizes[name]
        return found

    def gathered(self, own: T) -> list[T]:
        """Every rank's object, in their order."""
        if self.count == 1:
            return [own]
        packed = [b""] * self.count
        with self._together():
            dist.all_gather_object(packed, _packed(own))
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
            with self._together():
                dist.broadcast_object_list([word], 0)

    def heard(self) -> Any:
        """What the first rank says next."""
        words: list[Any] = [None]
        with self._together():
            dist.broadcast_object_list(words, 0)
        return words[0]

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


def _packed(thing: object) -> bytes:
    """By torch, not by pickle alone: views of one storage stand in it once, and small unsigned integers come back."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


ALONE = RankGroup()


class HasRanks(Protocol):
    """What has methods that are called in all ranks."""

    @property
    def ranks(self) -> RankGroup: ...


def everywhere(method: Method) -> Method:
    """A method that all ranks enter where the first one calls it, with the same arguments."""

    @wraps(method)
    def called(self: HasRanks, *arguments: Any) -> Any:
        self.ranks.tell((method.__name__, arguments))
        return method(self, *arguments)

    return cast("Method", called)
