"""The forms with JSON arguments: Hermes, Llama 3.1, Mistral, DeepSeek and gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, call_in, decode_at
from kvaudit.core.tool_forms.text import Pythonic

_HERMES_OPEN, _HERMES_CLOSE = re.compile(r"<tool_call>"), re.compile(r"\s*</tool_call>")


class Hermes(ToolForm):
    """The form of Hermes, Qwen2.5 and Qwen3: JSON objects in <tool_call> tags."""

    name = "hermes"
    says = "JSON in <tool_call> tags"
    marks = ("<tool_call>", "arguments")
    others = ("<function=", "<arg_key>")
    openings = ("<tool_call>",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _HERMES_OPEN.finditer(text):
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue  # half a call, or a tag in prose
            call = call_in(value)
            if call is not None:
                closing = _HERMES_CLOSE.match(text, end)
                yield FoundCall(match.start(), closing.end() if closing else end, *call)


_LLAMA_TAG = "<|python_tag|>"


class LlamaJson(ToolForm):
    """The form of Llama 3.1: bare JSON objects with name and parameters."""

    name = "llama_json"
    says = "bare JSON objects with name and parameters"
    marks = ("<|start_header_id|>", "parameters")
    openings = (_LLAMA_TAG,)

    @classmethod
    def recognises(cls, template: str) -> bool:
        return super().recognises(template) and "tool_call" in template and not Pythonic.recognises(template)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        tag = text.find(_LLAMA_TAG)
        start = tag if tag >= 0 else len(text) - len(text.lstrip())
        offset = start + len(_LLAMA_TAG) if tag >= 0 else start
        while offset < len(text):
            value, end = decode_at(text, offset)
            call = call_in(value)
            if call is None:
                return
            yield FoundCall(start, end, *call)
            # objects follow one another, between them blanks and semicolons
            rest = text[end:].lstrip(" \t\r\n;")
            start = end
            offset = len(text) - len(rest)


_MISTRAL_OPEN = re.compile(r"\[TOOL_CALLS\]\s*")
_MISTRAL_NAMED = re.compile(r"([\w.-]{1,200})\s*+(?:\[CALL_ID\]\s*+[\w-]{0,200}+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")


class Mistral(ToolForm):
    """The form of Mistral: a JSON list after [TOOL_CALLS]; newer models write NAME[ARGS]ARGUMENTS for each call."""

    name = "mistral"
    says = "a list of JSON objects behind [TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    openings = ("[TOOL_CALLS]",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _MISTRAL_OPEN.finditer(text):
            named = _MISTRAL_NAMED.match(text, match.end())
            try:
                value, end = decode_at(text, named.end() if named else match.end())
            except ValueError:
                continue
            if named:
                yield FoundCall(match.start(), end, named[1], value)
                continue
            calls = [call for call in map(call_in, value if isinstance(value, list) else [value]) if call is not None]
            for number, call in enumerate(calls):
                # the first call takes the text of the whole list
                yield FoundCall(match.start() if number == 0 else end, end, *call)


_DEEPSEEK_BEGIN, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
# in V3 the kind of the tool comes first, then its name and a fence around the arguments; repeats are possessive where
# a run of blanks could be divided between two of them, or an answer of blanks would take hours
_DEEPSEEK_V3 = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*+([^\n`{<]{1,200}+)\n\s*+```(?:json)?\s*+"
)
_DEEPSEEK_V31 = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*+([^<\n]{1,200}+)\s*+<｜tool▁sep｜>\s*+(?=\{)"
)
_DEEPSEEK_END = re.compile(r"(?:\s*```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")
_DEEPSEEK_OPEN = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>")


class DeepSeek(ToolForm):
    """The form of DeepSeek V3, R1 and V3.1: calls between separators."""

    name = "deepseek"
    says = "names and JSON between separators"
    marks = (_DEEPSEEK_BEGIN, _DEEPSEEK_SEPARATOR)
    openings = (_DEEPSEEK_BEGIN, "<｜tool▁calls▁begin｜>")

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for opening in _DEEPSEEK_OPEN.finditer(text):
            match = _DEEPSEEK_V3.match(text, opening.start()) or _DEEPSEEK_V31.match(text, opening.start())
            if match is None:
                continue
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue
            closing = _DEEPSEEK_END.match(text, end)
            yield FoundCall(match.start(), closing.end() if closing else end, match[1].strip(), value)


_HARMONY_CALL = re.compile(r"to=functions\.([\w.-]{1,200})[^{}\n]{0,200}?<\|message\|>")
_HARMONY_FINAL = re.compile(r"<\|channel\|>final[^\n]{0,40}?<\|message\|>")
_HARMONY_ENDS = re.compile(r"<\|(?:end|return|call|start)\|>")


class Harmony(ToolForm):
    """The form of gpt-oss: messages to a function in the commentary channel."""

    name = "harmony"
    says = "messages to functions in channels"
    marks = ("<|channel|>", "functions.")
    openings = ("to=functions.",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _HARMONY_CALL.finditer(text):
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue
            yield FoundCall(match.start(), end, match[1], value)

    def words(self, text: str, calls: Sequence[FoundCall]) -> str:
        """Return the text of the final channel; the other channels are thoughts and calls."""
        if "<|channel|>" not in text and not calls:
            return text.strip()
        final = _HARMONY_FINAL.search(text)
        return "" if final is None else _HARMONY_ENDS.split(text[final.end() :], maxsplit=1)[0].strip()
