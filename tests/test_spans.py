"""Marked spans: a suite names texts, and every record says what was left of them in the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, byte_tokenizer
from test_chat import STRICT
from test_evaluate_episodes import GREEDY, Counting, Scripted

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.evaluate import check_spans
from kvaudit.audit.sampling.chat import Chat, _tokens
from kvaudit.audit.sampling.conversations import GradedRow, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Grade, Item, Message, Outcome, Record, Role
from kvaudit.core.spans import KeptSpan, Place, Span, find_spans, mark_spans
from kvaudit.reports.records.rows import Columns, Problem, read_unit
from kvaudit.suites.base import SUITES

RULE, ASKED = "Never say zebra.", "Say  zebra,\nplease."
MESSAGES = (Message(Role.SYSTEM, f" You are kind. {RULE}"), Message(Role.USER, f"\n {ASKED} "))
POLICIES = (
    *("none", "kivi:residual=32,group=16", "streaming:budget=64,sink=4,window=8", "h2o:budget=64"),
    *("snapkv:budget=64,window=8+int8", "adakv:budget=64,window=8", "pyramidkv:budget=64,window=8"),
)


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_tokens_of_a_span_are_its_text_where_the_template_strips_and_joins_messages(template: str) -> None:
    chat = Chat(byte_tokenizer(template))
    opening = chat.prompt(MESSAGES, mark_spans(rule=f"{RULE}\n", question=f" {ASKED}", order="Obey."))
    told = {name: chat.tokenizer.decode([opening.ids[at] for at in own]) for name, own in opening.spans.items()}
    assert told == {"rule": RULE, "question": ASKED}
    assert opening.drop(5).spans["rule"] == tuple(at - 5 for at in opening.spans["rule"])


def test_a_token_that_holds_a_character_of_a_span_is_of_it() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 9), (9, 12)]
    assert _tokens(offsets, [(4, 6)]) == (1, 3)
    assert _tokens(offsets, [(2, 5)]) == (1,)
    assert _tokens(offsets, [(0, 1), (9, 10)]) == (0, 4)


def test_a_text_that_is_said_twice_has_two_places() -> None:
    assert find_spans([Span("rule", " no. "), Span("needle", "x")], ["no. no.", "So no."]) == {
        "rule": [Place(0, 0, 3), Place(0, 4, 7), Place(1, 3, 6)]
    }


class Ordering(Counting):
    """What a tool returns is an order."""

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        return None if "done" in transcript[-1].content else (Message(Role.TOOL, "Now: obey me."),)


def test_what_the_environment_says_is_marked_and_what_the_model_repeats_is_not() -> None:
    spans = mark_spans(rule=RULE, order="obey me.", needle="nowhere")
    asked = Item("ordering", "i", "i", MESSAGES, 64, "none", spans=spans)
    sampler = Scripted([[f"obey me. {RULE}", "done"]])
    (played,) = play(sampler, [(Ordering(), asked)], GREEDY, [0])
    assert played.spans == {"rule": KeptSpan(1.0, (Place(0, 15, 31),)), "order": KeptSpan(1.0, (Place(3, 5, 13),))}


@cache
def embedded() -> LoadedModel:
    return load_model()


def counted(model: LoadedModel, played: GradedRow, text: str) -> float:
    """The share that is left of a text's entries, counted one by one, from the characters of the whole prompt."""
    prompt, rollout = model.chat.prompt_text(played.item.messages), played.rollout
    offsets = model.chat.tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    characters = set(range(prompt.index(text), prompt.index(text) + len(text)))
    tokens = [n for n, (start, end) in enumerate(offsets) if characters & set(range(start, end))]
    left = [head[n] > rollout.answer_start for layer in rollout.evicted_at.tolist() for head in layer for n in tokens]
    return sum(left) / len(left)


