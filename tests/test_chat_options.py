"""What a spec hands to a chat template, what a run says of its conversations, and what a template refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, byte_tokenizer
from rich.console import Console
from test_chat import STRICT, SYSTEM, USER

from kvaudit.audit.rerun.measure import checkpoint_rollouts
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.prepare import prepare_run
from kvaudit.audit.sampling.chat import Chat
from kvaudit.core.errors import AuditError, SpecError
from kvaudit.core.records import Item, Message, Record, Role
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.suites.math import Math

# as templates of reasoning models do: without thinking the answer begins behind a thought that is over
REASONING = CHATML.replace(
    "<|im_start|>assistant\n' }}",
    "<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}",
)
SPEC = """\
name: options
model: {model}
{more}
train:
  arms: [dense]
  seeds: [1]
  policy: "streaming:budget=64,sink=4,window=8"
  suites: [math]
  context_tokens: 500
  steps: 1
  prompts_per_step: 1
  group: 2
evaluate: {{policies: [none], suites: {{math: {{items: 1, max_new_tokens: 2}}}}, context_tokens: [500], base: true}}
"""


def end_of(chat: Chat) -> str:
    return str(chat.tokenizer.decode(chat.prompt([USER]).ids)).rpartition("<|im_start|>")[2]


def test_an_option_reaches_the_template() -> None:
    tokenizer = byte_tokenizer(REASONING)
    assert end_of(Chat(tokenizer)) == "assistant\n"
    assert end_of(Chat(tokenizer, options={"enable_thinking": False})) == "assistant\n<think></think>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinkin": False}, "chat.enable_thinkin: false changes nothing in the chat template"),
        ({"enable_thinking": True}, "chat.enable_thinking: true changes nothing in the chat template"),
        ({"enable_thinking": False, "day": "1 May"}, 'chat.day: "1 May" changes nothing in the chat template'),
        ({"messages": "x"}, "chat.messages is set by kvaudit and the tokenizer"),
        ({"eos_token": "x"}, "chat.eos_token is set by kvaudit and the tokenizer"),
    ],
)
def test_an_option_that_changes_nothing_or_is_not_the_users_is_refused(
    options: dict[str, bool | str], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        Chat(byte_tokenizer(REASONING), options=options)
    assert message in str(caught.value)


def test_an_option_may_show_in_a_system_prompt_alone() -> None:
    dated = CHATML.replace("m['content'] +", "m['content'] + (day if m['role'] == 'system' and day else '') +")
    chat = Chat(byte_tokenizer(dated), options={"day": "1 May"})
    assert "Never say zebra.1 May" in chat.tokenizer.decode(chat.prompt([SYSTEM, USER]).ids)


def test_a_template_that_begins_a_thought_is_known() -> None:
    opening = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    assert [Chat(byte_tokenizer(template)).opens_thought for template in (CHATML, opening)] == [False, True]


def with_template(tiny_folder: Path, place: Path, template: str) -> Path:
    shutil.copytree(tiny_folder, place)
    (place / "chat_template.jinja").write_text(template)
    return place


def asked(model: Path | str, more: str = "") -> RunSpec:
    return parse_spec(SPEC.format(model=model, more=more), "q.yaml", NAMES)


def run(spec: RunSpec, folder: Path) -> str:
    """Train and evaluate; returns what was said."""
    said = StringIO()
    prepared = prepare_run(spec)
    pipeline = Pipeline(open_run(folder, spec, resume=False), Console(file=said, width=200), 1, prepared)
    pipeline.work_on("train", "evaluate")
    return said.getvalue()


def test_a_run_says_once_and_notes_that_the_template_takes_no_system_role(tiny_folder: Path, tmp_path: Path) -> None:
    said = run(asked(with_template(tiny_folder, tmp_path / "strict", STRICT)), tmp_path / "run")
    wanted = "chat: the template takes no system role: system prompts stand in the user's message"
    assert said.count(wanted) == 1
    known = json.loads((tmp_path / "run" / "provenance.json").read_text())["chat"]
    assert known == {"options": {}, "system_role": "user", "tool_role": "user"}


def test_an_option_is_in_rollouts_and_evaluation_alike(tiny_folder: Path, tmp_path: Path) -> None:
    model = with_template(tiny_folder, tmp_path / "reasoning", REASONING)
    tokens = {}
    for name, more in (("plain", ""), ("option", "chat: {enable_thinking: false}")):
        run(asked(model, more), tmp_path / name)
        rollout = checkpoint_rollouts(tmp_path / name / "checkpoints" / "dense" / "seed-1")[0].rollouts[0]
        records = [
            Record.from_json(line)
            for path in (tmp_path / name / "records").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        tokens[name] = (rollout.prompt_length, {row.arm: row.prompt_tokens for row in records})
    longer = len("<think></think>")
    assert tokens["option"][0] == tokens["plain"][0] + longer
    assert tokens["option"][1] == {arm: number + longer for arm, number in tokens["plain"][1].items()}
    assert set(tokens["plain"][1]) == {"base", "dense"}
    assert json.loads((tmp_path / "option" / "provenance.json").read_text())["chat"]["options"] == {
        "enable_thinking": False
    }


def test_a_template_that_refuses_neighbours_of_one_role_is_one_line_that_names_the_suite(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = Math.items

    def said_by_the_user(*args: Any) -> list[Item]:
        return [
            replace(item, messages=tuple(Message(Role.USER, message.content) for message in item.messages))
            for item in items(*args)
        ]

    monkeypatch.setattr(Math, "items", said_by_the_user)
    with pytest.raises(AuditError) as caught:
        prepare_run(asked(with_template(tiny_folder, tmp_path / "strict", STRICT)))
    assert str(caught.value) == (
        "suite math: the chat template refuses messages of roles user, user: must alternate; "
        "take another model or suite"
    )


def test_options_are_part_of_a_spec_only_where_they_are_given() -> None:
    plain, given = asked("tiny"), asked("tiny", "chat: {enable_thinking: false}")
    assert "chat" not in plain.written()
    assert given.written()["chat"] == {"enable_thinking": False}
    assert plain.sha256 == asked("tiny", "chat: {}").sha256 != given.sha256


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("chat: {tools: [a]}", "line 3: chat.tools is ['a'], wanted text, a number, true or false"),
        ("chat: {depth: .nan}", "chat.depth is nan, wanted text, a number, true or false"),
        ("chat: {depth: null}", "chat.depth is None, wanted text, a number, true or false"),
        ("chat: thinking", "chat is 'thinking', wanted a mapping"),
        ("chat: {a b: 1}", "wanted up to 100 letters, digits"),
    ],
)
def test_a_mistake_is_one_line(more: str, message: str) -> None:
    with pytest.raises(AuditError) as caught:
        asked("tiny", more)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
