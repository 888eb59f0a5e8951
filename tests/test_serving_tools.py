"""Tools over the wire: conversations with calls in every form, whole and streamed, and requests that are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from suite_world import words, write_rows
from test_chat_tools import CALL, RESPONSE, TALK, WEATHER, Asking, chat_of, random_name, random_tool
from test_engines_http import endpoint
from test_evaluate_episodes import Scripted
from test_serving import KEY, Server, serving
from tool_templates import FORMS, ONE_CALL, TEMPLATES, tool_tokenizer

from kvaudit.audit.engines.conversation import EngineAnswer, converse
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.conversations import GradedRow, item_prompt, play
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.serving.answers import AnswerReader
from kvaudit.audit.serving.engine import SamplingEngine
from kvaudit.audit.serving.wire import Choice, read_request
from kvaudit.core.records import Item, Message, Role, ToolCall
from kvaudit.core.tool_forms.base import TOOL_FORMS
from kvaudit.core.tool_forms.text import FORM, format_calls, read_calls
from kvaudit.suites.base import Suite
from kvaudit.suites.bfcl import Bfcl

QUESTION = {"role": "user", "content": "Weather in Köln?"}
GREEDY = Decoding(200, temperature=0.0)


@dataclass
class Script:
    """Stands in for the sampler of the server: says the given texts in order, token by token, and keeps the prompts."""

    chat: Chat
    texts: list[str]
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, *_: Any, **__: Any) -> Script:
        return self

    def open(self, prompts: Sequence[Sequence[int]], *_: Any, **__: Any) -> ScriptedEpisode:
        self.prompts += map(tuple, prompts)
        return ScriptedEpisode(self.chat, [self.texts.pop(0) for _ in prompts])


class ScriptedEpisode:
    def __init__(self, chat: Chat, texts: Sequence[str]) -> None:
        self._chat, self._texts, self.rows = chat, texts, len(texts)

    def decode(self, _: Any, limits: Sequence[int], grown: Any, heard: Any, __: Any) -> None:
        for row, text in enumerate(self._texts):
            ids = (*self._chat.encode(text), next(iter(self._chat.stop_ids)))
            reason = "stop" if len(ids) <= limits[row] else "length"
            ids = ids[: limits[row]]
            end = next((end for end in range(1, len(ids) + 1) if grown(row, ids[:end])), len(ids))
            heard(row, Completion(ids[:end], (0.0,) * end, reason))


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model()


@contextmanager
def saying(
    base: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, *texts: str, key: str | None = KEY
) -> Iterator[tuple[Server, Script]]:
    """A server of a model with the template ``name`` that says the texts."""
    model = replace(base, chat=chat_of(name), max_positions=50_000)
    script = Script(model.chat, list(texts))
    monkeypatch.setattr("kvaudit.audit.serving.engine.Sampler", script)
    monkeypatch.setattr("kvaudit.audit.serving.engine.rotary_length_limit", lambda _: None)
    with serving(SamplingEngine({"m": model, "standin": model}, batch_tokens=10**6), key) as server:
        yield server, script


def call_text(name: str, *calls: ToolCall, tools: Sequence[dict[str, Any]] = (WEATHER,)) -> str:
    """Calls as a model of the template would write them."""
    return chat_of(name).call_text(TALK[1:2], calls, tools) or format_calls(calls)


def ask(server: Server, messages: list[Any] | None = None, **options: Any) -> Any:
    options = {"model": "m", "tools": [WEATHER], "max_tokens": 900, "messages": messages or [QUESTION], **options}
    return server.client().chat.completions.create(**options)


def joined(chunks: Any) -> tuple[str, list[tuple[str, dict[str, Any]]], str]:
    """Return text, calls and end of a stream of one choice."""
    text, calls, end = "", list[tuple[str, dict[str, Any]]](), ""
    for chunk in chunks:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert (call.index, call.type, bool(call.id)) == (len(calls), "function", True)
            calls.append((call.function.name, json.loads(call.function.arguments)))
        end = choice.finish_reason or end
    return text, calls, end


def named(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


# one template of every form; that each template's calls are read back is seen without a server below
@pytest.mark.parametrize("name", {form: name for name, form in FORMS.items()}.values())
def test_the_client_of_openai_holds_a_conversation_with_calls(
    name: str, base: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = call_text(name, CALL)
    with saying(base, monkeypatch, name, text, text, "It rains.", "It rains.") as (server, script):
        first = ask(server).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        assert joined(ask(server, stream=True)) == ("", named(first.message), "tool_calls")
        (call,) = first.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == CALL.arguments
        talk = [QUESTION, first.message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
        last = ask(server, talk).choices[0]
        assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", "It rains.", None)
        assert joined(ask(server, talk, stream=True)) == ("It rains.", [], "stop")
        assert not any("weather" in line for line in server.lines)
    chat, called = chat_of(name), replace(CALL, call_id=call.id)
    result = Message(Role.TOOL, "It rains.", tool_call_id=call.id)
    talked = (TALK[1], Message(Role.ASSISTANT, "", (called,)), result)
    assert chat.tool_form_of(talked, (WEATHER,)) == (FORMS[name] or "text")
    assert script.prompts[0] == script.prompts[1] == chat.prompt(TALK[1:2], (), (WEATHER,)).ids
    assert script.prompts[2] == script.prompts[3] == chat.prompt(talked, (), (WEATHER,)).ids


def test_text_before_a_call_is_streamed_and_kept(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Let me look.\n" + call_text("qwen25", CALL).lstrip()
    with saying(base, monkeypatch, "qwen25", text, text) as (server, _):
        whole = ask(server).choices[0].message
        assert (whole.content, named(whole)) == ("Let me look.", [("get_weather", CALL.arguments)])
        chunks = list(ask(server, stream=True))
        assert joined(chunks) == (whole.content, named(whole), "tool_calls")
        assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 5, "the text came all at once"


def test_several_calls_are_returned_or_the_first_alone(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [CALL, ToolCall("get_weather", {"city": "Bonn"}, "call00002")]
    text = call_text("qwen25", *calls)
    with saying(base, monkeypatch, "qwen25", *[text] * 4) as (server, _):
        both = ask(server, parallel_tool_calls=True).choices[0].message
        assert named(both) == [(call.name, call.arguments) for call in calls]
        assert len({call.id for call in both.tool_calls}) == 2
        assert joined(ask(server, stream=True))[1] == named(both)
        assert named(ask(server, parallel_tool_calls=False).choices[0].message) == named(both)[:1]
        assert joined(ask(server, parallel_tool_calls=False, stream=True))[1:] == (named(both)[:1], "tool_calls")


def test_without_a_choice_tools_are_left_out(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = call_text("qwen25", CALL)
    with saying(base, monkeypatch, "qwen25", text) as (server, script):
        choice = ask(server, tool_choice="none").choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    assert script.prompts[0] == chat_of("qwen25").prompt(TALK[1:2]).ids


MALFORMED = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kö',
    '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"a": NaN}}\n</tool_call>',
    "<tool_call>" * 50,
    '{"name": "no_tool_of_mine", "arguments": {}}',
    'print("hello")',
    "get_weather(city=",
    "{" * 900,
    '{"a":' * 300,
    "A { b } and [c](d) <i>e</i> `{}`.  ",
    " \n ",
]


def test_a_call_that_cannot_be_read_stays_text(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [text for text in MALFORMED for _ in range(2)]
    with saying(base, monkeypatch, "qwen25", *twice) as (server, _):
        for text in MALFORMED:
            choice = ask(server, max_tokens=20_000).choices[0]
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
            assert joined(ask(server, max_tokens=20_000, stream=True)) == (text, [], "stop")


def test_a_cut_answer_ends_by_its_length(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = call_text("qwen25", CALL)
    with saying(base, monkeypatch, "qwen25", *[first + first] * 2) as (server, _):
        limit = len(chat_of("qwen25").encode(first)) + 20
        choice = ask(server, max_tokens=limit).choices[0]
        assert (choice.finish_reason, named(choice.message)) == ("length", [("get_weather", CALL.arguments)])
        assert choice.message.content.startswith("<tool_call>"), "half a call is no call"
        assert joined(ask(server, max_tokens=limit, stream=True)) == (
            choice.message.content,
            named(choice.message),
            "length",
        )


def test_every_choice_has_its_own_calls(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with saying(base, monkeypatch, "hermes", "No.", call_text("hermes", CALL)) as (server, _):
        choices = ask(server, n=2, stop=["zzz"]).choices
    assert [choice.finish_reason for choice in choices] == ["stop", "tool_calls"]


def test_a_call_inside_a_thought_is_none() -> None:
    reader = AnswerReader([WEATHER], TOOL_FORMS.get("hermes")())
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    thought = f"<think>I could {call}</think>"
    said = reader.read(choice_of(f"{thought}\n\nNo need."))
    assert (said.text, said.calls) == (f"{thought}\n\nNo need.", ())
    said = reader.read(choice_of(f"{thought}\n\n{call}"))
    assert (said.text, len(said.calls)) == (thought, 1)


# --- what is written is read ----------------------------------------------------------------------------------------


def choice_of(text: str) -> Choice:
    return Choice(text, "stop", (), ())


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_survive_the_way_to_a_client_and_back(name: str) -> None:
    chat = chat_of(name)
    for seed in range(25):
        draw = random.Random(f"{name}-{seed}")
        tools = [random_tool(draw) for _ in range(3)]
        if len({tool["function"]["name"] for tool in tools}) < 3:
            continue
        calls = [random_call(draw, tools) for _ in range(1 if name in ONE_CALL else draw.randint(1, 3))]
        request = read_request({"model": "m", "messages": [QUESTION], "tools": tools})
        form = chat.reader_of(chat.tool_form_of(request.messages, request.tools))
        choice = AnswerReader(request.tools, form).read(choice_of(call_text(name, *calls, tools=tools)))
        assert [(call.name, call.arguments) for call in choice.calls] == [(call.name, call.arguments) for call in calls]
        message = json.loads(json.dumps(choice.to_message()))
        assert message["content"] is None
        again = read_request({"model": "m", "messages": [QUESTION, message], "tools": tools})
        assert again.messages[1] == Message(Role.ASSISTANT, "", choice.calls)


def random_call(draw: random.Random, tools: Sequence[dict[str, Any]]) -> ToolCall:
    """A call with arguments of the kinds that the tool's schema has, which forms without types need."""
    function = draw.choice(tools)["function"]
    values = {"string": lambda: random_name(draw), "integer": lambda: draw.randint(-9, 99), "array": lambda: [1, "a"]}
    properties = function["parameters"]["properties"]
    return ToolCall(function["name"], {key: values[schema["type"]]() for key, schema in properties.items()})


