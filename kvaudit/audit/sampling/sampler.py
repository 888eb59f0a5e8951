"""The sampler of training rollouts and of evaluation: prompts and a policy in; completions, log-probs and ledger out.

Compression in training and in serving is therefore the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.policies import Mixture, Policy
from kvaudit.audit.sampling.decoding import AnswerScore, Completion, Decoding
from kvaudit.audit.sampling.episode import EndsTurn, Episode, OnTurnEnd, ServedModel, ShouldPause
from kvaudit.core.errors import SpecError

T = TypeVar("T")
__all__ = ["Completion", "ContinuousBatch", "Decoding", "Episode", "MixedEpisode", "Sampler", "ServedModel"]


class Sampler:
    """A sampler of completions from ``model``, whose KV cache is compressed by ``policy``.

    ``shared`` lets policies reuse each other's prefill of the same prompts, which changes no result. With
    ``recorded=False`` no rollouts are kept.
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
        """Return an episode (a batch with a live cache) of ``group`` rows per prompt, each with its own seed.

        Each prompt is prefilled once for all its rows. ``roles`` has the role of every prompt token, which a policy
        that pins roles (never evicts their tokens) needs. Under a mixture of policies the rows share no prefill, since
        one policy is drawn for each row. Raises SpecError for an empty prompt.
        """
        if not prompts or any(len(p) == 0 for p in prompts):
            raise SpecError("every prompt needs at least one token")
        assert len(seeds) == len(prompts) * group, (len(seeds), len(prompts), group)
        if self.policy.pinned_roles and roles is None:
            raise SpecError(f"policy {self.policy.canonical!r} pins roles; sample with the roles of the tokens")
        assert roles is None or [len(r) for r in roles] == [len(p) for p in prompts]
        if not isinstance(self.policy, Mixture):
            return Episode(self.model, self.policy, prompts, seeds, group, roles, self._shared, recorded=self._recorded)
        # repeat each prompt for its group: members may draw different policies
        prompts = [prompt for prompt in prompts for _ in range(group)]
        roles = None if roles is None else [row for row in roles for _ in range(group)]
        return MixedEpisode(self.model, self.policy, prompts, seeds, roles, recorded=self._recorded)


class MixedEpisode:
    """A batch under a mixture of policies: one policy is drawn for each row, and each policy has an ``Episode``."""

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
        policies = [policy.drawn(seed) for seed in seeds]  # by seed, so that every arm draws the same policies
        self._episodes: dict[Policy, tuple[list[int], Episode]] = {}  # with the numbers of its rows in the batch
        for row_policy in dict.fromkeys(policies):
            rows = [n for n, other_policy in enumerate(policies) if other_policy == row_policy]
            row_roles = None if roles is None else [roles[n] for n in rows]
            row_prompts, row_seeds = [prompts[n] for n in rows], [seeds[n] for n in rows]
            episode = Episode(model, row_policy, row_prompts, row_seeds, 1, row_roles, recorded=recorded)
            self._episodes[row_policy] = (rows, episode)

    @property
    def open_rows(self) -> int:
        """The number of rows that may still continue."""
        return sum(episode.open_rows for _, episode in self._episodes.values())

    def decode(
        self,
        decoding: Decoding,
        limits: Sequence[int] | None = None,
        ends_turn: EndsTurn | None = None,
        on_turn_end: OnTurnEnd | None = None,
        should_pause: ShouldPause | None = None,
    ) -> list[Completion | None]:
        """Decode as ``Episode.decode`` does.

        ``should_pause`` is called whenever the rows of all policies have one more token, so that no policy runs ahead.
        """
        caps = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)
        completions: list[Completion | None] = [None] * self.rows
        pause = None if should_pause is None else lambda: True  # after every step, so that no episode runs ahead
        unfinished = True
        while unfinished:
            for rows, episode in self._episodes.values():
                # rows are bound as a default, or every callback would see those of the last episode
                ends = None if ends_turn is None else lambda n, ids, rows=rows: ends_turn(rows[n], ids)
                on_end = None if on_turn_end is None else lambda n, done, rows=rows: on_turn_end(rows[n], done)
                turns = episode.decode(decoding, [caps[n] for n in rows], ends, on_end, pause)
                for n, completion in zip(rows, turns, strict=True):
                    if completion is not None:
                        completions[n], caps[n] = completion, 0  # 0: skip the row while other episodes continue
            unfinished = any(episode.has_open_turns for _, episode in self._episodes.values()) and not (
                should_pause and should_pause()
            )
        return completions

    def score(self, answers: Sequence[Sequence[int]]) -> list[AnswerScore | None]:
        """Score answers as ``Episode.score`` does."""
        return self._gather(lambda rows, episode: episode.score([answers[n] for n in rows]))

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """Append input to rows as ``Episode.extend`` does."""
        for rows, episode in self._episodes.values():
            episode.extend([chunks[n] for n in rows], None if roles is None else [roles[n] for n in rows])

    def join(self, other: MixedEpisode) -> None:
        """Append the rows of another batch as ``Episode.join`` does."""
        if not self._recorded:  # free the caches of episodes whose rows have all finished
            self._episodes = {policy: pair for policy, pair in self._episodes.items() if pair[1].open_rows}
        for policy, (rows, episode) in other._episodes.items():
            numbers = [self.rows + n for n in rows]  # the other's rows follow all of these
            if policy in self._episodes:
                self._episodes[policy][0].extend(numbers)
                self._episodes[policy][1].join(episode)
            else:
                self._episodes[policy] = (numbers, episode)
        self.rows += other.rows

    def rollouts(self) -> list[Rollout]:
        """Return every row's rollout as ``Episode.rollouts`` does."""
        return self._gather(lambda _, episode: episode.rollouts())

    def _gather(self, work: Callable[[list[int], Episode], Sequence[T]]) -> list[T]:
        """Call ``work`` with each policy's row numbers and episode; return the results in the order of all rows."""
        results: dict[int, T] = {}
        for rows, episode in self._episodes.values():
            results |= dict(zip(rows, work(rows, episode), strict=True))
        return [results[n] for n in range(self.rows)]


