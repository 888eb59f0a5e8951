"""What a policy saw at its evictions, cut out of one pass over its row; evictions side by side are rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.beside import QueryCentres, QueryMoments
from kvaudit.audit.cache.evict import attention_mass
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import Centres, Evictor, Moments, View
from kvaudit.audit.replay.codes import CodedSince
from kvaudit.audit.replay.schedule_check import Fed

ELEMENTS = 1 << 24  # of keys, or of a matrix over slots, that evictions side by side may take


class Running(NamedTuple):
    """What a policy asks for of all queries so far, eviction by eviction; None where it does not ask."""

    masses: Iterator[Tensor] | None
    moments: Iterator[Moments] | None
    centres: Iterator[Centres] | None


@dataclass(frozen=True)
class PassedLayer:
    """What one layer computed for a row of T tokens, and what codes make of its keys and values [1, H, T, D]."""

    call: AttentionCall
    at: Tensor  # [1, T]
    gone: Tensor  # [1, H, T]
    stored: tuple[Tensor, Tensor] | None
    codes: CodedSince | None

    def most(self, held: int) -> int:
        """How many evictions from ``held`` entries are ranked at once."""
        return max(1, ELEMENTS // (self.call.key.shape[1] * held * max(held, self.call.key.shape[3])))

    def view(self, times: Tensor, policy: Evictor, running: Running, rollout: Rollout) -> View:
        """What the policy saw when it evicted before queries ``times`` [E]."""
        positions = self.slots(times)
        keys, values = self.entries(positions, times)
        window = times[:, None] + torch.arange(-policy.observed_queries, 0, device=times.device)
        asked = self.call.query[0][:, window.clamp(min=0)].transpose(0, 1)  # [E, G*H, W, D]
        return View(
            layer=self.call.layer,
            keys=keys,
            values=values,
            positions=positions,
            seen=times,
            queries=asked,
            query_positions=window.clamp(min=-1),
            mass=keys.new_zeros(keys.shape[:3]) if running.masses is None else _taken(running.masses, positions),
            scaling=self.call.scaling,
            entry_keys=_entry_keys(rollout, positions),
            moments=None if running.moments is None else _moments([next(running.moments) for _ in times]),
            centres=None if running.centres is None else _centres([next(running.centres) for _ in times]),
            sink_logits=self.call.sink_logits,
        )

    def slots(self, times: Tensor) -> Tensor:
        """Positions [E, H, K] of what the cache held before it evicted for queries ``times`` [E], then -1."""
        seen = times[:, None, None]
        # what leaves at this very query is there: the policy chose among it
        there = (self.at[:, None] < seen) & (self.gone >= seen)
        counts = there.sum(2, keepdim=True)
        # stable: what is there comes first, in order of position
        order = there.int().sort(dim=2, descending=True, stable=True).indices[:, :, : int(counts.max())]
        return torch.where(self.at[:, None, : order.shape[2]] < counts, order, -1)

    def entries(self, positions: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [E, H, K, D] at positions [E, H, K], as codes where they were before queries ``times``."""
        exact = [along(part, positions) for part in (self.call.key, self.call.value)]
        if self.stored is None or self.codes is None:
            return exact[0], exact[1]
        since = [along(part[:, None], positions) for part in (self.codes.keys_at, self.codes.values_at)]
        keys, values = (
            # not at the time itself: codes are made after the eviction
            torch.where((at < times[:, None, None])[..., None], along(coded, positions), plain)
            for plain, coded, at in zip(exact, self.stored, since, strict=True)
        )
        return keys, values

    def masses(self, fed: Sequence[Fed], due: set[int]) -> Iterator[Tensor]:
        """Attention that every entry has drawn by each eviction, [1, H, T] float32."""
        total, start = torch.zeros(self.gone.shape, device=self.gone.device), 0
        for seen, _ in fed:
            time, part = torch.tensor([seen], device=self.gone.device), slice(start, seen)
            slots = self.slots(time)
            keys, _ = self.entries(slots, time)
            new = attention_mass(
                self.call.query[:, :, part], self.at[:, part], keys, slots, self.call.scaling, self.call.sink_logits
            )
            total.scatter_add_(2, slots.clamp(min=0), new)
            start = seen
            if seen in due:
                yield total.clone()

    def statistics(self, sums: QueryMoments | QueryCentres, due: Sequence[int]) -> Iterator[Any]:
        """What ``sums`` says of all queries before each eviction."""
        start = 0
        for seen in due:
            sums.add(self.call.query[:, :, start:seen], self.at[:, start:seen])
            start = seen
            yield sums.of(slice(None))


def _entry_keys(rollout: Rollout, positions: Tensor) -> Tensor:
    """The key of the row that each entry was made for; any, where the policy draws nothing."""
    prompt, own = rollout.row_keys or (0, 0)
    return torch.where(positions < rollout.prompt_length, prompt, own)


def along(tensor: Tensor, positions: Tensor) -> Tensor:
    """What ``tensor`` [1, H, T, ...] holds at positions [E, H, K], anything at -1: [E, H, K, ...]."""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    return tensor[0].expand(positions.shape[1], *tensor.shape[2:])[heads, positions]


def _taken(masses: Iterator[Tensor], positions: Tensor) -> Tensor:
    return torch.cat([along(next(masses), places[None]) for places in positions])


def _moments(parts: Sequence[Moments]) -> Moments:
    """One batch of several rows."""
    mean, covariance = (torch.cat(same) for same in zip(*(part[:2] for part in parts), strict=True))
    return Moments(mean, covariance, parts[0].turn)


def _centres(parts: Sequence[Centres]) -> Centres:
    """One batch of several rows."""
    mean, length = (torch.cat(same) for same in zip(*(part[:2] for part in parts), strict=True))
    return Centres(mean, length, parts[0].turn, parts[0].lengths)
