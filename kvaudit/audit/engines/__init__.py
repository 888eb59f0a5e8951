"""Serving engines, one file each, and the parser of policies and conditions."""

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
