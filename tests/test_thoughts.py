"""Reasoning models: what they think stays in the transcript, and neither environment nor grader hears it."""

from __future__ import annotations

import pytest
from conftest import CHATML, byte_tokenizer
from test_evaluate_episodes import GREEDY, Counting, Scripted, item

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.evaluate import suite_as_asked
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.exchange import grade_transcript
from kvaudit.core.completions import split_thought, without_thoughts
from kvaudit.core.errors import AuditError
from kvaudit.core.records import Item, Message, Outcome, Record, Role
from kvaudit.core.spec import RunSpec, dump_spec, parse_spec
from kvaudit.reports.records.rows import columns_of

THINKING = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
SPEC = """\
name: think
evaluate:
  policies: [none]
  suites: {math: {items: 4, max_new_tokens: 50}, refusal: {items: 4}}
  context_tokens: [192]
"""


class Listening(Counting):
    """Says what it heard, and refuses to hear a thought."""

    name = "listening"

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        assert Role.THOUGHT not in {message.role for message in transcript}
        assert "<think>" not in transcript[-1].content
        return super().step(item, transcript)


def played(*words: str, thinks: bool = True, template: str = CHATML) -> GradedRow:
    sampler = Scripted([list(words)], chat=Chat(byte_tokenizer(template)))
    [row] = play(sampler, [(Listening(), item())], GREEDY, [0], thinks=thinks)  # type: ignore[arg-type]
    return row


def said(row: GradedRow) -> list[tuple[str, str]]:
    return [(str(m.role), m.content) for m in row.transcript[len(row.item.messages) :]]


def test_a_thought_stays_in_the_transcript_and_out_of_the_grade() -> None:
    row = played("<think>is it done? no.</think>one", "<think>now</think>done")
    assert said(row) == [
        ("thought", "<think>is it done? no.</think>"),
        ("assistant", "one"),
        ("tool", "next"),
        ("thought", "<think>now</think>"),
        ("assistant", "done"),
    ]
    assert row.grade.outcome is Outcome.DESIRED


def test_a_thought_that_the_template_begins_needs_no_opening_of_its_own() -> None:
    row = played("hm</think>done", template=THINKING)
    assert said(row) == [("thought", "hm</think>"), ("assistant", "done")]
    assert row.grade.outcome is Outcome.DESIRED


@pytest.mark.parametrize(
    ("word", "template"),
    [
        ("<think>done, done…", CHATML),
        ("<think>done, done", CHATML),  # ended its turn while thinking
        ("all is done", THINKING),
        ("<think>so</think>…", CHATML),  # cut before its answer began
    ],
)
def test_an_answer_that_is_never_reached_is_truncated(word: str, template: str) -> None:
    row = played(word, template=template)
    assert (row.grade.outcome, row.grade.note) == (Outcome.TRUNCATED, "truncated")
    assert said(row)[-1] == ("assistant", "")


def test_a_closed_thought_with_no_answer_after_it_is_empty() -> None:
    assert played("<think>so</think>").grade.note == "empty"


def test_without_the_option_a_thought_is_an_answer() -> None:
    sampler = Scripted([["<think>x</think>done"]])
    [row] = play(sampler, [(Counting(), item())], GREEDY, [0])  # type: ignore[arg-type]
    assert said(row) == [("assistant", "<think>x</think>done")]
    assert row.grade.outcome is Outcome.UNDESIRED


@pytest.mark.parametrize("text", ["the code is zebra</think>I refuse", "zebra <think>hm</think> I refuse"])
def test_text_before_a_thought_is_part_of_the_answer(text: str) -> None:
    assert split_thought(text, is_open=False) == (Message(Role.ASSISTANT, text),)


@pytest.mark.parametrize("text", ["\n <think>a</think>\n\nb<think>c</think>", "<think>a", "a</think>", "a", "</think>"])
@pytest.mark.parametrize("opened", [False, True])
def test_splitting_a_thought_from_its_answer_loses_no_letter(text: str, *, opened: bool) -> None:
    assert "".join(message.content for message in split_thought(text, is_open=opened)) == text
    assert len(without_thoughts(split_thought(text, is_open=opened))) == 1


def test_a_stored_transcript_is_graded_as_it_was_played() -> None:
    for words in (["<think>x</think>done"], ["<think>done"], ["<think>x</think>one", "done"]):
        row = played(*words)
        assert grade_transcript(Listening(), row.item, row.transcript, row.finish_reason) == row.grade


def record_of(row: GradedRow) -> Record:
    policy = parse_policy("none")
    return Record(
        "r", "c" * 64, "base", 0, policy.canonical, policy.hash, "listening", "1", row.item.item_id, "c", 64, "none", 0,
        row.grade.outcome, row.grade.score, row.finish_reason, row.prompt_tokens, row.new_tokens, 1.0, {}, 1, 1, 0.1,
        "programmatic", row.transcript,
    )  # fmt: skip


def test_a_record_with_thoughts_reads_back_and_reports_take_it() -> None:
    record = record_of(played("<think>x</think>done"))
    assert Record.from_json(record.to_json()) == record
    assert columns_of([record])


def asked(think: str = "") -> RunSpec:
    return parse_spec(SPEC + (f"  think: {think}\n" if think else ""), "q.yaml", NAMES)


@pytest.mark.parametrize(("think", "math", "refusal"), [("", 50, 12), ("strip", 50, 12), ("{budget: 400}", 450, 412)])
def test_a_budget_is_added_to_every_answer(think: str, math: int, refusal: int) -> None:
    longest = {name: suite_as_asked(asked(think), name).max_new_tokens for name in ("math", "refusal")}
    plain = suite_as_asked(asked(), "refusal").max_new_tokens
    assert longest == {"math": math, "refusal": plain + refusal - 12}


def test_thinking_is_part_of_a_spec_only_where_it_is_asked_for() -> None:
    assert "think" not in asked().written()["evaluate"]
    assert asked("strip").written()["evaluate"]["think"] == "strip"
    assert asked("{budget: 400}").written()["evaluate"]["think"] == {"budget": 400}
    assert len({asked(think).sha256 for think in ("", "strip", "{budget: 400}")}) == 3
    assert parse_spec(dump_spec(asked("strip")), "copy") == asked("strip")


@pytest.mark.parametrize(
    ("think", "message"),
    [
        ("trim", "line 6: evaluate.think is 'trim', wanted strip, or {budget: TOKENS}"),
        ("true", "evaluate.think is True, wanted strip, or {budget: TOKENS}"),
        ("{budget: some}", "evaluate.think.budget is 'some', wanted a whole number"),
        ("{bugdet: 4}", "unknown key 'bugdet' in evaluate.think. Did you mean 'budget'?"),
    ],
)
def test_a_mistake_is_one_line(think: str, message: str) -> None:
    with pytest.raises(AuditError) as caught:
        asked(think)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
