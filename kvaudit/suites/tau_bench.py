"""The next step of an airline agent, from rewarded public traces (tau-bench: Yao et al. 2024, arXiv:2406.12045)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Role, ToolCall
from kvaudit.core.tool_forms.text import as_text, format_calls
from kvaudit.suites.base import ItemMaker, Published, Split, rotate, rows_of_split
from kvaudit.suites.sources import cache_rows, data_file, json_array, rows_of, value_of
from kvaudit.suites.tool_calls import accepts, exact_options, function_schema, grade_calls, make_calls

TRACES = "tau_bench/gpt-4o-airline.json"
UNCHECKED = ("think", "calculate")  # tools whose arguments are free text: no item asks for a call of these
FREE_TEXT = {"transfer_to_human_agents": ("summary",)}  # arguments that are free text
FEWEST = 4  # tasks, so that both splits have one
LONGEST_TALK = 12_000  # characters before a cut, so that a context of 8K tokens holds every item and an answer
LONGEST_REPLY = 600  # characters of an answer in words
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class AgentTurn(NamedTuple):
    """An agent's turn in a conversation that reached its goal (reward 1): the messages before it, and its text.

    The messages leave out the agent's instructions. If the turn is a tool call, ``calls`` are all calls from this one
    until the agent next writes to the user, and ``text`` is "". If it is written to the user, ``calls`` is ().
    """

    before: tuple[Message, ...]
    text: str
    calls: tuple[ToolCall, ...]


AgentTurns = dict[str, list[AgentTurn]]  # by twin: call, words


class Airline(NamedTuple):
    """The airline data: the agent's instructions (``policy``), the tools used in the traces, and each task's turns.

    Only tasks that have both kinds of turns, tool calls and texts, are kept.
    """

    policy: str
    tools: tuple[dict[str, Any], ...]
    tasks: tuple[tuple[int, AgentTurns], ...]


class TauBench(Published):
    """Twins, two turns of one task: in one the agent called a tool, in the other it wrote text to the user.

    The answer must be of the same kind as the turn. Nothing is executed: all messages before the turn are given. A call
    is right if the agent made it between this turn and its next text to the user, since the order of look-ups is free.
    Another way to the same goal counts as wrong. kvaudit adds the schemas of the tools, as the traces use them.
    ``cluster_id`` is the task: 34 tasks have rewarded traces with both kinds of turn, 26 of them for evaluation. These
    can show that a drop is below 11 points, but not that it is below 5.
    """

    name = "tau_bench"
    kind = "capability"
    source = "public rows: tau-bench, rewarded airline traces of gpt-4o"
    licence = "MIT"
    max_new_tokens = 256
    version = "4"  # tools in the form of the model's chat template
    tool_form = "native"
    twins = 2
    clusters = 26

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        airline = _airline(data_file(self.name, TRACES))
        groups = list[list[ItemMaker]]()
        for number, (task, turns) in enumerate(rows_of_split(airline.tasks, split, every=4, first=3)):
            order = {
                twin: random.Random(f"{split}-{seed}-{task}-{twin}").sample(twin_turns, len(twin_turns))
                for twin, twin_turns in turns.items()
            }
            groups.append(
                [
                    partial(self._item, f"s{seed}-g{group}-{twin}", order[twin][group], str(task), airline)
                    for group in range(max(map(len, order.values())))
                    for twin in rotate(("call", "words"), number)
                    if group < len(order[twin])
                ]
            )
        return groups

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("solved",) if item.payload["accepted"] else ("overcalled",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        accepted = item.payload["accepted"]

        def is_right(calls: tuple[ToolCall, ...]) -> bool:  # the policy allows one call at a time
            return len(calls) == 1 and any(accepts(options, _without_free_text(calls[0])) for options in accepted)

        return grade_calls(item, transcript[-1], self.facets(item)[0], is_right)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (item.payload["gold"],)

    def _item(self, stream: str, turn: AgentTurn, task: str, airline: Airline) -> Item:
        accepted = [exact_options(_without_free_text(call)) for call in turn.calls]
        payload = {"accepted": accepted, "gold": format_calls(turn.calls[:1]) or turn.text}
        messages = (Message(Role.SYSTEM, airline.policy), *turn.before)
        return self.row_item(task, stream, messages, payload, airline.tools, rule=airline.policy)


def _without_free_text(call: ToolCall) -> ToolCall:
    arguments = {key: value for key, value in call.arguments.items() if key not in FREE_TEXT.get(call.name, ())}
    return replace(call, arguments=arguments)


@cache_rows
def _airline(path: Path) -> Airline:
    policy, tasks, tools = "", dict[int, AgentTurns](), dict[str, dict[str, str]]()
    for number, row in enumerate(json_array(path), start=1):
        turns = rows_of(path, number, row, "traj")
        calls = [_call(path, number, turn) for turn in turns]
        # all traces, rewarded or not, show the parameters of a tool
        for call in filter(None, calls):
            types = {key: _TYPES.get(type(value), "string") for key, value in call.arguments.items()}
            tools.setdefault(call.name, {}).update(types)
        if row.get("reward") == 1:
            messages = _messages(path, number, turns, calls)
            if not messages or messages[0].role is not Role.SYSTEM:
                raise DataError(f"{str(path)!r} row {number} does not begin with the policy")
            policy = messages[0].content
            by_twin = tasks.setdefault(value_of(path, number, row, "task_id", int), {"call": [], "words": []})
            for turn in _agent_turns(messages[1:], calls[1:]):
                by_twin["call" if turn.calls else "words"].append(turn)
    schemas = tuple(
        function_schema(name, "", {key: {"type": kind} for key, kind in sorted(tools[name].items())})
        for name in sorted(tools)
    )
    complete = tuple((task, turns) for task, turns in sorted(tasks.items()) if all(turns.values()))
    if len(complete) < FEWEST:
        raise DataError(f"{str(path)!r} holds {len(complete)} tasks with a rewarded trace, expected {FEWEST} or more")
    return Airline(policy, schemas, complete)


def _call(path: Path, number: int, turn: Mapping[str, Any]) -> ToolCall | None:
    """Return the tool call of a turn; None if the turn is text."""
    if not turn.get("tool_calls"):
        return None
    try:
        (call,) = turn["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        return ToolCall(str(call["function"]["name"]), dict(arguments))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{str(path)!r} row {number} holds a tool call that cannot be read") from None


def _messages(
    path: Path, number: int, turns: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall | None]
) -> list[Message]:
    messages, count = list[Message](), 0
    for turn, call in zip(turns, calls, strict=True):
        role = turn.get("role")
        if role not in tuple(Role):
            raise DataError(f"{str(path)!r} row {number} holds a turn of role {str(role)[:20]!r}")
        if call is not None:
            messages.append(Message(Role(role), "", make_calls([call], count)))
            count += 1
            continue
        # a result belongs to the call right before it
        last_calls = messages[-1].tool_calls if messages and role == Role.TOOL else ()
        content = value_of(path, number, turn, "content", str)
        messages.append(Message(Role(role), content, tool_call_id=last_calls[0].call_id if last_calls else ""))
    return messages


def _agent_turns(messages: Sequence[Message], calls: Sequence[ToolCall | None]) -> tuple[AgentTurn, ...]:
    """Return the agent's turns that can be asked: calls of tools that can be checked, and short text replies.

    ``calls`` has, for each message, the tool call that it makes, or None. Turns after a long conversation are left out.
    """
    turns = []
    for at, (message, call) in enumerate(zip(messages, calls, strict=True)):
        if sum(len(before.content) for before in as_text(messages[:at], ())) > LONGEST_TALK:
            break
        if message.role is not Role.ASSISTANT or at == 0:
            continue
        if call is None and len(message.content) <= LONGEST_REPLY:
            turns.append(AgentTurn(tuple(messages[:at]), message.content, ()))
        elif call is not None and call.name not in UNCHECKED:
            pairs = zip(messages[at:], calls[at:], strict=True)
            until_words = takewhile(lambda pair: pair[0].role is not Role.ASSISTANT or pair[1] is not None, pairs)
            turns.append(
                AgentTurn(tuple(messages[:at]), "", tuple(call for _, call in until_words if call is not None))
            )
    return tuple(turns)
