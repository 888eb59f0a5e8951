"""Start and connect the ranks (processes that train a unit together), on this machine or under ``accelerate launch``.

Ranks find each other by the variables of torch's launchers (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
Those that this process started end with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from kvaudit.audit.engines.process import free_port
from kvaudit.audit.runs.launchers.base import Job, PrintLine
from kvaudit.audit.runs.launchers.local import GRACE_SECONDS, ExtraWorker
from kvaudit.audit.training.ranks import ALONE, RankGroup, can_shard
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import inline

USER_ERROR = 2  # exit code of an error that the user can fix
# timeout of one exchange in seconds: validation or a judge may take long, and the end of a rank is noticed without it
TIMEOUT_VARIABLE, _WEEK = "KVAUDIT_RANK_PATIENCE", 7 * 24 * 3600.0
_EXIT_CODE_SECONDS = 60.0  # from the first sign that a rank has ended to its exit code


class _Rank(ExtraWorker):
    """A rank (one of the processes that train a unit together) other than the first, started on this machine."""

    kind, consequence = "rank", "the other ranks of its unit stop too"


def is_launched() -> bool:
    """Return whether a launcher like torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_follower(ranks: int) -> bool:
    """Return whether this process is a rank other than the first, in a run with this many ranks per unit."""
    return ranks > 1 and is_launched() and os.environ["RANK"] != "0"


def check_ranks(ranks: int, device: torch.device) -> None:
    """Raise SpecError or RunError if this machine or torch cannot train one unit by ``ranks`` processes together."""
    if ranks > 1 and not can_shard():
        raise RunError(
            f"train.ranks is {ranks}, but torch {torch.__version__} cannot shard a model as needed (FSDP2 with summed "
            "gradients); install torch 2.13 or newer"
        )
    if ranks > 1 and is_launched() and int(os.environ["WORLD_SIZE"]) != ranks:
        raise SpecError(
            f"train.ranks is {ranks}, but {os.environ['WORLD_SIZE']} processes were launched; launch {ranks}, or let "
            "this command start them"
        )
    if ranks > 1 and device.index is not None:
        raise SpecError(f"train.ranks is {ranks}, a GPU each, but device is {str(device)!r}; give device: cuda")
    if ranks > 1 and device.type == "cuda" and not is_launched() and torch.cuda.device_count() < ranks:
        raise RunError(
            f"train.ranks is {ranks}, a GPU each, but this process sees {torch.cuda.device_count()}; give a worker "
            "more (CUDA_VISIBLE_DEVICES, --launcher slurm:gpus=N), or begin another run with fewer"
        )


class _Failures:
    """Collects the failures of ranks (processes that train a unit together) that were started here."""

    def __init__(self, print_line: PrintLine) -> None:
        self._print_line, self._lines = print_line, list[str]()
        self._has_line, self.has_ended = threading.Event(), threading.Event()

    def add(self, line: str) -> None:
        """Record a failure; called by the thread that waits for the rank."""
        self._lines.append(line)
        self._has_line.set()
        # the main thread may be waiting for a GPU, where it gets no exception: then this thread ends the process
        if not self.has_ended.wait(GRACE_SECONDS):
            self._print_line(f"error: {line}; saved steps are kept: go on with --resume")
            os._exit(USER_ERROR)

    def reason(self) -> str:
        """Return why a rank failed, after a short wait for its exit code; empty if no rank has failed."""
        self._has_line.wait(_EXIT_CODE_SECONDS)
        return self._lines[0] if self._lines else ""


@contextmanager
def start_ranks(ranks: int, job: Job, print_line: PrintLine, *, any_left: bool) -> Iterator[RankGroup]:
    """Yield the group of ranks (processes that train a unit together), with this process as the first.

    The other ranks are started here unless a launcher has started them. The group is this process alone if ``ranks`` is
    1, or if no launcher started any and no unit is left to train (not ``any_left``).
    """
    if ranks == 1 or not (any_left or is_launched()):
        yield ALONE
        return
    if is_launched():
        group = _connect(0, ranks, job.any_gpu, "env://", str)
        yield group
        group.broadcast(None)
    else:
        with _local_ranks(ranks, job, print_line) as group:
            yield group
    dist.destroy_process_group()


@contextmanager
def _local_ranks(ranks: int, job: Job, print_line: PrintLine) -> Iterator[RankGroup]:
    """Start the other ranks (processes that train a unit together) here; yield the group of all.

    They end with the body or with this process.
    """
    failures, port = _Failures(print_line), free_port()
    env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        others = [_Rank(n, job, failures.add, env | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(1, ranks)]
        for other in others:
            stack.callback(other.stop, 0.0, grace=0.0)  # it has no claims, and may be waiting for this process
        stack.callback(failures.has_ended.set)  # runs first
        group = _connect(0, ranks, job.any_gpu, f"tcp://127.0.0.1:{port}", failures.reason)
        yield group
        group.broadcast(None)
        for other in others:
            other.wait(GRACE_SECONDS)


@contextmanager
def join_ranks(ranks: int, *, any_gpu: bool) -> Iterator[RankGroup]:
    """Join the ranks (processes that train a unit together) as one other than the first; yield their group.

    The environment variables RANK and LOCAL_RANK name this rank and its GPU.
    """
    yield _connect(int(os.environ["RANK"]), ranks, any_gpu, "env://", str)
    dist.destroy_process_group()


def _connect(number: int, ranks: int, any_gpu: bool, address: str, reason: Callable[[], str]) -> RankGroup:
    """Connect this process to the other ranks (processes that train a unit together) as rank ``number`` of ``ranks``.

    Returns the group of ranks. ``reason()`` says later why an exchange with the others failed. Raises RunError if the
    ranks cannot connect.
    """
    on_gpus = any_gpu and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    try:
        dist.init_process_group(backend, init_method=address, rank=number, world_size=ranks, timeout=_timeout())
    except (RuntimeError, ValueError) as error:
        line = inline(str(error).partition("\n")[0])
        raise RunError(
            f"the {ranks} ranks of train.ranks cannot connect ({line}); see the logs of the others"
        ) from None
    return RankGroup(number, ranks, reason)


def _timeout() -> timedelta:
    text = os.environ.get(TIMEOUT_VARIABLE, str(_WEEK))
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise SpecError(f"{TIMEOUT_VARIABLE} is {inline(text)!r}, wanted seconds, such as 3600") from None
