"""The one reader of ``NAME:field=value,field=value``: the text of a policy, of an engine's condition, of a plug-in."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """One field as it was written, and its parts; ``value`` is None without an equals sign."""

    text: str
    name: str
    value: str | None


def split_named(text: str) -> tuple[str, list[Field]]:
    """Return the name and the fields; spaces around a part mean nothing, and empty fields are left out."""
    name, _, rest = text.partition(":")
    return name.strip(), [_field(part.strip()) for part in rest.split(",") if part.strip()]


def _field(text: str) -> Field:
    name, equals, value = text.partition("=")
    return Field(text, name.strip(), value.strip() if equals else None)
