"""The evicting policies that consist of one formula: by attention (H2O, TOVA, expected attention) or by keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeavyHitter(Evictor):
    """Rank by attention weight, summed over all queries so far and the GQA group (Zhang 2023, arXiv:2306.14048).

    Half of the budget goes to recent entries (`window=-1`), as in the original; no first tokens are protected.
    """

    name = "h2o"
    paper = "2306.14048"
    keeps = "half by the most accumulated attention, half the most recent entries"
    ordered = False
    accumulates = True

    sink: int = 0
    window: int = -1

    def __post_init__(self) -> None:
        if self.window == -1:
            object.__setattr__(self, "window", self.budget // 2)
        super().__post_init__()

    def importance(self, view: View) -> Tensor:
        return view.mass


@dataclass(frozen=True)
class Tova(Evictor):
    """Rank by the last query's attention, mean over all heads; no sink or window (Oren 2024, arXiv:2401.06104)."""

    name = "tova"
    paper = "2401.06104"
    keeps = "the entries the last query attends to, the same in every head"
    ordered = False

    sink: int = 0
    window: int = 0

    @property
    def observed_queries(self) -> int:
        return 1

    def importance(self, view: View) -> Tensor:
        attention = view.attention()[:, :, 0]  # [B, H, K]
        return attention.mean(1, keepdim=True).expand_as(attention)


@dataclass(frozen=True)
class Expected(Evictor):
    """Rank by the attention that future queries are expected to give, times |v| (Devoto 2025, arXiv:2510.00636).

    An entry of key k and value v has rank softmax(mu k s + k' Sigma k s^2 / 2) * |v|, where k' is k transposed and s
    the attention scale. mu and Sigma are the mean and covariance of the row's queries so far (without sinks) before
    rotation, both then turned by the mean rotation of the next ``future`` positions. This is the expected attention
    weight if queries are Gaussian. The softmax is over the entries after the sinks; its mean over the GQA group is
    taken.

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


@dataclass(frozen=True)
class KeyNorm(Evictor):
    """Keep the entries whose keys have the lowest L2 norm (Devoto 2024, arXiv:2406.11430).

    Attention tends to go to such keys. Departure: the first two layers, which the authors leave dense in some models,
    are compressed like the others.
    """

    name = "knorm"
    paper = "2406.11430"
    keeps = "the entries with the smallest keys"
    ordered = False

    sink: int = 0
    window: int = 0

    def importance(self, view: View) -> Tensor:
        norms: Tensor = view.keys.float().norm(dim=-1)
        return -norms


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """Keep the keys least similar to the mean of the normalised keys (Park 2025, arXiv:2504.15364)."""

    name = "keydiff"
    paper = "2504.15364"
    keeps = "the entries whose keys are least like the mean key"
    ordered = False

    sink: int = 0
    window: int = 0

    def importance(self, view: View) -> Tensor:
        from torch.nn.functional import cosine_similarity, normalize

        present = (view.positions >= 0)[..., None]  # [B, H, K, 1]
        keys = normalize(view.keys.float(), dim=-1)  # [B, H, K, D]; otherwise long keys would dominate the mean
        mean = (keys * present).sum(2, keepdim=True) / present.sum(2, keepdim=True)  # [B, H, 1, D]
        return -cosine_similarity(keys, mean, dim=-1)
