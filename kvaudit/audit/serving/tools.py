"""Tools in requests: schemas, the calls of earlier answers and their results, checked before they are rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvaudit.core.errors import SpecError
from kvaudit.core.records import Role, ToolCall
from kvaudit.core.text import is_text, short_repr
from kvaudit.core.tool_forms.base import is_plain

MOST_TOOLS, _MOST_CALLS = 128, 128  # of a request; of a message
_NAME = re.compile(r"[\w.-]{1,200}")  # what every form of calls can read
_NAME_SAYS = "1 to 200 letters, digits, _, . or -"
_LONGEST_ID = 200  # characters
_CHOICES = (None, "auto", "none")


def read_tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the function tools of a request, () with ``tool_choice`` none; raises SpecError naming the wrong key."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(choice, str | None) or choice not in _CHOICES:
        raise SpecError(
            f"tool_choice is {short_repr(choice)}, expected auto or none: this server forces no call; leave it out"
        )
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        got = f"{len(tools)} entries" if isinstance(tools, list) else short_repr(tools)
        raise SpecError(f"tools is {got}, expected a list of at most {MOST_TOOLS} function tools")
    names = [_check_tool(tool, number) for number, tool in enumerate(tools)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise SpecError(f"tools[{number}] has the name of tools[{names.index(name)}], {name!r}; rename one")
    return () if choice == "none" else tuple(tools)


def read_parallel(body: Mapping[str, Any]) -> bool:
    """Return whether an answer may have several calls; raises SpecError."""
    value = body.get("parallel_tool_calls")
    if not isinstance(value, bool | None):
        raise SpecError(f"parallel_tool_calls is {short_repr(value)}, expected true or false")
    return value is not False


def read_message_calls(row: Mapping[str, Any], role: Role, place: str) -> tuple[ToolCall, ...]:
    """Return the calls of a message, called ``place`` in errors; raises SpecError."""
    rows = row.get("tool_calls")
    if row.get("function_call"):
        raise SpecError(f"{place} has function_call, which this server does not support; send tool_calls")
    if not rows:
        return ()
    if role is not Role.ASSISTANT:
        raise SpecError(f"{place} has role {role} and tool_calls; only messages of the assistant have calls")
    if not isinstance(rows, list) or len(rows) > _MOST_CALLS:
        got = f"{len(rows)} entries" if isinstance(rows, list) else short_repr(rows)
        raise SpecError(f"{place}.tool_calls is {got}, expected a list of at most {_MOST_CALLS} calls")
    calls = tuple(_call(entry, f"{place}.tool_calls[{number}]") for number, entry in enumerate(rows))
    ids = [call.call_id for call in calls]
    if repeated := next((name for n, name in enumerate(ids) if name in ids[:n]), None):
        raise SpecError(f"{place}.tool_calls has the id {repeated!r} twice; give each call an id of its own")
    return calls


def read_call_id(row: Mapping[str, Any], role: Role, place: str, known: Collection[str]) -> str:
    """Return the id of the call that a tool's result answers, one of ``known``; "" for none. Raises SpecError."""
    name = row.get("tool_call_id")
    if role is not Role.TOOL or name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in known:
        raise SpecError(
            f"{place}.tool_call_id is {short_repr(name)}, expected the id of a call in a message before; send the "
            "assistant's tool_calls too"
        )
    return name


def _check_tool(tool: Any, number: int) -> str:
    """Return the name of a tool; raises SpecError for one that no template could be given."""
    place, function = f"tools[{number}]", tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise SpecError(f"{place} is {short_repr(tool)}, expected {{type: function, function: {{name, ...}}}}")
    if not is_plain(tool):
        raise SpecError(f"{place} is no plain JSON; at most 64 levels, finite numbers and whole characters are taken")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{place}.function.name is {short_repr(name)}, expected {_NAME_SAYS}")
    if not isinstance(description, str | None):
        raise SpecError(f"{place}.function.description is {short_repr(description)}, expected text")
    _check_schema(function.get("parameters"), f"{place}.function.parameters")
    return name


def _check_schema(schema: Any, place: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise SpecError(f"{place} is {short_repr(schema)}, expected a JSON schema of type object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise SpecError(f"{place}.properties is {short_repr(properties)}, expected an object of schemas by name")
    for name, entry in properties.items():
        if not isinstance(entry, Mapping | bool):
            raise SpecError(f"{place}.properties[{short_repr(name)}] is {short_repr(entry)}, expected a JSON schema")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SpecError(f"{place}.required is {short_repr(required)}, expected a list of names")


def _call(entry: Any, place: str) -> ToolCall:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type", "function") != "function":
        raise SpecError(f"{place} is {short_repr(entry)}, expected {{id, type: function, function: {{...}}}}")
    name, call_id = function.get("name"), entry.get("id")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{place}.function.name is {short_repr(name)}, expected {_NAME_SAYS}")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _LONGEST_ID or not is_text(call_id):
        raise SpecError(f"{place}.id is {short_repr(call_id)}, expected text of 1 to {_LONGEST_ID} characters")
    return ToolCall(name, _arguments(function.get("arguments"), f"{place}.function.arguments"), call_id)


def _arguments(text: Any, place: str) -> Mapping[str, Any]:
    try:
        # some clients send nothing for a call without arguments
        arguments = (json.loads(text) if text.strip() else {}) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not is_plain(arguments):
        raise SpecError(f"{place} is {short_repr(text)}, expected a text that is a JSON object, as the answer had it")
    return arguments


def count_characters(tools: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall]) -> int:
    """Return about how many characters a template writes for tools and calls."""
    values = [*tools, *({"name": call.name, "arguments": call.arguments} for call in calls)]
    return sum(len(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)
