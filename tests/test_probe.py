"""A probe of made-up endpoints: what is asked, every way of failing, going on after a kill, keys, noise and length."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from endpoint_world import Answers, Wire, completion, gold
from rich.console import Console
from typer.testing import CliRunner, Result

from kvaudit.audit.cli import app
from kvaudit.audit.runs.endpoint_probe import Plan, Probe, make_plan
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.chat_calls import wire
from kvaudit.core.endpoint import Endpoint, HttpReply
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Record, Role
from kvaudit.core.spec import parse_spec

PLAN = """
name: quarter
model: vendor
evaluate:
  suites: {refusal: {items: 6}, agent: {items: 5}}
  context_tokens: [200, 400]
  samples: 2
probe: {at_once: 1, key: VENDOR_KEY, price: {input: 2, output: 10}}
"""
SMALL = PLAN.replace(", agent: {items: 5}", "").replace("samples: 2", "samples: 1")
KEY = "sk-a-secret-of-the-test"
CALLS = 2 * 2 * (6 + 5 * 2)  # lengths, draws, and an agent looks before it acts
SECONDS = "seconds"


def planned(text: str = PLAN) -> Plan:
    return make_plan(parse_spec(text, "plan.yaml", NAMES))


class World:
    """A folder with a plan and an endpoint."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = tmp_path, patch
        patch.setenv("VENDOR_KEY", KEY)
        patch.setattr("kvaudit.core.endpoint.time.sleep", lambda _: None)
        patch.setattr("os.fsync", lambda _: None)

    def probe(
        self, answers: Answers, *words: str, plan: str = PLAN, out: str = "run", shown: bool = False
    ) -> tuple[Result, Wire]:
        """One call of the command, without its report unless that is to be ``shown``."""
        wire = Wire(answers)
        self._patch.setattr("kvaudit.core.endpoint.over_http", wire)
        path = self.folder / "plan.yaml"
        path.write_text(plan)
        done = ["probe", str(path), "--base-url", "http://endpoint/v1", "--out", str(self.folder / out), *words]
        with pytest.MonkeyPatch.context() as patch:
            if not shown:
                patch.setattr("kvaudit.audit.commands.probe._show", lambda *_: None)
            return CliRunner().invoke(app, done), wire

    def records(self, out: str = "run") -> list[Record]:
        files = sorted((self.folder / out / "records").glob("*.jsonl"))
        return [Record.from_json(line) for file in files for line in file.read_text().splitlines()]

    def failed(self) -> dict[str, int]:
        seals = (json.loads(path.read_text()) for path in (self.folder / "run" / "records").glob("*.done.json"))
        return {why: count for seal in seals for why, count in seal["failed"].items()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def invoked(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


# what is asked


def test_a_plan_asks_the_same_whenever_it_is_made() -> None:
    assert planned().asked == planned().asked
    other = planned(PLAN.replace("samples: 2", "samples: 2\n  seed: 7")).asked
    assert all(other[key] != value for key, value in planned().asked.items() if key.startswith("items"))


def test_every_item_has_a_short_twin_that_asks_the_same() -> None:
    units = planned().units
    for suite in ("refusal", "agent"):
        short, long = (unit for unit in units if unit.suite.name == suite)
        assert (short.context_tokens, long.context_tokens) == (200, 400)
        assert [(i.item_id, i.cluster_id, i.payload) for i in short.items] == [
            (i.item_id, i.cluster_id, i.payload) for i in long.items
        ]
        assert all(
            planned().tokens(i) <= 200 < planned().tokens(j) for i, j in zip(short.items, long.items, strict=True)
        )


def test_the_defaults_of_a_plan_are_enough_to_decide() -> None:
    plain = "{name: q, model: m, probe: {}"
    assert parse_spec(plain + "}", "plan.yaml").evaluate.context_tokens == (1024, 16_384, 32_768)
    plan = planned(plain + ", evaluate: {context_tokens: [400, 500]}}")
    assert not [line for line in plan.lines() if line.startswith(("small", "no A/A"))]


def test_a_tools_result_stands_in_the_users_message_or_by_itself() -> None:
    said = [Message(Role.ASSISTANT, "look"), Message(Role.TOOL, "found"), Message(Role.THOUGHT, "hm")]
    assert wire(said, "user")[1:] == [{"role": "user", "content": "Tool result:\nfound"}]
    assert wire(said, "tool")[1:] == [{"role": "tool", "content": "found"}]


def test_a_dry_run_says_what_it_costs_and_asks_nothing(world: World) -> None:
    done, wire = world.probe(gold(planned()), "--dry-run")
    assert done.exit_code == 0
    assert "requests: 84 at most" in done.stdout  # 24 of refusal, and three turns of 20 agents
    assert "estimated, one for 4 characters" in done.stdout
    assert "cost: at most about 0.0" in done.stdout
    assert "small: 11 items of 11 templates" in done.stdout
    assert not wire.asked
    assert not (world.folder / "run").exists()


# conversations, and going on


def test_conversations_become_ordinary_records(world: World) -> None:
    done, wire = world.probe(gold(planned()), shown=True)
    assert done.exit_code == 0, done.output
    assert len(wire.asked) == CALLS
    records = world.records()
    assert len(records) == 44
    assert {record.score for record in records} == {1.0}
    assert {(record.arm, record.policy, record.checkpoint) for record in records} == {
        ("endpoint", "unknown", "unknown")
    }
    assert "every second answer equals the first one, word for word" in done.stdout


def test_a_killed_probe_asks_only_what_was_not_answered(world: World) -> None:
    right, told = gold(planned()), 0

    def dies(body: dict[str, Any]) -> HttpReply:
        nonlocal told
        told += 1
        if told > 30:
            raise KeyboardInterrupt
        return right(body)

    assert world.probe(dies)[0].exit_code == 130
    calls = world.folder / "run" / "calls.jsonl"
    calls.write_bytes(calls.read_bytes()[:-20])  # the kill has cut the last line
    done, wire = world.probe(right, "--resume")
    assert done.exit_code == 0
    assert len(wire.asked) == CALLS - 29
    unbroken, _ = world.probe(right, out="other")
    assert unbroken.exit_code == 0
    assert [_timeless(r) for r in world.records()] == [_timeless(r) for r in world.records("other")]
    assert world.probe(right, "--resume")[1].asked == []


def test_what_another_process_was_told_meanwhile_is_not_asked_again(world: World) -> None:
    plan, folder = planned(SMALL), world.folder / "run"
    right, told = gold(plan), 0

    def every_third_fails(body: dict[str, Any]) -> HttpReply:
        nonlocal told
        told += 1
        return HttpReply(400, b"{}") if told % 3 == 0 else right(body)

    wires = [Wire(every_third_fails), Wire(right)]
    url, quiet = "http://endpoint/v1", Console(quiet=True)
    both = [
        Probe(open_run(folder, plan.spec, resume=n > 0), plan, Endpoint(url).client("probe", wire), quiet)
        for n, wire in enumerate(wires)
    ]
    for probe in both:
        probe.work()
    assert [len(wire.asked) for wire in wires] == [12, 4]


def test_answers_that_an_earlier_version_paid_for_are_not_asked_again(world: World) -> None:
    plan, calls = planned(SMALL), world.folder / "run" / "calls.jsonl"
    assert world.probe(gold(plan), plan=SMALL)[0].exit_code == 0
    before = [_timeless(record) for record in world.records()]
    rows = [json.loads(line) for line in calls.read_text().splitlines()]
    damaged = [{"call": "x", "failed": "status 500"}, {"call": "y", "text": ["no"]}, {"call": "z", "text": "no"}, 7]
    former = [*damaged, *({"call": row["question"], **row["answer"]} for row in rows[1:])]
    calls.write_text("".join(json.dumps(row) + "\n" for row in former))
    for path in (world.folder / "run" / "records").iterdir():
        path.unlink()
    done, wire = world.probe(gold(plan), "--resume", plan=SMALL)
    assert done.exit_code == 0, done.output
    assert len(wire.asked) == 1
    assert [_timeless(record) for record in world.records()] == before


def test_a_stored_answer_that_was_edited_is_asked_again(world: World) -> None:
    right, calls = gold(planned(SMALL)), world.folder / "run" / "calls.jsonl"
    assert world.probe(right, plan=SMALL)[0].exit_code == 0
    calls.write_text(calls.read_text().replace('"finish": "stop"', '"finish": "length"', 1))
    for path in (world.folder / "run" / "records").iterdir():
        path.unlink()
    assert len(world.probe(right, "--resume", plan=SMALL)[1].asked) == 1


def _timeless(record: Record) -> dict[str, Any]:
    return {key: value for key, value in json.loads(record.to_json()).items() if key != SECONDS}


def raises(error: BaseException) -> Callable[[], HttpReply]:
    def reply() -> HttpReply:
        raise error

    return reply


READ = {"prompt_tokens": 20, "completion_tokens": 3}
FAILURES: dict[str, Callable[[], HttpReply]] = {
    "status 429": lambda: HttpReply(429, b"{}", "1"),
    "status 500": lambda: HttpReply(500, b"<html>"),
    "status 400: too long": lambda: HttpReply(400, b'{"error": {"message": "too long"}}'),
    "TimeoutError": raises(TimeoutError("timed out")),
    "IncompleteRead": raises(IncompleteRead(b'{"choi')),
    "no chat completion": lambda: HttpReply(200, b'{"choices": [{"mess'),
    "content is no text": lambda: completion(["I must refuse."]),  # type: ignore[arg-type]
    "claims to have read 20 tokens": lambda: completion("I must refuse.", usage=READ),
    "claims 400 tokens": lambda: completion("I must refuse.", usage={"completion_tokens": 400}),
    "ended by 'tool_calls'": lambda: completion("I must refuse.", "tool_calls"),
    "cut after 2 tokens": lambda: completion("I", "length", usage={"completion_tokens": 2}),
    "ended by 'content_filter'": lambda: completion("", "content_filter"),
}


def test_a_failed_call_is_unscored_with_its_reason_and_asked_again(world: World) -> None:
    plan = SMALL.replace("items: 6", "items: 12")
    right, seen = gold(planned(plan)), list[str]()
    ways = list(FAILURES.values())

    def answers(body: dict[str, Any]) -> HttpReply:
        key = json.dumps(body["messages"])
        if key not in seen:
            seen.append(key)
        number, fails = divmod(seen.index(key), 2)
        return ways[number]() if fails else right(body)

    done, _ = world.probe(answers, plan=plan)
    assert done.exit_code == 0, done.output
    reasons = world.failed()
    assert [sum(why in reason for reason in reasons) for why in FAILURES] == [1] * len(FAILURES)
    assert set(reasons.values()) == {1}
    unscored = [record for record in world.records() if record.score is None]
    assert [record.finish_reason for record in unscored] == ["error"] * len(FAILURES)
    assert {record.unanswered for record in unscored} == reasons.keys()
    assert done.stdout.count("unscored: 1 conversations, ") == len(FAILURES)
    again, wire = world.probe(right, "--resume", plan=plan)
    assert again.exit_code == 0
    assert len(wire.asked) == len(FAILURES)
    assert {record.score for record in world.records()} == {1.0}
    assert world.failed() == {}


def test_conversations_beyond_the_reasons_that_a_seal_holds_are_counted_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvaudit.audit.runs.endpoint_probe._MOST_REASONS", 1)
    right, asked = gold(planned(SMALL)), 0

    def answers(body: dict[str, Any]) -> HttpReply:
        nonlocal asked
        asked += 1
        why = json.dumps({"error": {"message": f"filtered by rule {'abcdefghijkl'[asked // 2]}"}})
        return HttpReply(400, why.encode()) if asked % 2 else right(body)

    done, _ = world.probe(answers, plan=SMALL)
    assert done.exit_code == 0, done.output
    assert sum(record.score is None for record in world.records()) == 6
    assert "unscored: 4 conversations, for other reasons; --resume asks them again" in done.stdout


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda: HttpReply(401, b'{"error": {"message": "bad key"}}'), "status 401; model vendor, key from VENDOR_KEY"),
        (lambda: HttpReply(503, b""), "status 503"),
        (raises(ConnectionRefusedError("refused")), "ConnectionRefusedError"),
    ],
)
def test_an_endpoint_that_answers_no_more_stops_the_probe_in_one_line(world: World, reply: Any, words: str) -> None:
    right = gold(planned())
    asked = 0

    def answers(body: dict[str, Any]) -> HttpReply:
        nonlocal asked
        asked += 1
        return right(body) if asked <= 5 else reply()

    done, _ = world.probe(answers)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "--resume" in done.stderr
    again, wire = world.probe(right, "--resume")
    assert again.exit_code == 0
    assert len(wire.asked) == CALLS - 5


