"""The names that the installed plug-ins answer to, for a spec that is to run (``audit.core.spec.Names``)."""

from __future__ import annotations

from typing import Any, Literal

from audit.core.spec import Names, TrainSpec
from audit.policies import parse_policy
from audit.training.arms import get_arm
from audit.training.config import TrainConfig
from suites.base import SUITES


def _policy(written: Any) -> str:
    return parse_policy(written).canonical


def _kind(suite: str) -> Literal["safety", "capability"]:
    return SUITES.get(suite).kind


def _check_training(section: TrainSpec) -> None:
    for arm in section.arms:
        get_arm(arm)
    TrainConfig.of(section, section.arms[0], section.seeds[0])


NAMES = Names(policy=_policy, kind=_kind, check_training=_check_training)
