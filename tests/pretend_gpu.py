"""A GPU that is not there: tensors that say they are on ``cuda``, with the numbers of a CPU, and every wait noted.

Torch's FakeTensorMode says what shape, type and device a result has, and refuses to mix devices. Beside each of its
tensors stands a twin on the CPU, which is computed too, so that whatever a program reads is what a GPU would have told
it, and what comes out can be compared. Tensors on the CPU stay what they are: reading those waits for nothing.
Gradients are taken as anywhere, and what a backward pass reads is noted where it was asked for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import kvaudit
from kvaudit.audit.cache.hints import ranks
from kvaudit.audit.policies.q4_0 import hadamard

aten = torch.ops.aten
GPU, HOST = torch.device("cuda:0"), torch.device("cpu")
# what torch's own C++ is told instead of ``cuda``: autograd asks the driver of an accelerator for its streams, and this
# is a device that has no driver and that every build knows
BENEATH = torch.device("lazy:0")
OURS = Path(kvaudit.__file__).parent
MATHS = 0  # the plain formula among torch's attention kernels: those of a GPU have no twin
BY_INDEX = (aten.index.Tensor, aten.index_put_.default)
OWN_SHAPE = (aten.log_sigmoid_forward.default,)  # whose second result, kept for its backward pass, a GPU leaves empty
READS, UPLOADS = "read", "upload"
# calls that torch has said of once what they make and that they read nothing; what they make then is as large as on a
# CPU, and torch's own account of it, which takes most of the time, is not asked for again
PLAIN = set[tuple[Any, ...]]()


class PretendGpu(TorchDispatchMode):
    """Where in our code the host waits for the device: ``waits`` by kind and place.

    A read is a value that the host asks for. An upload is one that it hands over from ordinary memory and waits for, as
    torch does unless told ``non_blocking=True``.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._fake = fake

    def __torch_dispatch__(  # noqa: C901, PLR0911 - one case after the other
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked by C++ alone: in Python a fake tensor says ``cuda`` itself
            return BENEATH
        if kwargs.get("device") == BENEATH:
            kwargs = kwargs | {"device": GPU}
        tensors = [x for x in _flat([args, kwargs]) if isinstance(x, Tensor)]
        there, asked = [x for x in tensors if isinstance(x, FakeTensor)], kwargs.get("device")
        if not there and (asked is None or asked.type != GPU.type):
            with no_dispatch():
                return func(*args, **kwargs)
        if func is aten._fused_sdp_choice.default:
            return MATHS
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            self.note(READS)
            return self._real(func, args, kwargs)
        if func in BY_INDEX and any(x is not None and x.dtype == torch.bool for x in args[1]):
            return self._by_mask(func, args, kwargs)
        if func in BY_INDEX and any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in args[1]):
            self.note(UPLOADS)  # of a list of numbers, say: torch hands it over by itself
            real = self._real(func, args, kwargs)
            return self._paired(None, real) if func is aten.index.Tensor else args[0]
        if func is aten._to_copy.default and (not there or asked == HOST):
            return self._moved(func, args, kwargs)
        if func is aten.copy_.default and len(there) < len(tensors) and tensors[1].dim():
            self._note_move(tensors[1], non_blocking=len(args) > 2 and args[2])
            self._real(func, args, kwargs)
            return args[0]
        strangers = [tuple(x.shape) for x in tensors if not isinstance(x, FakeTensor) and x.dim()]
        assert not strangers, f"{func} is asked to mix devices: {strangers} on the CPU"
        call = (func, tuple(x is None for x in args), *kwargs)
        if call in PLAIN:
            return self._paired(None, self._real(func, args, kwargs))
        try:
            found = func(*self._known(args), **self._known(kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.note(READS)  # how large the result is, at the least
            found = None
        else:
            if not _shares(func):
                PLAIN.add(call)
        return self._paired(None if func in OWN_SHAPE else found, self._real(func, args, kwargs))

    def _by_mask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a mask chooses is counted first, unless one number is put everywhere."""
        if func is aten.index.Tensor or args[2].numel() > 1:
            self.note(READS)
        real = self._real(func, args, kwargs)
        return self._paired(None, real) if func is aten.index.Tensor else args[0]

    def note(self, kind: str) -> None:
        """One more wait, by the function of ours that asks for it, ``stock`` where none does."""
        self.waits[kind, where()] += 1

    def _known(self, x: Any) -> Any:
        """The same with plain numbers on the CPU, which may be mixed with anything, as fake ones."""
        fake = self._fake.from_tensor
        return _mapped(lambda t: fake(t) if isinstance(t, Tensor) and not isinstance(t, FakeTensor) else t, x)

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the CPU makes of the twins."""
        with no_dispatch():
            return func(*_mapped(_on_host, args), **_mapped(_on_host, kwargs))

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy from one side to the other."""
        self._note_move(args[0], non_blocking=bool(kwargs.get("non_blocking")))
        real = self._real(func, args, kwargs)
        return real if kwargs["device"] == HOST else self._paired(None, real)

    def _note_move(self, source: Tensor, *, non_blocking: bool) -> None:
        if isinstance(source, FakeTensor):
            self.note(READS)
        elif not non_blocking and source.numel():
            self.note(UPLOADS)

    def _paired(self, found: Any, real: Any) -> Any:
        """Fake results, made where there are none, each with its twin."""
        if isinstance(real, (list, tuple)):
            parts = [None] * len(real) if found is None else found
            return type(real)(self._paired(one, own) for one, own in zip(parts, real, strict=True))
        if not isinstance(real, Tensor):
            return real
        if found is None:
            with no_dispatch():
                like = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
                found = FakeTensor(self._fake, like, GPU)
        assert (found.shape, found.dtype, found.device) == (real.shape, real.dtype, GPU), (found, real)
        found.twin = real
        return found


def where() -> str:
    """File and function of ours that is nearest, ``stock`` where there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if name := _name(frame.f_code.co_filename):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "stock"


@cache
def _name(file: str) -> str | None:
    """A file of ours by its path in the package, None for one of others."""
    path = Path(file)
    return str(path.relative_to(OURS)) if path.is_relative_to(OURS) else None


def _shares(func: Any) -> bool:
    """Whether what an operator returns, or takes, is written in place or seen through another tensor."""
    schema = func._schema
    return any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for part in x:
            yield from _flat(part)
    elif isinstance(x, dict):
        yield from _flat([*x.values()])
    else:
        yield x


def _mapped(f: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_mapped(f, part) for part in x]
    return {name: _mapped(f, part) for name, part in x.items()} if isinstance(x, dict) else f(x)


def _on_host(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return x.twin
    return HOST if isinstance(x, torch.device) else x


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """Inside, ``cuda:0`` is a device."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as fake, PretendGpu(fake) as gpu:

        def tolist(tensor: FakeTensor) -> Any:
            gpu.note(READS)
            with no_dispatch():
                return tensor.twin.tolist()

        patch.setattr(FakeTensor, "tolist", tolist)
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a device's own thread would be its driver's
                yield gpu
        finally:
            for remembered in (ranks, hadamard):  # tensors of a device that is gone
                remembered.cache_clear()
