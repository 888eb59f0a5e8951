"""Tools as text: how they are listed, how an answer calls them, and what calls are accepted.

An answer is hostile: it is parsed, never evaluated.
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

FORM = (
    'To call a tool, answer with one JSON object and nothing else, such as {"name": "tool", "arguments": '
    '{"key": "value"}}; for several calls, one object a line. Where no tool is needed, answer in words.'
)
_EXAMPLE = ("tool", {"key": "value"})  # of the form: who repeats it calls nothing
LONGEST_ANSWER = 20_000  # characters of an answer that are looked at; of Python, a tenth
_ATTEMPT = re.compile(r"""["'](?:arguments|parameters)["']\s*:|\{\s*"name"\s*:""")
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_NAME = re.compile(r"\w+(\.\w+)*")
_IGNORED = re.compile(r"[\s,./_*^-]")  # in texts that are compared


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


def list_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools of a prompt, one JSON object a line, as chat templates list them."""
    return "Tools:\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def format_calls(calls: Sequence[Call]) -> str:
    """Calls in the form that the prompt asks for."""
    return "\n".join(json.dumps(call._asdict(), ensure_ascii=False) for call in calls)


def parse_calls(text: str) -> tuple[Call, ...] | None:
    """The calls of an answer, none where it is words; None where it tries to call and cannot be read.

    JSON objects count wherever they stand (prose, tags and fences around them), Python calls where nothing else does.
    A tool as it is listed is no call of it, though it has a name and parameters too.
    """
    text = text[:LONGEST_ANSWER]
    found = tuple(_json_calls(text))
    if found:
        return found
    return None if _ATTEMPT.search(text) else python_calls(_FENCE.sub("", text.strip()))


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object of a text, wherever it stands; none behind one that is too deep to be read."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1  # no object begins here: look behind the brace
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
            if not _is_listing(value, arguments) and call != _EXAMPLE:
                yield call


def _is_listing(value: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether an object says what a tool is: by a description beside it, or by a schema of its arguments."""
    return "description" in value or isinstance(arguments.get("properties"), dict)


def python_calls(text: str, parameters: Mapping[str, Sequence[str]] | None = None) -> tuple[Call, ...]:
    """The calls of a text that is Python calls and nothing else, or a list of them; none where it is anything else.

    ``parameters`` names what stands without a keyword, tool by tool.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a model writes
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
    given = dict(zip(names, map(ast.literal_eval, node.args), strict=True))
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return Call(name, given | named)


def accepts(options: Mapping[str, Mapping[str, Sequence[Any]]], call: Call, *, typed: bool = False) -> bool:
    """Whether ``{tool: {parameter: values}}`` accepts a call; "" among the values lets the parameter be left out.

    ``typed`` options that are whole numbers accept no number with a point, 5.0 for 5, as the leaderboard has it.
    """
    ((name, parameters),) = options.items()
    return call.name == name and _held(parameters, call.arguments, typed)


def _held(parameters: Mapping[str, Sequence[Any]], given: Mapping[str, Any], typed: bool) -> bool:
    # what may be left out has "" among what is accepted
    missing = parameters.keys() - given.keys()
    return given.keys() <= parameters.keys() and (
        all("" in parameters[key] for key in missing)
        and all(any(_same(option, value, typed) for option in parameters[key]) for key, value in given.items())
    )


def _same(option: Any, value: Any, typed: bool) -> bool:
    """Whether a value is the wanted one: numbers by value, texts without case and punctuation; True is no number."""
    if isinstance(option, Mapping):
        return isinstance(value, Mapping) and _held(option, value, typed)
    if isinstance(option, list):
        return isinstance(value, list | tuple) and (
            len(option) == len(value) and all(_same(*pair, typed) for pair in zip(option, value, strict=True))
        )
    if isinstance(option, str) and isinstance(value, str):
        return _normalised(option) == _normalised(value)
    if typed and isinstance(option, int) and isinstance(value, float):
        return False
    return isinstance(option, bool) == isinstance(value, bool) and bool(option == value)


def _normalised(text: str) -> str:
    return _IGNORED.sub("", text).casefold().replace("'", '"')


def exact_options(call: Call) -> dict[str, Any]:
    """The options that accept this call alone."""
    return {call.name: _only(call.arguments)}


def _only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: [_only(part)] for key, part in value.items()}
    return [_only(part) for part in value] if isinstance(value, list | tuple) else value


def accepted_call(options: Mapping[str, Mapping[str, Sequence[Any]]]) -> Call:
    """A call that ``options`` accept."""
    ((name, parameters),) = options.items()
    return Call(name, _chosen(parameters))


def _chosen(option: Any) -> Any:
    if isinstance(option, Mapping):
        return {key: _chosen(values[0]) for key, values in option.items() if values[0] != ""}
    return [_chosen(part) for part in option] if isinstance(option, list) else option


def grade_calls(text: str, facet: str, right: Callable[[tuple[Call, ...]], bool]) -> Grade:
    """The grade of an answer that should make the ``right`` calls (facet solved), or none (facet overcalled)."""
    if not text.strip():
        return formless("empty", (facet,))
    calls = parse_calls(text)
    if calls is None:
        return formless("malformed call", (facet,), Outcome.UNDESIRED)
    if facet == "overcalled":
        fault, value = "called where no call was right" if calls else "", bool(calls)
    else:
        value = bool(calls) and right(calls)
        fault = "" if value else "another call" if calls else "no call"
    return graded(not fault, {facet: value}, fault)