def test_the_key_is_in_one_header_and_nowhere_else(world: World) -> None:
    right = gold(planned())

    def echoes(body: dict[str, Any]) -> HttpReply:
        said = json.loads(right(body).body)
        said["choices"][0]["message"]["content"] += f" Your key is {KEY}."
        said["model"] = f"model of {KEY}"
        return HttpReply(200, json.dumps(said).encode())

    done, wire = world.probe(echoes, shown=True)
    assert done.exit_code == 0, done.output
    assert {headers["Authorization"] for headers in wire.headers} == {f"Bearer {KEY}"}
    written = [path.read_text() for path in (world.folder / "run").rglob("*") if path.is_file()]
    assert not any(KEY in text for text in (*written, done.output))


def test_a_rate_spaces_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "sleep", waited.append)
    line = Endpoint("http://endpoint/v1", per_minute=30).client("probe", lambda *_: completion("yes"))
    for _ in range(3):
        line.ask({"model": "m"})
    assert waited == [0.0, 2.0, 4.0]


# what comes of it


def test_a_probe_is_compared_and_judged_like_any_run(world: World) -> None:
    right = gold(planned(SMALL))
    now, _ = world.probe(right, plan=SMALL, out="now")
    assert world.probe(right, plan=SMALL, out="before")[0].exit_code == now.exit_code == 0
    before, after, judged = (world.folder / name for name in ("before", "now", "judged"))
    told = invoked("compare", before, after)
    assert told.exit_code == 6, told.output  # six templates do not even show that anything could be lost
    assert invoked("grade", "judge", after, "--out", judged, "--judge", "phrases").exit_code == 0
    assert [r.score for r in world.records("judged")] == [r.score for r in world.records("now")]
    assert "against the baseline" in invoked("probe", judged, "--baseline", after).stdout
    refused = invoked("report", after)
    assert refused.exit_code == 2
    assert "is a probe" in refused.stderr


