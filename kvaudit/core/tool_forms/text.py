"""Tool calls as text: how to read them from answers, and how to write tools and calls for templates without tools.

In a prompt, tools are listed in the system message and calls are JSON lines. Calls in an answer are read even if the
model does not write them in the form of its template: JSON inside prose, tags and fences, and Python calls, which some
templates ask for.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.tool_forms.base import (
    LONGEST_ANSWER,
    TOOL_FORMS,
    FoundCall,
    Reading,
    ToolForm,
    Tools,
    call_in,
    functions_of,
    properties_of,
)

FORM = (
    'To call a tool, answer with one JSON object and nothing else, such as {"name": "tool", "arguments": '
    '{"key": "value"}}; for several calls, one object a line. Where no tool is needed, answer in words.'
)
_EXAMPLE = ("tool", {"key": "value"})  # of FORM; repeating it calls nothing
_ATTEMPT = re.compile(r"""["'](?:arguments|parameters)["']\s*:|\{\s*"name"\s*:""")
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_NAME = re.compile(r"\w+(\.\w+)*")
_TAGS = re.compile(r"<\|python_(?:start|end|tag)\|>|<\|e(?:ot|om)(?:_id)?\|>")
_WRITES = re.compile(r"\.name\s*(?:~|\+)\s*[\"']\(|name\s*\}\}\(")


class TextForm(ToolForm):
    """The form for chat templates without tools: calls are written as FORM, an instruction in the prompt, asks for."""

    name = "text"
    says = "JSON lines that the prompt asks for, or calls in Python"

    @classmethod
    def recognises(cls, template: str) -> bool:  # noqa: ARG003 - it belongs to no template
        return False

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        calls_found = list(_json_calls(text))
        if not calls_found and not _ATTEMPT.search(text):
            calls = python_calls(_FENCE.sub("", text.strip()), _parameter_names(tools))
            calls_found = [FoundCall(0, len(text), call.name, plain_values(call.arguments)) for call in calls]
        yield from calls_found

    def is_attempt(self, text: str) -> bool:
        """Return whether a text in which no call can be read looks like an attempt to call."""
        return _ATTEMPT.search(text[:LONGEST_ANSWER]) is not None


def list_tools(tools: Tools) -> str:
    """Return tools as text for a prompt, one JSON object per line."""
    return "Tools:\n" + "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)


def format_calls(calls: Sequence[ToolCall]) -> str:
    """Return calls as text, in the form that the prompt's instruction (FORM) asks for."""
    return Message(Role.ASSISTANT, "", tuple(calls)).text


def json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (start, end, object) of every JSON object in a text, up to the first that is nested too deeply."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1  # no object begins here
        except RecursionError:
            return
        else:
            yield start, end, value
        start = text.find("{", end)


def _json_calls(text: str) -> Iterator[FoundCall]:
    for start, end, value in json_objects(text):
        call = call_in(value)
        if call is not None and call != _EXAMPLE:
            yield FoundCall(start, end, *call)


def _parameter_names(tools: Tools) -> dict[str, list[str]]:
    """Return {name of a tool: the names of its parameters in order}."""
    return {name: list(properties_of(tools, name)) for name in functions_of(tools)}


def python_calls(text: str, parameters: Mapping[str, Sequence[str]]) -> tuple[ToolCall, ...]:
    """Return the calls in a text that consists of Python calls, or of a list of them; () for any other text.

    ``parameters`` maps each tool to the names of its parameters in order, by which positional arguments get a name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a model's Python
            body = ast.parse(text[: LONGEST_ANSWER // 10]).body
        return tuple(_call(node, parameters) for line in body for node in _nodes(line))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ()


def _nodes(line: ast.stmt) -> Sequence[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError
    return line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> ToolCall:
    if not isinstance(node, ast.Call) or not _NAME.fullmatch(name := ast.unparse(node.func)):
        raise ValueError
    names = parameters.get(name, ())[: len(node.args)]
    positional = dict(zip(names, map(ast.literal_eval, node.args), strict=True))
    keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return ToolCall(name, positional | keywords)


def plain_values(value: Any) -> Any:
    """Return a Python value with its tuples replaced by lists, as in JSON."""
    if isinstance(value, dict):
        return {str(key): plain_values(entry) for key, entry in value.items()}
    return [plain_values(entry) for entry in value] if isinstance(value, list | tuple) else value


class Pythonic(ToolForm):
    """The form of the pythonic templates of Llama 3.2 and Llama 4: lists of calls in Python syntax."""

    name = "pythonic"
    says = "a list of calls in Python"
    openings = ("<|python_start|>",)

    @classmethod
    def recognises(cls, template: str) -> bool:
        return _WRITES.search(template) is not None

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        calls = python_calls(_TAGS.sub("", text).strip(), _parameter_names(tools))
        for number, call in enumerate(calls):
            start = 0 if number == 0 else len(text)
            yield FoundCall(start, len(text), call.name, plain_values(call.arguments))


_TEXT = TextForm()


def read_calls(text: str, tools: Tools = (), form: ToolForm | None = None) -> Reading:
    """Read the calls of an answer in the given ``form``; without one, in every form of which it contains an opening.

    The first form in which calls are found decides. If there are none, calls outside of these forms count (bare JSON,
    in prose or in a fence, and Python calls). The result ``is_broken`` if the answer tries to call in one of the forms
    tried, but no call can be read.
    """
    readings = list(_readings(text, tools, form))
    if with_calls := [reading for reading in readings if reading.calls]:
        return with_calls[0]
    other_text = readings[0].words if readings else text
    plain = _TEXT.read(other_text, tools)
    if plain.calls:
        return plain
    is_broken = any(reading.is_broken for reading in (*readings, plain)) or _TEXT.is_attempt(other_text)
    return Reading(other_text, (), is_broken)


def _readings(text: str, tools: Tools, form: ToolForm | None) -> Iterator[Reading]:
    if form is not None:
        yield form.read(text, tools)
        return
    for tool_form in TOOL_FORMS.all().values():
        if any(opening in text for opening in tool_form.openings):
            yield tool_form().read(text, tools)


def text_without_calls(message: Message, tools: Tools = (), form: ToolForm | None = None) -> str:
    """Return a message's ``content`` without the text of its tool calls, which only messages by models contain.

    ``tools`` and ``form`` are as in ``read_calls``. If the calls read from the text are not those of the message, the
    content is returned unchanged.
    """
    if not message.tool_calls or not message.content:
        return message.content
    reading = read_calls(message.content, tools, form)
    return reading.words if _pairs(reading.calls) == _pairs(message.tool_calls) else message.content


def _pairs(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in calls]


def as_text(messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
    """Return a conversation with its tools listed in the system message, and with each call as text in its message."""
    messages_as_text = tuple(_as_text(message, tools) for message in messages)
    if not tools:
        return messages_as_text
    head = f"{FORM}\n\n{list_tools(tools)}"
    if messages_as_text and messages_as_text[0].role is Role.SYSTEM:
        return (replace(messages_as_text[0], content=f"{messages_as_text[0].content}\n\n{head}"), *messages_as_text[1:])
    return (Message(Role.SYSTEM, head), *messages_as_text)


def _as_text(message: Message, tools: Tools) -> Message:
    content = message.content
    # the turn of a suite, not of a model, which holds its calls already
    if message.tool_calls and text_without_calls(message, tools) == content:
        content = "\n".join(filter(None, (content, format_calls(message.tool_calls))))
    return Message(message.role, content)
