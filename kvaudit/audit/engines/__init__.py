"""Serving engines, one file each. ``parse_serving_mode`` returns one of our policies or the condition of an engine."""

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
