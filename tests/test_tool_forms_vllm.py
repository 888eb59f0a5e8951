"""Tool forms beside vLLM's own parsers: whole answers are read alike, and a half call is a call for vLLM alone.

Its parsers of Mistral's older lists and of gpt-oss want the model's tokenizer, so they are left out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvaudit.core.tool_forms.base import TOOL_FORMS

PYTHON = os.environ.get("KVAUDIT_PYTHON_VLLM")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="KVAUDIT_PYTHON_VLLM names no python that has vllm"),
]
SCRIPT = Path(__file__).with_name("vllm_tool_parsers.py")
ANSWERS = 150  # of each form
KINDS = {
    "count": "integer",
    "ratio": "number",
    "text": "string",
    "flag": "boolean",
    "items": "array",
    "table": "object",
}
NAMES = ("get_weather", "send")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}},
        },
    }
    for name in NAMES
]
WORDS = ("amber", "naïve", "日本", "it's", 'say "hi"', "a\\b", "x < y", "{}", "[1]", "two\nlines", "</b>", "true", "7")
Call = tuple[str, dict[str, Any]]


class Form(NamedTuple):
    """A form of ours, vLLM's parser of it, how its template writes calls, and whether words may stand before them."""

    ours: str
    theirs: str
    write: Callable[[Sequence[Call]], str]
    after_words: bool = True


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def each(text: str, between: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(text % (name, dump(values)) for name, values in calls)


def tagged(around: str, value: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        bodies = ["".join(value % (key, plain(entry)) for key, entry in values.items()) for _, values in calls]
        return "\n".join(around % (name, body) for (name, _), body in zip(calls, bodies, strict=True))

    return write


def python(calls: Sequence[Call]) -> str:
    texts = (f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls)
    return f"[{', '.join(texts)}]"


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
V3, V31 = each(f"{_BEGIN}function{_SEP}%s\n```json\n%s\n```{_END}", "\n"), each(f"{_BEGIN}%s{_SEP}%s{_END}")
FORMS = {
    "hermes": Form("hermes", "hermes", each('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n")),
    "mistral": Form("mistral", "mistral", each("[TOOL_CALLS]%s[ARGS]%s")),
    "pythonic": Form("pythonic", "pythonic", python, after_words=False),
    "llama_json": Form("llama_json", "llama3_json", each('{"name": "%s", "parameters": %s}', "; "), after_words=False),
    "qwen_coder": Form(
        "qwen_coder",
        "qwen3_coder",
        tagged("<tool_call>\n<function=%s>\n%s</function>\n</tool_call>", "<parameter=%s>\n%s\n</parameter>\n"),
    ),
    "glm": Form(
        "glm", "glm45", tagged("<tool_call>%s\n%s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n")
    ),
    "deepseek_v3": Form("deepseek", "deepseek_v3", lambda calls: _CALLS % V3(calls)),
    "deepseek_v31": Form("deepseek", "deepseek_v31", lambda calls: _CALLS % V31(calls)),
}


def drawn(draw: random.Random) -> list[Call]:
    def value(kind: str) -> Any:
        return {
            "count": draw.randint(-5, 900),
            "ratio": draw.choice([0.5, 2.25, -1e3]),
            "text": " ".join(draw.sample(WORDS, draw.randint(1, 3))),
            "flag": draw.random() < 0.5,
            "items": draw.sample(WORDS, draw.randint(0, 3)),
            "table": {"key": draw.choice(WORDS), "numbers": [1, {"deep": 2}]},
        }[kind]

    # vLLM's parser of GLM reads no call without arguments
    return [
        (draw.choice(NAMES), {kind: value(kind) for kind in draw.sample(list(KINDS), draw.randint(1, 4))})
        for _ in range(draw.randint(1, 3))
    ]


def read_by_vllm(parser: str, texts: Sequence[str]) -> list[Any]:
    assert PYTHON is not None
    rows = "".join(json.dumps({"parser": parser, "tools": TOOLS, "text": text}) + "\n" for text in texts)
    done = subprocess.run([PYTHON, SCRIPT], input=rows, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()[-len(texts) :]]


def read_by_us(form: str, text: str) -> list[list[Any]]:
    return [[call.name, call.arguments] for call in TOOL_FORMS.get(form)().read(text, TOOLS).calls]


@pytest.mark.parametrize("name", FORMS)
def test_whole_answers_are_read_as_by_vllm(name: str) -> None:
    form, draw = FORMS[name], random.Random(f"whole-{name}")
    calls = [drawn(draw) for _ in range(ANSWERS)]
    starts = ("", "I will look.\n") if form.after_words else ("",)
    texts = [draw.choice(starts) + form.write(answer) for answer in calls]
    for text, answer, theirs in zip(texts, calls, read_by_vllm(form.theirs, texts), strict=True):
        assert read_by_us(form.ours, text) == theirs == [[*call] for call in answer], text


def test_half_a_call_is_none_of_ours() -> None:
    """Cut behind the first value: vLLM's readers of tags give the call without the rest, and would carry it out."""
    form = FORMS["glm"]
    text = form.write([("send", {"count": 3, "text": "amber"})])
    half = text[: text.index("<arg_key>text")]
    assert read_by_vllm(form.theirs, [half]) == [[["send", {"count": 3}]]]
    reading = TOOL_FORMS.get(form.ours)().read(half, TOOLS)
    assert (reading.calls, reading.is_broken) == ((), True)