@pytest.mark.parametrize("suite", ["agent", "refusal"])
def test_a_collapse_between_two_probes_fails(suite: str, world: World) -> None:
    """Where every answer of one side is degenerate no judge spoke there, which makes it no other judge."""
    plan = SMALL.replace("refusal: {items: 6}", f"{suite}: {{items: 24}}")
    world.probe(gold(planned(plan)), plan=plan, out="before")
    world.probe(lambda _: completion(""), plan=plan, out="now")
    assert {record.outcome.value for record in world.records("now")} == {"degenerate"}
    told = invoked("compare", world.folder / "before", world.folder / "now")
    assert told.exit_code == 3, told.output
    assert "verdict: FAIL" in " ".join(told.output.split())
    back = invoked("compare", world.folder / "now", world.folder / "before")
    assert back.exit_code != 5, back.output
    provenance = world.folder / "before" / "provenance.json"
    table = json.loads(provenance.read_text())
    provenance.write_text(json.dumps({key: value for key, value in table.items() if key != "asked"}))
    unlisted = invoked("compare", world.folder / "now", world.folder / "before")
    assert unlisted.exit_code == 5
    assert f"different decoding of {suite}" in " ".join(unlisted.output.split())


def test_a_probe_of_few_templates_gives_the_estimate_and_no_interval(world: World) -> None:
    plan = PLAN.replace("refusal: {items: 6}, agent: {items: 5}", "refusal: {items: 3}")
    done, _ = world.probe(lambda body: completion("No." if len(str(body)) % 2 else ""), plan=plan, shown=True)
    assert done.exit_code == 0, done.output
    again = invoked("probe", world.folder / "run", "--baseline", world.folder / "run")
    report = world.folder / "run" / "report"
    texts = [done.output, again.output, (report / "probe.md").read_text()]
    for text in (" ".join(text.split()) for text in texts):
        assert not re.search(r"pp \\?\[|% to \d", text), text
    assert "pp, too few templates for an interval (3, wanted 6)" in texts[2].replace("\\", "")
    body = json.loads((report / "probe.json").read_text())
    rows = [*body["noise"], *(row[key] for row in body["lengths"] for key in ("effect", "against"))]
    assert {(row["low"], row["high"]) for row in rows} == {(None, None)}
    assert not any(row["sign"] for row in body["lengths"])
    assert all("length: not measured, no suite has enough templates" in " ".join(text.split()) for text in texts)


