"""What goes over the wire: chat-completion requests read and checked, answers written; nothing here runs a model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role
from kvaudit.core.text import is_text, shown

MOST_TOKENS, MOST_CHOICES, MOST_STOPS = 32_768, 16, 16
_ROLES = {"developer": Role.SYSTEM, **{str(role): role for role in Role}}
# what changes an answer in a way that this sampler cannot: refused rather than ignored
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "none", "auto"),
    # of other servers
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "truncate_prompt_tokens": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "grammar": (None, ""),
    "json_schema": (None,),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "reasoning_effort": (None,),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. ``model`` is CHECKPOINT@POLICY or an alias; ``seed`` None leaves the draw to the server."""

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


def read_request(body: Any) -> ChatRequest:
    """The request in a JSON body; raises SpecError that says which key is wrong."""
    if not isinstance(body, Mapping):
        raise SpecError(f"the request is {shown(body)}, wanted a JSON object")
    for key, harmless in _NOT_SERVED.items():
        if key in body and body[key] not in harmless:
            raise SpecError(f"{key} is {shown(body[key])}, which this server cannot do; leave it out")
    options, model, rows = body.get("stream_options") or {}, body.get("model"), body.get("messages")
    if not isinstance(model, str) or not model or not is_text(model):
        raise SpecError(f"model is {shown(model)}, wanted text")
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"messages is {shown(rows)}, wanted a list of messages")
    return ChatRequest(
        model=model,
        messages=tuple(_message(row, number) for number, row in enumerate(rows)),
        max_tokens=_whole(body, "max_completion_tokens", 1, MOST_TOKENS) or _whole(body, "max_tokens", 1, MOST_TOKENS),
        temperature=_number(body, "temperature", 1.0, least=0.0, most=100.0),
        top_p=_number(body, "top_p", 1.0, least=1e-6, most=1.0),
        seed=_whole(body, "seed", 0, 2**63 - 1),
        choices=_whole(body, "n", 1, MOST_CHOICES) or 1,
        stop=_stops(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def _message(row: Any, number: int) -> Message:
    role = row.get("role") if isinstance(row, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise SpecError(f"messages[{number}] has role {shown(role)}, known are {', '.join(_ROLES)}")
    if row.get("tool_calls"):
        raise SpecError(f"messages[{number}] has tool_calls, which this server cannot do; write calls as text")
    return Message(_ROLES[role], _content(row.get("content"), number))


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return _whole_text(content, number)
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"messages[{number}] has content {shown(content)}, wanted text or a list of text parts")
    return _whole_text("".join(map(str, texts)), number)


def _whole_text(text: str, number: int) -> str:
    if not is_text(text):
        raise SpecError(f"messages[{number}] holds half of a character, which no tokenizer reads")
    return text


def _whole(body: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise SpecError(f"{key} is {shown(value)}, wanted a whole number from {least} to {most}")
    return value


def _number(body: Mapping[str, Any], key: str, default: float, *, least: float, most: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SpecError(f"{key} is {shown(value)}, wanted a number from {least:g} to {most:g}")
    return float(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > MOST_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise SpecError(f"stop is {shown(value)}, wanted a text or at most {MOST_STOPS} texts")
    return tuple(texts)


@dataclass(frozen=True)
class Choice:
    """One answer: its text without what ended it, and the drawn tokens with their log-probs in nats."""

    text: str
    finish_reason: str  # stop | length
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


class ReplyBodies:
    """The bodies of one answer: whole, or as chunks of a stream."""

    def __init__(self, asked: ChatRequest) -> None:
        self._asked = asked
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """A chat.completion object."""
        rows = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": _logprobs(choice) if self._asked.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": rows, "usage": usage(choices, prompt_tokens)}

    def chunk(self, index: int, delta: Mapping[str, str], finished: Choice | None = None) -> dict[str, Any]:
        """A chat.completion.chunk object; the one of a ``finished`` choice has the log-probs of all its tokens."""
        row: dict[str, Any] = {"index": index, "delta": dict(delta), "finish_reason": None}
        if finished is not None:
            row |= {"finish_reason": finished.finish_reason}
            row |= {"logprobs": _logprobs(finished)} if self._asked.logprobs else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [row]}

    def closing(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        body = {**self._head, "object": "chat.completion.chunk", "choices": list[Any]()}
        return {**body, "usage": usage(choices, prompt_tokens)}


def usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    """Tokens read and drawn."""
    drawn = sum(len(choice.logprobs) for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}


def _logprobs(choice: Choice) -> dict[str, Any]:
    pairs = zip(choice.tokens, choice.logprobs, strict=True)
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
