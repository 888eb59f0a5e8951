"""The forms with a tag for each argument: GLM-4.5 and Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, parse_argument, properties_of, read_tagged

_GLM_OPEN = re.compile(r"<tool_call>\s*([\w.-]{1,200})\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]{0,200})</arg_key>\s*<arg_value>")
_GLM_END = re.compile(r"\s*</tool_call>")
_GLM_CLOSE = "</arg_value>"


class Glm(ToolForm):
    """The form of GLM-4.5: a tag for each key and each value of the arguments."""

    name = "glm"
    says = "keys and values of arguments in tags"
    marks = ("<tool_call>", "<arg_key>")
    openings = ("<tool_call>", "<arg_key>", "<arg_value>")

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        for match in _GLM_OPEN.finditer(text):
            schemas = properties_of(tools, match[1])
            values, end = read_tagged(text, match.end(), _GLM_KEY, _GLM_CLOSE)
            arguments = {
                name: parse_argument(value, schemas[name]) if name in schemas else _json_or_text(value)
                for name, value in values.items()
            }
            if closing := _GLM_END.match(text, end):
                yield FoundCall(match.start(), closing.end(), match[1], arguments)


def _json_or_text(value: str) -> Any:
    """Return the value of an argument without schema: parsed as JSON if it is JSON, else the text unchanged."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


_QWEN_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,200})>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
_QWEN_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_QWEN_CLOSE = "</parameter>"


class QwenCoder(ToolForm):
    """The form of Qwen3-Coder: functions and parameters in tags."""

    name = "qwen_coder"
    says = "functions and parameters in tags"
    marks = ("<function=", "<parameter=")
    openings = ("<function=",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        for match in _QWEN_FUNCTION.finditer(text):
            name = match[1].strip()
            schemas = properties_of(tools, name)
            values, end = read_tagged(text, match.end(), _QWEN_PARAMETER, _QWEN_CLOSE)
            # the template sets every value between line breaks
            arguments = {
                parameter: parse_argument(value.removeprefix("\n").removesuffix("\n"), schemas.get(parameter))
                for parameter, value in values.items()
            }
            # a function without its end is half a call
            if closing := _QWEN_END.match(text, end):
                yield FoundCall(match.start(), closing.end(), name, arguments)
