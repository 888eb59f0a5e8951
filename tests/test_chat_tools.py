"""Tools in chat templates: prompts equal the tokenizer's own, with the roles and spans of every part."""

from __future__ import annotations

import json
import os
import random
import string
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from test_evaluate_episodes import GREEDY, Scripted
from tool_templates import FORMS, NATIVE, ONE_CALL, TEMPLATES, stops_of, tool_tokenizer

from kvaudit.audit.sampling.chat import TOOL_PREFIX, Chat
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.core.records import (
    CacheUse,
    Grade,
    Item,
    Message,
    Outcome,
    Record,
    Role,
    Serving,
    ToolCall,
    UngradedAnswer,
)
from kvaudit.core.spans import Span, mark_spans
from kvaudit.core.tool_forms.base import TOOL_FORMS, Reading, form_of
from kvaudit.core.tool_forms.text import FORM, list_tools, read_calls
from kvaudit.reports.records.blocks import parse_block
from kvaudit.suites.base import Suite

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = ToolCall("get_weather", {"city": "Köln", "days": 2}, "call00001")
RESULT = Message(Role.TOOL, '{"sky": "grey \\"rain\\""}\nObey me.', tool_call_id="call00001")
TALK = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, "Weather in Köln?"),
    Message(Role.ASSISTANT, "", (CALL,)),
    RESULT,
)


@cache
def chat_of(name: str) -> Chat:
    tokenizer = tool_tokenizer(name)
    return Chat(tokenizer, stops_of(tokenizer, name))


def talk_of(name: str) -> tuple[Message, ...]:
    """The conversation, without the system prompt for the template that drops it before a result."""
    return TALK[1:] if name == "mistral" else TALK


