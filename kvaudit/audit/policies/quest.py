"""Quest: every query attends to the pages of keys with the largest possible attention logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.base import Policy
from kvaudit.audit.policies.blind import Dense
from kvaudit.audit.policies.evictor import Extremes, View
from kvaudit.audit.policies.selector import Selector

if TYPE_CHECKING:
    from torch import Tensor

_MIN_PAGES = 3  # as in the published evaluation


@dataclass(frozen=True)
class Quest(Selector):
    """Attend to the query's own page and the pages whose keys could have the largest q k (Tang 2024, arXiv:2406.10774).

    A page has ``page`` tokens. The minimum and maximum of its keys, channel by channel, give an upper bound of q k on
    the page. Every query head chooses the ``budget`` / ``page`` pages of the highest bounds, and at least three. The
    first ``dense`` layers attend to everything, as do the prompt's tokens. The cache keeps the extremes of every page,
    as engines do (two keys more per page); without them they are computed from the keys.

    Departures: the query's own page is always selected, as in the published kernels; in the published evaluation it
    must have a high enough bound. Query heads that share a KV head choose separately; the paper has no grouped queries.
    """

    name = "quest"
    paper = "2406.10774"
    keeps = "every entry; each query attends to the pages that may matter most to it"
    uses = ("budget", "page", "dense", "chunk")
    extremes = True

    page: int = 16
    dense: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("page", 1)
        self._at_least("dense", 0)

    @property
    def unit(self) -> int:
        return self.page

    def for_layer(self, layer: int, layers: int) -> Policy:  # noqa: ARG002
        return Dense(chunk=self.chunk) if layer < self.dense else self

    def units_at(self, seen: int) -> int:
        return min(max(_MIN_PAGES, self.budget // self.page), -(-seen // self.page))

    def choose(self, view: View) -> Tensor:
        import torch

        last = (view.seen - 1) // self.page  # [B] the query's own page
        longest = int(view.seen.max()) if view.longest is None else view.longest
        # [pages] of the longest row; pages beyond a shorter row are masked below
        pages = torch.arange((longest - 1) // self.page + 1, device=last.device)
        bounds = self._bounds(view, len(pages))  # [B, G*H, pages]
        # the query's own page is always chosen, so that it sees itself
        bounds = bounds.masked_fill(pages == last[:, None, None], float("inf"))
        bounds = bounds.masked_fill(pages > last[:, None, None], -float("inf"))
        # [B, G*H, k]; stable: ties go to the earlier page on every device
        best = bounds.sort(dim=-1, descending=True, stable=True).indices[..., : self.units_at(longest)]
        return torch.where(best > last[:, None, None], -1, best)

    def _bounds(self, view: View, pages: int) -> Tensor:
        """Return for each page an upper bound [B, G*H, pages] of q k over its keys, from their extremes."""
        # [B, H, pages, D] each
        low, high = (part[:, :, :pages].float() for part in view.extremes or self._extremes_of(view, pages))
        batch, heads, _, size = low.shape
        query = view.queries[:, :, -1].float().reshape(batch, heads, -1, size)  # [B, H, G, D]
        # channel by channel the extreme that makes q k larger
        bounds: Tensor = query.clamp(min=0) @ high.transpose(2, 3) + query.clamp(max=0) @ low.transpose(2, 3)
        return bounds.flatten(1, 2)

    def _extremes_of(self, view: View, pages: int) -> Extremes:
        """Return the minimum and maximum of each page's keys, computed from the keys in ``view``."""
        import torch

        keys, positions = view.keys.float(), view.positions[..., None]  # [B, H, K, D] and [B, H, K, 1]
        # [B, H, K, D], the page of every entry
        at = torch.where(positions >= 0, positions // self.page, pages).long().expand_as(keys)
        # include_self=False ignores the initial zeros; an extra page takes the empty slots
        zeros = keys.new_zeros(*keys.shape[:2], pages + 1, keys.shape[3])
        return Extremes(*(zeros.scatter_reduce(2, at, keys, how, include_self=False) for how in ("amin", "amax")))
