"""The reader of chat completions, the replies of OpenAI-compatible servers: their text, thought, end and errors.

The fields of a reply's message, and what they hold:

    content            a text, or a list of parts: text, output_text, refusal, thinking, reasoning
    refusal            the model's text when it declines; part of the answer
    reasoning_content, reasoning, thinking, reasoning_details    a thought

In a transcript a thought is a message with its own role, hidden from suites and judges. Only the beginning of an answer
can be a thought: a later ``<think>`` is part of the answer and graded with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.text import is_text, one_line
from kvaudit.core.tool_forms.base import is_plain
from kvaudit.core.tool_forms.text import format_calls

Finish = Literal["stop", "length"]
# finish reasons of many servers, lower case with underscores; any other (such as a tool call) ends no answer
_FINISHES: Mapping[str, Finish] = {
    **dict.fromkeys(
        (
            *("stop", "stopped", "end", "eos", "eos_token", "eos_token_id", "eos_reached", "end_of_sequence", "eot"),
            *("end_turn", "end_of_turn", "stop_sequence", "stop_sequences", "stop_str", "stop_string", "stop_token"),
            *("stop_token_id", "stop_word", "stop_words", "complete", "completed", "finish", "finished", "done"),
            "natural",
        ),
        "stop",
    ),
    **dict.fromkeys(
        (
            *("length", "max_tokens", "max_new_tokens", "max_output_tokens", "max_completion_tokens", "max_length"),
            *("limit", "token_limit", "length_limit", "model_length", "model_context_window_exceeded"),
            *("context_length", "context_length_exceeded"),
        ),
        "length",
    ),
}  # fmt: skip
FILTERED = ("content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "refusal")
_PREFIX = re.compile(r"^(finish_reason|finishreason|finish|stop_reason)_(?=.)")
_CONTENT, _THOUGHT, _REFUSAL = "content", "reasoning", "refusal"
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
_PART_KINDS = {
    **dict.fromkeys(("text", "output_text", "input_text"), _CONTENT),
    "refusal": _REFUSAL,
    **dict.fromkeys(("thinking", "reasoning", "thought", "summary_text", "reasoning_text"), _THOUGHT),
    **dict.fromkeys(("reasoning.text", "reasoning.summary"), _THOUGHT),
}
_TEXT_KEYS = ("text", "refusal", "thinking", "reasoning", "content", "summary", "value")
_MAX_DEPTH = 8  # levels of parts in parts
THOUGHT_OPENING, THOUGHT_CLOSING = "<think>", "</think>"


class NoCompletion(Exception):
    """The error that a reply is no chat completion.

    ``is_retryable`` is True if the same request may succeed when it is sent again.
    """

    def __init__(self, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable


@dataclass(frozen=True)
class ChatCompletion:
    """A chat completion as the server sent it.

    Its texts are known to be strings that UTF-8 can encode; nothing else is checked. ``thought`` is a thought that the
    server sent apart from the answer. ``calls`` are the tool calls, a line of JSON each. ``said_in`` is "" if the
    answer is a plain text; else it says where the text was found: "content parts", "refusal", "content and refusal",
    or "reasoning" (a thought without an answer).
    """

    text: str
    finish_reason: str
    model: str
    usage: Any
    thought: str | None = None
    said_in: str = ""
    calls: str = ""

    @property
    def answer(self) -> str:
        """The text without a thought at its beginning."""
        return split_thought(self.text, is_open=None)[-1].content

    @property
    def is_withheld(self) -> bool:
        """Whether the model marked its reply as a refusal, or the server's content filter stopped the reply."""
        return is_filtered(self.finish_reason) or _REFUSAL in self.said_in


def parse_finish(word: str) -> Finish | None:
    """Return "stop" or "length" for a server's finish reason; None for any other reason, such as a tool call."""
    return _FINISHES.get(_normalise(word))


def is_filtered(word: str) -> bool:
    """Return whether a finish reason means that the server filtered the answer, or the rest of it."""
    return _normalise(word) in FILTERED


