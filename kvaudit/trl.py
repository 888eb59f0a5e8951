"""TRL's GRPO trainer with rollouts from a compressed cache, paired arms and the telemetry of this project.

    from kvaudit.trl import AuditedGRPOTrainer

    settings = GRPOConfig("runs/smd")
    AuditedGRPOTrainer(model, reward, settings, data, arm="smd", policy="snapkv:budget=512").train()

``AuditedGRPOTrainer`` is GRPOTrainer with two more arguments: ``arm`` (``kvaudit list arms``, all except smd-distill)
and the ``policy`` of the cache that samples. With ``use_vllm`` or a ``rollout_func``, allowed in all arms except smd,
those sample, and ``policy`` is only what the report says about them. ``output_dir`` becomes a checkpoint for a spec's
``checkpoints:``. Needs the extra ``trl``, which is imported on first use.
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
