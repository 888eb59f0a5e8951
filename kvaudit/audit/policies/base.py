"""The base of every compression policy: a frozen value with a name, fields and one canonical text.

An ``Evictor`` ranks entries to decide which are kept, a ``Quantiser`` stores them in fewer bits, a ``Selector`` chooses
what a query attends to. A policy holds no state; the cache does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvaudit.core.errors import SpecError
from kvaudit.core.plugins import Registry

LARGEST_NUMBER = 2**30  # the maximum of any whole number in a policy
# fields with their defaults that the canonical form omits, so that adding them changed no older hash
OPTIONAL = {
    "pin": "",
    "reposition": False,
    "rotate": False,
    "scale": "token",
    "scales": "",
    "skip_layers": "",
    "write": False,
}


@dataclass(frozen=True)
class Policy:
    """The rule by which a cache is compressed; plug-ins subclass ``Evictor``, ``Quantiser`` or ``Selector``."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # its arXiv number
    keeps: ClassVar[str] = ""  # the entries that stay, in words
    evicts: ClassVar[bool] = False
    quantises: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...] | None] = None  # the fields that can be set, in written order; None: all

    @property
    def chunk(self) -> int:
        """The number of prompt tokens that enter the cache at once; they attend before the cache is compressed."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[Policy, ...]:
        """The policies that act together on each request: the policy itself, unless it is composed of two."""
        return (self,)

    @property
    def replayable(self) -> bool:
        """Whether one forward over the whole rollout can reproduce the sampled log-probs, so that a learner can train.

        That forward hides from each query the entries that the ledger (the cache's record of evictions) says were gone.
        """
        return True

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        """The message roles (system, tool, ...) whose tokens are never evicted."""
        return ()

    @property
    def draws(self) -> tuple[Policy, ...]:
        """The policies from which one is drawn for each request: the policy itself, unless it is a mixture."""
        return (self,)

    def drawn(self, key: int) -> Policy:  # noqa: ARG002
        """Return the policy that serves the request whose random key is ``key``; a mixture draws one by that key."""
        return self

    def for_layer(self, layer: int, layers: int) -> Policy:  # noqa: ARG002
        """Return the policy of layer ``layer`` (from 0) of ``layers`` compressed ones.

        It is this policy itself, unless the policy treats layers differently.
        """
        return self

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields that a user can set, in order."""
        return tuple(f.name for f in dataclasses.fields(cls)) if cls.uses is None else cls.uses

    def parameters(self) -> dict[str, Any]:
        """Return {field: value} in order; a field listed in OPTIONAL only if it differs from its default."""
        values = {name: getattr(self, name) for name in self.field_names()}
        return {name: value for name, value in values.items() if name not in OPTIONAL or value != OPTIONAL[name]}

    def as_row(self) -> dict[str, Any]:
        """Return the policy as plain JSON, the same for equal policies."""
        return {"policy": self.name, **self.parameters()}

    @property
    def canonical(self) -> str:
        """The policy as text with every field written out, "snapkv:budget=96,..."; parsing it gives an equal policy."""
        texts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in self.parameters().items()}
        fields = ",".join(f"{name}={text}" for name, text in texts.items())
        return f"{self.name}:{fields}" if fields else self.name

    @cached_property
    def hash(self) -> str:
        """Return the first 12 hex digits of the sha256 of ``as_row`` as JSON with sorted keys."""
        row = json.dumps(self.as_row(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(row.encode()).hexdigest()[:12]

    def _at_least(self, field: str, minimum: int, maximum: int = LARGEST_NUMBER) -> None:
        value = getattr(self, field)
        if value < minimum:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted an integer of at least {minimum}")
        if value > maximum:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted an integer of at most {maximum}")

    def _one_of(self, field: str, options: tuple[object, ...]) -> None:
        value = getattr(self, field)
        if value not in options:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted one of {', '.join(map(str, options))}")


POLICIES: Registry[Policy] = Registry("policy", "kvaudit.audit.policies", Policy)