def _normalise(word: str) -> str:
    return _PREFIX.sub("", re.sub(r"[\s-]+", "_", word.strip().lower()))


def parse_completion(raw: bytes, redact: Callable[[str], str] = str) -> ChatCompletion:
    """Parse the body of a reply; ``redact`` is applied to every text. Raises NoCompletion if it is no completion."""
    try:
        body = json.loads(raw)
        choices = body["choices"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NoCompletion("a reply that is no chat completion") from None
    if choices is None or choices == []:
        raise NoCompletion("a reply without any choice", is_retryable=True)
    if isinstance(choices, list) and len(choices) > 1:  # the server decides which comes first
        raise NoCompletion(f"a reply of {len(choices)} choices where one was asked for")
    try:
        choice = choices[0]
        text, thought, said_in = _parse_message(choice["message"])
        finish, model = choice.get("finish_reason"), body.get("model")
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise NoCompletion("a reply that is no chat completion") from None
    finish = finish.get("type") if isinstance(finish, Mapping) else finish
    finish, model = (redact(word) if isinstance(word, str) and is_text(word) else "" for word in (finish, model))
    thought = None if thought is None else redact(thought)
    calls = redact("\n".join(_call_lines(choice["message"].get("tool_calls"))))
    return ChatCompletion(redact(text), finish, model, body.get("usage"), thought, said_in, calls)


def _call_lines(rows: Any) -> Iterator[str]:
    """Yield each tool call of a message as a line of JSON with name and arguments.

    If the arguments are not a JSON object, they are copied unchanged, and the line is not valid JSON.
    """
    for row in rows if isinstance(rows, list) else []:
        function = row.get("function") if isinstance(row, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not is_text(name):
            continue
        raw = arguments if isinstance(arguments, str) else ""
        try:
            arguments = json.loads(raw) if raw else arguments
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict) and is_plain(arguments):
            yield format_calls([ToolCall(name, arguments)])
        else:
            yield f'{{"name": {json.dumps(name)}, "arguments": {raw if is_text(raw) else ""}'


def _parse_message(message: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Return a message's text, its thought or None, and which fields held the text (``ChatCompletion.said_in``).

    Raises NoCompletion for content that is not text.
    """
    content, refusal = message.get("content"), message.get("refusal")
    texts = list(_texts(content))
    if isinstance(refusal, str) and refusal.strip():
        texts.append((_REFUSAL, refusal))
    thoughts = [text for kind, text in texts if kind == _THOUGHT]
    if not thoughts:  # several fields may repeat one thought; the first with text counts
        fields = (list(_texts(message.get(name), _THOUGHT)) for name in _THOUGHT_FIELDS)
        thoughts = next(([text for _, text in field] for field in fields if any(text for _, text in field)), [])
    answer = "".join(text for kind, text in texts if kind == _CONTENT)
    refusals = [text for kind, text in texts if kind == _REFUSAL]
    text = "\n".join(section for section in (answer, "\n".join(refusals)) if section)
    if not all(map(is_text, (text, *thoughts))):
        raise NoCompletion("a reply whose content is no text")
    thought = "".join(thoughts) or None
    return text, thought, _text_field(content, answer, refusals, thought)


def _text_field(content: Any, answer: str, refusals: Sequence[str], thought: str | None) -> str:
    if refusals:
        return f"{_CONTENT} and {_REFUSAL}" if answer.strip() else _REFUSAL
    if answer.strip():
        return "" if isinstance(content, str) else "content parts"
    return _THOUGHT if thought else ""


def _texts(value: Any, kind: str = _CONTENT, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for each part of a message's content; kinds are content, reasoning and refusal.

    If ``value`` is a plain text, its kind is the given ``kind``. ``depth`` counts the levels of parts inside parts.
    Raises NoCompletion for a value that is neither text nor parts.
    """
    if value is None:
        return
    if isinstance(value, str):
        yield kind, value
        return
    parts = [value] if isinstance(value, Mapping) else value
    if depth > _MAX_DEPTH or not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise NoCompletion("a reply whose content is no text")
    for part in parts:
        part_kind = _PART_KINDS.get(str(part.get("type", "text")))
        if part_kind is not None:  # an image or a tool call has no text
            text = next((part[key] for key in _TEXT_KEYS if part.get(key) is not None), None)
            yield from _texts(text, _THOUGHT if kind == _THOUGHT else part_kind, depth + 1)


# --- errors in a body ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerError:
    """An error in the body of a reply: its message, and its codes and types in lower case."""

    message: str
    codes: tuple[str, ...] = ()


def parse_error(raw: bytes) -> ServerError | None:
    """Return the error that the body of a reply holds, or None."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    error = body.get("error") or (first.get("error") if isinstance(first, Mapping) else None)
    if not error and (body.get("object") == "error" or not choices):  # the form of vLLM, LMDeploy and FastAPI
        error = body if isinstance(body.get("message"), str) else body.get("detail")
    return _server_error(error) if error else None


def _server_error(error: Any) -> ServerError:
    if isinstance(error, list) and error:
        error = error[0]
    if not isinstance(error, Mapping):
        return ServerError(_error_text(error))
    metadata = error.get("metadata")
    texts = [error.get("message") or error.get("msg") or error.get("detail") or error.get("error")]
    texts += [metadata.get("raw")] if isinstance(metadata, Mapping) else []
    message = ": ".join(dict.fromkeys(filter(None, map(_error_text, texts))))
    codes = [error.get(key) for key in ("code", "status", "type")]
    return ServerError(message, tuple(str(code).lower() for code in codes if isinstance(code, int | str) and code))


def _error_text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return one_line(text) if is_text(text) else ""


# --- thoughts --------------------------------------------------------------------------------------------------------


def split_thought(text: str, *, is_open: bool | None) -> tuple[Message, ...]:
    """Split an answer's text into messages of thought and answer; the answer is empty if the thought is not closed.

    Some chat templates end the prompt with the opening ``<think>``, so that the text has only the closing tag;
    ``is_open`` says whether this one does. None means that the template is unknown; then a text with a closing tag
    before any opening one counts as the answer to such a prompt.
    """
    starts_open = closes_unopened_thought(text) if is_open is None else is_open
    if not starts_open and not text.lstrip().startswith(THOUGHT_OPENING):
        return (Message(Role.ASSISTANT, text),)
    thought, closing, answer = text.partition(THOUGHT_CLOSING)
    return Message(Role.THOUGHT, thought + closing), Message(Role.ASSISTANT, answer)


def closes_unopened_thought(text: str) -> bool:
    """Return whether a text has a closing ``</think>`` before any opening ``<think>``."""
    before, closing, _ = text.partition(THOUGHT_CLOSING)
    return bool(closing) and THOUGHT_OPENING not in before


def starts_with_thought(text: str) -> bool:
    """Return whether an answer begins with a thought, either after ``<think>`` or ended by a lone ``</think>``."""
    return text.lstrip().startswith(THOUGHT_OPENING) or closes_unopened_thought(text)


def thought_message(text: str, *, is_closed: bool) -> Message:
    """Return a message that holds a thought between its tags; ``is_closed`` is False for a thought that was cut off.

    It is meant for thoughts that a server sends in a separate field, without tags.
    """
    return Message(Role.THOUGHT, f"{THOUGHT_OPENING}{text}{THOUGHT_CLOSING if is_closed else ''}")


def without_thoughts(transcript: Sequence[Message]) -> tuple[Message, ...]:
    """Return a transcript without thoughts, as suites, environments and judges see it."""
    return tuple(message for message in transcript if message.role is not Role.THOUGHT)


def answers_with_thoughts(transcript: Sequence[Message]) -> Iterator[tuple[str | None, str]]:
    """Yield the thought (or None) and the text of every answer in a transcript."""
    thought = None
    for message in transcript:
        if message.role is Role.ASSISTANT:
            yield thought, message.content
        thought = message.content if message.role is Role.THOUGHT else None