AnyEpisode = Episode | MixedEpisode
_SHARE = 4  # a quarter of the rows must be free before prompts enter, since entering copies the cache


class ContinuousBatch:
    """A batch of rows into which new prompts enter when other rows have finished; each prompt has ``group`` rows.

    ``open_episode`` starts the rows of a range of prompts; at most ``capacity`` prompts share the batch. Iterate over
    this object, and decode each yielded episode (the batch) with ``should_pause``. Row n belongs to prompt n //
    ``group``.
    """

    def __init__(
        self, open_episode: Callable[[range], AnyEpisode], prompts: int, capacity: int, group: int = 1
    ) -> None:
        self._open_episode, self._capacity, self._group = open_episode, capacity, group
        self._waiting = range(capacity, prompts)  # numbers of prompts that have not entered
        self._episode = open_episode(range(min(capacity, prompts)))

    def __iter__(self) -> Iterator[AnyEpisode]:
        """Yield the batch repeatedly, for the caller to decode, until all rows have finished; new prompts join it."""
        while self._waiting or self._episode.open_rows:
            if self._has_room():
                count = min(self._room, len(self._waiting))
                join_episodes(self._episode, self._open_episode(self._waiting[:count]))
                self._waiting = self._waiting[count:]
            yield self._episode

    @property
    def should_pause(self) -> ShouldPause | None:
        """The callback for ``decode`` that pauses when prompts can enter; None when no prompt waits."""
        return self._has_room if self._waiting else None

    def _has_room(self) -> bool:
        return 0 < min(len(self._waiting), max(1, self._capacity // _SHARE)) <= self._room

    @property
    def _room(self) -> int:
        # rounded up: a group that lost a row still occupies its prompt's place
        return self._capacity - -(-self._episode.open_rows // self._group)

    def rollouts(self) -> list[Rollout]:
        """Return every row's rollout as ``Episode.rollouts`` does."""
        return self._episode.rollouts()


def join_episodes(episode: AnyEpisode, other: AnyEpisode) -> None:
    """Append the rows of another episode of the same kind as ``Episode.join`` does."""
    if isinstance(episode, MixedEpisode):
        assert isinstance(other, MixedEpisode)
        episode.join(other)
    else:
        assert not isinstance(other, MixedEpisode)
        episode.join(other)
