"""The next step of a rewarded agent, from public traces (tau-bench, airline: Yao et al. 2024, arXiv:2406.12045)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.suites.base import Split
from kvaudit.suites.published import ItemMaker, Published, rows_of_split, rotate
from kvaudit.suites.sources import data_file, json_array, rows_of, value_of
from kvaudit.suites.tool_calls import FORM, Call, accepts, exact_options, grade_calls, list_tools, format_calls

TRACES = "tau_bench/gpt-4o-airline.json"
UNCHECKED = ("think", "calculate")  # tools whose arguments two good agents word differently: no trace is cut there
FREE = {"transfer_to_human_agents": ("summary",)}  # arguments that two good agents word differently
FEWEST = 4  # tasks, so that both splits have one
LONGEST_TALK = 12_000  # characters before a cut, so that 8K positions hold every item with the policy and an answer
LONGEST_REPLY = 600  # characters of an answer in words, which has to fit an answer's tokens
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class AgentTurn(NamedTuple):
    """A place in a rewarded conversation where the agent spoke: what came before without the policy, and what it said.

    ``calls`` are those that it made from here until it spoke to the user again; none where it speaks now.
    """

    before: tuple[Message, ...]
    text: str
    calls: tuple[Call, ...]


AgentTurns = dict[str, list[AgentTurn]]  # by twin: call, words


class Airline(NamedTuple):
    """What the file holds: the policy, the tools as the traces use them, and the tasks that have both kinds of turn."""

    policy: str
    tools: tuple[dict[str, Any], ...]
    tasks: tuple[tuple[int, AgentTurns], ...]


class TauBench(Published):
    """Twins of one task: where the agent called a tool, a call is asked for; where it spoke to the user, words.

    Nothing is executed: all before the cut is forced. Any call counts that the agent made before it next spoke, as the
    order of look-ups is free; another way to the same end is wrong here. Of ours are how tools are listed and called:
    their text stands below the policy. ``cluster_id`` is the task: 34 have a rewarded trace with both kinds of cut, 26
    of them for evaluation. They can decide a margin of 11 points, not of five.
    """

    name = "tau_bench"
    kind = "capability"
    source = "public rows: tau-bench, rewarded airline traces of gpt-4o"
    licence = "MIT"
    max_new_tokens = 256
    version = "3"  # a tool that is listed again was not called
    twins = 2
    clusters = 26

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        airline = _airline(data_file(self.name, TRACES))
        head = f"{airline.policy}\n\n{FORM}\n\n{list_tools(airline.tools)}"
        found = list[list[ItemMaker]]()
        for number, (task, turns) in enumerate(rows_of_split(airline.tasks, split, every=4, first=3)):
            order = {
                twin: random.Random(f"{split}-{seed}-{task}-{twin}").sample(own, len(own))
                for twin, own in turns.items()
            }
            paired = (
                (group, twin, order[twin][group])
                for group in range(max(map(len, order.values())))
                for twin in rotate(("call", "words"), number)
                if group < len(order[twin])
            )
            about = str(task), head, airline.policy
            found.append(
                [partial(self._item, f"s{seed}-g{group}-{twin}", turn, *about) for group, twin, turn in paired]
            )
        return found

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("solved",) if item.payload["accepted"] else ("overcalled",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        accepted = item.payload["accepted"]

        def right(calls: tuple[Call, ...]) -> bool:
            """One call, as the policy says, and one of the accepted."""
            given = [_checked(call) for call in calls]
            return len(given) == 1 and any(accepts(options, given[0]) for options in accepted)

        return grade_calls(transcript[-1].content, self.facets(item)[0], right)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (item.payload["gold"],)

    def _item(self, stream: str, turn: AgentTurn, task: str, head: str, policy: str) -> Item:
        accepted = [exact_options(_checked(call)) for call in turn.calls]
        payload = {"accepted": accepted, "gold": format_calls(turn.calls[:1]) or turn.text}
        return self.row_item(task, stream, (Message(Role.SYSTEM, head), *turn.before), payload, rule=policy)


def _checked(call: Call) -> Call:
    """A call without the arguments that anybody may word."""
    kept = {key: value for key, value in call.arguments.items() if key not in FREE.get(call.name, ())}
    return call._replace(arguments=kept)


@cache
def _airline(path: Path) -> Airline:
    policy, tasks, tools = "", dict[int, AgentTurns](), dict[str, dict[str, str]]()
    for number, row in enumerate(json_array(path), start=1):
        turns = rows_of(path, number, row, "traj")
        calls = [_call(path, number, turn) for turn in turns]
        # what a tool takes is told by every trace, rewarded or not
        for call in filter(None, calls):
            types = {key: _TYPES.get(type(value), "string") for key, value in call.arguments.items()}
            tools.setdefault(call.name, {}).update(types)
        if row.get("reward") == 1:
            messages = [_message(path, number, *pair) for pair in zip(turns, calls, strict=True)]
            if not messages or messages[0].role is not Role.SYSTEM:
                raise DataError(f"{str(path)!r} row {number} does not begin with the policy")
            policy = messages[0].content
            by_twin = tasks.setdefault(value_of(path, number, row, "task_id", int), {"call": [], "words": []})
            for turn in _agent_turns(messages[1:], calls[1:]):
                by_twin["call" if turn.calls else "words"].append(turn)
    described = ({"name": name, "parameters": dict(sorted(tools[name].items()))} for name in sorted(tools))
    # tasks with both kinds of turn
    whole = tuple((task, turns) for task, turns in sorted(tasks.items()) if all(turns.values()))
    if len(whole) < FEWEST:
        raise DataError(f"{str(path)!r} holds {len(whole)} tasks with a rewarded trace, wanted {FEWEST} or more")
    return Airline(policy, tuple(described), whole)


def _call(path: Path, number: int, turn: Mapping[str, Any]) -> Call | None:
    """The call that a turn makes, None for one in words."""
    if not turn.get("tool_calls"):
        return None
    try:
        (made,) = turn["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        return Call(str(made["function"]["name"]), dict(arguments))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{str(path)!r} row {number} holds a tool call that cannot be read") from None


def _message(path: Path, number: int, turn: Mapping[str, Any], call: Call | None) -> Message:
    role = turn.get("role")
    if role not in tuple(Role):
        raise DataError(f"{str(path)!r} row {number} holds a turn of role {str(role)[:20]!r}")
    return Message(Role(role), format_calls([call]) if call else value_of(path, number, turn, "content", str))


def _agent_turns(messages: Sequence[Message], calls: Sequence[Call | None]) -> tuple[AgentTurn, ...]:
    """Where the agent spoke: calls whose arguments follow from what was said, and words that are short enough."""
    found = []
    for at, (message, call) in enumerate(zip(messages, calls, strict=True)):
        if sum(len(before.content) for before in messages[:at]) > LONGEST_TALK:
            break
        if message.role is not Role.ASSISTANT or at == 0:
            continue
        if call is None and len(message.content) <= LONGEST_REPLY:
            found.append(AgentTurn(tuple(messages[:at]), message.content, ()))
        elif call is not None and call.name not in UNCHECKED:
            found.append(AgentTurn(tuple(messages[:at]), "", _run(messages[at:], calls[at:])))
    return tuple(found)


def _run(messages: Sequence[Message], calls: Sequence[Call | None]) -> tuple[Call, ...]:
    """The calls up to the agent's next words."""
    pairs = zip(messages, calls, strict=True)
    before_words = takewhile(lambda pair: pair[0].role is not Role.ASSISTANT or pair[1] is not None, pairs)
    return tuple(call for _, call in before_words if call is not None)
