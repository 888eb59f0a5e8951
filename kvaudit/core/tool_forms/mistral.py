"""Lists of calls after [TOOL_CALLS]; newer models write the name, [ARGS] and the arguments of each call."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, call_in, decode_at

_OPEN = re.compile(r"\[TOOL_CALLS\]\s*")
_NAMED = re.compile(r"([\w.-]{1,200})\s*+(?:\[CALL_ID\]\s*+[\w-]{0,200}+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")


class Mistral(ToolForm):
    name = "mistral"
    says = "a list of JSON objects behind [TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    openings = ("[TOOL_CALLS]",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _OPEN.finditer(text):
            named = _NAMED.match(text, match.end())
            try:
                value, end = decode_at(text, named.end() if named else match.end())
            except ValueError:
                continue
            if named:
                yield FoundCall(match.start(), end, named[1], value)
                continue
            calls = [call for call in map(call_in, value if isinstance(value, list) else [value]) if call is not None]
            for number, call in enumerate(calls):
                # the first call takes the text of the whole list
                yield FoundCall(match.start() if number == 0 else end, end, *call)
