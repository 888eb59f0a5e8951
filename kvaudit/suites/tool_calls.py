"""Tools in suites: their schemas, the tool calls in an answer, and the comparison with the calls that are accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvaudit.core.records import Grade, Item, Message, Outcome, ToolCall
from kvaudit.core.tool_forms.base import Reading
from kvaudit.core.tool_forms.text import read_calls, text_without_calls
from kvaudit.suites.base import formless, graded

Options = Mapping[str, Mapping[str, Sequence[Any]]]  # {tool: {parameter: accepted values}}

_IGNORED = re.compile(r"[\s,./_*^-]")  # when texts are compared
# names of types in public rows that JSON Schema has not
_TYPES = {
    "dict": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "list": "array",
    "any": "string",
    "int": "integer",
    "bool": "boolean",
    "str": "string",
}


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates expect it; ``parameters`` is one schema, or {name of a parameter: its schema}."""
    if "properties" not in parameters:
        parameters = {"properties": dict(parameters)}
    schema = {"type": "object", **parameters}
    schema.setdefault("required", [])
    function = {"name": name, "description": description, "parameters": _json_schema(schema)}
    return {"type": "function", "function": function}


def _json_schema(value: Any) -> Any:
    """Return a schema whose types are renamed, at every level, to those of JSON Schema, such as "dict" to "object"."""
    if isinstance(value, list):
        return [_json_schema(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _json_schema(entry) for key, entry in value.items()}
    kind = schema.get("type")
    return schema | {"type": _TYPES.get(kind.casefold(), kind)} if isinstance(kind, str) else schema


def read_answer(item: Item, answer: Message) -> Reading:
    """Return an answer's tool calls and its other text.

    The calls are those that were parsed when the answer was recorded; if there are none, any that the text contains.
    """
    if answer.tool_calls:
        return Reading(text_without_calls(answer, item.tools), answer.tool_calls)
    return read_calls(answer.content, item.tools)


def make_calls(calls: Sequence[ToolCall], first: int = 0) -> tuple[ToolCall, ...]:
    """Return the calls with ids of nine letters and digits, as Mistral's templates require, numbered from ``first``."""
    return tuple(
        ToolCall(call.name, call.arguments, f"call{number:05}") for number, call in enumerate(calls, start=first)
    )


def accepts(options: Options, call: ToolCall, *, typed: bool = False) -> bool:
    """Return whether ``options``, {function's name: {parameter: its right values}}, accept a call.

    A parameter may be missing if "" is among its values. If ``typed``, the value 5 does not accept 5.0, as in the
    Berkeley Function Calling Leaderboard.
    """
    ((name, parameters),) = options.items()
    return call.name == name and _match_arguments(parameters, call.arguments, typed)


def _match_arguments(parameters: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any], typed: bool) -> bool:
    missing = parameters.keys() - arguments.keys()
    return arguments.keys() <= parameters.keys() and (
        all("" in parameters[key] for key in missing)
        and all(any(_equals(option, value, typed) for option in parameters[key]) for key, value in arguments.items())
    )


def _equals(option: Any, value: Any, typed: bool) -> bool:
    """Return whether an argument, ``value``, equals ``option``, an accepted value; True and 1 differ.

    Numbers are compared by value; in texts, case and punctuation are ignored. ``typed`` is as in ``accepts``.
    """
    if isinstance(option, Mapping):
        return isinstance(value, Mapping) and _match_arguments(option, value, typed)
    if isinstance(option, list):
        return isinstance(value, list | tuple) and (
            len(option) == len(value) and all(_equals(*pair, typed) for pair in zip(option, value, strict=True))
        )
    if isinstance(option, str) and isinstance(value, str):
        return _normalise(option) == _normalise(value)
    if typed and isinstance(option, int) and isinstance(value, float):
        return False
    return isinstance(option, bool) == isinstance(value, bool) and bool(option == value)


def _normalise(text: str) -> str:
    return _IGNORED.sub("", text).casefold().replace("'", '"')


def exact_options(call: ToolCall) -> dict[str, Any]:
    """Return the options (see ``accepts``) that accept only this call."""
    return {call.name: _as_options(call.arguments)}


def _as_options(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: [_as_options(entry)] for key, entry in value.items()}
    return [_as_options(entry) for entry in value] if isinstance(value, list | tuple) else value


def accepted_call(options: Options) -> ToolCall:
    """Return one of the calls that ``options`` (see ``accepts``) accept, with the first value of each parameter."""
    ((name, parameters),) = options.items()
    return ToolCall(name, _first_choice(parameters))


def _first_choice(option: Any) -> Any:
    if isinstance(option, Mapping):
        return {key: _first_choice(values[0]) for key, values in option.items() if values[0] != ""}
    return [_first_choice(entry) for entry in option] if isinstance(option, list) else option


def grade_calls(item: Item, answer: Message, facet: str, is_right: Callable[[tuple[ToolCall, ...]], bool]) -> Grade:
    """Grade an answer: for the facet "solved" it must make the right calls, for "overcalled" no call at all.

    The function ``is_right`` says whether the answer's calls are right.
    """
    if not answer.content.strip():
        return formless("empty", (facet,))
    reading = read_answer(item, answer)
    if reading.is_broken:
        return formless("malformed call", (facet,), Outcome.UNDESIRED)
    calls = reading.calls
    if facet == "overcalled":
        fault, value = "called where no call was right" if calls else "", bool(calls)
    else:
        value = bool(calls) and is_right(calls)
        fault = "" if value else "another call" if calls else "no call"
    return graded(not fault, {facet: value}, fault)
