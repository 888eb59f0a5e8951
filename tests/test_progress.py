"""The bar of a run: how far it is, rich's estimate of the rest, and what was found so far."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvaudit.audit.runs import progress
from kvaudit.audit.runs.progress import Part, RunBar, duration


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the bar."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def lines(said: io.StringIO) -> list[str]:
    return said.getvalue().splitlines()


def test_a_line_now_and_then_says_how_far_how_long_and_what_was_found(now: list[float]) -> None:
    said, found = io.StringIO(), ["int8: no loss so far in 40 of 72 answers"]
    with RunBar(Console(file=said, width=40), lambda: found) as bar:
        bar.expect([Part("a", 100)])
        for step in range(1, 71):
            now[0] += 1.0
            bar.count("a", step)
            bar.show("asking: math under int8")
    assert lines(said) == [
        f"{done}% done, ETA {left}: asking: math under int8; {found[0]}"
        for done, left in ((20, "1.3 min"), (40, "1.0 min"), (60, "40 s"))
    ]


def test_what_an_earlier_run_did_counts_as_done_and_not_as_speed(now: list[float]) -> None:
    said = io.StringIO()
    with RunBar(Console(file=said, width=200)) as bar:
        bar.expect([Part("a", 100, lambda: 60)])
        for step in range(61, 82):
            now[0] += 1.0
            bar.count("a", step)
            bar.show("asking")
    assert lines(said) == ["80% done, ETA 20 s: asking"]


def test_what_another_process_did_is_counted(now: list[float]) -> None:
    said, on_disk = io.StringIO(), {"a": 0.0, "b": 0.0}
    with RunBar(Console(file=said, width=200)) as bar:
        bar.expect([Part("a", 50, lambda: on_disk["a"]), Part("b", 50, lambda: on_disk["b"])])
        bar.claim(["a"])
        on_disk |= {"a": 50.0, "b": 50.0}  # of a part of its own this process knows better
        for step in range(1, 21):
            now[0] += 1.0
            bar.count("a", step)
            bar.show("asking")
    assert lines(said)[0].startswith("70% done, ETA ")


@pytest.mark.parametrize(("seconds", "text"), [(None, "unknown"), (4.4, "4 s"), (59, "59 s"), (90, "1.5 min")])
def test_a_duration_is_in_seconds_or_minutes(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_round_after_a_finished_part_has_an_estimate_of_its_own(now: list[float]) -> None:
    said = io.StringIO()
    with RunBar(Console(file=said, width=200)) as bar:
        bar.expect([Part("pilot", 10)])
        for step in range(1, 11):
            now[0] += 1.0
            bar.count("pilot", step)
        bar.restart("round 1")
        bar.expect([Part("a", 40)])
        for step in range(1, 21):
            now[0] += 1.0
            bar.count("a", step)
            bar.show("asking")
    assert lines(said) == ["25% of round 1 done, ETA 30 s: asking"]


def test_parts_that_come_after_all_others_are_done_have_an_estimate(now: list[float]) -> None:
    said = io.StringIO()
    with RunBar(Console(file=said, width=200)) as bar:
        for name in ("a", "b"):
            bar.expect([Part(name, 20)])
            for step in range(1, 21):
                now[0] += 1.0
                bar.count(name, step)
                if step < 20:
                    bar.show("asking")
    assert lines(said) == ["52% done, ETA 19 s: asking"]
