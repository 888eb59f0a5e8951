"""TRL as a host: its GRPO trainer with this project's sampler, arms and telemetry (``kvaudit.trl``)."""

from __future__ import annotations

from importlib import metadata

from kvaudit.core.errors import RunError

WORKS_WITH = "1.16"  # the trainer overrides methods that TRL calls its own, so each version has to be looked at


def require_trl() -> str:
    """The version of TRL; raises RunError where it is missing or another one than this was written against."""
    wanted = f"pip install 'trl=={WORKS_WITH}.*'"
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise RunError(f"kvaudit.trl trains with TRL {WORKS_WITH}, which is not installed: {wanted}") from None
    if found.split(".")[:2] != WORKS_WITH.split("."):
        raise RunError(f"kvaudit.trl was written against TRL {WORKS_WITH}, installed is {found[:40]}: {wanted}")
    return found
