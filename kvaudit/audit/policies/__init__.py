"""Compression policies: rules by which a cache evicts or quantises entries, or by which queries select entries.

``parse_policy`` turns a spec's text ("snapkv:budget=96") or mapping into a frozen policy object.
"""

from kvaudit.audit.policies.base import POLICIES, Policy
from kvaudit.audit.policies.blind import Dense
from kvaudit.audit.policies.compose import (
    Composed,
    Mixture,
    evictor_of,
    parse_policy,
    quantiser_of,
    quantiser_on_write,
    selector_of,
)
from kvaudit.audit.policies.evictor import Centres, Evictor, Extremes, Moments, View, softmax
from kvaudit.audit.policies.quantiser import Quantiser
from kvaudit.audit.policies.selector import Selector

__all__ = [
    "POLICIES",
    "Centres",
    "Composed",
    "Dense",
    "Evictor",
    "Extremes",
    "Mixture",
    "Moments",
    "Policy",
    "Quantiser",
    "Selector",
    "View",
    "evictor_of",
    "parse_policy",
    "quantiser_of",
    "quantiser_on_write",
    "selector_of",
    "softmax",
]
