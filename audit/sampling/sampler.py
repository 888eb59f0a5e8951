"""The one decoder of the project: prompts and a policy in; completions, log-probs and the ledger out.

Training rollouts and evaluation both go through here, so "the compression used in training" and "the compression used
in serving" mean the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from audit.cache.ledger import Rollout
from audit.cache.shared import SharedPrefill
from audit.core.errors import SpecError
from audit.policies import Mixture, Policy
from audit.sampling.decoding import Completion, Decoding, Scored, nucleus
from audit.sampling.episode import Ended, Episode, Heard, ServedModel

T = TypeVar("T")
__all__ = ["Completion", "Decoding", "Episode", "MixedEpisode", "Sampler", "Scored", "ServedModel", "nucleus"]


class Sampler:
    """Decodes from ``model`` with its cache compressed by ``policy``.

    ``shared`` is what the policies that are played with the same prompts have of each other's prefill; no rollout
    depends on it.
    """

    def __init__(self, model: ServedModel, policy: Policy, shared: SharedPrefill | None = None) -> None:
        self.model, self.policy, self._shared = model, policy, shared

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
            each = [n for n in range(len(prompts)) for _ in range(group)]
            own = None if roles is None else [roles[n] for n in each]
            return MixedEpisode(self.model, self.policy, [prompts[n] for n in each], seeds, own)
        return Episode(self.model, self.policy, prompts, seeds, group, roles, self._shared)


class MixedEpisode:
    """A batch whose rows were each served under a policy they drew: one ``Episode`` per policy."""

    def __init__(
        self,
        model: ServedModel,
        policy: Mixture,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        roles: Sequence[Sequence[str]] | None,
    ) -> None:
        self.rows = len(prompts)
        chosen = [policy.drawn(seed) for seed in seeds]  # the same in every arm, as the rows' seeds are
        self._parts: list[tuple[list[int], Episode]] = []
        for part in dict.fromkeys(chosen):
            rows = [n for n, own in enumerate(chosen) if own == part]
            own = None if roles is None else [roles[n] for n in rows]
            episode = Episode(model, part, [prompts[n] for n in rows], [seeds[n] for n in rows], 1, own)
            self._parts.append((rows, episode))

    def decode(
        self,
        decoding: Decoding,
        limits: Sequence[int] | None = None,
        ended: Ended | None = None,
        heard: Heard | None = None,
    ) -> list[Completion | None]:
        """See ``Episode.decode``."""
        most = [decoding.max_new_tokens] * self.rows if limits is None else list(limits)

        def work(rows: list[int], episode: Episode) -> list[Completion | None]:
            own_ended = None if ended is None else lambda n, ids: ended(rows[n], ids)
            own_heard = None if heard is None else lambda n, completion: heard(rows[n], completion)
            return episode.decode(decoding, [most[n] for n in rows], own_ended, own_heard)

        return self._gather(work)

    def score(self, answers: Sequence[Sequence[int]]) -> list[Scored | None]:
        """See ``Episode.score``."""
        return self._gather(lambda rows, episode: episode.score([answers[n] for n in rows]))

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """See ``Episode.extend``."""
        for rows, episode in self._parts:
            episode.extend([chunks[n] for n in rows], None if roles is None else [roles[n] for n in rows])

    def rollouts(self) -> list[Rollout]:
        """See ``Episode.rollouts``."""
        return self._gather(lambda _, episode: episode.rollouts())

    def _gather(self, work: Callable[[list[int], Episode], Sequence[T]]) -> list[T]:
        """Results of every part, in the order of the rows."""
        found: dict[int, T] = {}
        for rows, episode in self._parts:
            found |= dict(zip(rows, work(rows, episode), strict=True))
        return [found[n] for n in range(self.rows)]