PIECES = (
    *("<tool_call>", "</tool_call>", '{"name": "get_weather", "arguments": {"city": "K"}}', '{"a": [1', "}", "{", "\n"),
    *("get_weather(city='K')", "get_wea", "[", "]", "(", ", ", "```", "```json\n", "#", "Text. ", " ", "<", "\\", '"'),
    *("<function=get_weather>\n", "<parameter=city>\nK\n</parameter>\n", "</function>", "<|python_tag|>", "tru", "[]"),
    *('[TOOL_CALLS] [{"name": "get_weather", "arguments": {}}]', "[TOOL_", "get_weather\n<arg_key>city</arg_key>\n"),
    *(
        "<arg_value>K</arg_value>\n",
        "<think>",
        "</think>",
        "other(1)",
        "<|channel|>final<|message|>",
        "Ã",
        "\ud83d\ude00",
    ),
    *("<|channel|>commentary to=functions.get_weather <|message|>{}", "<|start|>assistant", "get_weather", ";"),
    *("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<|python_start|>"),
    *('{"name": "tool", "arguments": {"key": "value"}}', '{"name": "other", "parameters": {}}', "<", "`", "<thi"),
)


@pytest.mark.parametrize("form", [*TOOL_FORMS.all(), None])
def test_a_stream_sends_what_the_whole_answer_says(form: str | None) -> None:
    """Whatever the text and however it is cut into deltas."""
    called = 0
    for seed in range(150):
        draw = random.Random(f"{form}-{seed}")
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 9))).encode("utf-8", "replace").decode()
        opens = draw.random() < 0.1
        reader = AnswerReader([WEATHER], TOOL_FORMS.get(form)() if form else None, opens_thought=opens)
        whole, growing, sent = reader.read(choice_of(text)), reader.start(), ""
        called += bool(whole.calls)
        place = 0
        while place < len(text):
            place += draw.randint(1, 6)
            known = growing.sendable(text[:place])
            assert known.startswith(sent) or sent.startswith(known), (text, place)
            sent = max(sent, known, key=len)
            assert whole.text.startswith(sent), (text, place)
        if not whole.calls:
            assert whole.text == text
    assert called > 7


