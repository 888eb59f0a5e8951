"""The arm and the sampler of an audited TRL trainer, and the checks that TRL's settings agree with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.rollout_checks import LOGPROB_ROUNDING
from kvaudit.audit.training.config import Arm, get_arm
from kvaudit.audit.training.corrections import MIS_RANGE, TIS_CAP
from kvaudit.core.errors import AuditError, DataError, SpecError

VLLM, FUNCTION = "vLLM", "rollout_func"  # external samplers
# settings with which TRL's own correction of vLLM's log-probs equals canonical
TRL_CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "tis": {"mode": "token_truncate", "clip_max": TIS_CAP, "clip_min": None},
    "mis": {"mode": "token_mask", "clip_max": MIS_RANGE[1], "clip_min": MIS_RANGE[0]},
}
_CORRECTION = "vllm_importance_sampling_correction"
# settings that truncate the sampling distribution, with the values that do not
_FULL_DISTRIBUTION: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
_FOR_OUR_CACHE: Mapping[str, tuple[Any, ...]] = {
    **_FULL_DISTRIBUTION,
    "generation_kwargs": (None, {}),
    "cache_implementation": (None,),
    "use_transformers_continuous_batching": (False,),
}


@dataclass(frozen=True)
class HostedArm:
    """An arm of an audited TRL trainer with its sampler: kvaudit's cache under ``policy``, or an external sampler."""

    arm: Arm
    policy: Policy | None
    external_sampler: str | None
    sampler_settings: str  # the sampler's settings in words

    @classmethod
    def of(cls, arm: str, policy: str | None, external_sampler: str | None) -> HostedArm:
        """Combine an arm and a sampler; raise SpecError if TRL cannot train them, UnknownName for an unknown name."""
        design = get_arm(arm)
        if design.distill:
            raise SpecError(
                f"arm {arm!r} distils whole distributions, and TRL's loss has the sampled tokens only; use arm 'smd', "
                "or train it with kvaudit run"
            )
        if external_sampler is not None:
            return cls(design, None, external_sampler, _external_settings(design, policy, external_sampler))
        if policy is None and design.rollout == "compressed":
            raise SpecError(f"arm {arm!r} samples under a policy; give one, such as policy='snapkv:budget=512'")
        declared = parse_policy(policy or "none")
        # dense ignores the policy, so that two runs can differ in the arm only
        used = declared if design.rollout == "compressed" else parse_policy("none")
        if design.learner == "shadow" and not used.replayable:
            raise SpecError(
                f"policy {used.canonical!r} leaves no ledger that the learner could replay, which arm {arm!r} needs; "
                "use another policy, or arm 'tis'"
            )
        if used.pinned_roles:
            raise SpecError(f"policy {used.canonical!r} pins roles, but TRL passes tokens without roles; remove pin")
        return cls(design, used, None, used.canonical)

    @property
    def trl_corrects(self) -> bool:
        """Whether TRL itself applies the arm's importance weights.

        It can apply those of some corrections (``TRL_CORRECTIONS``), and only to rollouts sampled by vLLM.
        """
        return self.external_sampler == VLLM and self.arm.correction in TRL_CORRECTIONS

    def apply_settings(self, config: Any) -> None:
        """Set the arm's correction in TRL's GRPOConfig, if TRL applies it.

        Raises SpecError for settings that contradict the arm or its sampler.
        """
        if self.arm.correction != "none" and config.loss_type == "vespo" and not self.trl_corrects:
            raise SpecError(
                f"loss_type 'vespo' weights rollouts by its own ratio and arm {self.arm.name!r} by another; use "
                "another loss_type, or arm 'naive'"
            )
        sampler = self.external_sampler or "kvaudit's cache"
        for name, allowed in (_FOR_OUR_CACHE if self.external_sampler is None else _FULL_DISTRIBUTION).items():
            if (value := getattr(config, name)) not in allowed:
                raise SpecError(
                    f"GRPOConfig has {name}={value!r}, but the learner's log-probs are of the full distribution, so "
                    f"{sampler} must sample from it too; remove {name}"
                )
        if self.external_sampler == VLLM:
            self._apply_vllm_settings(config)

    def _apply_vllm_settings(self, config: Any) -> None:
        settings = {_CORRECTION: self.trl_corrects}
        if self.trl_corrects:
            options = TRL_CORRECTIONS[self.arm.correction]
            settings |= {f"vllm_importance_sampling_{name}": value for name, value in options.items()}
        defaults = {field.name: field.default for field in fields(config) if field.default is not MISSING}
        for name, value in settings.items():
            current = getattr(config, name)
            # TRL's default is not a user's choice and may be replaced
            if current not in (value, defaults.get(name)):
                raise SpecError(f"GRPOConfig has {name}={current!r}, arm {self.arm.name!r} needs {value!r}; remove it")
            setattr(config, name, value)

    def recipe_summary(self) -> dict[str, Any]:
        """Return how the checkpoint was trained, as {aspect: words}, readable without this project's table of arms."""
        return {
            "rollouts": self.sampler_settings,
            "rollouts_hash": None if self.policy is None else self.policy.hash,
            "learner": self.arm.learner,
            "correction": self.arm.correction,
            "distillation": self.arm.distill,
        }


def check_logprobs(
    sampler: str, completions: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]] | None
) -> None:
    """Raise DataError if an external sampler did not return one log-prob for each token.

    A log-prob must not be above 0; it may be None for a token that was not scored.
    """
    if logprobs is None:
        raise DataError(f"{sampler} returned no log-probs, and every arm needs one per token; have it return them")
    # errors in a list are reported before a wrong number of lists
    for number, (ids, values) in enumerate(zip(completions, logprobs, strict=False)):
        if len(ids) != len(values):
            raise DataError(f"{sampler} returned {len(values)} log-probs for the {len(ids)} tokens of rollout {number}")
        positive = next((value for value in values if value is not None and value > LOGPROB_ROUNDING), None)
        if positive is not None:
            raise DataError(
                f"{sampler} returned log-prob {positive} in rollout {number}, wanted at most 0: the natural logarithm "
                "of a probability"
            )
    if len(completions) != len(logprobs):
        raise DataError(f"{sampler} returned log-probs of {len(logprobs)} rollouts for {len(completions)}")


def _external_settings(arm: Arm, policy: str | None, sampler: str) -> str:
    """Return in words the settings of an external sampler, as the user declares them; they cannot be verified.

    Raises SpecError if the arm or the policy cannot be used with this sampler.
    """
    if arm.learner == "shadow":
        raise SpecError(
            f"arm {arm.name!r} replays the ledger of kvaudit's cache, but {sampler} samples and leaves none; use arm "
            "'tis', or let kvaudit's cache sample"
        )
    if policy is None:
        return "none" if arm.rollout == "dense" else f"{sampler}, its cache settings not told"
    try:
        canonical = parse_policy(policy).canonical
    except AuditError:
        return policy  # an engine's settings
    if sampler == VLLM and canonical != "none":
        raise SpecError(
            f"policy {canonical!r} is of kvaudit's own cache, but vLLM samples; describe how vLLM was started, such as "
            "policy='vllm:kv_cache_dtype=fp8', or remove use_vllm"
        )
    return canonical
