"""SnapKV: keep the entries that the last queries attend to, smoothed over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Rank by mean attention of the last ``window`` queries, pooled along positions (Li 2024, arXiv:2404.14469).

    The mean also runs over the GQA group. The original compresses the prompt once (`phase=prefill`); with `both`, the
    default, decoding is compressed by the same rule every ``interval`` tokens, so that memory stays bounded.
    """

    name = "snapkv"
    paper = "2404.14469"
    keeps = "the entries the last `window` queries attend to, and that window"

    sink: int = 0
    window: int = 32
    interval: int = 128
    kernel: int = 7
    pool: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise SpecError(f"policy snapkv: window={self.window}, wanted at least 1 observing query")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise SpecError(f"policy snapkv: kernel={self.kernel}, wanted an odd number")
        self._one_of("pool", ("max", "avg"))

    @property
    def observed_queries(self) -> int:
        return self.window

    def importance(self, view: View) -> Tensor:
        from torch.nn.functional import avg_pool1d, max_pool1d

        attention = view.attention()  # [B, H, W, K]
        present = (view.query_positions >= 0).sum(-1).clamp(min=1)  # [B]
        score = attention.sum(2) / present[:, None, None]  # [B, H, K]; rows of absent queries are 0
        # the window stays anyway; pooling must not spread its mass to the entries before it
        in_window = view.positions >= (view.seen[:, None, None] - self.window)
        score = score.masked_fill(in_window | (view.positions < 0), 0.0)
        if self.pool == "max":
            return max_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)  # [B, H, K], padded with -inf
        # [B, H, K], padded with zeros, which count in the mean
        return avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2, count_include_pad=True)