def streamed(reader: AnswerReader, text: str) -> str:
    """What a stream has sent, letter by letter, before the whole answer is read."""
    growing = reader.start()
    sent = [growing.sendable(text[:end]) for end in range(1, len(text) + 1)]
    return max(sent, key=len)


def test_a_call_in_python_behind_a_thought_is_not_sent_as_text() -> None:
    reader = AnswerReader([WEATHER])
    text = "<think>Hm.</think>get_weather(city='Bonn')"
    assert [call.name for call in reader.read(choice_of(text)).calls] == ["get_weather"]
    assert streamed(reader, text) == reader.read(choice_of(text)).text == "<think>Hm.</think>"


def test_channels_before_a_call_are_not_sent_as_text() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Bonn"}'
    )
    for form in (TOOL_FORMS.get("harmony")(), None):
        reader = AnswerReader([WEATHER], form)
        said = reader.read(choice_of(text))
        assert [(call.name, call.arguments) for call in said.calls] == [("get_weather", {"city": "Bonn"})]
        assert said.text == streamed(reader, text) == ""


def test_text_behind_the_longest_answer_that_is_read_is_kept() -> None:
    reader = AnswerReader([WEATHER], TOOL_FORMS.get("hermes")())
    call = call_text("qwen25", CALL).strip()
    said = reader.read(choice_of(call + "x" * 30_000))
    assert (len(said.calls), said.text) == (1, "x" * 30_000)
    late = "x" * 20_000 + call
    assert reader.read(choice_of(late)) == choice_of(late)
    assert reader.start().sendable(late) == late


