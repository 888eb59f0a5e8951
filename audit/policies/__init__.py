"""Compression policies: one file each. ``parse_policy`` turns a spec string or mapping into a frozen object."""

from audit.policies.base import POLICIES, Centres, Moments, Policy, View, softmax
from audit.policies.compose import Composed, Mixture
from audit.policies.parse import parse_policy, policy_hash
from audit.policies.quantiser import Quantiser
from audit.policies.selector import Selector

__all__ = [
    "POLICIES",
    "Centres",
    "Composed",
    "Mixture",
    "Moments",
    "Policy",
    "Quantiser",
    "Selector",
    "View",
    "parse_policy",
    "policy_hash",
    "softmax",
]