def test_a_conversation_without_an_answer_is_judged_as_unscored(world: World) -> None:
    right, number = gold(planned(SMALL)), 0

    def answers(body: dict[str, Any]) -> HttpReply:
        nonlocal number
        number += 1
        return right(body) if number > 1 else HttpReply(400, b"")

    assert world.probe(answers, plan=SMALL)[0].exit_code == 0
    done = invoked("grade", "judge", world.folder / "run", "--out", world.folder / "judged")
    assert done.exit_code == 0, done.output
    assert [record.score for record in world.records("judged")].count(None) == 1


def test_probes_of_other_items_are_not_compared(world: World) -> None:
    right = gold(planned(SMALL))
    for out in ("before", "now"):
        assert world.probe(right, plan=SMALL, out=out)[0].exit_code == 0
    story = world.folder / "before" / "provenance.json"
    asked = planned(SMALL).asked["items of refusal at 200"]
    assert asked in story.read_text()
    story.write_text(story.read_text().replace(asked, "0" * 64))
    done = invoked("compare", world.folder / "before", world.folder / "now")
    assert done.exit_code == 5
    assert "items of refusal at 200" in done.stdout
    done = invoked("probe", world.folder / "now", "--baseline", world.folder / "before")
    assert done.exit_code == 2
    assert "was asked something else (items of refusal at 200)" in done.stderr


