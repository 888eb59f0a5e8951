"""Rollouts of training that an engine draws: weights go in, tokens and their log-probs come out, in every step.

    drawer.push(weights)            the learner's, by the names of its checkpoint
    drawer.draw(asked, keep=1)      a rollout for each, the first with the keys and values that the engine wrote

An engine answers with the sha256 of the weights that it holds, and what comes of others is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import GenerationRequest, Drawer, DrawnRollout, EngineContext
from kvaudit.audit.engines.worker_client import WorkerSession
from kvaudit.core.errors import RunError
from kvaudit.core.files import mutex

if TYPE_CHECKING:
    from torch import Tensor

_NAMED, _HELD, _MUTEX = "kvaudit-rollouts-", "held", ".kvaudit-rollouts.lock"  # of a folder that is handed over


class WorkedDrawer(Drawer):
    """An engine in a worker that answers pushes and requests; see ``inside/openvino_rollouts_inside.py``.

    It was started with the weights of ``work``. Files of weights, keys and values are handed over in a folder of its
    own beside its log, which goes with it.
    """

    def __init__(self, session: WorkerSession, who: str, work: EngineContext, *, exact: bool) -> None:
        self.described, self.exact = session.described, exact
        self._session, self._who, self._pushed = session, who, ""
        try:
            self._handover = Handover(work.log.parent)
        except BaseException:
            session.stop()
            raise
        try:
            self._push(weights_of(work.model.model), known=True)
        except BaseException:
            self.stop()
            raise

    def push(self, weights: Mapping[str, Tensor]) -> None:
        self._push(weights, known=False)

    def draw(self, asked: Sequence[GenerationRequest], *, keep: int) -> list[DrawnRollout]:
        path, kept = self._handover.path / "written.npz", min(keep, len(asked))
        rows = [
            {**one._asdict(), "messages": None, "keep": str(path) if n < kept else None} for n, one in enumerate(asked)
        ]
        replies = self._session.ask(rows, f"it drew {len(rows)} rollouts")
        # one row of older weights spoils the step
        if stale := next((row for row in replies if row.get("weights") != self._pushed), None):
            raise RunError(
                f"engine {self._who} drew by weights {str(stale.get('weights'))[:12]!r}, the learner has "
                f"{self._pushed[:12]}: the step is not taken, and what is saved stays; start the run again"
            )
        written = [*(self._read(path, kept) if kept else ()), *[None] * (len(rows) - kept)]
        return [self._drawn(row, one, own) for row, one, own in zip(replies, asked, written, strict=True)]

    def stop(self) -> None:
        self._session.stop()
        self._handover.remove()

    def _push(self, weights: Mapping[str, Tensor], *, known: bool) -> None:
        try:
            path, self._pushed = self._written(weights)
        except OSError as error:
            raise RunError(
                f"the weights for engine {self._who} cannot be written into {str(self._handover.path)!r} "
                f"({error.strerror}); make room there, and start the run again: what is saved stays"
            ) from None
        (said,) = self._session.ask([{"push": str(path), "known": known}], "it took weights")
        path.unlink()
        if said.get("sha256") != self._pushed:
            raise RunError(
                f"engine {self._who} holds weights {str(said.get('sha256'))[:12]!r} after a push of "
                f"{self._pushed[:12]}: it would draw by others than the learner has; see its log"
            )

    def _written(self, weights: Mapping[str, Tensor]) -> tuple[Path, str]:
        """A file of weights as the engine reads them, and the sha256 by which it says that it holds them."""
        import numpy as np

        path = self._handover.path / "weights.npz"
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in weights.items()}
        np.savez(path, **arrays)  # type: ignore[arg-type]  # every name is a name of a weight
        return path, digest(arrays)

    def _read(self, path: Path, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each row, which are gone from the disk afterwards."""
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            found = [self._kept(file, row) for row in range(rows)]
        path.unlink()
        return found

    def _kept(self, file: Mapping[str, Any], row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, L, H * D] of a row, of the arrays that the worker wrote."""
        import torch

        return torch.from_numpy(file[f"{row}.keys"]), torch.from_numpy(file[f"{row}.values"])

    def _drawn(self, row: Mapping[str, Any], asked: GenerationRequest, written: tuple[Tensor, Tensor] | None) -> DrawnRollout:
        """A reply as a rollout; raises RunError for one without a log-prob for every token."""
        # a sum of log-probs is not asked for: there is one for every token
        reply = self._session.read({**row, "logprob": None}, asked)
        logprobs = row.get("logprobs")
        good = isinstance(logprobs, list) and all(isinstance(one, float) and math.isfinite(one) for one in logprobs)
        if not good or not isinstance(logprobs, list) or len(logprobs) != len(reply.ids) or not reply.ids:
            raise RunError(
                f"engine {self._who} gives no log-prob for every token of a rollout, so nothing could be learnt from "
                "it; draw from another engine"
            )
        if row.get("read", list(asked.ids)) != list(asked.ids):
            raise RunError(f"engine {self._who} read another prompt than the learner has: the two tokenize differently")
        return DrawnRollout(reply.ids, reply.finish, tuple(logprobs), written)


class Handover:
    """The folder in which a drawer and its engine hand each other weights, keys and values: gigabytes, for a moment.

        RUN/logs/engines/kvaudit-rollouts-XXXXXXXX/held    locked for as long as somebody uses the folder

    It is this process's own, in ``place``, which is made where it is not there. It goes with the drawer. A process that
    is killed leaves it, and whoever next makes one in the same place removes it: the kernel lets go of a lock when its
    process dies, so what a living one has stays.
    """

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        with mutex(place / _MUTEX):  # or another could find it before it is locked
            for folder in place.glob(f"{_NAMED}*"):
                _remove_left(folder)
            self._folder = tempfile.TemporaryDirectory(prefix=_NAMED, dir=place.resolve())
            self.path = Path(self._folder.name)
            self._held = (self.path / _HELD).open("w")
            fcntl.flock(self._held, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it; a second call does nothing."""
        self._folder.cleanup()
        self._held.close()


def weights_of(model: Any) -> dict[str, Tensor]:
    """A model's weights by name, each once where several names share it."""
    return each_once(model.state_dict())


def each_once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, each once where several names share it."""
    found, seen = dict[str, Any](), set[int]()
    for name, tensor in weights.items():
        # tied weights are one piece of memory under several names
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


def digest(arrays: Mapping[str, Any]) -> str:
    """The sha256 of numpy arrays by name; the same that a worker makes of what its engine holds."""
    whole = hashlib.sha256()
    for name in sorted(arrays):
        whole.update(name.encode() + arrays[name].tobytes())
    return whole.hexdigest()


def _remove_left(folder: Path) -> None:
    """Remove a folder of a process that is gone; what its engine, just ending, still writes is the next start's."""
    with suppress(OSError):  # somebody has it, or it is not ours to touch
        if not (folder / _HELD).exists():
            folder.rmdir()  # it was killed before it had any use for it
            return
        with (folder / _HELD).open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
