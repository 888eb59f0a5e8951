"""TRL's GRPO trainer with rollouts from a compressed cache, and with the arms and training log of kvaudit.

    from kvaudit.trl import AuditedGRPOTrainer

    settings = GRPOConfig("runs/smd")
    AuditedGRPOTrainer(model, reward, settings, data, arm="smd", policy="snapkv:budget=512").train()

``AuditedGRPOTrainer`` is GRPOTrainer with two more arguments. ``arm`` is a name from ``kvaudit list arms``, any but
smd-distill, and ``policy`` is that of the cache with which rollouts are sampled. If ``use_vllm`` or a ``rollout_func``
is given, these sample the rollouts, and ``policy`` is only what the report says about them; the arm smd does not allow
that. The folder ``output_dir`` can be named under ``checkpoints:`` in a spec. The package needs kvaudit's extra
``trl``, and is imported on first use.
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
