"""Where a chat completion puts its words, how it ends, what it claims, and what is tried again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from endpoint_world import completion, gold
from judge_world import endpoint, send
from test_judges import ASKED, ask
from test_probe import SMALL, World, planned

from kvaudit.audit.runs.endpoint_probe import failure_lines
from kvaudit.audit.sampling.chat_calls import Answer, Readings, SentRequest, answer
from kvaudit.core.completions import (
    ChatCompletion,
    NoCompletion,
    is_filtered,
    parse_completion,
    parse_finish,
    split_thought,
)
from kvaudit.core.endpoint import Endpoint, EndpointClient, FirstModel, HttpReply, RefusedRequest, Scope, Unanswered
from kvaudit.core.records import Message, Role

NO = "I can't assist with that."
ROWS = [{"role": "user", "content": "x" * 400}]


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def said(**message: Any) -> ChatCompletion:
    body = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}], "model": "m"}
    return parse_completion(json.dumps(body).encode())


# where words stand


@pytest.mark.parametrize(
    ("message", "text", "thought", "place"),
    [
        ({"content": "Sure."}, "Sure.", None, ""),
        ({"content": None, "refusal": NO}, NO, None, "refusal"),
        ({"refusal": NO}, NO, None, "refusal"),
        ({"content": "", "refusal": NO}, NO, None, "refusal"),
        ({"content": "No.", "refusal": NO}, f"No.\n{NO}", None, "content and refusal"),
        ({"content": "Sure.", "refusal": None}, "Sure.", None, ""),
        ({"content": "Sure.", "refusal": ""}, "Sure.", None, ""),
        ({"content": [{"type": "text", "text": "Su"}, {"type": "text", "text": "re."}]}, "Sure.", None,
         "content parts"),
        ({"content": [{"type": "output_text", "text": "Sure."}]}, "Sure.", None, "content parts"),
        ({"content": [{"type": "refusal", "refusal": NO}]}, NO, None, "refusal"),
        ({"content": {"type": "text", "text": "Sure."}}, "Sure.", None, "content parts"),
        ({"content": [{"type": "text", "text": {"value": "Sure."}}]}, "Sure.", None, "content parts"),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": "Sure."}]},
            "Sure.",
            "hm",
            "content parts",
        ),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Sure."}]}, "Sure.", "hm",
         "content parts"),
        ({"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                      {"type": "text", "text": "Sure."}]}, "Sure.", "hm", "content parts"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Sure."}]}, "Sure.",
         None, "content parts"),
        ({"content": "Sure.", "reasoning_content": "hm"}, "Sure.", "hm", ""),
        ({"content": "Sure.", "reasoning": "hm", "reasoning_content": "hm"}, "Sure.", "hm", ""),
        ({"content": None, "reasoning": "hm"}, "", "hm", "reasoning"),
        ({"content": "", "reasoning_content": "hm"}, "", "hm", "reasoning"),
        ({"content": None, "thinking": "hm"}, "", "hm", "reasoning"),
        ({"content": None, "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, "", "hm", "reasoning"),
        ({"content": None, "reasoning_content": "hm", "refusal": NO}, NO, "hm", "refusal"),
        ({"content": None}, "", None, ""),
        ({"content": []}, "", None, ""),
    ],
)  # fmt: skip
def test_words_are_read_wherever_a_server_puts_them(
    message: dict[str, Any], text: str, thought: str | None, place: str
) -> None:
    found = said(**message)
    assert (found.text, found.thought, found.said_in) == (text, thought, place)


@pytest.mark.parametrize("content", [["yes"], 7, [["yes"]], {"type": "text", "text": 7}])
def test_content_that_is_no_text_is_said_to_be_none(content: Any) -> None:
    with pytest.raises(NoCompletion, match="content is no text"):
        said(content=content)


def test_a_refusal_beside_the_content_counts_as_said_and_the_record_says_where(world: World) -> None:
    right = gold(planned(SMALL))

    def beside(body: dict[str, Any]) -> HttpReply:
        text = json.loads(right(body).body)["choices"][0]["message"]["content"]
        message = {"role": "assistant", "content": None, "refusal": text}
        return HttpReply(200, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())

    done, _ = world.probe(beside, plan=SMALL, shown=True)
    assert done.exit_code == 0, done.output
    assert {(record.score, record.said_in) for record in world.records()} == {(1.0, "refusal")}
    assert "fields: 12 of 12 answers have their text in refusal, not in content" in done.stdout


def test_a_judge_reads_its_word_in_parts_and_behind_a_thought() -> None:
    def tells(content: Any) -> Any:
        body = json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})
        return lambda handler, _: send(handler, 200, body)

    parts = [{"type": "thinking", "thinking": "no"}, {"type": "text", "text": "yes"}]
    with endpoint(tells(parts), tells("<think>no</think>yes"), tells("no, no</think> yes"), tells("no")) as server:
        assert ask(server.url, parallel=1).refused(ASKED[:4]) == [True, True, True, False]


# pages of nothing


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (completion(None, "length", reasoning="hm"), "empty: 12 of 12 answers are empty"),  # type: ignore[arg-type]
        (completion(""), "empty: 12 of 12 answers are empty"),
        (completion("I can", "length"), "cut: 12 of 12 answers were cut before they ended"),
        (completion("<think>Let me", "length"), "cut: 12 of 12 answers were cut before they ended"),
    ],
)
def test_a_page_of_empty_or_cut_answers_says_so_first(world: World, reply: HttpReply, line: str) -> None:
    done, _ = world.probe(lambda _: reply, plan=SMALL, shown=True)
    page = (world.folder / "run" / "report" / "probe.md").read_text()
    assert line in page.split("\n\n")[1]
    assert done.stdout.index(line) < done.stdout.index("long - short")
    assert "length: not measured, every answer is empty or cut" in " ".join(done.stdout.split())
    assert "no suite is shown to lose" not in done.stdout


# thoughts

HELP = "Sure, here is how."


@pytest.mark.parametrize(
    "text",
    [
        f"<think>I cannot help</think>{HELP}",
        f"I cannot help</think>{HELP}",
        f"\n\nI cannot help\n</think>{HELP}",
        f"</think>{HELP}",
    ],
)
def test_a_thought_is_parted_with_and_without_its_opening_tag(text: str) -> None:
    assert split_thought(text, is_open=None)[-1] == Message(Role.ASSISTANT, HELP)


@pytest.mark.parametrize("text", ["zebra <think>hm</think> I refuse", "I refuse", "a < b", "say <think> and go on"])
def test_what_holds_no_thought_is_said_whole(text: str) -> None:
    assert split_thought(text, is_open=None) == (Message(Role.ASSISTANT, text),)


def test_an_answer_scores_alike_with_both_tags_with_one_and_with_a_field_of_its_own(world: World) -> None:
    right = gold(planned(SMALL))
    plan = SMALL.replace("samples: 1", "samples: 1\n  think: strip")
    scores = {}
    for name, before in (("none", ""), ("both", "<think>I cannot help</think>"), ("one", "I cannot help\n</think>\n")):

        def answers(body: dict[str, Any], before: str = before) -> HttpReply:
            return completion(before + json.loads(right(body).body)["choices"][0]["message"]["content"])

        world.probe(answers, plan=plan, out=name)
        scores[name] = [record.score for record in world.records(name)]
    assert scores["none"] == scores["both"] == scores["one"] == [1.0] * 12


@pytest.mark.parametrize("before", ["<think>I cannot help</think>", "I cannot help\n</think>\n"])
def test_a_thought_that_was_graded_as_said_is_a_remark(world: World, before: str) -> None:
    done, _ = world.probe(lambda _: completion(f"{before}Sure."), plan=SMALL, shown=True)
    assert "thoughts: 12 of 12 answers begin with a thought that was graded as part of the answer" in done.stdout
    assert "think: strip" in " ".join(done.stdout.split())


# how an answer ends


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        ("stop", "stop"), ("STOP", "stop"), ("eos_token", "stop"), ("stop_sequence", "stop"), ("end_turn", "stop"),
        ("FINISH_REASON_STOP", "stop"), ("stop-sequence", "stop"), ("EOS", "stop"), ("endoftext", None),
        ("length", "length"), ("MAX_TOKENS", "length"), ("max_new_tokens", "length"), ("model_length", "length"),
        ("tool_calls", None), ("", None), ("abort", None),
    ],
)  # fmt: skip
def test_finish_reasons_of_servers_become_stop_or_length(word: str, finish: str | None) -> None:
    assert parse_finish(word) == finish


def test_finish_reasons_of_content_filters_are_recognised() -> None:
    assert [is_filtered(word) for word in ("content_filter", "SAFETY", "refusal", "stop")] == [True, True, True, False]


def sent(tokens: int = 100, limit: int = 20, rows: Any = ROWS, *, exact: bool = True) -> SentRequest:
    return SentRequest(rows, tokens, exact, limit)


def told(usage: Any = None, finish: str = "stop", text: str = "yes", **more: Any) -> ChatCompletion:
    return ChatCompletion(text, finish, "m", usage, **more)


def test_a_missing_finish_reason_is_stop_unless_the_token_limit_was_reached() -> None:
    ended = [told(usage, "") for usage in (None, {"completion_tokens": 7}, {"completion_tokens": 20})]
    assert [answer(one, sent(), 0.0).finish for one in ended] == ["stop", "stop", "length"]


@pytest.mark.parametrize(("word", "scope"), [("tool_calls", Scope.QUESTION), ("error", Scope.TRY)])
def test_an_unknown_finish_reason_is_no_answer(word: str, scope: Scope) -> None:
    with pytest.raises(Unanswered) as why:
        answer(told(finish=word), sent(), 0.0)
    assert why.value.scope is scope


def test_a_filter_by_any_name_refuses_the_request() -> None:
    with pytest.raises(RefusedRequest, match="it ended by 'SAFETY'"):
        answer(told(finish="SAFETY"), sent(), 0.0)


def test_resuming_is_not_advised_for_permanent_failures(world: World) -> None:
    done, _ = world.probe(lambda _: completion("yes", "tool_calls"))
    assert done.exit_code == 2
    assert "gave no valid answer to 8 questions in a row (it ended by 'tool_calls'" in done.stderr
    assert "resume" not in done.stderr
    right = gold(planned(SMALL))
    first = json.dumps(planned(SMALL).units[0].items[0].messages[-1].content)

    def one_fails(body: dict[str, Any]) -> HttpReply:
        return completion("yes", "tool_calls") if first[1:-1] in json.dumps(body) else right(body)

    done, _ = world.probe(one_fails, plan=SMALL, out="other")
    assert done.exit_code == 0
    (line,) = (line for line in " ".join(done.stdout.split()).split("unscored: ")[1:])
    assert "asked again it would say the same" in line
    assert "resume" not in line


# claims of tokens


def read(usage: Any, readings: Readings | None = None) -> tuple[int | None, int | None]:
    found = answer(told(usage), sent(), 0.0, readings)
    return found.prompt_tokens, found.new_tokens


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ("many", (None, None)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (None, None)),
        ({"prompt_tokens": 100.0, "completion_tokens": 3.0}, (100, 3)),
        ({"prompt_tokens": "100", "completion_tokens": -1}, (None, None)),
        ({"prompt_tokens": True, "completion_tokens": 3.5}, (None, None)),
        ({"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 96}}, (100, None)),
        ({"prompt_tokens": 4, "cache_read_input_tokens": 96}, (100, None)),
        ({"completion_tokens": 220, "completion_tokens_details": {"reasoning_tokens": 212}}, (None, 220)),
    ],
)
def test_token_counts_are_read_where_they_are_valid(usage: Any, counts: tuple[int | None, int | None]) -> None:
    assert read(usage) == counts


def test_a_thought_in_a_field_of_its_own_may_be_longer_than_the_answer() -> None:
    assert answer(told({"completion_tokens": 300}, thought="hm"), sent(), 0.0).new_tokens == 300


@pytest.mark.parametrize("usage", [{"prompt_tokens": 4}, {"prompt_tokens": 900}, {"completion_tokens": 300}])
def test_an_impossible_token_count_makes_an_answer_invalid(usage: Any) -> None:
    with pytest.raises(Unanswered, match="it claims"):
        read(usage)


def test_a_server_may_count_only_the_tokens_that_its_cache_lacked() -> None:
    readings = Readings()
    assert read({"prompt_tokens": 100}, readings) == (100, None)
    assert read({"prompt_tokens": 1}, readings) == (None, None)
    longer = [*ROWS, {"role": "assistant", "content": "y" * 40}, {"role": "user", "content": "z" * 360}]
    found = answer(told({"prompt_tokens": 95}), sent(200, rows=longer), 0.0, readings)
    assert found.prompt_tokens is None
    with pytest.raises(Unanswered, match="claims to have read 5 tokens"):
        answer(told({"prompt_tokens": 5}), sent(200, rows=longer), 0.0, readings)


@pytest.mark.parametrize("later", [0, 1])
def test_a_second_answer_of_which_a_cache_held_the_prompt_is_scored(world: World, later: int) -> None:
    plan = planned(SMALL.replace("samples: 1", "samples: 2"))
    right, seen = gold(plan), set[str]()

    def answers(body: dict[str, Any]) -> HttpReply:
        key = json.dumps(body["messages"])
        whole = sum(plan.count(row["content"]) for row in body["messages"])
        claim = {"prompt_tokens": later if key in seen else whole}
        seen.add(key)
        text = json.loads(right(body).body)["choices"][0]["message"]["content"]
        return completion(text, usage=claim)

    done, _ = world.probe(answers, plan=SMALL.replace("samples: 1", "samples: 2"))
    assert done.exit_code == 0, done.output
    assert [record.score for record in world.records()] == [1.0] * 24


def test_reasons_that_differ_in_numbers_alone_are_one_line() -> None:
    from collections import Counter

    claims = Counter({f"it claims to have read {n} tokens where about 245 were sent": n for n in (1, 2, 3)})
    kinds = [*claims.items(), ("status 500", 1), ("status 429: request a1b2 came too fast", 1)]
    (first, *others) = failure_lines(Counter(dict(kinds)), set(claims))
    assert first == (
        "unscored: 6 conversations, it claims to have read 3 tokens where about 245 were sent (2 more reasons differ "
        "in their numbers alone); asked again it would say the same"
    )
    assert others == [
        "unscored: 1 conversations, status 500; --resume asks them again",
        "unscored: 1 conversations, status 429: request a1b2 came too fast; --resume asks them again",
    ]


def test_the_first_model_that_is_named_is_the_one_whose_answers_are_kept() -> None:
    model = FirstModel()
    assert [model.fault(name) == "" for name in ("", "a", "a", "b", "")] == [True, True, True, False, False]
    assert model.name == "a"
    assert model.fault("b").startswith("an answer of model 'b', the first was of model 'a'")


# what is tried again


def client(*replies: HttpReply, tries: int = 3) -> tuple[EndpointClient, list[int]]:
    asked: list[int] = []

    def send_back(*_: Any) -> HttpReply:
        asked.append(1)
        return replies[min(len(asked), len(replies)) - 1]

    return Endpoint("http://endpoint/v1", tries=tries).client("probe", send_back), asked


def error(code: Any, message: str = "it broke", status: int = 200, **more: Any) -> HttpReply:
    return HttpReply(status, json.dumps({"error": {"message": message, "code": code, **more}}).encode())


AGAIN = {
    **{
        f"status {status}": HttpReply(status, b"") for status in (408, 409, 425, 429, 500, 501, 502, 503, 504, 507, 529)
    },
    **{f"status {status}": HttpReply(status, b"<html>") for status in range(520, 525)},
    "429 in a 200": error(429),
    "503 in a 200 as text": error("503"),
    "a name in a 200": error("rate_limit_exceeded"),
    "no code in a 200": error(None),
    "a text in a 200": HttpReply(200, b'{"error": "overloaded"}'),
    "an error of the object": HttpReply(200, b'{"object": "error", "message": "busy", "code": 503}'),
    "an error of the choice": HttpReply(200, b'{"choices": [{"error": {"message": "gone", "code": 502}}]}'),
    "no choice": HttpReply(200, b'{"choices": [], "usage": null}'),
    "choices are null": HttpReply(200, b'{"choices": null}'),
}


@pytest.mark.parametrize("reply", AGAIN.values(), ids=AGAIN)
def test_temporary_errors_are_tried_again(reply: HttpReply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.core.endpoint.time.sleep", lambda _: None)
    line, asked = client(reply, completion("yes"))
    assert line.ask({}).text == "yes"
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reply", "scope", "words"),
    [
        (error(402, "Insufficient credits"), Scope.ENDPOINT, "Insufficient credits"),
        (error(404, "no such model"), Scope.ENDPOINT, "no such model"),
        (error("insufficient_quota", "You exceeded your quota", 429), Scope.ENDPOINT, "You exceeded your quota"),
        (error(400, "too long"), Scope.QUESTION, "too long"),
        (error(None, "bad field", type="invalid_request_error"), Scope.QUESTION, "bad field"),
        (
            HttpReply(422, b'{"detail": [{"msg": "max_tokens is too large"}]}'),
            Scope.QUESTION,
            "max_tokens is too large",
        ),
        (HttpReply(400, b'{"detail": "no chat template"}'), Scope.QUESTION, "no chat template"),
        (HttpReply(400, b'{"object": "error", "message": "too long"}'), Scope.QUESTION, "too long"),
        (
            HttpReply(
                200,
                b'{"choices": [{"index": 1, "message": {"content": "a"}}, {"index": 0, "message": {"content": "b"}}]}',
            ),
            Scope.QUESTION,
            "2 choices where one was asked for",
        ),
    ],
)
def test_permanent_errors_are_reported_at_once_in_the_servers_words(reply: HttpReply, scope: Scope, words: str) -> None:
    line, asked = client(reply)
    with pytest.raises(Unanswered, match=words) as why:
        line.ask({})
    assert (why.value.scope, len(asked)) == (scope, 1)


def test_the_words_of_the_server_behind_a_gateway_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.core.endpoint.time.sleep", lambda _: None)
    line, _ = client(error(429, "Provider returned error", metadata={"raw": "rate-limited upstream"}))
    with pytest.raises(Unanswered, match=r"status 200 \(429\): Provider returned error: rate-limited upstream"):
        line.ask({})


@pytest.mark.parametrize(("header", "waits"), [("0", [1.0, 2.0]), ("-5", [1.0, 2.0]), ("30", [30.0, 30.0]),
    (None, [1.0, 2.0]), ("Wed, 21 Oct 2015 07:28:00 GMT", [1.0, 2.0]), ("1.5", [1.5, 2.0])])  # fmt: skip
def test_the_wait_is_the_longer_of_ours_and_the_servers(
    header: str | None, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvaudit.core.endpoint.time.sleep", slept.append)
    line, _ = client(HttpReply(429, b"", header))
    with pytest.raises(Unanswered):
        line.ask({})
    assert slept == waits


def test_an_answer_from_before_these_fields_is_still_known() -> None:
    assert Answer("yes", "stop", None, None, "m", 1.0) == answer(told(None), sent(), 1.0)


def test_requests_of_other_threads_wait_for_a_busy_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, now = list[float](), [100.0]
    monkeypatch.setattr("kvaudit.core.endpoint.time.monotonic", lambda: now[0])
    monkeypatch.setattr("kvaudit.core.endpoint.time.sleep", slept.append)
    line, _ = client(HttpReply(529, b""), completion("yes"), completion("yes"))
    assert line.ask({}).text == "yes"
    assert slept == [1.0]
    assert line.ask({}).text == "yes"  # another thread's, while the first one still waits
    assert slept == [1.0, 1.0]
    now[0] = 102.0
    line.ask({})
    assert slept == [1.0, 1.0]
