"""What an audited trainer of TRL is to do: its arm, who samples, and the settings that are not to contradict them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.rollout_checks import LOGPROB_ROUNDING
from kvaudit.audit.training.arms import Arm, get_arm
from kvaudit.audit.training.corrections import MIS_RANGE, TIS_CAP
from kvaudit.core.errors import AuditError, DataError, SpecError

VLLM, FUNCTION = "vLLM", "rollout_func"  # samplers that are not ours
# settings by which TRL's own correction is one of ours, where its log-probs come from vLLM
TRL_CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "tis": {"mode": "token_truncate", "clip_max": TIS_CAP, "clip_min": None},
    "mis": {"mode": "token_mask", "clip_max": MIS_RANGE[1], "clip_min": MIS_RANGE[0]},
}
_CORRECTION = "vllm_importance_sampling_correction"
# what cuts the distribution off, whoever samples, by the value at which it does not
_WHOLE: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
_OF_OUR_CACHE: Mapping[str, tuple[Any, ...]] = {
    **_WHOLE,
    "generation_kwargs": (None, {}),
    "cache_implementation": (None,),
    "use_transformers_continuous_batching": (False,),
}


@dataclass(frozen=True)
class HostedArm:
    """An arm and its sampler: our cache under ``policy``, or somebody else, ``outside``; ``sampled_under`` in words."""

    arm: Arm
    policy: Policy | None
    outside: str | None
    sampled_under: str

    @classmethod
    def of(cls, arm: str, policy: str | None, outside: str | None) -> HostedArm:
        """Raises UnknownName and SpecError for what cannot be trained in this way."""
        chosen = get_arm(arm)
        if chosen.distill:
            raise SpecError(
                f"arm {arm!r} pulls whole distributions together, and TRL's loss has the sampled tokens alone; "
                "take arm 'smd', or train it by kvaudit run"
            )
        if outside is not None:
            return cls(chosen, None, outside, _sampled_under(chosen, policy, outside))
        if policy is None and chosen.rollout == "compressed":
            raise SpecError(f"arm {arm!r} samples under a policy; give one, such as policy='snapkv:budget=512'")
        asked = parse_policy(policy or "none")
        # dense compresses nothing whatever is given, so that two runs differ in the arm alone
        own = asked if chosen.rollout == "compressed" else parse_policy("none")
        if chosen.learner == "shadow" and not own.replayable:
            raise SpecError(
                f"policy {own.canonical!r} leaves no ledger that a learner could replay, which arm {arm!r} needs; "
                "take another policy, or arm 'tis'"
            )
        if own.pinned_roles:
            raise SpecError(
                f"policy {own.canonical!r} pins roles, and TRL hands over tokens without them; leave pin out"
            )
        return cls(chosen, own, None, own.canonical)

    @property
    def by_trl(self) -> bool:
        """Whether TRL's own code corrects: what vLLM sampled, in arms whose correction it knows."""
        return self.outside == VLLM and self.arm.correction in TRL_CORRECTIONS

    def settle(self, config: Any) -> None:
        """Hold a GRPOConfig to the arm, and set what TRL corrects by; raises SpecError for what contradicts it."""
        if self.arm.correction != "none" and config.loss_type == "vespo" and not self.by_trl:
            raise SpecError(
                f"loss_type 'vespo' weighs rollouts by a ratio of its own, arm {self.arm.name!r} by another; take "
                "another loss_type, or arm 'naive'"
            )
        who = self.outside or "kvaudit's cache"
        for name, whole in (_OF_OUR_CACHE if self.outside is None else _WHOLE).items():
            if (value := getattr(config, name)) not in whole:
                raise SpecError(
                    f"GRPOConfig has {name}={value!r}, and the learner's log-probs are of the whole distribution, of "
                    f"which {who} then has to sample; leave {name} out"
                )
        if self.outside == VLLM:
            self._settle_vllm(config)

    def _settle_vllm(self, config: Any) -> None:
        """What TRL makes of vLLM's log-probs is the arm's to say."""
        wanted = {_CORRECTION: self.by_trl}
        if self.by_trl:
            own = TRL_CORRECTIONS[self.arm.correction]
            wanted |= {f"vllm_importance_sampling_{name}": value for name, value in own.items()}
        usual = {field.name: field.default for field in fields(config) if field.default is not MISSING}
        for name, value in wanted.items():
            given = getattr(config, name)
            # what TRL has by itself is nobody's wish and may be set
            if given not in (value, usual.get(name)):
                raise SpecError(f"GRPOConfig has {name}={given!r}, arm {self.arm.name!r} means {value!r}; leave it out")
            setattr(config, name, value)

    def disclosed(self) -> dict[str, Any]:
        """What a reader of the checkpoint has to know, without this project's table of arms."""
        return {
            "rollouts": self.sampled_under,
            "rollouts_hash": None if self.policy is None else self.policy.hash,
            "learner": self.arm.learner,
            "correction": self.arm.correction,
            "distillation": self.arm.distill,
        }


def check_logprobs(
    outside: str, completions: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]] | None
) -> None:
    """Raise DataError where somebody else sampled and did not say how likely every token was; None is not scored."""
    if logprobs is None:
        raise DataError(f"{outside} gave no log-probs, and every arm is measured by them; have it give one a token")
    # another number of lists is said behind what is wrong in one of them
    for number, (ids, values) in enumerate(zip(completions, logprobs, strict=False)):
        if len(ids) != len(values):
            raise DataError(f"{outside} gave {len(values)} log-probs for the {len(ids)} tokens of rollout {number}")
        above = next((value for value in values if value is not None and value > LOGPROB_ROUNDING), None)
        if above is not None:
            raise DataError(
                f"{outside} gave log-prob {above} in rollout {number}, wanted at most 0: the natural logarithm of a "
                "probability"
            )
    if len(completions) != len(logprobs):
        raise DataError(f"{outside} gave log-probs of {len(logprobs)} rollouts for {len(completions)}")


def _sampled_under(arm: Arm, policy: str | None, outside: str) -> str:
    """What rollouts of somebody else were sampled under, in the words of whoever trains; nobody can verify it."""
    if arm.learner == "shadow":
        raise SpecError(
            f"arm {arm.name!r} replays the ledger of kvaudit's cache, and rollouts come from {outside}, which leaves "
            "none; take arm 'tis', or let kvaudit's cache sample"
        )
    if policy is None:
        return "none" if arm.rollout == "dense" else f"{outside}, its cache settings not told"
    try:
        ours = parse_policy(policy).canonical
    except AuditError:
        return policy  # words of an engine
    if outside == VLLM and ours != "none":
        raise SpecError(
            f"policy {ours!r} is of kvaudit's own cache, and rollouts come from vLLM; say how that was started, such "
            "as policy='vllm:kv_cache_dtype=fp8', or leave use_vllm out"
        )
    return ours
