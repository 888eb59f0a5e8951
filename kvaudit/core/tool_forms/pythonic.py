"""Lists of calls in Python syntax: the pythonic templates of Llama 3.2 and Llama 4."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, properties_of
from kvaudit.core.tool_forms.text import plain_values, python_calls

_TAGS = re.compile(r"<\|python_(?:start|end|tag)\|>|<\|e(?:ot|om)(?:_id)?\|>")
_WRITES = re.compile(r"\.name\s*(?:~|\+)\s*[\"']\(|name\s*\}\}\(")


class Pythonic(ToolForm):
    name = "pythonic"
    says = "a list of calls in Python"
    openings = ("<|python_start|>",)

    @classmethod
    def recognises(cls, template: str) -> bool:
        return _WRITES.search(template) is not None

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        calls = python_calls(_TAGS.sub("", text).strip(), {name: list(properties_of(tools, name)) for name in names})
        for number, call in enumerate(calls):
            start = 0 if number == 0 else len(text)
            yield FoundCall(start, len(text), call.name, plain_values(call.arguments))