def test_calls_of_a_tokenizers_own_form_are_sent_at_the_end() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    tokenizer = tool_tokenizer("qwen25")
    tokenizer.response_template = RESPONSE
    reader = AnswerReader([WEATHER], Chat(tokenizer).reader_of("tokenizer"))
    text = "Look: " + call_text("qwen25", CALL).strip()
    said = reader.read(choice_of(text))
    assert [(call.name, call.arguments) for call in said.calls] == [(CALL.name, CALL.arguments)]
    assert (said.text, streamed(reader, text)) == ("Look:", "")


def test_plain_text_is_not_held_back() -> None:
    growing = AnswerReader([WEATHER], TOOL_FORMS.get("hermes")()).start()
    text = 'Its JSON is {"sky": ["grey"], "n": 1} and [here](there), or a{b}c.'
    behind = [len(text[:end]) - len(growing.sendable(text[:end])) for end in range(1, len(text) + 1)]
    assert max(behind) < 30
    assert behind[-1] < 14


# --- other programs -------------------------------------------------------------------------------------------------


def local_and_served(
    base: LoadedModel, monkeypatch: pytest.MonkeyPatch, folder: Path, item: Item, suite: Suite, *texts: str
) -> tuple[GradedRow, EngineAnswer]:
    """An item asked of our own sampler, and of the server by the engine ``endpoint``."""
    model = replace(base, chat=chat_of("qwen25"), max_positions=50_000)
    sampler = Scripted([list(texts)], max_positions=50_000, chat=model.chat)
    [row] = play(sampler, [(suite, item)], GREEDY, [0])  # type: ignore[arg-type]
    # the engine asks first which model answers
    with (
        saying(base, monkeypatch, "qwen25", "x", *texts, key=None) as (server, _),
        endpoint(model, f"{server.url}/v1", folder) as session,
    ):
        prompts = [item_prompt(model.chat, item)]
        [answer] = converse(session, model, suite, [item], prompts, GREEDY, [0])
    return row, answer


