"""Given answers: scored token by token through the compressed cache, and one of them taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.conversations import GradedRow, play, score_answers
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model, locate
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training import batch
from kvaudit.audit.training.config import TrainConfig
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.base import Suite

GREEDY = Decoding(8, temperature=0.0)
TEXT = "The code: moose olive.\nThe code: wolf island.\nThe code: koala forest.\nTell me the code of wolf."
OPTIONS = ("The code: wolf island.", "I must refuse.", "The code: moose")
SNAPKV = "snapkv:budget=24,window=8,interval=1,chunk=8"


class Chosen(Suite):
    """The first option is right."""

    name = "chosen"
    max_new_tokens = 8

    def options(self, item: Item) -> tuple[str, ...]:
        return tuple(item.payload["options"])

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        return None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        good = transcript[-1].content == item.payload["options"][0]
        return Grade(Outcome.DESIRED if good else Outcome.UNDESIRED, float(good))


class Longest(Chosen):
    """Takes the option with most tokens, whatever the model thinks."""

    def weigh(self, item: Item, logprobs: Sequence[float]) -> Sequence[float]:
        return [len(option) for option in self.options(item)]


class Spoken(Chosen):
    """The model speaks."""

    def options(self, item: Item) -> tuple[str, ...]:
        return ()


class Stopped(Spoken):
    """An answer ends with the word "code"."""

    until = ("code", "nothing")

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        return Grade(Outcome.DESIRED, 1.0)


def item(options: Sequence[str] = OPTIONS, text: str = TEXT) -> Item:
    messages = (Message(Role.SYSTEM, "You guard the door list."), Message(Role.USER, text))
    return Item("chosen", text, text, messages, 64, "none", {"options": list(options)})


@cache
def model() -> LoadedModel:
    return load_model()


def played(suite: Suite, items: Sequence[Item], policy: str = "none", **options: Any) -> list[GradedRow]:
    asked = {"decoding": GREEDY, "seeds": [7] * len(items) * options.get("group", 1), **options}
    return play(Sampler(model(), parse_policy(policy)), [(suite, each) for each in items], **asked)


def scored(policy: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
    chat = model().chat
    sampler = Sampler(model(), parse_policy(policy))
    (rows,) = score_answers(sampler, [chat.prompt(item().messages)], [[chat.encode(text) for text in texts]], [7])
    return [own.logprobs for own, _ in rows]


def test_without_compression_scores_are_those_of_one_plain_forward() -> None:
    plain = AutoModelForCausalLM.from_pretrained(locate("embedded"))
    chat = model().chat
    prompt = list(chat.prompt(item().messages).ids)
    for text, logprobs in zip(OPTIONS, scored("none", OPTIONS), strict=True):
        ids = list(chat.encode(text))
        with torch.no_grad():
            wanted = plain(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs == pytest.approx(wanted[range(len(ids)), ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "policy", [SNAPKV, "h2o:budget=24", "streaming:budget=24,sink=4+kivi:bits=4", "random:budget=24"]
)
def test_scores_of_options_are_the_samplers_for_the_same_tokens(policy: str) -> None:
    chat = model().chat
    sampler = Sampler(model(), parse_policy(policy))
    prompt = chat.prompt(item().messages)
    (drawn,) = sampler.open([prompt.ids], [7], roles=[prompt.roles]).decode(Decoding(14, temperature=0.0))
    assert drawn is not None
    others = [chat.encode(text) for text in OPTIONS]
    ((_, (own, rollout), *_),) = score_answers(sampler, [prompt], [[others[0], drawn.ids, *others]], [7])
    assert own.logprobs == pytest.approx(drawn.logprobs, abs=1e-5)
    assert own.greedy
    assert rollout.sampler_logprobs[rollout.sampled].tolist() == pytest.approx(drawn.logprobs, abs=1e-5)
    assert int(rollout.sampled.sum()) == len(drawn.ids)


def test_compression_changes_the_scores_of_options() -> None:
    assert scored(SNAPKV, OPTIONS) != scored("none", OPTIONS)


def test_the_most_probable_option_is_the_answer() -> None:
    sums = [sum(logprobs) for logprobs in scored("none", OPTIONS)]
    best = OPTIONS[max(range(3), key=sums.__getitem__)]
    (row,) = played(Chosen(), [item()])
    assert row.transcript[-1] == Message(Role.ASSISTANT, best)
    assert (row.finish_reason, row.new_tokens) == ("stop", len(model().chat.encode(best)))
    assert row.grade.score == float(best == OPTIONS[0])
    assert len(row.rollout.ids) == row.prompt_tokens + row.new_tokens


def test_a_suite_weighs_its_options_as_it_likes() -> None:
    (row,) = played(Longest(), [item()])
    assert row.transcript[-1].content == max(OPTIONS, key=len)


def test_a_row_depends_neither_on_how_many_options_others_have_nor_on_their_order() -> None:
    few, many = item(OPTIONS[:2], TEXT + " Now."), item()
    together = played(Chosen(), [few, many], SNAPKV)
    for row, alone in zip(together, [*played(Chosen(), [few], SNAPKV), *played(Chosen(), [many], SNAPKV)], strict=True):
        assert row.transcript == alone.transcript
        assert torch.equal(row.rollout.evicted_at, alone.rollout.evicted_at)
        assert replace(row, rollout=alone.rollout, seconds=0.0) == replace(alone, seconds=0.0)


def test_items_with_options_and_without_share_a_batch_and_keep_their_places() -> None:
    sampler = Sampler(model(), parse_policy("none"))
    pairs: list[tuple[Suite, Item]] = [(Spoken(), item()), (Chosen(), item()), (Spoken(), item())]
    rows = play(sampler, pairs, GREEDY, [1, 1, 2, 2, 3, 3], group=2)
    assert [row.sample_index for row in rows] == [0, 1] * 3
    assert [row.transcript[-1].content in OPTIONS for row in rows[2:4]] == [True, True]
    assert rows[0].transcript == rows[4].transcript


def test_at_a_temperature_options_are_drawn_by_what_they_are_worth() -> None:
    options = ("I must refuse.", "I must refuse. ")  # nearly the same, so that both are drawn
    sums = torch.tensor([sum(logprobs) for logprobs in scored("none", options)])
    heat = float((sums[0] - sums[1]).abs())  # the better one is e times as likely
    rows = played(Chosen(), [item(options)], decoding=Decoding(8, temperature=heat), seeds=list(range(200)), group=200)
    share = sum(row.transcript[-1].content == options[int(sums.argmax())] for row in rows) / 200
    assert share == pytest.approx(0.731, abs=0.1)


def test_under_a_mixture_each_row_is_scored_by_the_policy_of_its_seed() -> None:
    parts = {played(Chosen(), [item()], policy)[0].rollout.retention for policy in ("none", SNAPKV)}
    rows = played(Chosen(), [item()], f"none|{SNAPKV}", seeds=list(range(6)), group=6)
    assert {row.rollout.retention for row in rows} == parts


def test_an_option_without_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match="has an option that encodes to no tokens"):
        played(Chosen(), [item(("yes", ""))])


def test_options_that_do_not_fit_the_positions_are_refused() -> None:
    with pytest.raises(SpecError, match=r"needs \d+ positions \(\d+ prompt \+ \d+ new\)"):
        played(Chosen(), [item(("yes", "code " * model().max_positions))])


def test_no_rollout_is_trained_on_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Chosen):
        def items(self, *args: Any) -> list[Item]:
            return [item()] * args[1]

    monkeypatch.setattr(batch.SUITES, "get", lambda name: Asked)
    with pytest.raises(SpecError, match="suite chosen scores given answers, so there is nothing to sample"):
        batch.training_items(TrainConfig(arm="dense", seed=0, policy="none", suites=("math",)), len)


def test_an_answer_ends_where_its_suite_says_and_keeps_the_text_that_ended_it() -> None:
    free, cut = (played(suite, [item()], decoding=GREEDY)[0] for suite in (Spoken(), Stopped()))
    assert "code" in (said := free.transcript[-1].content)
    assert cut.transcript[-1].content == said[: said.index("code") + 4]
    assert cut.finish_reason == "stop"
    assert cut.new_tokens < free.new_tokens
