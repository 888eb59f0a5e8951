"""Compression policies: one file each. ``parse_policy`` turns a spec string or mapping into a frozen object."""

from audit.policies.base import POLICIES, Policy
from audit.policies.compose import Composed, Mixture, evictor_of, quantiser_of, selector_of, written_by
from audit.policies.evictor import Centres, Evictor, Moments, View, softmax
from audit.policies.none import Dense
from audit.policies.parse import parse_policy
from audit.policies.quantiser import Quantiser
from audit.policies.selector import Selector

__all__ = [
    "POLICIES",
    "Centres",
    "Composed",
    "Dense",
    "Evictor",
    "Mixture",
    "Moments",
    "Policy",
    "Quantiser",
    "Selector",
    "View",
    "evictor_of",
    "parse_policy",
    "quantiser_of",
    "selector_of",
    "softmax",
    "written_by",
]