def test_the_engine_endpoint_gets_from_the_server_what_our_sampler_gives(
    base: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    write_rows(tmp_path)
    bfcl = Bfcl()
    cases: list[tuple[Suite, Item, tuple[str, ...]]] = []
    item = Item("asking", "i", "i", TALK[1:2], 64, "none", tools=(WEATHER,))
    cases.append((Asking(), item, (call_text("qwen25", CALL), "Rain.")))
    for asked in bfcl.items("eval", 20, 3, 0, words):
        if calls := read_calls(bfcl.gold(asked)[0]).calls:
            cases.append((bfcl, asked, (call_text("qwen25", *calls, tools=asked.tools),)))
    assert len(cases) > 5
    for suite, item, texts in cases[:6]:
        row, answer = local_and_served(base, monkeypatch, tmp_path, item, suite, *texts)
        served = answer.answer
        assert (served.finish_reason, served.unanswered) == (row.finish_reason, row.unanswered)
        assert (answer.grade, answer.grade.score) == (row.grade, 1.0)
        assert (served.prompt_tokens, served.tool_form) == (row.prompt_tokens, "hermes")
        # the text of a turn with calls is that of the server's JSON, the rest is equal
        mine, its = (
            [replace(m, content="") if m.tool_calls else m for m in t] for t in (row.transcript, served.transcript)
        )
        assert mine == its
        assert served.said_in == ("" if suite.name == "asking" else "tool_calls")


# --- requests that are refused --------------------------------------------------------------------------------------


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **changes}}


