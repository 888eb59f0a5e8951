"""Function calls graded by syntax tree, from public rows (Berkeley Function Calling Leaderboard: Patil et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Role, ToolCall
from kvaudit.core.tool_forms.text import as_text, format_calls, list_tools, plain_values, python_calls
from kvaudit.suites import tool_calls
from kvaudit.suites.base import ItemMaker, Published, Split, rotate, rows_of_split
from kvaudit.suites.sources import cache_rows, data_file, json_lines, rows_of, value_of
from kvaudit.suites.tool_calls import Options, accepts, function_schema, make_calls

SINGLE = ("simple_python", "multiple", "parallel")
MULTI = "multi_turn_base"
CLASSES = {  # classes of the multi-turn rows, with the file that lists the tools of each
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_QUESTIONS = tuple(f"BFCL_v4_{kind}.json" for kind in (*SINGLE, MULTI))
_IRRELEVANT = "bfcl/BFCL_v4_irrelevance.json"
FILES = (
    *(f"bfcl/{name}" for name in _QUESTIONS),
    *(f"bfcl/possible_answer/{name}" for name in _QUESTIONS),
    _IRRELEVANT,
    *(f"bfcl/multi_turn_func_doc/{name}.json" for name in CLASSES.values()),
)
SPARE = 3  # unneeded tools of a multi-turn item
LONGEST_CASE = 3600  # characters of tools and messages; a row with all eight classes has twenty times as many
DONE = '{"status": "done"}'
_SYSTEM = "You help a user with tools."
_NO_CALL = "I answer in words: none of the tools is needed now."


class Case(NamedTuple):
    """An item's tools and messages, and the right calls (``accepted``), which are () if the right answer is text."""

    tools: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]
    accepted: tuple[Options, ...] = ()


class Pair(NamedTuple):
    """A case whose right answer is tool calls (``call``), and one whose right answer is text (``no_call``).

    If ``ordered``, the calls are the steps of a turn, and an answer is right if it makes the first one or more of
    them, in this order. Otherwise it must make all of them, in any order.
    """

    name: str
    call: Case
    no_call: Case
    ordered: bool


