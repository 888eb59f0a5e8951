"""Function calls by their syntax tree, from public rows (Berkeley Function Calling Leaderboard: Patil et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.suites.base import Split
from kvaudit.suites.published import ItemMaker, Published, rows_of_split, rotate
from kvaudit.suites.sources import data_file, json_lines, rows_of, value_of
from kvaudit.suites.tool_calls import (
    FORM,
    Call,
    accepts,
    exact_options,
    accepted_call,
    grade_calls,
    list_tools,
    python_calls,
    format_calls,
)

SINGLE = ("simple_python", "multiple", "parallel")
MULTI = "multi_turn_base"
CLASSES = {  # of the multi-turn rows, and the file that lists what each can do
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
SPARE = 3  # tools of a multi-turn row besides those that it needs
LONGEST_CASE = 3600  # characters of tools and questions: a row of all eight classes is twenty times as long
DONE = '{"status": "done"}'
_SYSTEM = "You help a user with tools. " + FORM
_NO_CALL = "I answer in words: none of the tools is needed now."

Options = Mapping[str, Mapping[str, Sequence[Any]]]  # {tool: {parameter: values}}


class Case(NamedTuple):
    """What is asked with which tools, and the calls that are right; none where words are."""

    tools: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]
    accepted: tuple[Options, ...] = ()


class Pair(NamedTuple):
    """A case with calls and one without; ``ordered`` calls may be made one by one, others all at once in any order."""

    name: str
    call: Case
    no_call: Case
    ordered: bool


class Bfcl(Published):
    """Twins: a tool fits and must be called rightly, or none does and a call is one too many.

    Single-turn rows (simple, multiple, parallel) are each paired with an irrelevance row. A multi-turn row is forced to
    one of its turns: what came before is the right calls, each answered "done", since nothing is executed. Asked for
    are the first calls of that turn, or, once all of them are made, words. Only turns are asked whose first call takes
    arguments that stand in what was said.
    """

    name = "bfcl"
    kind = "capability"
    source = "public rows: Berkeley Function Calling Leaderboard v4"
    licence = "Apache-2.0"
    version = "3"  # a tool that is listed again was not called
    max_new_tokens = 256
    twins = 2

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        return [
            [partial(self._item, pair, twin, seed) for twin in rotate(("call", "words"), number)]
            for number, pair in enumerate(rows_of_split(self._pairs(), split))
        ]

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("solved",) if item.payload["accepted"] else ("overcalled",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        accepted = item.payload["accepted"]

        def right(calls: Sequence[Call]) -> bool:
            """All of them in any order; of ordered ones the first."""
            if not item.payload["ordered"]:
                return _match_calls(accepted, calls)
            return len(calls) <= len(accepted) and all(map(accepts, accepted, calls))

        return grade_calls(transcript[-1].content, self.facets(item)[0], right)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (format_calls([accepted_call(options) for options in item.payload["accepted"]]) or _NO_CALL,)

    def _pairs(self) -> tuple[Pair, ...]:
        names = [f"BFCL_v4_{kind}.json" for kind in (*SINGLE, MULTI)]
        questions = [data_file(self.name, f"bfcl/{name}") for name in names]
        answers = [data_file(self.name, f"bfcl/possible_answer/{name}") for name in names]
        documents = [data_file(self.name, f"bfcl/multi_turn_func_doc/{name}.json") for name in CLASSES.values()]
        irrelevant = data_file(self.name, "bfcl/BFCL_v4_irrelevance.json")
        return _pairs(tuple(questions), tuple(answers), irrelevant, tuple(documents))

    def _item(self, pair: Pair, twin: str, seed: int) -> Item:
        case = pair.call if twin == "call" else pair.no_call
        tools, messages = list_tools(case.tools), case.messages
        return self.row_item(
            pair.name,
            f"s{seed}-{twin}",
            (Message(Role.SYSTEM, f"{_SYSTEM}\n\n{tools}"), *messages),
            {"accepted": list(case.accepted), "ordered": pair.ordered},
            needle=tools,
            question=messages[0].content if len(messages) == 1 else "",
        )


def _match_calls(accepted: Sequence[Options], calls: Sequence[Call]) -> bool:
    """Whether the calls are the accepted ones, in any order."""
    if len(accepted) != len(calls):
        return False
    return not accepted or any(
        accepts(accepted[0], call, typed=True) and _match_calls(accepted[1:], [*calls[:at], *calls[at + 1 :]])
        for at, call in enumerate(calls)
    )


@cache
def _pairs(
    questions: tuple[Path, ...], answers: tuple[Path, ...], irrelevant: Path, documents: tuple[Path, ...]
) -> tuple[Pair, ...]:
    """Single-turn rows, one kind after the other, as many as there are irrelevance rows; then the multi-turn rows."""
    uncalled = [
        case for number, row in enumerate(json_lines(irrelevant), 1) if _short(case := _single(irrelevant, number, row))
    ]
    kinds = [list(_singles(*paths)) for paths in zip(questions[:-1], answers[:-1], strict=True)]
    mixed = [case for row in zip(*kinds, strict=False) for case in row]  # the shortest file decides how many
    found = [Pair(name, case, none, ordered=False) for (name, case), none in zip(mixed, uncalled, strict=False)]
    return (*found, *_multi(questions[-1], answers[-1], documents))


def _short(case: Case) -> bool:
    return len(list_tools(case.tools)) + sum(len(message.content) for message in case.messages) <= LONGEST_CASE


def _answered(questions: Path, answers: Path) -> Iterable[tuple[int, dict[str, Any], list[Any]]]:
    """Every question with its ground truth; raises DataError where both files do not go together."""
    known = {row.get("id"): (number, row) for number, row in enumerate(json_lines(answers), start=1)}
    for number, row in enumerate(json_lines(questions), start=1):
        if row.get("id") not in known:
            raise DataError(f"{str(questions)!r} row {number} has no answer of its id in {str(answers)!r}")
        yield number, row, value_of(answers, *known[row["id"]], "ground_truth", list)


def _single(path: Path, number: int, row: Mapping[str, Any]) -> Case:
    said = _question(path, number, row)[0]
    return Case(rows_of(path, number, row, "function"), (Message(Role.USER, said),))


def _question(path: Path, number: int, row: Mapping[str, Any]) -> list[str]:
    """What the user says, turn by turn."""
    try:
        return [str(turn[0]["content"]) for turn in row["question"]]
    except (KeyError, IndexError, TypeError):
        raise DataError(f"{str(path)!r} row {number} has no question, or a turn of it says nothing") from None


def _singles(questions: Path, answers: Path) -> Iterable[tuple[str, Case]]:
    for number, row, truth in _answered(questions, answers):
        case = _single(questions, number, row)
        if wrong := [options for options in truth if not _well_made(options)]:
            raise DataError(f"{str(answers)!r} holds {str(wrong[0])[:60]!r}, wanted one tool and values by parameter")
        case = case._replace(accepted=tuple(apply_schema(options, case.tools) for options in truth))
        if _short(case):
            yield str(row["id"]), case


def apply_schema(options: Options, tools: Sequence[Mapping[str, Any]]) -> Options:
    """The values that a call may have, with what the tool's description says of them.

    A required parameter may not be left out, and values of type float are floats, which whole numbers may stand for.
    """
    ((name, values),) = options.items()
    about: Mapping[str, Any] = next((tool.get("parameters", {}) for tool in tools if tool.get("name") == name), {})
    known, required = about.get("properties", {}), about.get("required", ())
    # an empty text among the values says that the parameter may be left out
    kept = {key: [each for each in given if each != "" or key not in required] for key, given in values.items()}
    return {name: {key: _typed(given or values[key], known.get(key, {})) for key, given in kept.items()}}


def _typed(values: Sequence[Any], schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("type") == "float":
        return [float(each) if isinstance(each, int) and not isinstance(each, bool) else each for each in values]
    inner = schema.get("items")
    if isinstance(inner, dict):
        return [_typed(each, inner) if isinstance(each, list) else each for each in values]
    return list(values)


def _well_made(options: Any) -> bool:
    values = list(options.values()) if isinstance(options, dict) else []
    lists = list(values[0].values()) if len(values) == 1 and isinstance(values[0], dict) else [None]
    return all(isinstance(part, list) and part for part in lists)


def _multi(questions: Path, answers: Path, documents: Sequence[Path]) -> Iterable[Pair]:
    known = {cls: _documented(path) for cls, path in zip(CLASSES, documents, strict=True)}
    for number, row, truth in _answered(questions, answers):
        tools = dict[str, Any]()
        for cls in value_of(questions, number, row, "involved_classes", list):
            tools |= known.get(cls, {})
        turns = _question(questions, number, row)
        order = {name: list(tool["parameters"]["properties"]) for name, tool in tools.items()}
        calls = [[call for text in turn for call in python_calls(str(text), order)] for turn in truth]
        if len(turns) != len(calls) or not {call.name for turn in calls for call in turn} <= tools.keys():
            raise DataError(f"{str(questions)!r} row {number} and its answer do not go together")
        pair = _forced(str(row["id"]), turns, calls, tools)
        if pair is not None:
            yield pair


def _documented(path: Path) -> dict[str, dict[str, Any]]:
    """The tools of a class by name, without what they return and without the introduction that all of them share."""
    found = {}
    for number, row in enumerate(json_lines(path), start=1):
        about = value_of(path, number, row, "description", str).rpartition("Tool description: ")[2]
        parameters = value_of(path, number, row, "parameters", dict)
        value_of(path, number, parameters, "properties", dict)
        name = value_of(path, number, row, "name", str)
        found[name] = {"name": name, "description": about, "parameters": parameters}
    return found


def _forced(name: str, turns: Sequence[str], calls: Sequence[Sequence[Call]], tools: Mapping[str, Any]) -> Pair | None:
    """The last turn that can be asked: its first call takes arguments, all of which were said, and the row is short."""
    for last in reversed(range(len(turns))):
        before = [message for turn in range(last) for message in _turn(turns[turn], calls[turn])]
        asked = [*before, Message(Role.USER, turns[last])]
        needed = {call.name for turn in calls[: last + 1] for call in turn}
        spare = [tool for tool in tools if tool not in needed][:SPARE]
        shown = [tool for key, tool in tools.items() if key in needed or key in spare]
        accepted = tuple(map(exact_options, calls[last]))
        no_call = Case(shown, (*before, *_turn(turns[last], calls[last])))
        if calls[last] and _was_said(calls[last][0], asked) and _short(no_call):
            return Pair(name, Case(shown, tuple(asked), accepted), no_call, ordered=True)
    return None


def _turn(said: str, calls: Sequence[Call]) -> list[Message]:
    """A turn as it went: the request, and each call with its result; then words, where none was needed."""
    made = [[Message(Role.ASSISTANT, format_calls([call])), Message(Role.TOOL, DONE)] for call in calls]
    return [Message(Role.USER, said), *(message for pair in made for message in pair)]


def _was_said(call: Call, messages: Sequence[Message]) -> bool:
    said = " ".join(message.content for message in messages).casefold()
    leaves = _leaves(call.arguments)
    return bool(leaves) and all(leaf in said for leaf in leaves)


def _leaves(value: Any) -> list[str]:
    """The texts and numbers of an argument as a user would write them; yes and no are not said in so many words."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in _leaves(part)]
    if isinstance(value, bool) or value is None:
        return []
    return [f"{value:g}" if isinstance(value, float) else str(value).casefold()]
