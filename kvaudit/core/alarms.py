"""The alarms of training: bounds on numbers of the telemetry (log of training steps), shared by trainer and report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """A bound on a number of the training log: its limit (``least`` or ``most``), what passing it means, a remedy."""

    name: str
    least: float | None
    most: float | None
    meaning: str
    remedy: str

    def is_passed(self, value: float | None) -> bool:
        """Return whether a number is beyond the bound, so that its alarm is raised; False for None."""
        least, most = self.least, self.most
        return value is not None and ((least is not None and value < least) or (most is not None and value > most))

    @property
    def limit(self) -> str:
        """The bound as text, such as ``below 0.86``."""
        return f"below {self.least:g}" if self.least is not None else f"above {self.most:g}"

    @property
    def sentence(self) -> str:
        """The name of the alarm, its limit, and what a value beyond the limit means, as a sentence."""
        return f"{self.name} is {self.limit}: {self.meaning}"


_COMPRESS_LESS = "compress rollouts less, or train smd, whose learner sees what the sampler saw"
_USE_FLOAT32 = "train in float32 or with a lower learning rate"
_UNLIKELY_TOKENS = "one sampled token in twenty is hardly one that the learner would have drawn"
_LOST_WEIGHT = "reweighted by the learner, most of the tokens count for nothing"
_IMPOSSIBLE_TOKENS = "so many rollouts hold a token that the learner gives next to no chance"
_EQUAL_REWARDS = "a share of groups that earned the same in every rollout and teach nothing"
_CHANGE_ITEMS = "train on items that the model solves now and then, or draw larger groups"
_LOW_ENTROPY = "a share of the first step's, so that rollouts of a group grow alike"
MISMATCH_BOUNDS = (  # of a mismatch panel (``kvaudit.audit.training.mismatch``)
    Bound("overlap_p5", 0.86, None, _UNLIKELY_TOKENS, _COMPRESS_LESS),
    Bound("ess", 0.3, None, _LOST_WEIGHT, _COMPRESS_LESS),
    Bound("frac_sequences_vetoed", None, 0.2, _IMPOSSIBLE_TOKENS, _COMPRESS_LESS),
    Bound("frac_not_finite", None, 0.0, "the learner gives log-probs that are no numbers", _USE_FLOAT32),
)
FLAT = Bound("flat_rewards", None, 0.5, _EQUAL_REWARDS, _CHANGE_ITEMS)
ENTROPY = Bound("entropy", 0.1, None, _LOW_ENTROPY, "lower the learning rate, or stop earlier")
ALARMS = {bound.name: bound for bound in (*MISMATCH_BOUNDS, FLAT, ENTROPY)}


def alarm_numbers(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries ``alarm/NAME`` of a row of the telemetry (log of training steps): 1 for a raised alarm, or 0.

    ``first`` is the first row of the training run. The alarm on entropy compares the row's entropy with that row's.
    """
    values = {bound.name: row[f"mismatch/{bound.name}"] for bound in MISMATCH_BOUNDS}
    entropy, start = row["entropy"], first["entropy"]
    values[FLAT.name] = row["frac_reward_zero_std"]
    values[ENTROPY.name] = None if entropy is None or not start else entropy / start
    return {alarm_key(name): int(ALARMS[name].is_passed(value)) for name, value in values.items()}


def alarm_key(name: str) -> str:
    """Return the key ``alarm/NAME``, under which a row of the telemetry (log of training steps) stores an alarm."""
    return f"alarm/{name}"


def active_alarms(row: Mapping[str, Any]) -> list[Bound]:
    """Return the bounds whose alarm is raised in a row of the telemetry (log of training steps)."""
    return [bound for name, bound in ALARMS.items() if row.get(alarm_key(name)) == 1]
