"""The forms of calls: literal cases, what cannot be read, and hostile answers, none of which raises."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvaudit.core.completions import parse_completion
from kvaudit.core.records import Message, Role, ToolCall, fingerprint_rows, message_rows
from kvaudit.core.tool_forms.base import LONGEST_ANSWER, TOOL_FORMS, Reading, is_plain
from kvaudit.core.tool_forms.text import FORM, as_text, list_tools, read_calls, text_without_calls
from kvaudit.reports.page.remarks import _tool_remarks

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "does f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "c": {"type": "array"},
                    "d": {"type": "boolean"},
                },
            },
        },
    }
]
F1, G = ToolCall("f", {"a": 1, "b": "x"}), ToolCall("g", {})

WRITTEN: list[tuple[str, str, tuple[ToolCall, ...], str]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', (F1,), ""),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        (F1, G),
        "Let me see.",
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}', (G,), ""),  # ended by a stop token before the tag
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "b": "x"}, "id": "call00001"}]', (F1,), ""),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "b": "x"}}, {"name": "g", "arguments": {}}]',
        (F1, G),
        "",
    ),
    ("mistral", 'Well.[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}', (F1, G), "Well."),
    ("pythonic", '[f(a=1, b="x"), g()]', (F1, G), ""),
    ("pythonic", "<|python_start|>[f(1, 'x')]<|python_end|>", (F1,), ""),
    ("pythonic", "[f(c=('u', None), d=True)]", (ToolCall("f", {"c": ["u", None], "d": True}),), ""),
    ("llama_json", '{"name": "f", "parameters": {"a": 1, "b": "x"}}', (F1,), ""),
    (
        "llama_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "x"}}; {"name": "g", "parameters": {}}',
        (F1, G),
        "",
    ),
    (
        "qwen_coder",
        "I call.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
        (F1,),
        "I call.",
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=b>\n1\n2 < 3\n</parameter>\n<parameter=c>\n[1]\n</parameter>\n"
        "<parameter=d>\nTrue\n</parameter>\n<parameter=e>\n7\n</parameter>\n</function>\n</tool_call>",
        (ToolCall("f", {"b": "1\n2 < 3", "c": [1], "d": True, "e": "7"}),),  # an unknown parameter stays text
        "",
    ),
    ("qwen_coder", "<function=g>\n</function>", (G,), ""),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n"
        "</tool_call>",
        (F1,),
        "",
    ),
    ("glm", "Yes.\n<tool_call>g\n</tool_call>", (G,), "Yes."),
    (
        "glm",
        "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        (ToolCall("f", {"b": "5"}),),
        "",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I need f.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>',
        (F1,),
        "",
    ),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1, "b": "x"}', (F1,), ""),
    ("harmony", "<|channel|>analysis<|message|>No.<|end|><|start|>assistant<|channel|>final<|message|>Hi!", (), "Hi!"),
    (
        "deepseek",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (F1, G),
        "Sure.",
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1, "b": "x"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        (F1,),
        "",
    ),
    ("text", '{"name": "f", "arguments": {"a": 1, "b": "x"}}\n{"name": "g", "arguments": {}}', (F1, G), ""),
]
HALF = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1',
        "<tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
    ],
    "mistral": ['[TOOL_CALLS] [{"name": "f", "arg', "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{"],
    "pythonic": ["<|python_start|>[f(a=1"],
    "llama_json": ['<|python_tag|>{"name": "f", "param', '{"name": "f", "parameters": {'],
    "qwen_coder": ["<tool_call>\n<function=f>\n<parameter=a>\n1", "<tool_call>\n<function=f>\n"],
    "glm": ["<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1", "<tool_call>f\n<arg_key>a"],
    "harmony": ['<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1'],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
        "<｜tool▁calls▁begin｜>",
    ],
}
DEEP = "[" * 5000
HOSTILE = [
    "",
    "\x00\x01\x1b[31m\ud800",
    '<tool_call>{"name": "f", "arguments": {"a": ' + DEEP,
    '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
    "[TOOL_CALLS] " + DEEP,
    "f(a=" + "(" * 3000 + ")",
    "[f(a=" + "-" * 4000 + "1)]",
    "<tool_call>" * 100_000,
    "<function=f>" + "<parameter=a>" * 80_000,
    "<tool_call>f" + "<arg_key>a</arg_key>" * 60_000,
    "to=functions.f" * 80_000,
    "<｜tool▁call▁begin｜>" * 60_000,
    "{" * 1_000_000,
    '{"a":' * 200_000,
    " " * 1_000_000 + "x",
    '{"name": "f", "arguments": {"a": ' + "9" * 6000 + "}}",
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f\\ud800", "arguments": {}}',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    "f(a={1, 2}, b=b'x', c=...)",
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
]


def form(name: str) -> Any:
    return TOOL_FORMS.get(name)()


@pytest.mark.parametrize(("name", "text", "calls", "words"), WRITTEN)
def test_a_call_is_read_in_its_form(name: str, text: str, calls: tuple[ToolCall, ...], words: str) -> None:
    assert form(name).read(text, TOOLS) == Reading(words, calls, False)


@pytest.mark.parametrize(("name", "text", "calls", "words"), WRITTEN)
def test_a_call_is_read_without_knowing_its_form(name: str, text: str, calls: tuple[ToolCall, ...], words: str) -> None:
    assert read_calls(text, TOOLS).calls == calls


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HALF.items() for text in texts])
def test_half_a_call_is_a_broken_call_and_not_plain_text(name: str, text: str) -> None:
    for reading in (read_calls(text, TOOLS, form(name)), read_calls(text, TOOLS)):
        assert reading.calls == ()
        assert reading.is_broken, text


@pytest.mark.parametrize("name", TOOL_FORMS.all())
def test_plain_text_is_not_read_as_a_call_in_any_form(name: str) -> None:
    for text in ("Done.", "I would call f(a=1) now.", "See <this> and [that]. {'a': 1}", "The name is f."):
        assert form(name).read(text, TOOLS) == Reading(text, (), False)


@pytest.mark.parametrize("name", TOOL_FORMS.all())
def test_a_call_in_prose_counts_in_any_form(name: str) -> None:
    text = 'Sure, here it is:\n```json\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n```'
    assert read_calls(text, TOOLS, form(name)).calls == (F1,)


@pytest.mark.parametrize("name", TOOL_FORMS.all())
def test_a_listing_that_is_repeated_is_no_call(name: str) -> None:
    for listing in (list_tools(TOOLS), f"<tool_call>{json.dumps(TOOLS[0]['function'])}</tool_call>"):
        reading = read_calls(listing, TOOLS, form(name))
        assert (reading.calls, reading.is_broken) == ((), True)


def test_half_a_call_beside_a_whole_one_leaves_the_whole_one() -> None:
    whole = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    assert read_calls(f'{whole}\n<tool_call>{{"name": "g', TOOLS, form("hermes")).calls == (F1,)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", [*TOOL_FORMS.all(), None])
@pytest.mark.timeout(20)
def test_a_hostile_answer_raises_nothing_and_gives_calls_that_a_record_holds(name: str | None, text: str) -> None:
    reading = read_calls(text, TOOLS, form(name) if name else None)
    for call in reading.calls:
        assert is_plain(call.arguments)
        json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()


_BLANKS = " " * LONGEST_ANSWER
_RUNS = [  # a beginning of a call before a run that several parts of a pattern could take
    "<｜tool▁call▁begin｜>" + _BLANKS,
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + " \n" * (LONGEST_ANSWER // 2),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n" + _BLANKS,
    ("<｜tool▁call▁begin｜>" + " " * 200) * 90,
    "[TOOL_CALLS]a[CALL_ID]" + _BLANKS,
    "[TOOL_CALLS]a[CALL_ID]" + "a" * LONGEST_ANSWER,
    ("to=functions." + "a" * 400) * 48,
    "<tool_call>" + _BLANKS,
    "f" + _BLANKS + "x",
]


@pytest.mark.parametrize("text", _RUNS, ids=range(len(_RUNS)))
def test_a_long_run_of_one_character_is_read_at_once(text: str) -> None:
    started = time.process_time()
    assert read_calls(text, TOOLS).calls == ()
    assert time.process_time() - started < 1.0


_PIECES = st.sampled_from(
    [text[start : start + 17] for texts in HALF.values() for text in texts for start in range(0, len(text), 9)]
    + [
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "<",
        ">",
        "|",
        "\n",
        "f",
        "(",
        ")",
        "=",
        ",",
        ":",
        "```",
        "</tool_call>",
        "\ud800",
    ]
)


@settings(max_examples=75, deadline=None)
@given(st.lists(_PIECES, max_size=12).map("".join))
def test_no_mixture_of_markers_raises(text: str) -> None:
    for each in TOOL_FORMS.all().values():
        each().read(text, TOOLS)
    reading = read_calls(text, TOOLS)
    assert not (reading.calls and reading.is_broken)


def test_only_the_beginning_of_a_long_answer_is_read() -> None:
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read_calls("x" * LONGEST_ANSWER + call, TOOLS).calls == ()


@pytest.mark.parametrize("name", TOOL_FORMS.all())
def test_every_form_says_what_it_is(name: str) -> None:
    each = TOOL_FORMS.get(name)
    assert each.says
    assert vars(each)["__doc__"]


# --- messages --------------------------------------------------------------------------------------------------------

CALLED = Message(Role.ASSISTANT, "", (ToolCall("f", {"a": 1, "b": "x"}, "call00001"),))
RESULT = Message(Role.TOOL, "ok", tool_call_id="call00001")


def test_a_conversation_as_text_lists_tools_and_writes_calls() -> None:
    system, user = Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Go.")
    head = f"{FORM}\n\n{list_tools(TOOLS)}"
    line = '{"name": "f", "arguments": {"a": 1, "b": "x"}}'
    assert as_text((system, user, CALLED, RESULT), TOOLS) == (
        Message(Role.SYSTEM, f"Be brief.\n\n{head}"),
        user,
        Message(Role.ASSISTANT, line),
        Message(Role.TOOL, "ok"),
    )
    assert as_text((user,), TOOLS) == (Message(Role.SYSTEM, head), user)
    # a model's own turn holds its calls already
    spoken = Message(Role.ASSISTANT, f"Sure. {line}", CALLED.tool_calls)
    assert as_text((user, spoken), ()) == (user, Message(Role.ASSISTANT, f"Sure. {line}"))
    assert text_without_calls(spoken, TOOLS) == "Sure."


def test_messages_with_calls_survive_a_record_and_others_stay_as_they_were() -> None:
    row = CALLED.to_row()
    assert row == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": "x"}, "id": "call00001"}],
    }
    assert Message.from_row(json.loads(json.dumps(row))) == CALLED
    assert RESULT.to_row() == {"role": "tool", "content": "ok", "tool_call_id": "call00001"}
    assert Message.from_row(RESULT.to_row()) == RESULT
    plain = Message(Role.USER, "Hi")
    assert list(plain.to_row()) == ["role", "content"]
    assert fingerprint_rows([plain]) == [["user", "Hi"]]
    assert fingerprint_rows([plain], TOOLS) == [["user", "Hi"], {"tools": TOOLS}]


@pytest.mark.parametrize("calls", [1, [1], [{"name": 1, "arguments": {}}], [{"name": "f", "arguments": "x"}], [{}]])
def test_a_bad_call_in_a_record_is_named(calls: Any) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        Message.from_row({"role": "assistant", "content": "", "tool_calls": calls})


def test_an_endpoint_gets_arguments_as_text() -> None:
    (row,) = message_rows([CALLED])
    function = {"name": "f", "arguments": '{"a": 1, "b": "x"}'}
    assert row["tool_calls"] == [{"id": "call00001", "type": "function", "function": function}]


def answered(calls: Any) -> str:
    choice = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    return parse_completion(json.dumps({"choices": [choice], "model": "m"}).encode()).calls


def test_calls_that_a_server_read_become_text() -> None:
    sent = [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}]
    assert read_calls(answered(sent)).calls == (F1,)
    assert read_calls(answered([{"function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}])).calls == (F1,)
    broken = read_calls(answered([{"function": {"name": "f", "arguments": '{"a": '}}]))
    assert (broken.calls, broken.is_broken) == ((), True)
    for strange in (None, 1, [1], [{}], [{"function": 1}], [{"function": {"name": 1}}]):
        assert answered(strange) == ""


def test_a_report_says_where_tools_stood_as_text() -> None:
    used = {"bfcl": {"hermes": 46, "text": 2}, "tau_bench": {"hermes": 8}, "x": {"any": 3}, "bad": 1}
    assert [line.partition(":")[0] for line in _tool_remarks({"tool_forms": used})] == [
        "TOOLS AS TEXT in bfcl (2 of 48 items)",
        "TOOLS of a template with an unknown form of calls in x (3 of 3 items)",
    ]
    assert list(_tool_remarks({})) == []
    (line,) = _tool_remarks({"tool_forms": {"bfcl": {"mistral": 2}}, "tool_system_moved": True})
    assert line.startswith("SYSTEM PROMPTS are part of the user's message where tools are offered")
