"""Parse and check chat-completion requests and their tools, and make the JSON bodies of responses; runs no model."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.core.errors import SpecError
from kvaudit.core.records import TOKEN_ROLES, CacheUse, Message, Role, ToolCall
from kvaudit.core.text import is_text, short_repr
from kvaudit.core.tool_forms.base import is_plain

MOST_TOOLS, _MOST_CALLS = 128, 128  # of a request; of a message
_NAME = re.compile(r"[\w.-]{1,200}")  # what every form of calls can read
_NAME_SAYS = "1 to 200 letters, digits, _, . or -"
_LONGEST_ID = 200  # characters
_CHOICES = (None, "auto", "none")


def read_tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the function tools of a request, () if ``tool_choice`` is "none"; raise SpecError for invalid tools."""
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
    """Return whether an answer may have several tool calls; raise SpecError if the request's value is not a boolean."""
    value = body.get("parallel_tool_calls")
    if not isinstance(value, bool | None):
        raise SpecError(f"parallel_tool_calls is {short_repr(value)}, expected true or false")
    return value is not False


def read_message_calls(row: Mapping[str, Any], role: Role, path: str) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message; raise SpecError for invalid calls (``path`` names the message in it)."""
    rows = row.get("tool_calls")
    if row.get("function_call"):
        raise SpecError(f"{path} has function_call, which this server does not support; send tool_calls")
    if not rows:
        return ()
    if role is not Role.ASSISTANT:
        raise SpecError(f"{path} has role {role} and tool_calls; only messages of the assistant have calls")
    if not isinstance(rows, list) or len(rows) > _MOST_CALLS:
        got = f"{len(rows)} entries" if isinstance(rows, list) else short_repr(rows)
        raise SpecError(f"{path}.tool_calls is {got}, expected a list of at most {_MOST_CALLS} calls")
    calls = tuple(_call(entry, f"{path}.tool_calls[{number}]") for number, entry in enumerate(rows))
    ids = [call.call_id for call in calls]
    if repeated := next((name for n, name in enumerate(ids) if name in ids[:n]), None):
        raise SpecError(f"{path}.tool_calls has the id {repeated!r} twice; give each call another id")
    return calls


def read_call_id(row: Mapping[str, Any], role: Role, path: str, call_ids: Collection[str]) -> str:
    """Return the id of the call that a tool's result answers, "" if it has none; raise SpecError for an unknown id."""
    name = row.get("tool_call_id")
    if role is not Role.TOOL or name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in call_ids:
        raise SpecError(
            f"{path}.tool_call_id is {short_repr(name)}, expected the id of a call in a message before; send the "
            "assistant's tool_calls too"
        )
    return name


def _check_tool(tool: Any, number: int) -> str:
    """Return the name of a tool; raise SpecError for a tool that no template could render."""
    path, function = f"tools[{number}]", tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise SpecError(f"{path} is {short_repr(tool)}, expected {{type: function, function: {{name, ...}}}}")
    if not is_plain(tool):
        raise SpecError(f"{path} is no plain JSON; at most 64 levels, finite numbers and whole characters are taken")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{path}.function.name is {short_repr(name)}, expected {_NAME_SAYS}")
    if not isinstance(description, str | None):
        raise SpecError(f"{path}.function.description is {short_repr(description)}, expected text")
    _check_schema(function.get("parameters"), f"{path}.function.parameters")
    return name