def called(**changes: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [{**call, **changes}]}


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {"a": 1}}, "tools is {'a': 1}, expected a list of at most 128"),
    ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools is 129 entries"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0] is {'type': 'retrieval'}, expected {type: function"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0] is"),
    ({"tools": [7]}, "tools[0] is 7"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name is 'a b', expected 1 to 200 letters"),
    ({"tools": [tool(name="")]}, "tools[0].function.name is ''"),
    ({"tools": [tool(), tool()]}, "tools[1] has the name of tools[0], 'f'; rename one"),
    ({"tools": [tool(description=["x"])]}, "tools[0].function.description is ['x'], expected text"),
    ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters is [1], expected a JSON schema"),
    ({"tools": [tool(parameters={"type": "array"})]}, "expected a JSON schema of type object"),
    ({"tools": [tool(parameters={"properties": []})]}, "parameters.properties is []"),
    ({"tools": [tool(parameters={"properties": {"x": "text"}})]}, "properties['x'] is 'text', expected a JSON schema"),
    ({"tools": [tool(parameters={"required": "x"})]}, "parameters.required is 'x', expected a list of names"),
    ({"tools": [tool(parameters=nested(100))]}, "tools[0] is no plain JSON; at most 64 levels"),
    ({"tools": [tool(parameters={"default": float("nan")})]}, "finite numbers"),
    ({"tools": [tool(description="\ud800")]}, "whole characters"),
    ({"tools": [tool(description="x" * 9_000_000)]}, "positions of the model hold at most"),
    ({"tools": [tool()], "tool_choice": "required"}, "tool_choice is 'required', expected auto or none"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "this server forces no call"),
    ({"tool_choice": ["auto"]}, "tool_choice is ['auto']"),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls is 'no', expected true or false"),
    ({"functions": [{"name": "f"}]}, "functions is"),
    ({"function_call": {"name": "f"}}, "function_call is"),
    ({"messages": [{**called(), "tool_calls": 7}]}, "messages[0].tool_calls is 7"),
    ({"messages": [{**called(), "tool_calls": [7]}]}, "messages[0].tool_calls[0] is 7, expected {id, type"),
    ({"messages": [{**called(), "tool_calls": called()["tool_calls"] * 2}]}, "has the id 'c1' twice"),
    ({"messages": [{**called(), "tool_calls": called()["tool_calls"] * 129}]}, "tool_calls is 129 entries"),
    ({"messages": [{**called(), "role": "user"}]}, "messages[0] has role user and tool_calls"),
    ({"messages": [called(id=None)]}, "messages[0].tool_calls[0].id is None"),
    ({"messages": [called(id="x" * 201)]}, "expected text of 1 to 200 characters"),
    ({"messages": [called(type="custom")]}, "messages[0].tool_calls[0] is"),
    ({"messages": [called(function={"name": 7, "arguments": "{}"})]}, "tool_calls[0].function.name is 7"),
    (
        {"messages": [called(function={"name": "f", "arguments": {}})]},
        "arguments is {}, expected a text that is a JSON",
    ),
    ({"messages": [called(function={"name": "f", "arguments": "[1]"})]}, "arguments is '[1]'"),
    ({"messages": [called(function={"name": "f", "arguments": "{"})]}, "arguments is '{'"),
    ({"messages": [called(function={"name": "f", "arguments": "[" * 99_999})]}, "expected a text that is a JSON"),
    ({"messages": [called(function={"name": "f", "arguments": json.dumps(nested(99))})]}, "expected a text that is"),
    ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "send tool_calls"),
    ({"messages": [{"role": "assistant", "content": None}]}, "has content None"),
    (
        {"messages": [called(), {"role": "tool", "content": "x", "tool_call_id": "c2"}]},
        "messages[1].tool_call_id is 'c2'",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}, called()]}, "a call in a message before"),
    ({"messages": [called(), {"role": "tool", "content": "x", "tool_call_id": {}}]}, "messages[1].tool_call_id is {}"),
]


@pytest.fixture(scope="module")
def plain(base: LoadedModel) -> Iterator[Server]:
    with serving(SamplingEngine({"m": base}), KEY) as server:
        yield server


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_request_with_wrong_tools_is_a_one_line_error(plain: Server, change: dict[str, Any], message: str) -> None:
    status, body, _ = plain.post(json.dumps({"model": "m", "messages": [QUESTION], "max_tokens": 1, **change}).encode())
    assert status == 400, body
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert len(body["error"]["message"]) < 500
    assert plain.lines[-1].startswith("400 "), "a log line has the status and the time alone"
    assert plain.lines[-1].endswith(" ms")


@pytest.mark.parametrize(
    "change",
    [
        {"tools": []},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [tool(strict=True, description=None)]},
        {"tools": [tool(parameters={})]},
        {"messages": [called(function={"name": "f", "arguments": ""})]},
        {"messages": [QUESTION, called(), {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        {"messages": [QUESTION, {**called(), "content": []}, {"role": "tool", "content": "x"}]},
        {"messages": [QUESTION, {"role": "assistant", "content": "x", "tool_calls": []}, QUESTION]},
    ],
)
def test_requests_of_common_clients_are_accepted(plain: Server, change: dict[str, Any]) -> None:
    status, body, _ = plain.post(json.dumps({"model": "m", "messages": [QUESTION], "max_tokens": 1, **change}).encode())
    assert status == 200, body


def test_a_model_without_a_form_is_asked_in_text(base: LoadedModel) -> None:
    request = read_request({"model": "m", "messages": [QUESTION], "tools": [WEATHER]})
    assert FORM in base.chat.prompt_text(request.messages, request.tools)
