"""One reader splits every text of the form NAME:field=value,field=value."""

from __future__ import annotations

import pytest

from kvaudit.core.plugins import Field, split_named


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("none", "none", []),
        ("snapkv:", "snapkv", []),
        (" snapkv : budget = 96 ,, window=8", "snapkv", [("budget", "96"), ("window", "8")]),
        ("endpoint:base_url=http://localhost:8000/v1", "endpoint", [("base_url", "http://localhost:8000/v1")]),
        ("a:b=c=d,e=", "a", [("b", "c=d"), ("e", "")]),
        ("a:b", "a", [("b", None)]),
        ("a:b=1,b=2", "a", [("b", "1"), ("b", "2")]),
    ],
)
def test_a_text_has_a_name_and_fields(text: str, name: str, fields: list[tuple[str, str | None]]) -> None:
    found, own = split_named(text)
    assert (found, [(field.name, field.value) for field in own]) == (name, fields)


def test_a_field_keeps_what_was_written() -> None:
    assert split_named("a: b = 1 ")[1] == [Field("b = 1", "b", "1")]
