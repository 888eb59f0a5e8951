"""Serving engines, one file each. ``parse_serving_mode`` returns a policy of our cache, or an engine's condition."""

from kvaudit.audit.engines.base import (
    ENGINES,
    Condition,
    Engine,
    GenerationRequest,
    Reply,
    ServingMode,
    Session,
    parse_condition,
    parse_serving_mode,
)

__all__ = [
    "ENGINES",
    "Condition",
    "Engine",
    "GenerationRequest",
    "Reply",
    "ServingMode",
    "Session",
    "parse_condition",
    "parse_serving_mode",
]