def test_a_probe_of_which_nothing_was_answered_says_nothing_of_length(world: World) -> None:
    right = gold(planned(SMALL))

    def too_long(body: dict[str, Any]) -> HttpReply:
        long = sum(len(row["content"]) for row in body["messages"]) > 4 * 250
        return HttpReply(400, b"") if long else right(body)

    world.probe(too_long, plan=SMALL)
    shown = invoked("probe", world.folder / "run")
    assert shown.exit_code == 0, shown.output
    assert "length: not measured, no item was answered at two lengths" in " ".join(shown.output.split())


def test_a_baseline_of_other_items_is_refused_before_a_call_is_paid_for(world: World) -> None:
    right = gold(planned(SMALL))
    world.probe(right, plan=SMALL, out="before")
    other = SMALL.replace("items: 6", "items: 5")
    done, wire = world.probe(right, "--baseline", str(world.folder / "before"), plan=other, out="now")
    assert (done.exit_code, len(wire.asked)) == (2, 0)
    assert "was asked something else" in done.stderr
    assert not (world.folder / "now").exists()


def test_the_folder_of_a_probe_takes_no_options_of_asking(world: World) -> None:
    world.probe(gold(planned(SMALL)), plan=SMALL)
    assert invoked("probe", world.folder / "run", "--limit", "2").exit_code == 2


def test_noise_is_what_two_answers_to_one_item_differ_in(world: World) -> None:
    right, seen = gold(planned()), dict[str, int]()

    def wavers(body: dict[str, Any]) -> HttpReply:
        key = json.dumps(body["messages"])
        seen[key] = seen.get(key, 0) + 1
        rows = body["messages"]
        lapse = seen[key] == 2 and len(rows) == 2 and rows[0]["content"].startswith("You guard")
        return completion("purple purple") if lapse else right(body)

    done, _ = world.probe(wavers, shown=True)
    found = json.loads((world.folder / "run" / "report" / "probe.json").read_text())["noise"]
    assert [(row["suite"], row["scores"]) for row in found] == [
        ("refusal", 1.0),
        ("refusal", 1.0),
        ("agent", 0.0),
        ("agent", 0.0),
    ]
    assert "the endpoint itself is not deterministic" in done.stdout


