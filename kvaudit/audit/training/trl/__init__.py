"""TRL's GRPO trainer with this project's sampler, arms and telemetry (public name: ``kvaudit.trl``)."""

from __future__ import annotations

from importlib import metadata

from kvaudit.core.errors import RunError

WORKS_WITH = "1.16"  # the trainer overrides private methods of TRL, so every new version must be checked


def require_trl() -> str:
    """Return the installed version of TRL; raises RunError if it is missing or not supported."""
    remedy = f"pip install 'trl=={WORKS_WITH}.*'"
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise RunError(f"kvaudit.trl needs TRL {WORKS_WITH}, which is not installed: {remedy}") from None
    if version.split(".")[:2] != WORKS_WITH.split("."):
        raise RunError(f"kvaudit.trl supports TRL {WORKS_WITH}, installed is {version[:40]}: {remedy}")
    return version