class Bfcl(Published):
    """Twins: in one a tool fits and must be called correctly; in the other no call is right, the answer must be text.

    A single-turn row (simple, multiple or parallel) is paired with an irrelevance row, in which no tool fits. Of a
    multi-turn row one turn is used. The turns before it contain their right calls, each with the result "done", since
    nothing is executed. One twin asks for the first calls of the turn. In the other all its calls have been made, so
    that text is right. In a turn that can be used, the arguments of the first call were all mentioned before.
    """

    name = "bfcl"
    kind = "capability"
    source = "public rows: Berkeley Function Calling Leaderboard v4"
    licence = "Apache-2.0"
    version = "4"  # tools in the form of the model's chat template
    tool_form = "native"
    max_new_tokens = 256
    twins = 2

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        paths = tuple(data_file(self.name, file) for file in FILES)
        n = len(_QUESTIONS)
        pairs = _pairs(paths[:n], paths[n : 2 * n], paths[2 * n], paths[2 * n + 1 :])
        return [
            [partial(self._item, pair, twin, seed) for twin in rotate(("call", "words"), number)]
            for number, pair in enumerate(rows_of_split(pairs, split))
        ]

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("solved",) if item.payload["accepted"] else ("overcalled",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        accepted = item.payload["accepted"]

        def is_right(calls: Sequence[ToolCall]) -> bool:
            if not item.payload["ordered"]:
                return _match_calls(accepted, calls)
            return len(calls) <= len(accepted) and all(map(accepts, accepted, calls))

        return tool_calls.grade_calls(item, transcript[-1], self.facets(item)[0], is_right)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (format_calls([tool_calls.accepted_call(options) for options in item.payload["accepted"]]) or _NO_CALL,)

    def _item(self, pair: Pair, twin: str, seed: int) -> Item:
        case = pair.call if twin == "call" else pair.no_call
        tools = [_schema(tool) for tool in case.tools]
        return self.row_item(
            pair.name,
            f"s{seed}-{twin}",
            (Message(Role.SYSTEM, _SYSTEM), *case.messages),
            {"accepted": list(case.accepted), "ordered": pair.ordered},
            tools,
            needle=list_tools(tools),
            question=case.messages[0].content if len(case.messages) == 1 else "",
        )


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    return function_schema(str(tool.get("name")), str(tool.get("description", "")), tool.get("parameters", {}))


def _match_calls(accepted: Sequence[Options], calls: Sequence[ToolCall]) -> bool:
    if len(accepted) != len(calls):
        return False
    return not accepted or any(
        accepts(accepted[0], call, typed=True) and _match_calls(accepted[1:], [*calls[:at], *calls[at + 1 :]])
        for at, call in enumerate(calls)
    )


@cache_rows
def _pairs(
    questions: tuple[Path, ...], answers: tuple[Path, ...], irrelevant: Path, documents: tuple[Path, ...]
) -> tuple[Pair, ...]:
    """Return the pairs of cases made from single-turn rows, then those from multi-turn rows.

    A single-turn row (simple, multiple and parallel ones alternate) is paired with an irrelevance row, in which no tool
    fits. Each irrelevance row is used once.
    """
    no_calls = [_single(irrelevant, number, row) for number, row in enumerate(json_lines(irrelevant), start=1)]
    kinds = [list(_singles(*paths)) for paths in zip(questions[:-1], answers[:-1], strict=True)]
    cases = [case for row in zip(*kinds, strict=False) for case in row]  # as many of each kind as the shortest file has
    short = filter(_is_short, no_calls)
    pairs = [Pair(name, case, no_call, ordered=False) for (name, case), no_call in zip(cases, short, strict=False)]
    return (*pairs, *_multi(questions[-1], answers[-1], documents))


def _is_short(case: Case) -> bool:
    return len(list_tools(case.tools)) + len(_text_of(case.messages, "")) <= LONGEST_CASE


def _text_of(messages: Sequence[Message], between: str) -> str:
    return between.join(message.content for message in as_text(messages, ()))


def _with_truth(questions: Path, answers: Path) -> Iterable[tuple[int, dict[str, Any], list[Any]]]:
    """Yield (row number, question row, right calls) for every question; raises DataError if its answer is missing."""
    by_id = {row.get("id"): (number, row) for number, row in enumerate(json_lines(answers), start=1)}
    for number, row in enumerate(json_lines(questions), start=1):
        if row.get("id") not in by_id:
            raise DataError(f"{str(questions)!r} row {number}: {str(answers)!r} has no answer with its id")
        yield number, row, value_of(answers, *by_id[row["id"]], "ground_truth", list)


def _single(path: Path, number: int, row: Mapping[str, Any]) -> Case:
    text = _user_turns(path, number, row)[0]
    return Case(rows_of(path, number, row, "function"), (Message(Role.USER, text),))


def _user_turns(path: Path, number: int, row: Mapping[str, Any]) -> list[str]:
    try:
        return [str(turn[0]["content"]) for turn in row["question"]]
    except (KeyError, IndexError, TypeError):
        raise DataError(f"{str(path)!r} row {number} has no question, or a turn without content") from None


def _singles(questions: Path, answers: Path) -> Iterable[tuple[str, Case]]:
    for number, row, truth in _with_truth(questions, answers):
        case = _single(questions, number, row)
        if invalid := [options for options in truth if not _is_valid(options)]:
            raise DataError(
                f"{str(answers)!r} holds {str(invalid[0])[:60]!r}, expected one tool and values by parameter"
            )
        case = case._replace(accepted=tuple(apply_schema(options, case.tools) for options in truth))
        if _is_short(case):
            yield str(row["id"]), case


def apply_schema(options: Options, tools: Sequence[Mapping[str, Any]]) -> Options:
    """Return ``options``, the accepted values of a call's parameters, corrected by the schemas of the ``tools``.

    A parameter that the schema requires is no longer optional. Where the schema's type is float, whole numbers become
    floats, since these accept whole numbers too.
    """
    ((name, values),) = options.items()
    schema: Mapping[str, Any] = next((tool.get("parameters", {}) for tool in tools if tool.get("name") == name), {})
    properties, required = schema.get("properties", {}), schema.get("required", ())
    # an empty text among the values makes the parameter optional
    choices = {key: [value for value in choice if value != "" or key not in required] for key, choice in values.items()}
    return {name: {key: _as_type(choice or values[key], properties.get(key, {})) for key, choice in choices.items()}}


def _as_type(values: Sequence[Any], schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("type") == "float":
        return [float(value) if isinstance(value, int) and not isinstance(value, bool) else value for value in values]
    inner = schema.get("items")
    if isinstance(inner, dict):
        return [_as_type(value, inner) if isinstance(value, list) else value for value in values]
    return list(values)


def _is_valid(options: Any) -> bool:
    values = list(options.values()) if isinstance(options, dict) else []
    lists = list(values[0].values()) if len(values) == 1 and isinstance(values[0], dict) else [None]
    return all(isinstance(choice, list) and choice for choice in lists)


def _multi(questions: Path, answers: Path, documents: Sequence[Path]) -> Iterable[Pair]:
    by_class = {cls: _documented_tools(path) for cls, path in zip(CLASSES, documents, strict=True)}
    for number, row, truth in _with_truth(questions, answers):
        tools = dict[str, Any]()
        for cls in value_of(questions, number, row, "involved_classes", list):
            tools |= by_class.get(cls, {})
        turns = _user_turns(questions, number, row)
        parameters = {name: list(tool["parameters"]["properties"]) for name, tool in tools.items()}
        calls = [[c for text in turn for c in python_calls(str(text), parameters)] for turn in truth]
        if len(turns) != len(calls) or not {call.name for turn in calls for call in turn} <= tools.keys():
            raise DataError(f"{str(questions)!r} row {number} does not match its answer")
        pair = _turn_pair(str(row["id"]), turns, calls, tools)
        if pair is not None:
            yield pair


def _documented_tools(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tools that a file documents (the methods of one class of the leaderboard), by name.

    It leaves out the schemas of the tools' results, and the introduction that all descriptions of the tools share.
    """
    tools = {}
    for number, row in enumerate(json_lines(path), start=1):
        description = value_of(path, number, row, "description", str).rpartition("Tool description: ")[2]
        parameters = value_of(path, number, row, "parameters", dict)
        value_of(path, number, parameters, "properties", dict)
        name = value_of(path, number, row, "name", str)
        tools[name] = {"name": name, "description": description, "parameters": parameters}
    return tools


def _turn_pair(
    name: str, turns: Sequence[str], calls: Sequence[Sequence[ToolCall]], tools: Mapping[str, Any]
) -> Pair | None:
    """Return the pair of cases made from the last suitable turn of a multi-turn row; None if no turn is suitable.

    ``turns`` are the user's texts, and ``calls`` the right calls of each turn. A turn is suitable if its first call has
    arguments that were all mentioned before, and if the conversation up to the end of the turn is short.
    """
    for last in reversed(range(len(turns))):
        counts = [sum(map(len, calls[:turn])) for turn in range(last + 1)]
        history = [m for turn in range(last) for m in _turn_messages(turns[turn], calls[turn], counts[turn])]
        messages = [*history, Message(Role.USER, turns[last])]
        used = {call.name for turn in calls[: last + 1] for call in turn}
        spare = [tool for tool in tools if tool not in used][:SPARE]
        offered_tools = [tool for key, tool in tools.items() if key in used or key in spare]
        accepted = tuple(map(tool_calls.exact_options, calls[last]))
        no_call = Case(offered_tools, (*history, *_turn_messages(turns[last], calls[last], counts[last])))
        if calls[last] and _is_mentioned(calls[last][0], messages) and _is_short(no_call):
            return Pair(name, Case(offered_tools, tuple(messages), accepted), no_call, ordered=True)
    return None


def _turn_messages(text: str, calls: Sequence[ToolCall], earlier: int) -> list[Message]:
    """Return the messages of a complete turn: the request, then each tool call with its result.

    ``earlier`` is the number of calls before this turn, which the ids of its calls continue.
    """
    pairs = [
        (Message(Role.ASSISTANT, "", (call,)), Message(Role.TOOL, DONE, tool_call_id=call.call_id))
        for call in make_calls([replace(call, arguments=plain_values(call.arguments)) for call in calls], earlier)
    ]
    return [Message(Role.USER, text), *(message for pair in pairs for message in pair)]


def _is_mentioned(call: ToolCall, messages: Sequence[Message]) -> bool:
    text = _text_of(messages, " ").casefold()
    leaves = _leaves(call.arguments)
    return bool(leaves) and all(leaf in text for leaf in leaves)


def _leaves(value: Any) -> list[str]:
    """Return the texts and numbers inside an argument, in lower case and as a user would write them.

    Booleans and None are left out.
    """
    if isinstance(value, dict | list | tuple):
        entries = value.values() if isinstance(value, dict) else value
        return [leaf for entry in entries for leaf in _leaves(entry)]
    if isinstance(value, bool) or value is None:
        return []
    return [f"{value:g}" if isinstance(value, float) else str(value).casefold()]