def test_a_loss_with_length_is_told_from_one_that_the_baseline_had(world: World) -> None:
    plan = SMALL.replace("items: 6", "items: 36")
    right = gold(planned(plan))

    def forgets(body: dict[str, Any]) -> HttpReply:
        long = sum(len(row["content"]) for row in body["messages"]) > 4 * 250
        return completion("Nothing comes to mind.") if long else right(body)

    assert "loses with it" not in world.probe(right, plan=plan, out="whole", shown=True)[0].stdout
    done, _ = world.probe(forgets, plan=plan, out="before", shown=True)
    assert "length: refusal at 400 loses with it" in done.stdout
    found = json.loads((world.folder / "before" / "report" / "probe.json").read_text())["lengths"][0]
    assert found["effect"]["estimate"] == -1.0
    against = [invoked("probe", world.folder / "before", "--baseline", world.folder / "whole").stdout]
    world.probe(forgets, plan=plan, out="it is now")
    against.append(invoked("probe", world.folder / "it is now", "--baseline", world.folder / "before").stdout)
    assert ["more than at the baseline" in text for text in against] == [True, False]
    now, before = world.folder / "it is now", world.folder / "before"
    assert f"at any length: kvaudit compare {before} '{now}'" in " ".join(against[1].split())  # which this does not say


def test_an_answer_of_another_model_than_the_first_is_asked_again_later(world: World) -> None:
    right, count = gold(planned()), itertools.count()

    def falls_back(body: dict[str, Any]) -> HttpReply:
        said = json.loads(right(body).body)
        return HttpReply(200, json.dumps(said | ({"model": "fallback-mini"} if next(count) == 5 else {})).encode())

    done, _ = world.probe(falls_back)
    why = "an answer of model 'fallback-mini', the first was of model 'made-up': turn off the server's fallback"
    assert world.failed() == {why: 1}
    assert "--resume asks them again" in done.output
    world.probe(right, "--resume")
    assert world.failed() == {}


# plans that cannot be


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[200, 400]", "[400]"), "a probe needs a short length for comparison"),
        (("[200, 400]", "[20, 400]"), "does not fit 20"),
        (("samples: 2", "policies: [none, int8]"), "evaluate.policies cannot be used with probe"),
        (("model: vendor", "checkpoints: {a: here}"), "checkpoints cannot be used with probe"),
        (("model: vendor", ""), "model is missing"),
        (("probe: {", "probe: {kee: x, "), "unknown key 'kee' in probe"),
        (("VENDOR_KEY", "$VENDOR"), "probe.key"),
        (("at_once: 1", "at_once: 0"), "at_once"),
    ],
)
def test_a_plan_that_cannot_be_asked_is_one_line(change: tuple[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("(", r"\(")) as error:
        planned(PLAN.replace(*change))
    assert "\n" not in str(error.value)


def test_rates_and_prices_may_change_while_a_probe_goes_on(world: World) -> None:
    right = gold(planned())
    world.probe(right)
    slower = PLAN.replace("at_once: 1", "at_once: 2, per_minute: 600000, tries: 2")
    assert world.probe(right, "--resume", plan=slower)[0].exit_code == 0
    refused, _ = world.probe(right, "--resume", plan=PLAN.replace("samples: 2", "samples: 3"))
    assert "holds another spec" in refused.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("run", "plan.yaml"), "is the plan of a probe; run it with: kvaudit probe plan.yaml --base-url URL"),
        (("run", "my plan.yaml"), "kvaudit probe 'my plan.yaml' --base-url URL"),
        (("probe", "plan.yaml"), "--base-url is missing"),
        (("probe", "plan.yaml", "--base-url", "http://me:secret@h/v1"), "no password in it"),
        (("probe", "plan.yaml", "--base-url", "http://h/v1?key=secret"), "no query"),
        (("probe", "."), "is missing"),
    ],
)
def test_impossible_commands_are_one_line_errors(
    world: World, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(world.folder)
    for name in ("plan.yaml", "my plan.yaml"):
        Path(name).write_text(PLAN)
    done = invoked(*words)
    assert done.exit_code == 2
    assert line in done.stderr
    assert "secret" not in done.stderr
    assert not Path("runs").exists()


def test_a_key_that_is_not_set_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VENDOR_KEY")
    done, _ = world.probe(gold(planned()))
    assert done.exit_code == 2
    assert "the environment variable VENDOR_KEY is not set" in done.stderr
