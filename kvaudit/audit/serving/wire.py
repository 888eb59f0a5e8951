"""Chat-completion requests, parsed and checked, and the bodies of responses; nothing here runs a model."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.audit.serving.tools import read_call_id, read_message_calls, read_parallel, read_tools
from kvaudit.core.errors import SpecError
from kvaudit.core.records import CacheUse, Message, Role, ToolCall
from kvaudit.core.text import is_text, short_repr

_MAX_TOKENS, _MAX_CHOICES, _MAX_STOPS = 32_768, 16, 16
_ROLES = {"developer": Role.SYSTEM, **{str(role): role for role in Role}}
# options that would change an answer in ways our sampler does not support, with the values that change nothing
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
    """A checked request. ``model`` is CHECKPOINT@POLICY or an alias; without a ``seed`` the server draws one.

    ``tools`` are the schemas of the functions that an answer may call; without ``parallel_calls`` one at a time.
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
    """Parse a JSON body; raise SpecError that names the wrong key."""
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
    place, content = f"messages[{number}]", row.get("content")
    calls = read_message_calls(row, _ROLES[role], place)
    if calls and not content:
        content = ""  # null, or no part
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"messages[{number}] has content {short_repr(content)}, expected text or a list of text parts")
    text = "".join(map(str, texts))
    if not is_text(text):
        raise SpecError(f"messages[{number}] holds a lone surrogate (half of a character), which cannot be tokenized")
    return Message(_ROLES[role], text, calls, read_call_id(row, _ROLES[role], place, ids))


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
    """One answer: its text without the stop text, and the drawn tokens with their log-probs in nats.

    ``text`` is what stands beside its ``calls``; the tokens are those of the calls too. ``use`` is that of the cache,
    where it was recorded.
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
    """The bodies of the response to a request: one object, or the chunks of a stream."""

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
        """Return a chunk for each call of a choice, with the call whole."""
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
        """Return the chunk that ends a stream if usage was requested."""
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


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
