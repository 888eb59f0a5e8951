"""What every compression policy is: a frozen value with a name, fields and one spelling of them.

How it compresses is told by its kind: an ``Evictor`` ranks what stays, a ``Quantiser`` stores it in fewer bits, a
``Selector`` chooses what a query attends to. A policy holds no state: what it has to remember lives in the cache.
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

LARGEST_NUMBER = 2**30  # of any whole number in a policy
# fields that stand in the canonical form only where they are not what they are by default
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
    """A rule by which a cache is compressed. Plug-ins subclass one of its kinds."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    evicts: ClassVar[bool] = False
    quantises: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...] | None] = None  # the fields that matter in the order they are written, None for all

    @property
    def chunk(self) -> int:
        """Given tokens enter the cache this many at a time, each chunk attending before anything is done to it."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[Policy, ...]:
        """The policies that serve one request together: itself, unless it is composed."""
        return (self,)

    @property
    def replayable(self) -> bool:
        """Whether one pass under the ledger reproduces what was sampled, so that a learner can use it."""
        return True

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        """Roles whose tokens never leave."""
        return ()

    @property
    def draws(self) -> tuple[Policy, ...]:
        """What a request may be served under: itself, unless it is a mixture."""
        return (self,)

    def drawn(self, key: int) -> Policy:  # noqa: ARG002
        """The policy of the request with this key: itself, unless it is a mixture."""
        return self

    def for_layer(self, layer: int, layers: int) -> Policy:  # noqa: ARG002
        """The policy of layer ``layer`` of ``layers`` that it governs; the same in all unless budgets differ."""
        return self

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields that can be set, in order."""
        return tuple(f.name for f in dataclasses.fields(cls)) if cls.uses is None else cls.uses

    def parameters(self) -> dict[str, Any]:
        """The fields that matter to this policy, in order; what is optional is left out while it is as usual."""
        values = {name: getattr(self, name) for name in self.field_names()}
        return {name: value for name, value in values.items() if name not in OPTIONAL or value != OPTIONAL[name]}

    def as_row(self) -> dict[str, Any]:
        """Plain JSON, the same for equal policies."""
        return {"policy": self.name, **self.parameters()}

    @property
    def canonical(self) -> str:
        """The spec string with every field written out; parses back to an equal policy."""
        fields = ",".join(f"{k}={_text(v)}" for k, v in self.parameters().items())
        return f"{self.name}:{fields}" if fields else self.name

    @cached_property
    def hash(self) -> str:
        """First 12 hex digits of the sha256 of the canonical JSON."""
        # as_row leaves optional fields out, so that a new field changes no older hash
        row = json.dumps(self.as_row(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(row.encode()).hexdigest()[:12]

    def _at_least(self, field: str, least: int) -> None:
        value = getattr(self, field)
        if value < least:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted an integer of at least {least}")
        if value > LARGEST_NUMBER:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted an integer of at most {LARGEST_NUMBER}")

    def _one_of(self, field: str, known: tuple[object, ...]) -> None:
        value = getattr(self, field)
        if value not in known:
            raise SpecError(f"policy {self.name}: {field}={value}, wanted one of {', '.join(map(str, known))}")


POLICIES: Registry[Policy] = Registry("policy", "kvaudit.audit.policies", Policy)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
