"""What a chat completion says: the one reader of the places where an OpenAI-compatible server puts words.

    content            a text, or parts: text, output_text, refusal, thinking, reasoning
    refusal            what the model says where it declines; it counts as said
    reasoning_content, reasoning, thinking, reasoning_details    a thought, which counts as thought
    tool_calls         calls that the server read, kept as text; they count where tools were offered

What a server says of an error in a reply of status 200 is read here too, and so is the word that it ends by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvaudit.core.records import ToolCall
from kvaudit.core.text import is_text, one_line
from kvaudit.core.thoughts import parted
from kvaudit.core.tool_forms.base import is_plain
from kvaudit.core.tool_forms.text import format_calls

Finish = Literal["stop", "length"]
# how an end is called here and there, lower case with underscores; what else there is (a tool call) ends no answer
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
_SAID, _THOUGHT, _REFUSED = "content", "reasoning", "refusal"
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
_PARTS = {
    **dict.fromkeys(("text", "output_text", "input_text"), _SAID),
    "refusal": _REFUSED,
    **dict.fromkeys(("thinking", "reasoning", "thought", "summary_text", "reasoning_text"), _THOUGHT),
    **dict.fromkeys(("reasoning.text", "reasoning.summary"), _THOUGHT),
}
_WORD_KEYS = ("text", "refusal", "thinking", "reasoning", "content", "summary", "value")
_DEEPEST = 8  # levels of parts in parts


class NoCompletion(Exception):
    """A body that is no chat completion. ``again``: whether the same question may get one at the next try."""

    def __init__(self, what: str, *, again: bool = False) -> None:
        super().__init__(what)
        self.again = again


@dataclass(frozen=True)
class ChatCompletion:
    """A chat completion as the server says it; nothing in it is checked but that the texts are texts.

    ``thought`` is what came in a field of its own, None where there was none. ``said_in`` names where the words of
    ``text`` stood if not in a plain ``content``: content parts | refusal | content and refusal, or reasoning where a
    thought is all there is. ``calls`` are the calls in a field of their own, one JSON object a line.
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
        """What was said behind every thought, as judges and guards read a reply."""
        return parted(self.text, opened=None)[-1].content


def finish_of(word: str) -> Finish | None:
    """The word by which a server ends an answer as ours; None for what ends none."""
    return _FINISHES.get(_spelt(word))


def is_filtered(word: str) -> bool:
    """Whether a server says by this word that it kept the answer, or the rest of it, back."""
    return _spelt(word) in FILTERED


def _spelt(word: str) -> str:
    return _PREFIX.sub("", re.sub(r"[\s-]+", "_", word.strip().lower()))


def completion_of(raw: bytes, struck: Callable[[str], str] = str) -> ChatCompletion:
    """The completion in a body; raises NoCompletion. ``struck`` takes out what must not be repeated."""
    try:
        body = json.loads(raw)
        choices = body["choices"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NoCompletion("a reply that is no chat completion") from None
    if choices is None or choices == []:
        raise NoCompletion("a reply without any choice", again=True)
    try:
        choice = choices[0]
        message = choice["message"]
        words = _words_of(message)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise NoCompletion("a reply that is no chat completion") from None
    finish, model = choice.get("finish_reason"), body.get("model")
    named = finish.get("type") if isinstance(finish, Mapping) else finish
    ended, name = (struck(w) if isinstance(w, str) and is_text(w) else "" for w in (named, model))
    text, thought, place = words
    kept = None if thought is None else struck(thought)
    calls = struck("\n".join(_call_lines(message.get("tool_calls"))))
    return ChatCompletion(struck(text), ended, name, body.get("usage"), kept, place, calls)


def _call_lines(rows: Any) -> Iterator[str]:
    """Yield each call as a JSON object; one whose arguments are no object stays a broken one, and counts as such."""
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


def _words_of(message: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """What a message says and thinks, and where the words stood; raises NoCompletion for content that is no text."""
    content, refusal = message.get("content"), message.get("refusal")
    pieces = list(_pieces(content))
    if isinstance(refusal, str) and refusal.strip():
        pieces.append((_REFUSED, refusal))
    thoughts = [text for kind, text in pieces if kind == _THOUGHT]
    if not thoughts:  # of several fields that tell one thought, the first
        told = (list(_pieces(message.get(name), _THOUGHT)) for name in _THOUGHT_FIELDS)
        thoughts = next(([text for _, text in own] for own in told if any(text for _, text in own)), [])
    said = [text for kind, text in pieces if kind == _SAID]
    refused = [text for kind, text in pieces if kind == _REFUSED]
    text = "\n".join(part for part in ("".join(said), "\n".join(refused)) if part)
    if not all(map(is_text, (text, *thoughts))):
        raise NoCompletion("a reply whose content is no text")
    thought = "".join(thoughts) or None
    return text, thought, _place(content, "".join(said), refused, thought)


def _place(content: Any, said: str, refused: Sequence[str], thought: str | None) -> str:
    if refused:
        return f"{_SAID} and {_REFUSED}" if said.strip() else _REFUSED
    if said.strip():
        return "" if isinstance(content, str) else "content parts"
    return _THOUGHT if thought else ""


def _pieces(value: Any, kind: str = _SAID, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Kind and words of every part; raises NoCompletion for what is neither a text nor parts."""
    if value is None:
        return
    if isinstance(value, str):
        yield kind, value
        return
    parts = [value] if isinstance(value, Mapping) else value
    if depth > _DEEPEST or not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise NoCompletion("a reply whose content is no text")
    for part in parts:
        own = _PARTS.get(str(part.get("type", "text")))
        if own is not None:  # a picture or a call of a tool says nothing
            words = next((part[key] for key in _WORD_KEYS if part.get(key) is not None), None)
            yield from _pieces(words, _THOUGHT if kind == _THOUGHT else own, depth + 1)


@dataclass(frozen=True)
class ServerError:
    """An error as a body tells it: its words, and the numbers and names that it has for its kind."""

    message: str
    codes: tuple[str, ...] = ()


def error_in(raw: bytes) -> ServerError | None:
    """The error that a body holds, None for one that holds none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    inner = first.get("error") if isinstance(first, Mapping) else None
    found = body.get("error") or inner
    if not found and (body.get("object") == "error" or not choices):  # as vLLM, LMDeploy and FastAPI say it
        found = body if isinstance(body.get("message"), str) else body.get("detail")
    return None if not found else _error(found)


def _error(found: Any) -> ServerError:
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, Mapping):
        return ServerError(_words(found))
    metadata = found.get("metadata")
    told = [found.get("message") or found.get("msg") or found.get("detail") or found.get("error")]
    told += [metadata.get("raw")] if isinstance(metadata, Mapping) else []
    message = ": ".join(dict.fromkeys(filter(None, map(_words, told))))
    codes = [found.get(key) for key in ("code", "status", "type")]
    return ServerError(message, tuple(str(code).lower() for code in codes if isinstance(code, int | str) and code))


def _words(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return one_line(text) if is_text(text) else ""