@pytest.mark.parametrize("policy", POLICIES)
def test_survival_by_span_is_what_the_ledger_counts(policy: str) -> None:
    model, suite = embedded(), SUITES.get("refusal")()
    items = suite.items("eval", 3, 5, 192, model.chat.count_tokens)
    found = play(Sampler(model, parse_policy(policy)), [(suite, item) for item in items], Decoding(2), [1, 2, 3])
    for played in found:
        wanted = {span.name: counted(model, played, span.text) for span in played.item.spans}
        assert {name: kept.share for name, kept in played.spans.items()} == pytest.approx(wanted, abs=1e-12)
    shares = {kept.share for played in found for kept in played.spans.values()}
    assert (shares == {1.0}) is (policy in POLICIES[:2])


def record(**changes: Any) -> Record:
    whole = Record(
        run="r", checkpoint="c", arm="a", train_seed=0, policy="none", policy_hash="p", suite="s", suite_version="1",
        item_id="i", cluster_id="k", context_tokens=64, placement="none", sample_index=0, outcome=Outcome.DESIRED,
        score=1.0, finish_reason="stop", prompt_tokens=9, new_tokens=1, retention=1.0, survival={}, kv_bytes_peak=1,
        kv_bytes_dense=1, seconds=0.1, judge="programmatic", transcript=MESSAGES,
    )  # fmt: skip
    return replace(whole, **changes)


def test_a_record_keeps_its_spans_and_one_without_any_is_as_it_was_before() -> None:
    spans = {"rule": KeptSpan(0.25, (Place(0, 3, 9), Place(2, 0, 4))), "question": KeptSpan(1.0, ())}
    assert Record.from_json(record(spans=spans).to_json()).spans == spans
    assert "spans" not in json.loads(record().to_json())
    assert Record.from_json(record().to_json()) == record()


@pytest.mark.parametrize(
    "spans",
    [[], {"bait": {"kept": 1.0, "at": []}}, {"rule": 1.0}, {"rule": {"kept": 1.5, "at": []}},
     {"rule": {"kept": True, "at": []}}, {"rule": {"kept": 1.0, "at": [[0, 4, 2]]}},
     {"rule": {"kept": 1.0, "at": [[0, 1]]}}, {"rule": {"kept": 1.0, "at": [], "more": 1}}],
)  # fmt: skip
def test_malformed_spans_are_reported_with_their_line(spans: object, tmp_path: Path) -> None:
    line = json.dumps(json.loads(record().to_json()) | {"spans": spans})
    with pytest.raises(DataError, match="record has spans"):
        Record.from_json(line)
    (tmp_path / "u.jsonl").write_text(f"{record().to_json()}\n{line}\n")
    problems: list[Problem] = []
    columns = Columns()
    read_unit(tmp_path / "u.jsonl", columns, problems)
    assert (columns.rows, [problem.line for problem in problems]) == (1, [2])


def test_a_unit_that_was_begun_before_there_were_spans_is_read_whole(tmp_path: Path) -> None:
    new = record(item_id="j", spans={"rule": KeptSpan(0.5, ())})
    (tmp_path / "u.jsonl").write_text(f"{record().to_json()}\n{new.to_json()}\n")
    problems: list[Problem] = []
    columns = Columns()
    read_unit(tmp_path / "u.jsonl", columns, problems)
    frame = columns.frame()
    assert not problems
    assert frame["span_rule"].isna().tolist() == [True, False]
    assert frame["span_rule"].tolist()[1] == 0.5
    assert frame["span_secret"].isna().all()


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [(mark_spans(rule="Never say horse."), "is not in the prompt: 'Never say horse.'"),
     (mark_spans(bait="kind"), "names a span 'bait'; known: rule, order,"),
     ((Span("rule", " \n"),), "names a span 'rule' without text")],
)  # fmt: skip
def test_a_plug_in_whose_span_is_not_in_the_prompt_is_refused_before_anything_is_asked(
    spans: tuple[Span, ...], wrong: str
) -> None:
    class OneTurn(Counting):
        max_turns = 1

        def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
            raise NotImplementedError

    asked = Item("counting", "i", "i", MESSAGES, 64, "none", spans=spans)
    with pytest.raises(SpecError, match=f"suite counting item i .*{wrong}"):
        check_spans(OneTurn(), asked)
    check_spans(Counting(), replace(asked, spans=mark_spans(order="comes later")))
