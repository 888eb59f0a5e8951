"""Serving engines: one file each. ``parse_served`` gives a policy of ours, or an engine's condition."""

from kvaudit.audit.engines.base import (
    ENGINES,
    Asked,
    Condition,
    Engine,
    Reply,
    Served,
    Session,
    parse_condition,
    parse_served,
)

__all__ = ["ENGINES", "Asked", "Condition", "Engine", "Reply", "Served", "Session", "parse_condition", "parse_served"]
