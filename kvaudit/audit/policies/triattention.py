"""TriAttention: keep entries that the mean query would attend to from future positions, and those with long keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor

_MIN_SPREAD = 1e-6  # of a head's scores


@dataclass(frozen=True)
class TriAttention(Evictor):
    """Rank by the mean query's q k at future distances, plus key norms (Mao 2026, arXiv:2604.04921).

    A query head has a centre c, its mean query before rotation. Its score of a key k (before rotation) at position p is
    the mean over offsets d = 1, 2, 4 .. ``horizon`` of sum_f |c_f| |k_f| cos((seen + d - p) w_f + arg c_f - arg k_f),
    plus sum_f (E|q_f| - |c_f|) |k_f|. Here f is a pair of channels, read as a complex number, that rotates by the
    frequency w_f; ``seen`` is the number of tokens so far. Scores are standardised per query head; the largest in a GQA
    group counts. ``mode``: "union" keeps one set of entries for all layers and heads, by their largest score;
    "per_head" one set per KV head for all layers, by the mean over layers; "per_layer_perhead" one set per layer and KV
    head.

    Departures: centres are of the row's own queries so far, not of a calibration text. The prompt competes too and
    counts towards the budget. Ties go to the earlier position, without noise. Channels that do not rotate add c k.
    """

    name = "triattention"
    paper = "2604.04921"
    keeps = "the entries that the mean query will attend to from later positions, and those with long keys"
    centres = True

    budget: int = 2048
    sink: int = 0
    window: int = 0
    interval: int = 128
    mode: str = "union"
    horizon: int = 65536

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("horizon", 1)
        self._one_of("mode", ("union", "per_head", "per_layer_perhead"))

    @property
    def across_layers(self) -> bool:
        return self.mode != "per_layer_perhead"

    def importance(self, view: View) -> Tensor:
        import torch

        assert view.centres is not None, "the cache provides the centres this policy asks for"
        mean, length, turn, lengths = view.centres
        group = (len(mean), view.keys.shape[1], -1)
        offsets = 2 ** torch.arange(self.horizon.bit_length(), device=mean.device)  # 1, 2, 4 .. horizon, in tokens
        # [B, N, D], the centre rotated to those distances, mean over them
        ahead = torch.einsum("bij,bnj->bni", turn(view.seen, offsets), mean)
        spread = length - lengths(mean)  # [B, N, F], F pairs of channels that rotate; never below 0
        keys = view.keys.to(mean.dtype)
        attended = torch.einsum("bhgi,bhki->bhgk", ahead.reshape(*group, ahead.shape[-1]), keys)  # [B, H, G, K]
        norms = torch.einsum("bhgf,bhkf->bhgk", spread.reshape(*group, spread.shape[-1]), lengths(keys))  # [B, H, G, K]
        # [B, H, K], entries that may leave
        unprotected = (view.positions >= self.sink) & (view.positions < view.seen[:, None, None] - self.window)
        return _standardise(attended + norms, unprotected).amax(2)

    def agreed(self, importances: Sequence[Tensor]) -> Sequence[Tensor]:
        import torch

        if not self.across_layers:
            return importances
        every = torch.stack([*importances])  # [L, B, H, K]
        agreed = every.mean(0) if self.mode == "per_head" else every.amax((0, 2)).unsqueeze(1).expand(every.shape[1:])
        return [agreed] * len(every)


def _standardise(scores: Tensor, counted: Tensor) -> Tensor:
    """Return scores [B, H, G, K] scaled to mean 0 and standard deviation 1 over ``counted`` [B, H, K]; 0 elsewhere."""
    counted = counted[:, :, None]
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    centred = (scores - (scores * counted).sum(-1, keepdim=True) / count) * counted
    spread = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / spread.clamp(min=_MIN_SPREAD)
