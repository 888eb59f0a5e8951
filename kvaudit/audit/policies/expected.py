"""Expected attention: the entries that future queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Expected(Evictor):
    """Rank by the attention that future queries are expected to give, times |v| (Devoto 2025, arXiv:2510.00636).

    An entry of key k and value v has rank softmax(mu k s + k' Sigma k s^2 / 2) * |v|; s is the attention scale. mu
    and Sigma are mean and covariance of the row's queries so far (without sinks) before rotation, turned by the mean
    rotation of the next ``future`` positions. This is the expected attention weight if queries are Gaussian. The
    softmax is over the entries after the sinks; the result is the mean over the GQA group.

    Departure: the authors compress a prompt once; here decoding is compressed by the same rule every ``interval``
    tokens, with running statistics.
    """

    name = "expected"
    paper = "2510.00636"
    keeps = "the entries that the next `future` queries are expected to attend to, weighted by value norm"
    moments = True

    window: int = 0
    interval: int = 128
    future: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("future", 1, maximum=65536)

    def importance(self, view: View) -> Tensor:
        import torch

        assert view.moments is not None, "the cache provides the moments this policy asks for"
        turn = view.moments.turn(view.seen, self.future)  # [B, D, D]
        mean = torch.einsum("bij,bnj->bni", turn, view.moments.mean)  # [B, N, D], N = G * H query heads
        covariance = turn[:, None] @ view.moments.covariance @ turn[:, None].transpose(2, 3)  # [B, N, D, D]
        batch, heads, _, size = view.keys.shape
        keys = view.keys.to(mean.dtype)  # [B, H, K, D]
        mean = mean.reshape(batch, heads, -1, size)
        covariance = covariance.reshape(batch, heads, -1, size, size)
        # k' Sigma k of every entry: [B, H, G, K], G query heads of a KV head
        spread = torch.einsum("bhki,bhgij,bhkj->bhgk", keys, covariance, keys)
        logits = torch.einsum("bhgi,bhki->bhgk", mean, keys) * view.scaling + spread * view.scaling**2 / 2
        ranked = view.positions >= self.sink  # [B, H, K]; sinks stay anyway and would take most of the softmax
        # [B, H, K]; a row of sinks alone is NaN before nan_to_num
        weights = logits.masked_fill(~ranked[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0).mean(2)
        norms: Tensor = view.values.to(mean.dtype).norm(dim=-1)
        return weights * norms
