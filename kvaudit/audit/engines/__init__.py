"""Serving engines: one file each. ``parse_serving_mode`` gives a policy of ours, or an engine's condition."""

from kvaudit.audit.engines.base import (
    ENGINES,
    GenerationRequest,
    Condition,
    Engine,
    Reply,
    ServingMode,
    Session,
    parse_condition,
    parse_serving_mode,
)

__all__ = ["ENGINES", "Asked", "Condition", "Engine", "Reply", "Served", "Session", "parse_condition", "parse_served"]