def _check_schema(schema: Any, path: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise SpecError(f"{path} is {short_repr(schema)}, expected a JSON schema of type object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise SpecError(f"{path}.properties is {short_repr(properties)}, expected an object of schemas by name")
    for name, entry in properties.items():
        if not isinstance(entry, Mapping | bool):
            raise SpecError(f"{path}.properties[{short_repr(name)}] is {short_repr(entry)}, expected a JSON schema")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SpecError(f"{path}.required is {short_repr(required)}, expected a list of names")


def _call(entry: Any, path: str) -> ToolCall:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type", "function") != "function":
        raise SpecError(f"{path} is {short_repr(entry)}, expected {{id, type: function, function: {{...}}}}")
    name, call_id = function.get("name"), entry.get("id")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{path}.function.name is {short_repr(name)}, expected {_NAME_SAYS}")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _LONGEST_ID or not is_text(call_id):
        raise SpecError(f"{path}.id is {short_repr(call_id)}, expected text of 1 to {_LONGEST_ID} characters")
    return ToolCall(name, _arguments(function.get("arguments"), f"{path}.function.arguments"), call_id)


def _arguments(text: Any, path: str) -> Mapping[str, Any]:
    try:
        # some clients send nothing for a call without arguments
        arguments = (json.loads(text) if text.strip() else {}) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not is_plain(arguments):
        raise SpecError(f"{path} is {short_repr(text)}, expected a text that is a JSON object, as the answer had it")
    return arguments


def count_characters(tools: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall]) -> int:
    """Return about how many characters a chat template writes into a prompt for tools and calls."""
    values = [*tools, *({"name": call.name, "arguments": call.arguments} for call in calls)]
    return sum(len(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)


_MAX_TOKENS, _MAX_CHOICES, _MAX_STOPS = 32_768, 16, 16
# Role.THOUGHT is internal: no chat template knows it
_ROLES = {"developer": Role.SYSTEM, **{str(role): role for role in TOKEN_ROLES}}
# options that would change an answer in ways that this sampler does not support, with the values that change nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "function_call": (None, "none", "auto"),
    "add_generation_prompt": (None, True),
    "top_k": (None, 0, -1),
    "best_of": (None, 1),
    "grammar": (None, ""),
    **dict.fromkeys(("functions", "stop_token_ids", "guided_choice", "bad_words"), (None, [])),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), (None, {})),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "top_logprobs", "min_tokens"), (None, 0)),
    **dict.fromkeys(("typical_p", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("ignore_eos", "continue_final_message", "use_beam_search"), (None, False)),
    **dict.fromkeys(("chat_template", "truncate_prompt_tokens", "guided_json", "guided_regex"), (None,)),
    **dict.fromkeys(("guided_grammar", "structured_outputs", "json_schema", "reasoning_effort"), (None,)),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat-completion request; ``model`` is CHECKPOINT@POLICY or an alias.

    Without a ``seed`` the server uses a random one. ``tools`` are the schemas of the functions that an answer may
    call; without ``parallel_calls`` an answer has one call at most.
    """

    model: str
    messages: tuple[Message, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    choices: int
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage_in_stream: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    parallel_calls: bool = True


def read_request(body: Any) -> ChatRequest:
    """Return the chat request in a parsed JSON body; raise a SpecError that names the wrong key."""
    if not isinstance(body, Mapping):
        raise SpecError(f"the request is {short_repr(body)}, expected a JSON object")
    for key, neutral in _UNSUPPORTED.items():
        if key in body and body[key] not in neutral:
            raise SpecError(f"{key} is {short_repr(body[key])}, which this server does not support; leave it out")
    options, model, rows = body.get("stream_options") or {}, body.get("model"), body.get("messages")
    if not isinstance(model, str) or not model or not is_text(model):
        raise SpecError(f"model is {short_repr(model)}, expected text")
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"messages is {short_repr(rows)}, expected a list of messages")
    max_tokens = _integer(body, "max_completion_tokens", 1, _MAX_TOKENS)
    return ChatRequest(
        model=model,
        messages=_messages(rows),
        max_tokens=max_tokens or _integer(body, "max_tokens", 1, _MAX_TOKENS),
        temperature=_number(body, "temperature", 1.0, least=0.0, most=100.0),
        top_p=_number(body, "top_p", 1.0, least=1e-6, most=1.0),
        seed=_integer(body, "seed", 0, 2**63 - 1),
        choices=_integer(body, "n", 1, _MAX_CHOICES) or 1,
        stop=_stops(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, Mapping) and bool(options.get("include_usage")),
        tools=read_tools(body),
        parallel_calls=read_parallel(body),
    )


def _messages(rows: Sequence[Any]) -> tuple[Message, ...]:
    messages, ids = list[Message](), set[str]()  # of the calls so far
    for number, row in enumerate(rows):
        messages.append(_message(row, number, ids))
        ids.update(call.call_id for call in messages[-1].tool_calls)
    return tuple(messages)


def _message(row: Any, number: int, ids: set[str]) -> Message:
    role = row.get("role") if isinstance(row, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise SpecError(f"messages[{number}] has role {short_repr(role)}, expected one of {', '.join(_ROLES)}")
    path, content = f"messages[{number}]", row.get("content")
    calls = read_message_calls(row, _ROLES[role], path)
    if calls and not content:
        content = ""  # null, or an empty list
    entries = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [entry.get("text") for entry in entries if isinstance(entry, Mapping) and entry.get("type") == "text"]
    if not entries or len(texts) != len(entries) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"messages[{number}] has content {short_repr(content)}, expected text or a list of text parts")
    text = "".join(map(str, texts))
    if not is_text(text):
        raise SpecError(f"messages[{number}] holds a lone surrogate (half of a character), which cannot be tokenized")
    return Message(_ROLES[role], text, calls, read_call_id(row, _ROLES[role], path, ids))


def _integer(body: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise SpecError(f"{key} is {short_repr(value)}, expected an integer from {least} to {most}")
    return value


def _number(body: Mapping[str, Any], key: str, default: float, *, least: float, most: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SpecError(f"{key} is {short_repr(value)}, expected a number from {least:g} to {most:g}")
    return float(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise SpecError(f"stop is {short_repr(value)}, expected a text or at most {_MAX_STOPS} texts")
    return tuple(texts)


@dataclass(frozen=True)
class Choice:
    """One answer: its text without the stop text, and the sampled tokens with their log-probs in nats.

    ``text`` is the text beside the tool ``calls``; the tokens cover both. ``use`` holds the measurements of the cache,
    None if they were not recorded.
    """

    text: str
    finish_reason: str  # stop | length | tool_calls
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    calls: tuple[ToolCall, ...] = ()
    use: CacheUse | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the message of the answer; its content is null if it has calls and no text."""
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        rows = [_call_row(call) for call in self.calls]
        return {"role": "assistant", "content": self.text or None, "tool_calls": rows}


def _call_row(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.call_id, "type": "function", "function": function}


class ReplyBodies:
    """The object that makes the JSON bodies of the response to one request: a whole answer, or a stream's chunks."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}

    def completion(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return a chat.completion object."""
        rows = [
            {
                "index": index,
                "message": choice.to_message(),
                "logprobs": _logprobs(choice) if self._request.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": rows, "usage": _usage(choices, prompt_tokens)}

    def call_chunks(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        """Return the chunks of a stream for the tool calls of a choice; each chunk has one whole call."""
        rows = [{"index": number, **_call_row(call)} for number, call in enumerate(choice.calls)]
        return [self.chunk(index, {"tool_calls": [row]}) for row in rows]

    def chunk(self, index: int, delta: Mapping[str, Any], finished: Choice | None = None) -> dict[str, Any]:
        """Return a chat.completion.chunk object; the last one of a choice holds the log-probs of all its tokens."""
        row: dict[str, Any] = {"index": index, "delta": dict(delta), "finish_reason": None}
        if finished is not None:
            row |= {"finish_reason": finished.finish_reason}
            row |= {"logprobs": _logprobs(finished)} if self._request.logprobs else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [row]}

    def usage_chunk(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return the chunk with the token counts, which ends a stream if the request asks for usage."""
        body = {**self._head, "object": "chat.completion.chunk", "choices": list[Any]()}
        return {**body, "usage": _usage(choices, prompt_tokens)}


def _usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    new = sum(len(choice.logprobs) for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
        ]
    }


def error_body(message: str, kind: str) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
