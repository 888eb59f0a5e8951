"""The telemetry row of one optimiser step of TRL, added up from its batches of rollouts and its microbatches.

The names are those of ``kvaudit.audit.training.telemetry``. Means are over microbatches, as TRL's own metrics are;
None stands where TRL leaves nothing to count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.training.mismatch import MismatchPanel
from kvaudit.audit.training.optimiser import HALF_METRICS
from kvaudit.audit.training.telemetry import CERTIFICATE, TelemetryRow, entries_seen

# TRL's metric -> ours, of a batch of rollouts and of a microbatch
SAMPLED = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "completions/clipped_ratio": "frac_truncated",
    "completions/mean_length": "length_mean",
}
LEARNED = {"entropy": "entropy", "clip_ratio/region_mean": "clip_fraction", "kl": "kl_ref"}
_ABSENT = (*HALF_METRICS, "frac_degenerate", "distill_kl", "value_loss")  # our own trainer has them
COUNTS = ("tokens", "kept", "dense", "peak", "dense_bytes", "prompt", "rows")


class StepNumbers:
    """What one optimiser step said so far. Batches of rollouts are drawn in some steps and learnt from in others too:
    ``before`` is the step whose batch is gone on with where this one draws none.
    """

    def __init__(self, before: StepNumbers | None = None) -> None:
        self._panel = MismatchPanel()
        self._learned: dict[str, list[float]] = defaultdict(list)
        self._sampled: dict[str, list[float]] = defaultdict(list)
        self._earlier: dict[str, list[float]] = {} if before is None else dict(before._sampled or before._earlier)
        self.loss, self.seconds = 0.0, {"seconds_rollout": 0.0, "seconds_learner": 0.0}
        self.counts = dict.fromkeys(COUNTS, 0.0)  # of this process

    def sampled(self, metrics: Mapping[str, Sequence[float]], own: Mapping[str, float]) -> None:
        """Count a batch of rollouts: the last of TRL's metrics, and numbers of our own."""
        for name, ours in SAMPLED.items():
            self._sampled[ours].append(metrics[name][-1])
        for name, values in metrics.items():
            if name.startswith("rewards/") and name.endswith("/mean"):
                self._sampled["reward/" + name.removeprefix("rewards/").removesuffix("/mean")].append(values[-1])
        for name, value in own.items():
            self._sampled[name].append(value)

    def learned(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Count a microbatch: the last of TRL's metrics."""
        for name, ours in LEARNED.items():
            if metrics.get(name):
                self._learned[ours].append(metrics[name][-1])

    def compared(self, gathered: Tensor) -> None:
        """Count a microbatch of all processes, [N, T, 4].

        Log-probs in nats from its sampler and from the weights that sampled it, 1 where a token was sampled, and
        advantages before any correction.
        """
        sampler, learner, mask, advantages = gathered.unbind(-1)  # each [N, T]
        self._panel.add(sampler, learner, mask.bool(), advantages)

    def saw(self, rollouts: Sequence[Rollout], tokens: int) -> None:
        """Count the ``tokens`` of a microbatch of this process, and what the caches of its rollouts held."""
        self.counts["tokens"] += tokens
        for rollout in rollouts:
            kept, dense = entries_seen(rollout)
            held = (kept, dense, rollout.kv_bytes_peak, rollout.kv_bytes_dense, rollout.prompt_length, 1)
            for name, value in zip(COUNTS[1:], held, strict=True):
                self.counts[name] += value

    def row(self, step: int, grad_norm: float | None, totals: Mapping[str, float], *, replays: bool) -> TelemetryRow:
        """All numbers of the step; ``totals`` are the counts of all processes, ``replays`` is of the learner's view."""
        means = {name: _mean(values) for name, values in (self._sampled or self._earlier).items()}
        row: TelemetryRow = {"step": step, **dict.fromkeys(_ABSENT), **dict.fromkeys(LEARNED.values()), **means}
        row |= {name: _mean(values) for name, values in self._learned.items()}
        norm = grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None
        row |= {"loss": self.loss, "grad_norm": norm, "update_skipped": False, "groups_sampled_again": 0}
        row |= _memory(totals)
        row |= {f"mismatch/{name}": value for name, value in self._panel.numbers().items()}
        # the replay is the learner's own view in the one arm, and nobody asks for it in the others
        row |= {name: row[name.replace("shadow/", "mismatch/")] if replays else None for name in CERTIFICATE}
        return row | self.seconds


def _memory(totals: Mapping[str, float]) -> TelemetryRow:
    """Bytes are sums over the step's rows, as in our own trainer."""
    rows, dense = totals["rows"], totals["dense"]
    return {
        "learner_tokens": int(totals["tokens"]),
        "prompt_tokens_mean": totals["prompt"] / rows if rows else None,
        "kv_bytes_peak": int(totals["peak"]) if rows else None,
        "kv_bytes_dense": int(totals["dense_bytes"]) if rows else None,
        "token_savings": 1.0 - totals["kept"] / dense if dense else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else None
