"""Calls with a tag for each key and each value of the arguments: GLM-4.5."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, properties_of, read_tagged, typed

_OPEN = re.compile(r"<tool_call>\s*([\w.-]{1,200})\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*<arg_key>([^<]{0,200})</arg_key>\s*<arg_value>")
_END = re.compile(r"\s*</tool_call>")
_CLOSE = "</arg_value>"


class Glm(ToolForm):
    name = "glm"
    says = "keys and values of arguments in tags"
    marks = ("<tool_call>", "<arg_key>")
    openings = ("<tool_call>", "<arg_key>", "<arg_value>")

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        for match in _OPEN.finditer(text):
            schemas, (values, end) = properties_of(tools, match[1]), read_tagged(text, match.end(), _KEY, _CLOSE)
            arguments = {
                name: typed(value, schemas[name]) if name in schemas else _by_form(value)
                for name, value in values.items()
            }
            if closing := _END.match(text, end):
                yield FoundCall(match.start(), closing.end(), match[1], arguments)


def _by_form(value: str) -> Any:
    """Return a value for which there is no schema: the template writes texts unchanged, all else as JSON."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
