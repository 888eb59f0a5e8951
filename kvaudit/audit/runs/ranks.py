"""How the ranks of a training unit meet: started here, beside the process that trains, or by ``accelerate launch``.

Either way they find each other by the variables that torch's launchers set (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). What is started here ends with the process that started it.
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

STUCK = 2  # the exit code of what the user can mend
# seconds of one exchange: validation, a judge or a disk may take long, and a rank that ends is seen otherwise
PATIENCE, _WEEK = "KVAUDIT_RANK_PATIENCE", 7 * 24 * 3600.0
_SEEN_SECONDS = 60.0  # from the first that is seen of a rank's end to its exit code


class _Rank(ExtraWorker):
    kind, loss = "rank", "the others of its unit stop too"


def is_launched() -> bool:
    """Whether a launcher of torch's started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_follower(ranks: int) -> bool:
    """Whether this process is there to train what another one says, in a run whose units have so many ranks."""
    return ranks > 1 and is_launched() and os.environ["RANK"] != "0"


def check_ranks(ranks: int, device: torch.device) -> None:
    """Raise SpecError or RunError where units of so many ranks cannot be trained from here."""
    if ranks > 1 and not can_shard():
        raise RunError(
            f"train.ranks is {ranks}, and torch {torch.__version__} cannot share a model's weights out as they need "
            "(FSDP2 whose gradients are sums); install a newer one, 2.13 can"
        )
    if ranks > 1 and is_launched() and int(os.environ["WORLD_SIZE"]) != ranks:
        raise SpecError(
            f"train.ranks is {ranks}, and {os.environ['WORLD_SIZE']} processes were launched; launch {ranks}, or none: "
            "then they are started by this command"
        )
    if ranks > 1 and device.index is not None:
        raise SpecError(f"train.ranks is {ranks}, a GPU each, and device names one, {str(device)!r}; give device: cuda")
    if ranks > 1 and device.type == "cuda" and not is_launched() and torch.cuda.device_count() < ranks:
        raise RunError(
            f"train.ranks is {ranks}, a GPU each, and this process sees {torch.cuda.device_count()}; give a worker "
            "more (CUDA_VISIBLE_DEVICES, --launcher slurm:gpus=N), or begin another run with fewer"
        )


class _Losses:
    """What is known of ranks that were started here and ended too early."""

    def __init__(self, say: PrintLine) -> None:
        self._say, self._lines = say, list[str]()
        self._heard, self.over = threading.Event(), threading.Event()

    def hear(self, line: str) -> None:
        """Told by the thread that waits for a rank."""
        self._lines.append(line)
        self._heard.set()
        # a process that waits inside a GPU's queue cannot be told: then this one ends as if it had been killed
        if not self.over.wait(GRACE_SECONDS):
            self._say(f"error: {line}; what is saved stays: go on with --resume")
            os._exit(STUCK)

    def why(self) -> str:
        """For whom an exchange failed: the transport may know of an end before its exit code is there."""
        self._heard.wait(_SEEN_SECONDS)
        return self._lines[0] if self._lines else ""


@contextmanager
def start_ranks(ranks: int, job: Job, say: PrintLine, *, any_left: bool) -> Iterator[RankGroup]:
    """The ranks of every unit that the body trains; this process is the first of them, alone where nothing is left."""
    if ranks == 1 or not (any_left or is_launched()):
        yield ALONE
        return
    if is_launched():
        found = _joined(0, ranks, job.any_gpu, "env://", str)
        yield found
        found.broadcast(None)
    else:
        with _with_local_ranks(ranks, job, say) as found:
            yield found
    dist.destroy_process_group()


@contextmanager
def _with_local_ranks(ranks: int, job: Job, say: PrintLine) -> Iterator[RankGroup]:
    """Start the other ranks on this machine; they end with the body, and with this process."""
    losses, port = _Losses(say), free_port()
    known = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        others = [_Rank(n, job, losses.hear, known | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(1, ranks)]
        for other in others:
            stack.callback(other.stop, 0.0, grace=0.0)  # it holds nothing, and may wait for this process
        stack.callback(losses.over.set)  # first of all
        found = _joined(0, ranks, job.any_gpu, f"tcp://127.0.0.1:{port}", losses.why)
        yield found
        found.broadcast(None)
        for other in others:
            other.wait(GRACE_SECONDS)


@contextmanager
def join_ranks(ranks: int, *, any_gpu: bool) -> Iterator[RankGroup]:
    """The ranks that this process is one of, and not the first; its GPU is that of its place on its machine."""
    yield _joined(int(os.environ["RANK"]), ranks, any_gpu, "env://", str)
    dist.destroy_process_group()


def _joined(number: int, ranks: int, any_gpu: bool, where: str, why: Callable[[], str]) -> RankGroup:
    on_gpus = any_gpu and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    kind = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    try:
        dist.init_process_group(kind, init_method=where, rank=number, world_size=ranks, timeout=_patience())
    except (RuntimeError, ValueError) as error:
        line = inline(str(error).partition("\n")[0])
        raise RunError(f"the {ranks} ranks of train.ranks cannot meet ({line}); look at what the others say") from None
    return RankGroup(number, ranks, why)


def _patience() -> timedelta:
    """How long a rank that says nothing is waited for."""
    asked = os.environ.get(PATIENCE, str(_WEEK))
    try:
        return timedelta(seconds=float(asked))
    except (ValueError, OverflowError):
        raise SpecError(f"{PATIENCE} is {inline(asked)!r}, wanted seconds, such as 3600") from None
