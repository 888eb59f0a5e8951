"""Serving engines such as vLLM, one file each; and the parser of the ways to serve a model that a spec names.

A way to serve a model is a policy (of kvaudit's own cache), or an engine with settings.
"""

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
