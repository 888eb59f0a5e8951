"""Requests that wait together: answered in one batch by kvaudit's own cache or by an engine's session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from kvaudit.audit.engines.base import EngineFailed, GenerationRequest, Reply, Session
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.inspect_units import session_answers
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.serving.batched import AnswerBatch, AskedPrompt, BatchedModel, cache_answers
from kvaudit.audit.serving.wire import ChatRequest, Choice, read_request
from kvaudit.core.errors import AuditError, RunError, SpecError

SNAPKV = parse_policy("snapkv:budget=24,window=8,interval=1,chunk=8")
TEXTS = (
    "Tell me the code of moose.",
    "The code: moose olive.\nThe code: wolf river.\nTell me the code of wolf.",
    "Hm?",
)


def request(text: str, **options: object) -> ChatRequest:
    return read_request({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options})


def answers(answer: AnswerBatch, requests: Sequence[ChatRequest], at_once: int = 64) -> list[Choice]:
    model = load_model()
    with closing(BatchedModel(model.chat, model.max_positions, answer, at_once)) as asked:
        return [pending.result()[0] for _, pending in [asked.submit(request) for request in requests]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_of_our_cache_is_that_of_the_sampler_alone_whatever_its_batch(temperature: float) -> None:
    model, sizes = load_model(), list[int]()
    sample = cache_answers(model, SNAPKV, 16_384)

    def counted(asked: Sequence[AskedPrompt]) -> Sequence[Choice | AuditError]:
        sizes.append(len(asked))
        return sample(asked)

    requests = [request(text, temperature=temperature, seed=n) for n, text in enumerate(TEXTS)]
    together = answers(counted, requests)
    assert sizes == [3]
    assert [choice.text for choice in answers(sample, requests, at_once=1)] == [choice.text for choice in together]
    for n, (entry, choice) in enumerate(zip(requests, together, strict=True)):
        prompt = model.chat.prompt(entry.messages)
        episode = Sampler(model, SNAPKV).open([prompt.ids], [n], roles=[prompt.roles])
        (done,) = episode.decode(Decoding(8, temperature=temperature))
        (rollout,) = episode.rollouts()
        assert done is not None
        assert (choice.text, choice.finish_reason) == (model.chat.text(done.ids), done.finish_reason)
        assert choice.use is not None
        assert (choice.use.retention, len(choice.tokens)) == (rollout.retention, len(done.ids))
        assert (choice.use.retention == 1.0) is (len(prompt.ids) <= 24)


def test_requests_that_are_decoded_otherwise_or_too_long_for_a_batch_are_answered_apart() -> None:
    model = load_model()
    requests = [request(TEXTS[0]), request(TEXTS[1], temperature=0), request(TEXTS[2], temperature=0)]
    wide, narrow = (answers(cache_answers(model, SNAPKV, tokens), requests[1:]) for tokens in (16_384, 1))
    assert [choice.text for choice in wide] == [choice.text for choice in narrow]
    assert answers(cache_answers(model, SNAPKV, 16_384), requests)[1:] == wide


def test_an_answer_ends_at_a_stop_text_without_it() -> None:
    whole = answers(cache_answers(load_model(), SNAPKV, 16_384), [request(TEXTS[1], temperature=0)])[0].text
    stop = whole[len(whole) // 2 :][:2]
    (cut,) = answers(cache_answers(load_model(), SNAPKV, 16_384), [request(TEXTS[1], temperature=0, stop=[stop])])
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_prompt_that_does_not_fit_is_the_error_of_its_request() -> None:
    with pytest.raises(SpecError, match="answer up to 5000, the model has 4096 positions"):
        answers(cache_answers(load_model(), SNAPKV, 1), [replace(request("Hm?"), max_tokens=5000)])


class Scripted(Session):
    """A session whose replies a test defines."""

    def __init__(self, reply: Callable[[GenerationRequest], Reply]) -> None:
        self.described, self.reply, self.asked = {}, reply, list[GenerationRequest]()

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        self.asked += requests
        return [self.reply(request) for request in requests]

    def stop(self) -> None:
        """Do nothing."""


def test_an_engine_is_sent_the_prompt_and_the_seed_and_its_refusal_is_that_of_one_request() -> None:
    model = load_model()
    ids = model.chat.encode("moose olive")

    def reply(request: GenerationRequest) -> Reply:
        if request.seed == 1:
            return Reply((), "error", refused="too hot")
        return Reply((), "stop", text="moose") if request.seed else Reply(ids, "length")

    session = Scripted(reply)
    with closing(BatchedModel(model.chat, 4096, session_answers(session, model), 64)) as asked:
        pending = [asked.submit(request(text, seed=n, temperature=0.5))[1] for n, text in enumerate(TEXTS)]
        by_ids, by_text = pending[0].result()[0], pending[2].result()[0]
        with pytest.raises(RunError, match="too hot"):
            pending[1].result()
    assert (by_ids.text, by_ids.finish_reason, len(by_ids.tokens)) == ("moose olive", "length", len(ids))
    assert (by_text.text, by_text.finish_reason, by_text.use) == ("moose", "stop", None)
    assert [(entry.seed, entry.temperature, entry.max_tokens) for entry in session.asked] == [
        (n, 0.5, 8) for n in range(3)
    ]
    assert [entry.ids for entry in session.asked] == [model.chat.prompt(request(text).messages).ids for text in TEXTS]


def test_an_engine_that_died_fails_this_request_and_every_later_one() -> None:
    def dies(request: GenerationRequest) -> Reply:
        raise EngineFailed("it is gone")

    model, session = load_model(), Scripted(dies)
    with closing(BatchedModel(model.chat, 4096, session_answers(session, model), 1)) as asked:
        for text in TEXTS[:2]:
            with pytest.raises(EngineFailed, match="it is gone"):
                asked.submit(request(text))[1].result()
        assert isinstance(asked.failure, EngineFailed)
    assert len(session.asked) == 1
