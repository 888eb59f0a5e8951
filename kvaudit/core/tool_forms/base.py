"""The base class of a tool form: how a family of models writes tool calls, and how to read them from an answer.

A model's form is recognised by its chat template. Answers are untrusted: they are parsed, never evaluated, and reading
an answer never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from kvaudit.core.plugins import Registry
from kvaudit.core.records import ToolCall
from kvaudit.core.text import is_text

LONGEST_ANSWER = 20_000  # characters of an answer that are parsed
_DEEPEST = 64  # levels of lists and objects in the arguments of a call
_DECODER = json.JSONDecoder()
Tools = Sequence[Mapping[str, Any]]  # function schemas as OpenAI's interface has them


class FoundCall(NamedTuple):
    """A call in a text, from character ``start`` to ``end``; its arguments are not checked yet."""

    start: int
    end: int
    name: str
    arguments: Any


class Reading(NamedTuple):
    """The tool calls of an answer, and its other text (``words``).

    ``is_broken`` says that the answer tries to call a tool, but no call can be read.
    """

    words: str
    calls: tuple[ToolCall, ...] = ()
    is_broken: bool = False


class ToolForm:
    """The base of forms of tool calls; the registry finds a subclass that has a ``name`` and a file in this package.

    A chat template has this form if it contains all texts of ``marks`` and none of ``others``; override ``recognises``
    if that is not enough. An answer that contains a text of ``openings`` counts as an attempt to call.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # the form in a few words
    marks: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()
    openings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template writes calls in this form."""
        return all(mark in template for mark in cls.marks) and not any(text in template for text in cls.others)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        """Yield the calls in a text, in order; a broken call may raise ValueError or RecursionError.

        ``tools`` are the schemas of the tools, for forms that need them to read arguments.
        """
        raise NotImplementedError

    def words(self, text: str, calls: Sequence[FoundCall]) -> str:
        """Return the text of an answer without ``calls``, which were found in it."""
        ends = [0, *(call.end for call in calls)]
        starts = [*(call.start for call in calls), len(text)]
        return "".join(text[end:start] for end, start in zip(ends, starts, strict=True)).strip()

    def read(self, text: str, tools: Tools = ()) -> Reading:
        """Return the calls in an answer and its other text; only the first ``LONGEST_ANSWER`` characters are read."""
        text = text[:LONGEST_ANSWER]
        found_calls, has_unstorable = [], False
        try:
            for call in self.find(text, tools):
                if is_plain(call.arguments) and is_text(call.name):
                    found_calls.append(call)
                else:
                    has_unstorable = True
        except (ValueError, RecursionError):  # the calls before the broken one count
            pass
        calls = tuple(ToolCall(call.name, call.arguments) for call in found_calls)
        is_broken = not calls and (has_unstorable or any(opening in text for opening in self.openings))
        return Reading(self.words(text, found_calls), calls, is_broken)


TOOL_FORMS = Registry("tool form", "kvaudit.core.tool_forms", ToolForm)


def form_of(template: str) -> ToolForm | None:
    """Return the form in which a chat template writes calls; None if no form recognises it."""
    return next((form() for form in TOOL_FORMS.all().values() if form.recognises(template)), None)


def is_plain(arguments: Any) -> bool:
    """Return whether a call's arguments are a JSON object that a record can store.

    Its numbers must be finite, its texts such that UTF-8 can encode them, and its nesting not too deep.
    """
    try:
        return (
            isinstance(arguments, dict)
            and _is_shallow(arguments, _DEEPEST)
            and is_text(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        )
    except (ValueError, TypeError, RecursionError):
        return False


def _is_shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list | tuple):
        return True
    entries = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(entry, levels - 1) for entry in entries)


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Return (JSON value at ``start`` after blanks, offset of its end); raise ValueError or RecursionError if none."""
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _DECODER.raw_decode(text, start)
    return value, end


def call_in(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return (name, arguments) if a JSON value is a tool call; None for any other value, such as a tool's schema."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    is_listing = "description" in value or isinstance(arguments.get("properties"), dict)
    return None if is_listing else (name, arguments)


def functions_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Return {name of a tool: JSON schema of its parameters}, with {} for a malformed schema."""
    schemas = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        schemas[str(function.get("name"))] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return {parameter: its JSON schema} for the tool called ``name``, {} if there is no such tool or schema."""
    properties = functions_of(tools).get(name, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def read_tagged(text: str, start: int, opening: re.Pattern[str], close: str) -> tuple[dict[str, str], int]:
    """Return {name: value} of the tags from offset ``start`` on, and the offset after the last tag.

    ``opening`` matches the beginning of a tag, its group 1 being the name. The value follows and ends at the text
    ``close``. Reading stops at a tag that is not closed.
    """
    values = dict[str, str]()
    while match := opening.match(text, start):
        end = text.find(close, match.end())
        if end < 0:
            break
        values[match[1].strip()] = text[match.end() : end]
        start = end + len(close)
    return values, start


def parse_argument(text: str, schema: Any) -> Any:
    """Return the value of an argument that is written as text; ``schema`` is its JSON schema.

    If the schema names no type or "string", the value is the text. Otherwise the text is parsed as JSON, or as Python's
    True, False or None; if neither is possible, the value is the text.
    """
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        lowered = text.strip().casefold()  # Python's words for it are common
        return {"true": True, "false": False, "none": None}.get(lowered, text)
