"""Serving engines such as vLLM, one file each; and the parser of how to serve: a policy, or an engine with settings."""

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