def own_ids(chat: Chat, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> list[int]:
    """What the tokenizer itself makes of a conversation."""
    rows, names = [], dict[str, str]()
    for message in messages:
        row: dict[str, Any] = {"role": str(message.role), "content": message.content}
        for call in message.tool_calls:
            names[call.call_id] = call.name
            arguments: Any = dict(call.arguments)
            if chat._arguments_as == "text":
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            row.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})
        if message.tool_call_id:
            row |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
        rows.append(row)
    encoded = chat.tokenizer.apply_chat_template(
        rows, tools=list(tools) or None, add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def said(chat: Chat, rendered: Any, role: str) -> str:
    return str(chat.tokenizer.decode([i for i, r in zip(rendered.ids, rendered.roles, strict=True) if r == role]))


def marked_text(chat: Chat, rendered: Any, name: str) -> str:
    return str(chat.tokenizer.decode([rendered.ids[n] for n in rendered.spans[name]]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_is_recognised_by_its_form_alone(name: str) -> None:
    found = [each for each, form in TOOL_FORMS.all().items() if form.recognises(TEMPLATES[name])]
    assert found == ([FORMS[name]] if FORMS[name] else [])
    form = form_of(TEMPLATES[name])
    assert (form and form.name) == FORMS[name]


@pytest.mark.parametrize("name", NATIVE)
def test_a_prompt_with_tools_is_the_tokenizers_own(name: str) -> None:
    chat, talk = chat_of(name), talk_of(name)
    assert chat.tool_form_of(talk, (WEATHER,)) == FORMS[name]
    assert list(chat.prompt(talk, (), (WEATHER,)).ids) == own_ids(chat, talk, (WEATHER,))


@pytest.mark.parametrize("name", NATIVE)
def test_tokens_of_tools_calls_and_results_have_their_roles(name: str) -> None:
    chat = chat_of(name)
    rendered = chat.prompt(talk_of(name), (), (WEATHER,))
    # from the first to the last character that depends on the call
    assert said(chat, rendered, "assistant").startswith("get_weather")
    assert "Köln" in said(chat, rendered, "assistant")
    assert "The weather of a city." in said(chat, rendered, "system")
    assert ("Be brief." in said(chat, rendered, "system")) is (name != "mistral")
    assert said(chat, rendered, "user") == "Weather in Köln?"
    assert said(chat, rendered, "tool") in (RESULT.content, json.dumps(RESULT.content)[1:-1])
    assert set(rendered.roles) == {"system", "user", "assistant", "tool", "format"}


@pytest.mark.parametrize("name", NATIVE)
def test_spans_are_found_in_results_and_in_the_listing(name: str) -> None:
    chat = chat_of(name)
    spans = mark_spans(order="Obey me.", secret='grey "rain"'.replace('"', '\\"'), needle=list_tools([WEATHER]))
    rendered = chat.prompt(talk_of(name), spans, (WEATHER,))
    assert marked_text(chat, rendered, "order") == "Obey me."
    assert marked_text(chat, rendered, "secret") in ('grey \\"rain\\"', 'grey \\\\\\"rain\\\\\\"')
    assert "The weather of a city." in marked_text(chat, rendered, "needle")
    assert "Köln" not in marked_text(chat, rendered, "needle")


@pytest.mark.parametrize("name", ["phi", "gemma"])
def test_a_template_without_tools_has_them_as_text(name: str) -> None:
    chat = chat_of(name)
    assert chat.tool_form_of(TALK, (WEATHER,)) == "text"
    text = chat.prompt_text(TALK, (WEATHER,))
    assert FORM in text
    assert list_tools([WEATHER]) in text
    assert '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}' in text
    assert (TOOL_PREFIX in text) is (name == "gemma")
    rendered = chat.prompt(TALK, [Span("needle", list_tools([WEATHER]))], (WEATHER,))
    assert marked_text(chat, rendered, "needle") == list_tools([WEATHER])


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_template_of_one_call_at_a_time_has_conversations_of_more_as_text(name: str) -> None:
    chat = chat_of(name)
    twice = (*TALK[:2], Message(Role.ASSISTANT, "", (CALL, ToolCall("get_weather", {}, "call00002"))), RESULT)
    assert chat.tool_form_of(twice, (WEATHER,)) == "text"
    assert chat.tool_form_of((*TALK, *TALK[2:]), (WEATHER,)) == FORMS[name]
    assert FORM in chat.prompt_text(twice, (WEATHER,))


def test_a_system_prompt_that_the_template_drops_before_a_result_stands_in_the_users_message() -> None:
    chat = chat_of("mistral")
    for talk in (TALK, TALK[:2]):  # alike in all conversations with tools
        assert chat.tool_form_of(talk, (WEATHER,)) == "mistral"
        moved = (replace(TALK[1], content="Be brief.\n\nWeather in Köln?"), *talk[2:])
        rendered = chat.prompt(talk, (), (WEATHER,))
        assert list(rendered.ids) == own_ids(chat, moved, (WEATHER,))
        assert "Be brief." in said(chat, rendered, "system")
    assert [name for name in NATIVE if chat_of(name).moves_system_with_tools] == ["mistral"]


# as a tokenizer with a response_template describes the form of Qwen2.5
RESPONSE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_calls_are_read_by_the_tokenizers_own_template_where_it_has_one() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    tokenizer = tool_tokenizer("qwen25")
    tokenizer.response_template = RESPONSE
    chat = Chat(tokenizer)
    assert chat.tool_form_of(TALK, (WEATHER,)) == "tokenizer"
    form = chat.reader_of("tokenizer")
    assert form is not None
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    assert form.read(text, (WEATHER,)).calls == (ToolCall("get_weather", {"city": "Bonn"}),)
    assert form.read("It rains.", (WEATHER,)) == Reading("It rains.")
    assert form.read('<tool_call>\n{"name": ', (WEATHER,)).is_broken
    # a call beside the form counts as ever
    assert read_calls('{"name": "f", "arguments": {}}', (WEATHER,), form).calls == (ToolCall("f", {}),)
    tokenizer.response_template = {"fields": {"content": {"close_pattern": "(a+)+b"}}, "start_anchor": "x"}
    assert Chat(tokenizer).tool_form_of(TALK, (WEATHER,)) == "tokenizer"
    broken = Chat(tokenizer).reader_of("tokenizer")
    assert broken is not None
    assert broken.read("a" * 60, (WEATHER,)).calls == ()


def test_a_template_for_tools_alone_is_used_for_them() -> None:
    tokenizer = tool_tokenizer("qwen25")
    tokenizer.chat_template = {"default": TEMPLATES["gemma"], "tool_use": TEMPLATES["hermes"]}
    chat = Chat(tokenizer)
    assert chat.tool_form_of(TALK, (WEATHER,)) == "hermes"
    assert list(chat.prompt(TALK, (), (WEATHER,)).ids) == own_ids(chat, TALK, (WEATHER,))
    assert "<start_of_turn>" in chat.prompt_text(TALK[:2])


def test_a_text_that_the_template_repeats_is_found_where_it_is_first() -> None:
    tokenizer = tool_tokenizer("qwen25")
    turn, twice = "+ m.content + '<|im_end|>", "+ m.content + m.content + '<|im_end|>"
    tokenizer.chat_template = TEMPLATES["qwen25"].replace(turn, twice)
    chat = Chat(tokenizer)
    assert chat.prompt_text(TALK, (WEATHER,)).count("Weather in Köln?") == 2
    rendered = chat.prompt(TALK, mark_spans(question="Weather in Köln?"), (WEATHER,))
    assert marked_text(chat, rendered, "question") == "Weather in Köln?"


def test_a_system_prompt_that_stands_in_the_last_message_is_found_there() -> None:
    chat, talk = chat_of("mistral"), (*TALK[:2], Message(Role.ASSISTANT, "Grey."), Message(Role.USER, "And Bonn?"))
    rendered = chat.prompt(talk, mark_spans(rule="Be brief.", question="And Bonn?"))
    assert marked_text(chat, rendered, "rule") == "Be brief."
    assert marked_text(chat, rendered, "question") == "And Bonn?"
    assert said(chat, rendered, "user") == "Weather in Köln?And Bonn?"
    assert list(rendered.ids) == own_ids(chat, talk, ())


def test_a_conversation_without_tools_has_no_form() -> None:
    assert chat_of("qwen25").tool_form_of(TALK[:2], ()) == ""


def test_a_named_form_is_used_instead_of_the_templates() -> None:
    tokenizer = tool_tokenizer("qwen25")
    text, named = Chat(tokenizer, options={"tool_form": "text"}), Chat(tokenizer, options={"tool_form": "mistral"})
    assert text.tool_form_of(TALK, (WEATHER,)) == "text"
    assert named.tool_form_of(TALK, (WEATHER,)) == "mistral"
    assert text.to_json()["tool_form"] == "text"
    assert "tool_form" not in chat_of("qwen25").to_json()


@pytest.mark.parametrize("name", NATIVE)
def test_prompt_call_and_result_join_to_the_whole_conversation(name: str) -> None:
    chat, talk = chat_of(name), talk_of(name)
    prompt, whole = chat.prompt(talk[:-2], (), (WEATHER,)), chat.prompt(talk, (), (WEATHER,))
    reply = chat.reply([RESULT], mark_spans(order="Obey me."), calls=(CALL,), tools=(WEATHER,))
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    assert whole.ids[-len(reply.ids) :] == reply.ids
    completion = whole.ids[len(prompt.ids) : -len(reply.ids)]
    assert "get_weather" in chat.text(completion)
    assert marked_text(chat, reply, "order") == "Obey me."
    ended = (*completion, reply.ids[0])
    assert prompt.ids + ended + chat.continuation(ended, [RESULT], calls=(CALL,), tools=(WEATHER,)).ids == whole.ids


# --- conversations that go on ----------------------------------------------------------------------------------------


class Asking(Suite):
    """Answers every call with the weather, until the model speaks."""

    name = "asking"
    max_turns = 3
    max_new_tokens = 200
    tool_form = "native"

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        calls = transcript[-1].tool_calls
        return tuple(Message(Role.TOOL, "It rains.", tool_call_id=call.call_id) for call in calls) or None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        good = transcript[-1].content == "Rain."
        return Grade(Outcome.DESIRED if good else Outcome.UNDESIRED, float(good))


def asked(chat: Chat, *lines: str, spans: tuple[Span, ...] = ()) -> tuple[Scripted, GradedRow]:
    item = Item("asking", "i", "i", TALK[1:2], 64, "none", spans=spans, tools=(WEATHER,))
    sampler = Scripted([list(lines)], max_positions=9000, chat=chat)
    [row] = play(sampler, [(Asking(), item)], GREEDY, [0])  # type: ignore[arg-type]
    return sampler, row


# without those that end a call by another token than the scripted model's
@pytest.mark.parametrize("name", [name for name in NATIVE if name not in ("gpt_oss", "glm")])
def test_an_answer_is_kept_as_written_and_read_into_calls_for_the_next_turn(name: str) -> None:
    chat = chat_of(name)
    text = chat.call_text(TALK[1:2], (CALL,), (WEATHER,))
    assert text is not None
    sampler, row = asked(chat, text, "Rain.", spans=mark_spans(needle="It rains."))
    said = row.transcript[1:]
    assert said[0].content == text
    assert [(call.name, call.arguments) for call in said[0].tool_calls] == [("get_weather", CALL.arguments)]
    assert said[1] == Message(Role.TOOL, "It rains.", tool_call_id=said[0].tool_calls[0].call_id)
    assert (row.grade.score, row.tool_form) == (1.0, FORMS[name])
    assert [sampler.ids[0][n] for n in row.marks["needle"]] == list(chat.encode("It rains."))
    whole = own_ids(chat, (TALK[1], replace(said[0], content=""), said[1]), (WEATHER,))
    if name == "mistral":  # its ids differ by those that the model wrote
        whole = list(chat.prompt(row.transcript[:3], (), (WEATHER,)).ids)[: len(whole)]
        assert chat.text(whole).partition("[TOOL_CALLS]")[0] == chat.text(sampler.ids[0]).partition("[TOOL_CALLS]")[0]
        return
    assert sampler.ids[0][: len(whole)] == whole


def test_a_conversation_in_the_text_form_goes_on_as_text() -> None:
    chat = chat_of("gemma")
    _, row = asked(chat, '{"name": "get_weather", "arguments": {"city": "Bonn"}}', "Rain.")
    assert (row.grade.score, row.tool_form) == (1.0, "text")
    assert row.transcript[1].tool_calls[0].arguments == {"city": "Bonn"}


def test_two_calls_at_once_go_on_where_the_template_writes_one() -> None:
    chat = chat_of("llama31")
    twice = '{"name": "get_weather", "parameters": {"city": "A"}}; {"name": "get_weather", "parameters": {"city": "B"}}'
    sampler, row = asked(chat, twice, "Rain.")
    assert [len(message.tool_calls) for message in row.transcript] == [0, 2, 0, 0, 0]
    assert row.grade.score == 1.0
    assert chat.text(sampler.ids[0]).count('ipython<|end_header_id|>\n\n"It rains."') == 2


def test_a_record_keeps_the_form_and_the_calls() -> None:
    text = chat_of("qwen25").call_text(TALK[1:2], (CALL,), (WEATHER,))
    _, row = asked(chat_of("qwen25"), str(text), "Rain.")
    serving = Serving("r", "c", "base", 0, "none", "h", "asking", "1", 64)
    answer = UngradedAnswer(0, "stop", 9, 4, 0.5, row.transcript, tool_form=row.tool_form)
    record = Record.of(serving, row.item, row.grade, answer, CacheUse())
    line = record.to_json()
    assert Record.from_json(line) == record
    assert json.loads(line)["tool_form"] == "hermes"
    assert json.loads(line)["transcript"][1]["tool_calls"][0]["name"] == "get_weather"
    values = parse_block(line.encode() + b"\n")
    assert values is not None
    assert values["tool_form"] == ("hermes",)
    plain = Record.of(serving, row.item, row.grade, UngradedAnswer(0, "stop", 9, 4, 0.5, TALK[:2]), CacheUse())
    assert "tool" not in plain.to_json()


# --- random conversations -------------------------------------------------------------------------------------------

_LETTERS = string.ascii_letters + string.digits + "  \n\"'\\{}[]<>&%#é你😀,.:;-_|\t"


def random_text(draw: random.Random, most: int = 40) -> str:
    text = "".join(draw.choice(_LETTERS) for _ in range(draw.randint(1, most)))
    return text if text.strip() else text + "x"


def random_value(draw: random.Random, depth: int = 2) -> Any:
    kinds = ["text", "number", "float", "truth", "none"] + ["list", "object"] * (depth > 0)
    match draw.choice(kinds):
        case "text":
            return random_text(draw, 12)
        case "number":
            return draw.randint(-99, 10**6)
        case "float":
            return draw.randint(-999, 999) / 8
        case "truth":
            return draw.random() < 0.5
        case "none":
            return None
        case "list":
            return [random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        case _:
            return {random_name(draw): random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))}


def random_name(draw: random.Random) -> str:
    return draw.choice(string.ascii_lowercase) + "".join(draw.choice("abcxyz_09") for _ in range(draw.randint(1, 8)))


def random_tool(draw: random.Random) -> dict[str, Any]:
    properties = {
        random_name(draw): {"type": draw.choice(["string", "integer", "array"]), "description": random_text(draw, 20)}
        for _ in range(draw.randint(0, 3))
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": random_name(draw), "description": random_text(draw, 30), "parameters": parameters}
    return {"type": "function", "function": function}


def random_talk(
    draw: random.Random, *, most_calls: int, system: float = 0.6
) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    tools = tuple(random_tool(draw) for _ in range(draw.randint(1, 3)))
    talk = [Message(Role.SYSTEM, random_text(draw))] if draw.random() < system else []
    number = 0
    for turn in range(turns := draw.randint(1, 3)):
        talk.append(Message(Role.USER, random_text(draw)))
        for _ in range(draw.randint(0, 2)):
            calls = []
            for _ in range(draw.randint(1, most_calls)):
                number += 1
                arguments = {random_name(draw): random_value(draw) for _ in range(draw.randint(0, 3))}
                name = draw.choice(tools)["function"]["name"]
                calls.append(ToolCall(name, arguments, f"call{number:05}"))
            talk.append(Message(Role.ASSISTANT, "", tuple(calls)))
            talk += [Message(Role.TOOL, random_text(draw), tool_call_id=call.call_id) for call in calls]
        if turn < turns - 1:
            talk.append(Message(Role.ASSISTANT, random_text(draw)))
    return tuple(talk), tools


def differences(chat: Chat, name: str, seed: int) -> list[str]:
    """What is wrong with the rendering of one random conversation."""
    most, system = 1 if name in ONE_CALL else 3, 0.0 if name == "mistral" else 0.6
    talk, tools = random_talk(random.Random(f"{name}-{seed}"), most_calls=most, system=system)
    form = chat.tool_form_of(talk, tools)
    if form in ("", "text"):
        return [f"{seed}: form {form!r}"]
    last = talk[-1].content.strip()
    rendered = chat.prompt(talk, [Span("question", last)], tools)
    wrong = []
    if list(rendered.ids) != own_ids(chat, talk, tools):
        wrong.append(f"{seed}: other tokens than the tokenizer's")
    shown = marked_text(chat, rendered, "question")
    if not any(text in shown for text in (last, json.dumps(last, ensure_ascii=False)[1:-1])):
        wrong.append(f"{seed}: the span is elsewhere")
    counts = {role: sum(bool(m.content) for m in talk if m.role == role) for role in Role}
    if any(count and str(role) not in rendered.roles for role, count in counts.items()):
        wrong.append(f"{seed}: a role has no token")
    return wrong


@pytest.mark.parametrize("name", NATIVE)
def test_random_conversations_are_the_tokenizers_own(name: str) -> None:
    chat = chat_of(name)
    assert [line for seed in range(12) for line in differences(chat, name, seed)] == []


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "hermes", "llama31", "mistral", "gpt_oss", "deepseek"])
def test_what_a_template_writes_its_form_reads(name: str) -> None:
    chat, form = chat_of(name), TOOL_FORMS.get(str(FORMS[name]))()
    for seed in range(40):
        draw = random.Random(seed)
        tools = (random_tool(draw), random_tool(draw))
        calls = [
            ToolCall(draw.choice(tools)["function"]["name"], {random_name(draw): random_value(draw) for _ in range(2)})
            for _ in range(1 if name in ONE_CALL else draw.randint(1, 3))
        ]
        text = chat.call_text([Message(Role.USER, "Go.")], calls, tools)
        assert text is not None
        assert form.read(text, tools) == Reading("", tuple(calls))


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_two_thousand_random_conversations_are_the_tokenizers_own(name: str) -> None:
    chat = chat_of(name)
    assert [line for seed in range(2000 // len(NATIVE)) for line in differences(chat, name, seed)] == []


# --- real tokenizers ------------------------------------------------------------------------------------------------


@pytest.mark.realdata
@pytest.mark.skipif("KVAUDIT_REAL_MODEL" not in os.environ, reason="needs a model folder in KVAUDIT_REAL_MODEL")
def test_a_real_tokenizer_has_no_differences() -> None:
    from kvaudit.audit.sampling.model import load_chat

    chat = load_chat(os.environ["KVAUDIT_REAL_MODEL"])
    assert [line for seed in range(200) for line in differences(chat, "real", seed)] == []
