"""Remedies: what a checkpoint could be served under instead of a policy that fails.

``pin=system,budget=128`` changes fields of the policy that fails; ``kivi:bits=4`` is another policy in its place. In
YAML also ``{pin: [system], budget: 128}`` and the mappings of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.audit.policies.base import Policy
from kvaudit.audit.policies.compose import Composed, Mixture
from kvaudit.audit.policies.parse import parse_policy
from kvaudit.core.errors import SpecError
from kvaudit.core.policy_names import DENSE_POLICY, policy_text

_WHOLE = ("name", "compose", "mixture")


@dataclass(frozen=True)
class Remedy:
    """A change of fields, or a ``whole`` policy; ``text`` is the one spelling of either."""

    text: str
    whole: Policy | None
    fields: tuple[tuple[str, str], ...] = ()


def parse_remedy(source: Any) -> Remedy:
    """The remedy that text or a mapping describes; raises SpecError and UnknownName as ``parse_policy`` does."""
    if isinstance(source, Mapping) and not set(source) & set(_WHOLE):
        # fields alone go the same way as text from here on
        source = policy_text({"name": "", **source}).removeprefix(":")
    # a policy's name and colon come before its first equals sign; fields have no name
    if isinstance(source, str) and "=" in source.partition(":")[0]:
        return _change(source)
    whole = parse_policy(source)
    if whole.canonical == DENSE_POLICY:
        raise SpecError(
            "remedy 'none' compresses nothing: it is what every remedy is held against; name a policy that compresses"
        )
    return Remedy(whole.canonical, whole)


def _change(text: str) -> Remedy:
    fields: dict[str, str] = {}
    for part in text.split(","):
        field, sign, value = (word.strip() for word in part.partition("="))
        if not (field and sign and value):
            raise SpecError(f"remedy {text!r}: {part.strip()!r} is not field=value, such as pin=system")
        if field in fields:
            raise SpecError(f"remedy {text!r}: field {field} is given twice")
        fields[field] = value
    return Remedy(",".join(f"{field}={value}" for field, value in fields.items()), None, tuple(fields.items()))


def remedied(remedy: Remedy, failing: Policy) -> Policy | None:
    """What is served instead of ``failing``; None where the remedy has no hold on it, or leaves it as it is.

    Raises SpecError and UnknownName for values that the policy cannot have.
    """
    found = remedy.whole or _changed(failing, dict(remedy.fields))
    return None if found == failing else found


def _changed(policy: Policy, fields: Mapping[str, str]) -> Policy | None:
    """The policy with other fields: of a composition its evictor's, or else its quantiser's."""
    if isinstance(policy, Mixture):
        return None
    # the evictor comes first in a composition, so a field of both is its own
    for place, part in enumerate(policy.members):
        if set(fields) <= set(part.field_names()):
            values = {**part.parameters(), **fields}
            # by its text, so that values meet the policy's own checks
            changed = parse_policy(f"{part.name}:" + ",".join(f"{field}={value}" for field, value in values.items()))
            parts = [*policy.members[:place], changed, *policy.members[place + 1 :]]
            return Composed(parts=tuple(parts)) if isinstance(policy, Composed) else changed
    return None


def check_remedies(remedies: Sequence[str], gated: Sequence[str]) -> None:
    """Raise SpecError for a remedy that changes none of the gated policies, or is one of them."""
    policies = [parse_policy(text) for text in gated if text != DENSE_POLICY]
    if remedies and not policies:
        raise SpecError(
            "remedies: no gated policy of our own cache compresses, so there is none whose place they could take; gate "
            "one, or leave them out"
        )
    for remedy in map(parse_remedy, remedies):
        if remedy.whole in policies:
            raise SpecError(
                f"remedy {remedy.text!r} is a gated policy itself, so the gate decides it; name what could be served "
                "in its place"
            )
        if not any([remedied(remedy, policy) for policy in policies]):  # a list: each must be able to have the values
            raise SpecError(f"remedy {remedy.text!r} changes none of the gated policies: {_why(remedy, policies)}")


def _why(remedy: Remedy, policies: Sequence[Policy]) -> str:
    first = policies[0]
    if isinstance(first, Mixture):
        return f"{first.canonical} is a mixture; write what could be served in its place as a whole"
    known = [field for part in first.members for field in part.field_names()]
    strange = [field for field, _ in remedy.fields if field not in known]
    if strange:
        return f"{first.canonical} has no field {strange[0]}; known are {', '.join(known)}"
    return f"{first.canonical} is so already"
