"""GRPO by TRL with rollouts from a compressed cache, paired arms and the telemetry of this project.

    from kvaudit.trl import AuditedGRPOTrainer

    settings = GRPOConfig("runs/smd")
    AuditedGRPOTrainer(model, reward, settings, data, arm="smd", policy="snapkv:budget=512").train()

``AuditedGRPOTrainer`` is TRL's GRPOTrainer with two arguments more: ``arm`` (``kvaudit list arms``, all but
smd-distill) and the ``policy`` of the cache that rollouts are sampled from. With ``use_vllm`` or a
``rollout_func`` others sample, in every arm but smd, and ``policy`` is what the report says of them. ``output_dir``
becomes a checkpoint that a spec names under ``checkpoints:``. Needs the extra ``trl``, loaded on first use.
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
