"""The one decoder of the project: prompts and a policy in; completions, log-probs and the ledger out.

Training rollouts and evaluation both go through here, so "the compression used in training" and "the compression used
in serving" mean the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.policies import Mixture, Policy
from kvaudit.audit.sampling.decoding import Completion, Decoding, AnswerScore
from kvaudit.audit.sampling.episode import EndsTurn, Episode, OnTurnEnd, ShouldPause, ServedModel
from kvaudit.core.errors import SpecError

T = TypeVar("T")
__all__ = ["Arrivals", "Completion", "Decoding", "Episode", "MixedEpisode", "Sampler", "ServedModel", "admit"]


class Sampler:
    """Decodes from ``model`` with its cache compressed by ``policy``.

    ``shared`` is what the policies that are played with the same prompts have of each other's prefill; no rollout
    depends on it. Not ``recorded``: only answers are asked for, and no rollouts.
    """

    def __init__(
        self, model: ServedModel, policy: Policy, shared: SharedPrefill | None = None, *, recorded: bool = True
    ) -> None:
        self.model, self.policy, self._shared, self._recorded = model, policy, shared, recorded

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        group: int = 1,
        roles: Sequence[Sequence[str]] | None = None,
    ) -> Episode | MixedEpisode:
        """Prefill each prompt once and give it ``group`` rows; one seed per row.

        ``roles`` name the role of every prompt token, which a policy that pins roles needs. Under a mixture the rows
        share no prefill: each draws its own policy. Raises SpecError for a bad prompt.
        """
        if not prompts or any(len(p) == 0 for p in prompts):
            raise SpecError("every prompt needs at least one token")
        assert len(seeds) == len(prompts) * group, (len(seeds), len(prompts), group)
        if self.policy.pinned_roles and roles is None:
            raise SpecError(f"policy {self.policy.canonical!r} pins roles; sample with the roles of the tokens")
        assert roles is None or [len(r) for r in roles] == [len(p) for p in prompts]
        if isinstance(self.policy, Mixture):
            # a prompt for every row: members of a group may draw different policies
            each = [n for n in range(len(prompts)) for _ in range(group)]
            own = None if roles is None else [roles[n] for n in each]
            return MixedEpisode(
                self.model, self.policy, [prompts[n] for n in each], seeds, own, recorded=self._recorded
            )
        return Episode(self.model, self.policy, prompts, seeds, group, roles, self._shared, recorded=self._recorded)


class MixedEpisode:
    """A batch whose rows were each served under a policy they drew: one ``Episode`` per policy."""

    def __init__(
        self,
        model: ServedModel,
        policy: Mixture,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        roles: Sequence[Sequence[str]] | None,
        *,
        recorded: bool = True,
    ) -> None:
        self.rows, self._recorded = len(prompts), recorded
        chosen = [policy.drawn(seed) for seed in seeds]  # the same in every arm, as the rows' seeds are
        self._parts: dict[Policy, tuple[list[int], Episode]] = {}
        for part in dict.fromkeys(chosen):
            rows = [n for n, own in enumerate(chosen) if own == part]
            own = None if roles is None else [roles[n] for n in rows]
            some = ([prompts[n] for n in rows], [seeds[n] for n in rows])
            episode = Episode(model, part, *some, 1, own, recorded=recorded)
            self._parts[part] = (rows, episode)

    @property
    def open_rows(self) -> int:
        """See ``Episode.going_on``."""
        return sum(episode.open_rows for _, episode in self._parts.values())

    def decode(
        self,
        decoding: Decoding,
        limits: Sequence[int] | None = None,
        ended: EndsTurn | None = None,
        heard: OnTurnEnd | None = None,
        pause: ShouldPause | None = None,
    ) -> list[Completion | None]:
        """See ``Episode.decode``; with ``pause`` the parts take a step each in turn, so that none waits for another."""
        most = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)
        found: list[Completion | None] = [None] * self.rows
        begun = True
        while begun:
            for rows, episode in self._parts.values():
                # bound as a default: a closure would ask every part about the rows of the last
                own_ended = None if ended is None else lambda n, ids, rows=rows: ended(rows[n], ids)
                own_heard = None if heard is None else lambda n, completion, rows=rows: heard(rows[n], completion)
                # a pause after every step, so that no part runs ahead
                step = None if pause is None else lambda: True
                for n, done in zip(
                    rows, episode.decode(decoding, [most[n] for n in rows], own_ended, own_heard, step), strict=True
                ):
                    if done is not None:
                        found[n], most[n] = done, 0  # 0: not drawn for again while other parts still speak
            begun = any(episode.has_open_turns for _, episode in self._parts.values()) and not (pause and pause())
        return found

    def score(self, answers: Sequence[Sequence[int]]) -> list[AnswerScore | None]:
        """See ``Episode.score``."""
        return self._gather(lambda rows, episode: episode.score([answers[n] for n in rows]))

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """See ``Episode.extend``."""
        for rows, episode in self._parts.values():
            episode.extend([chunks[n] for n in rows], None if roles is None else [roles[n] for n in rows])

    def join(self, other: MixedEpisode) -> None:
        """See ``Episode.join``."""
        if not self._recorded:  # a part that nobody goes on with would hold its cache for nothing
            self._parts = {part: found for part, found in self._parts.items() if found[1].open_rows}
        for part, (rows, episode) in other._parts.items():
            # rows of the other batch stand behind all of this one
            numbers = [self.rows + n for n in rows]
            if part in self._parts:
                self._parts[part][0].extend(numbers)
                self._parts[part][1].join(episode)
            else:
                self._parts[part] = (numbers, episode)
        self.rows += other.rows

    def rollouts(self) -> list[Rollout]:
        """See ``Episode.rollouts``."""
        return self._gather(lambda _, episode: episode.rollouts())

    def _gather(self, work: Callable[[list[int], Episode], Sequence[T]]) -> list[T]:
        found: dict[int, T] = {}
        for rows, episode in self._parts.values():
            found |= dict(zip(rows, work(rows, episode), strict=True))
        return [found[n] for n in range(self.rows)]


AnyEpisode = Episode | MixedEpisode
_SHARE = 4  # a quarter of the rows must be free before others enter, since the cache is copied then


class ContinuousBatch:
    """A batch that further prompts enter as rows leave it, each with ``group`` rows.

    ``opened`` gives prompts of these numbers an episode; ``most`` of ``prompts`` share the batch. Iterate, and decode
    what comes with ``pause``; rows are numbered by their prompts. Others enter once a quarter of ``most`` is free.
    """

    def __init__(self, opened: Callable[[range], AnyEpisode], prompts: int, most: int, group: int = 1) -> None:
        self._opened, self._most, self._group = opened, most, group
        self._waiting = range(most, prompts)  # numbers of prompts; the first ones are in the batch
        self._episode = opened(range(min(most, prompts)))

    def __iter__(self) -> Iterator[AnyEpisode]:
        """The batch again and again, until every row is over."""
        while self._waiting or self._episode.open_rows:
            if self._enough():
                count = min(self._room, len(self._waiting))
                join_episodes(self._episode, self._opened(self._waiting[:count]))
                self._waiting = self._waiting[count:]
            yield self._episode

    @property
    def pause(self) -> ShouldPause | None:
        """What ``decode`` is to be given: whether there is room for enough of those that wait; None: nobody does."""
        return self._enough if self._waiting else None

    def _enough(self) -> bool:
        return 0 < min(len(self._waiting), max(1, self._most // _SHARE)) <= self._room

    @property
    def _room(self) -> int:
        # rounded up: a group that lost a row still takes a prompt's room
        return self._most - -(-self._episode.open_rows // self._group)

    def rollouts(self) -> list[Rollout]:
        """See ``Episode.rollouts``."""
        return self._episode.rollouts()


def join_episodes(one: AnyEpisode, other: AnyEpisode) -> None:
    """Let ``one`` take the rows of another of its kind in, see ``Episode.join``."""
    if isinstance(one, MixedEpisode):
        assert isinstance(other, MixedEpisode)
        one.join(other)
    else:
        assert not isinstance(other, MixedEpisode)
        one.join(other)
