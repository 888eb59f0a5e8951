"""Tools as text: their listing in a prompt, the calls in an answer, and the comparison with the accepted calls.

Answers are untrusted: they are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvaudit.core.records import Grade, Outcome
from kvaudit.suites.base import formless, graded

Options = Mapping[str, Mapping[str, Sequence[Any]]]  # {tool: {parameter: accepted values}}

FORM = (
    'To call a tool, answer with one JSON object and nothing else, such as {"name": "tool", "arguments": '
    '{"key": "value"}}; for several calls, one object a line. Where no tool is needed, answer in words.'
)
_EXAMPLE = ("tool", {"key": "value"})  # of FORM; repeating it calls nothing
LONGEST_ANSWER = 20_000  # characters of an answer that are parsed; as Python, a tenth
_ATTEMPT = re.compile(r"""["'](?:arguments|parameters)["']\s*:|\{\s*"name"\s*:""")
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_NAME = re.compile(r"\w+(\.\w+)*")
_IGNORED = re.compile(r"[\s,./_*^-]")  # when texts are compared


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def list_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the tools as text for a prompt, one JSON object a line, as chat templates list them."""
    return "Tools:\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def format_calls(calls: Sequence[Call]) -> str:
    """Return calls in the form that the prompt asks for."""
    return "\n".join(json.dumps(call._asdict(), ensure_ascii=False) for call in calls)


def parse_calls(text: str) -> tuple[Call, ...] | None:
    """Return the calls of an answer, () if it has none; None if it tries to call but cannot be parsed.

    JSON objects count anywhere in the text (inside prose, tags and fences); Python calls only if the text is nothing
    else. A repeated listing of a tool is no call, although it has a name and parameters too.
    """
    text = text[:LONGEST_ANSWER]
    if calls := tuple(_json_calls(text)):
        return calls
    return None if _ATTEMPT.search(text) else python_calls(_FENCE.sub("", text.strip()))


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a text, up to the first one that is nested too deeply to parse."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1  # no object begins here
        except RecursionError:
            return
        else:
            yield value
        start = text.find("{", end)


def _json_calls(text: str) -> Iterator[Call]:
    for value in json_objects(text):
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(value.get("name"), str) and isinstance(arguments, dict):
            call = Call(value["name"], arguments)
            is_listing = "description" in value or isinstance(arguments.get("properties"), dict)
            if not is_listing and call != _EXAMPLE:
                yield call


def python_calls(text: str, parameters: Mapping[str, Sequence[str]] | None = None) -> tuple[Call, ...]:
    """Return the calls of a text that consists of Python calls, or a list of them; () for any other text.

    ``parameters`` names the positional arguments of each tool.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a model's Python
            body = ast.parse(text[: LONGEST_ANSWER // 10]).body
        return tuple(_call(node, parameters or {}) for line in body for node in _nodes(line))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ()


def _nodes(line: ast.stmt) -> Sequence[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError
    return line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> Call:
    if not isinstance(node, ast.Call) or not _NAME.fullmatch(name := ast.unparse(node.func)):
        raise ValueError
    names = parameters.get(name, ())[: len(node.args)]
    positional = dict(zip(names, map(ast.literal_eval, node.args), strict=True))
    keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return Call(name, positional | keywords)


def accepts(options: Options, call: Call, *, typed: bool = False) -> bool:
    """Return whether ``options`` accept a call; "" among the values makes a parameter optional.

    With ``typed``, an integer option accepts no float (5.0 for 5), as in the leaderboard.
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
    """Compare numbers by value, and texts without case and punctuation; True and 1 differ."""
    if isinstance(option, Mapping):
        return isinstance(value, Mapping) and _match_arguments(option, value, typed)
    if isinstance(option, list):
        return isinstance(value, list | tuple) and (
            len(option) == len(value) and all(_equals(*pair, typed) for pair in zip(option, value, strict=True))
        )
    if isinstance(option, str) and isinstance(value, str):
        return _normalised(option) == _normalised(value)
    if typed and isinstance(option, int) and isinstance(value, float):
        return False
    return isinstance(option, bool) == isinstance(value, bool) and bool(option == value)


def _normalised(text: str) -> str:
    return _IGNORED.sub("", text).casefold().replace("'", '"')


def exact_options(call: Call) -> dict[str, Any]:
    """Return the options that accept only this call."""
    return {call.name: _as_options(call.arguments)}


def _as_options(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: [_as_options(entry)] for key, entry in value.items()}
    return [_as_options(entry) for entry in value] if isinstance(value, list | tuple) else value


def accepted_call(options: Options) -> Call:
    """Return a call that ``options`` accept."""
    ((name, parameters),) = options.items()
    return Call(name, _first_choice(parameters))


def _first_choice(option: Any) -> Any:
    if isinstance(option, Mapping):
        return {key: _first_choice(values[0]) for key, values in option.items() if values[0] != ""}
    return [_first_choice(entry) for entry in option] if isinstance(option, list) else option


def grade_calls(text: str, facet: str, is_right: Callable[[tuple[Call, ...]], bool]) -> Grade:
    """Grade an answer that should make the right calls (facet solved) or no call (facet overcalled)."""
    if not text.strip():
        return formless("empty", (facet,))
    calls = parse_calls(text)
    if calls is None:
        return formless("malformed call", (facet,), Outcome.UNDESIRED)
    if facet == "overcalled":
        fault, value = "called where no call was right" if calls else "", bool(calls)
    else:
        value = bool(calls) and is_right(calls)
        fault = "" if value else "another call" if calls else "no call"
    return graded(not fault, {facet: value}, fault)
