"""Measure what the compression of the KV cache did to the alignment of a model.

    import kvaudit

    kvaudit.check("embedded", policy="snapkv:budget=64")   # may I serve this model with this setting?
    run = kvaudit.run("spec.yaml", out="runs/mine")         # train, evaluate, report
    run = kvaudit.load_run("runs/mine")                     # records, drift, verdict; .table() for pandas
    kvaudit.gate("runs/mine").status                        # PASS, FAIL, INCONCLUSIVE, ...
    kvaudit.compare("a.jsonl", "b.jsonl", margin=5)         # two result files, of kvaudit or of other tools

``CompressedCache`` and ``shadow`` work on unchanged transformers models, ``kvaudit.trl`` in a trainer of TRL. Plug-ins
subclass ``Evictor``, ``Selector``, ``Quantiser``, ``Suite``, ``Engine``, ``Judge``, ``Loss`` or ``Reward``. Everything
is imported on first use, torch only where something needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvaudit.core.moved import install as _install_moved_modules

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvaudit.api import Comparison, Run, check, compare, gate, load_run, run
    from kvaudit.audit.cache.stock import CompressedCache
    from kvaudit.audit.engines.base import Engine
    from kvaudit.audit.judges.base import Judge
    from kvaudit.audit.policies.evictor import Evictor
    from kvaudit.audit.policies.quantiser import Quantiser
    from kvaudit.audit.policies.selector import Selector
    from kvaudit.audit.replay.shadow import shadow
    from kvaudit.audit.training.losses.base import Loss
    from kvaudit.audit.training.rewards.base import Reward
    from kvaudit.core.errors import AuditError
    from kvaudit.suites.base import Suite

# name -> the module below kvaudit that it is imported from
_HOME = {
    **dict.fromkeys(("Comparison", "Run", "check", "compare", "gate", "load_run", "run"), "api"),
    "AuditError": "core.errors",
    "CompressedCache": "audit.cache.stock",
    "Engine": "audit.engines.base",
    "Evictor": "audit.policies.evictor",
    "Judge": "audit.judges.base",
    "Loss": "audit.training.losses.base",
    "Quantiser": "audit.policies.quantiser",
    "Reward": "audit.training.rewards.base",
    "Selector": "audit.policies.selector",
    "Suite": "suites.base",
    "shadow": "audit.replay.shadow",
}
__all__ = [
    "AuditError",
    "Comparison",
    "CompressedCache",
    "Engine",
    "Evictor",
    "Judge",
    "Loss",
    "Quantiser",
    "Reward",
    "Run",
    "Selector",
    "Suite",
    "check",
    "compare",
    "gate",
    "load_run",
    "run",
    "shadow",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from kvaudit.core.moved import removed_import

        if (refusal := removed_import(f"kvaudit.{name}")) is not None:
            raise ImportError(refusal)
        raise AttributeError(f"module 'kvaudit' has no attribute {name!r}")
    return getattr(import_module(f"kvaudit.{_HOME[name]}"), name)


_install_moved_modules()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
