"""kvaudit: what KV-cache compression did to the alignment of a model.

``CompressedCache`` and ``shadow`` work on stock transformers models; they are imported on first use, with torch.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["CompressedCache", "shadow"]


def __getattr__(name: str) -> Any:
    if name == "CompressedCache":
        from kvaudit.audit.cache.stock import CompressedCache

        return CompressedCache
    if name == "shadow":
        from kvaudit.audit.replay.shadow import shadow

        return shadow
    raise AttributeError(f"module 'kvaudit' has no attribute {name!r}")
