"""Engines in a worker process that sample rollouts for training, with the learner's new weights in each step.

    drawer.push(weights)               the learner's weights, by their names in the checkpoint
    drawer.draw(requests, keep=1)      a rollout per request (tokens, log-probs), the first one with keys and values

The engine reports the sha256 of the weights that it holds; rollouts of any other weights are an error.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import Drawer, DrawnRollout, EngineContext, GenerationRequest
from kvaudit.audit.engines.inside.worker import arrays_sha256
from kvaudit.audit.engines.worker_client import WorkerSession
from kvaudit.core.errors import RunError
from kvaudit.core.files import mutex

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX, _LOCK, _MUTEX = "kvaudit-rollouts-", "held", ".kvaudit-rollouts.lock"  # names of exchange folders


class WorkerDrawer(Drawer):
    """A drawer (engine that samples training rollouts) in a worker process; ``session`` is the connection to it.

    The worker was started with the weights of ``context.model``. Weights, keys and values are exchanged as files in an
    ``ExchangeFolder`` next to the log. ``inside/openvino_rollouts_inside.py`` describes the requests.
    """

    def __init__(self, session: WorkerSession, engine: str, context: EngineContext, *, exact: bool) -> None:
        self.described, self.exact = session.described, exact
        self._session, self._engine, self._pushed = session, engine, ""
        try:
            self._exchange = ExchangeFolder(context.log.parent)
        except BaseException:
            session.stop()
            raise
        try:
            self._push(model_weights(context.model.model), known=True)
        except BaseException:
            self.stop()
            raise

    def push(self, weights: Mapping[str, Tensor]) -> None:
        self._push(weights, known=False)

    def draw(self, requests: Sequence[GenerationRequest], *, keep: int) -> list[DrawnRollout]:
        path, keep = self._exchange.path / "written.npz", min(keep, len(requests))
        rows = [
            {**request._asdict(), "messages": None, "keep": str(path) if n < keep else None}
            for n, request in enumerate(requests)
        ]
        replies = self._session.ask(rows, f"drawing {len(rows)} rollouts")
        # one rollout of older weights spoils the step
        if stale := next((row for row in replies if row.get("weights") != self._pushed), None):
            raise RunError(
                f"engine {self._engine} drew with weights {str(stale.get('weights'))[:12]!r}, the learner has "
                f"{self._pushed[:12]}: the step is not taken; finished work is kept, start the run again"
            )
        keys_and_values = [*(self._read(path, keep) if keep else ()), *[None] * (len(rows) - keep)]
        return [self._rollout(*row) for row in zip(replies, requests, keys_and_values, strict=True)]

    def stop(self) -> None:
        self._session.stop()
        self._exchange.remove()

    def _push(self, weights: Mapping[str, Tensor], *, known: bool) -> None:
        """Send weights to the engine; raise RunError if it then reports the hash of other weights.

        ``known``: the engine was started with these weights already; it only has to find out which of its own tensors
        belong to which name.
        """
        try:
            path, self._pushed = self._write(weights)
        except OSError as error:
            raise RunError(
                f"the weights for engine {self._engine} cannot be written into {str(self._exchange.path)!r} "
                f"({error.strerror or error}); make room there and start the run again: finished work is kept"
            ) from None
        (reply,) = self._session.ask([{"push": str(path), "known": known}], "loading weights")
        path.unlink()
        if reply.get("sha256") != self._pushed:
            raise RunError(
                f"engine {self._engine} holds weights {str(reply.get('sha256'))[:12]!r} after a push of "
                f"{self._pushed[:12]}, so it would not draw with the learner's weights; see its log"
            )

    def _write(self, weights: Mapping[str, Tensor]) -> tuple[Path, str]:
        """Write weights into a file for the engine; return the path, and the sha256 that the engine has to report."""
        import numpy as np

        path = self._exchange.path / "weights.npz"
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in weights.items()}
        np.savez(path, **arrays)  # type: ignore[arg-type]  # every name is a name of a weight
        return path, arrays_sha256(arrays)

    def _read(self, path: Path, rows: int) -> list[tuple[Tensor, Tensor]]:
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            pairs = [self._keys_and_values(file, row) for row in range(rows)]
        path.unlink()
        return pairs

    def _keys_and_values(self, file: Mapping[str, Any], row: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [tokens, L, H * D] of a row from the arrays that the worker wrote."""
        import torch

        return torch.from_numpy(file[f"{row}.keys"]), torch.from_numpy(file[f"{row}.values"])

    def _rollout(
        self, row: Mapping[str, Any], request: GenerationRequest, keys_and_values: tuple[Tensor, Tensor] | None
    ) -> DrawnRollout:
        """Return the rollout in the reply ``row``; raise RunError if it lacks log-probs or has another prompt."""
        # a row has a log-prob per token, and no sum
        reply = self._session.parse({**row, "logprob": None}, request)
        logprobs = row.get("logprobs")
        is_complete = isinstance(logprobs, list) and all(isinstance(n, float) and math.isfinite(n) for n in logprobs)
        if not is_complete or not isinstance(logprobs, list) or len(logprobs) != len(reply.ids) or not reply.ids:
            raise RunError(
                f"engine {self._engine} returned a rollout without a log-prob for every token, which training needs; "
                "use another engine"
            )
        if row.get("read", list(request.ids)) != list(request.ids):
            raise RunError(
                f"engine {self._engine} read a different prompt than the learner's: they tokenize differently"
            )
        return DrawnRollout(reply.ids, reply.finish, tuple(logprobs), keys_and_values)


class ExchangeFolder:
    """A folder for the files in which a drawer and its engine exchange weights, keys and values (gigabytes).

        RUN/logs/engines/kvaudit-rollouts-XXXXXXXX/held    locked while the folder is in use

    It is created in ``parent`` and removed when the drawer stops. A killed process leaves it behind, but the kernel
    releases the lock, and the next ExchangeFolder in the same parent removes it.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        with mutex(parent / _MUTEX):  # otherwise another process could remove it before it is locked
            for folder in parent.glob(f"{_PREFIX}*"):
                _remove_if_unused(folder)
            self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent.resolve())
            self.path = Path(self._folder.name)
            self._lock = (self.path / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._folder.cleanup()
        self._lock.close()


def model_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's weights by name; tied weights, which share memory, are listed under their first name only."""
    unique: dict[int, tuple[str, Tensor]] = {}  # by address
    for name, tensor in model.state_dict().items():
        unique.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(unique.values())


def _remove_if_unused(folder: Path) -> None:
    """Remove an exchange folder if the process that made it has ended.

    If its engine is still writing files there, they are left for the next call.
    """
    with suppress(OSError):  # it is in use, or not ours to remove
        if not (folder / _LOCK).exists():
            folder.rmdir()  # its process was killed before it locked the folder
            return
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
