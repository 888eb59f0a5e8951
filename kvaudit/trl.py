"""GRPO by TRL with rollouts from a compressed cache, paired arms and the telemetry of this project.

    from kvaudit.trl import AuditedGRPOTrainer

Needs the extra ``trl``, which is loaded when the name is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvaudit.audit.training.trl.trainer import AuditedGRPOTrainer

__all__ = ["AuditedGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvaudit.trl' has no attribute {name!r}")
    from kvaudit.audit.training.trl import require_trl

    require_trl()
    from kvaudit.audit.training.trl import trainer

    return getattr(trainer, name)


def __dir__() -> list[str]:
    return list(__all__)
