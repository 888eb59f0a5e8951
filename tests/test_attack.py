"""The harness of attacks: what is tried, held and broken is counted, and nothing hangs it up."""

from __future__ import annotations

import threading

import pytest

from bench.attack.hostile import Hostile, completion, reply
from bench.attack.trial import Broken, Trial, expect, run_trials
from kvaudit.core.endpoint import Endpoint, Unanswered


def test_broken_trials_are_named_and_counted() -> None:
    def raises() -> None:
        raise ValueError("a fault")

    def breaks() -> None:
        expect(False, "it is shown")

    result = run_trials([Trial("holds", lambda: None), Trial("breaks", breaks), Trial("raises", raises)])
    assert (result.tried, result.held) == (3, 1)
    assert result.broken[0] == "breaks: it is shown"
    assert result.broken[1].startswith("raises: ValueError: a fault (test_attack.py:")


def test_a_trial_that_hangs_is_broken_and_the_next_is_tried() -> None:
    released = threading.Event()
    result = run_trials([Trial("hangs", lambda: released.wait(60)), Trial("holds", lambda: None)], seconds=0.2)
    released.set()
    assert result == (2, ("hangs: still running after 0 s",))


def test_a_trial_without_time_left_is_broken() -> None:
    assert run_trials([Trial("late", lambda: None)], section_seconds=0.0).broken == (
        "late: the section's time was over",
    )


def test_expect_raises_only_where_its_condition_is_empty() -> None:
    expect([1], "never")
    with pytest.raises(Broken, match="empty"):
        expect([], "empty")


def test_a_hostile_server_is_calm_first() -> None:
    with Hostile(reply(b"{}", "418 No"), calm=1) as server:
        client = Endpoint(server.url, timeout=20, tries=1).client("test")
        assert client.ask({"model": "m", "messages": []}).text == "four"
        with pytest.raises(Unanswered, match="status 418"):
            client.ask({"model": "m", "messages": []})
    assert [request.path for request in server.requests] == ["/v1/chat/completions"] * 2
    assert b'"content": "x"' in completion("x")
