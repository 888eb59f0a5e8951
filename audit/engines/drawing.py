"""Rollouts of training that an engine draws: weights go in, tokens and their log-probs come out, in every step.

    drawer.push(weights)            the learner's, by the names of its checkpoint
    drawer.draw(asked, keep=1)      a rollout for each, the first with the keys and values that the engine wrote

An engine answers with the sha256 of the weights that it holds, and what comes of others is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import Asked, Drawer, Drawn, Work
from kvaudit.audit.engines.handover import Handover
from kvaudit.audit.engines.worked import WorkedSession
from kvaudit.core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


class WorkedDrawer(Drawer):
    """An engine in a worker that answers pushes and requests; see ``inside/openvino_rollouts_inside.py``.

    It was started with the weights of ``work``. Files of weights, keys and values are handed over in a folder of its
    own beside its log, which goes with it.
    """

    def __init__(self, session: WorkedSession, who: str, work: Work, *, exact: bool, shows: bool = True) -> None:
        self.described, self.shows, self.exact = session.described, shows, exact
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

    def draw(self, asked: Sequence[Asked], *, keep: int) -> list[Drawn]:
        path, kept = self._handover.path / "written.npz", min(keep, len(asked)) if self.shows else 0
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
        written = [*(_read(path, kept) if kept else ()), *[None] * (len(rows) - kept)]
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

    def _drawn(self, row: Mapping[str, Any], asked: Asked, written: tuple[Tensor, Tensor] | None) -> Drawn:
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
        return Drawn(reply.ids, reply.finish, tuple(logprobs), written)


def weights_of(model: Any) -> dict[str, Tensor]:
    """A model's weights by name, each once where several names share it."""
    found, seen = dict[str, Any](), set[int]()
    for name, tensor in model.state_dict().items():
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


def _read(path: Path, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each row, which are gone from the disk afterwards."""
    import numpy as np
    import torch

    with np.load(path, allow_pickle=False) as file:
        found = [(torch.from_numpy(file[f"{n}.keys"]), torch.from_numpy(file[f"{n}.values"])) for n in range(rows)]
    path.unlink()
    return found
