"""The forecast on a clock of its own: what it says of the time that is left, against what the run then takes."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import pytest
from rich.console import Console

from kvaudit.audit.runs import progress
from kvaudit.audit.runs.forecast import Forecast, Part
from kvaudit.audit.runs.progress import RunBar, time_left

NEAR = 0.3  # of what is really left


class Leg(NamedTuple):
    """A part, with the seconds that each of its steps really takes; a step is one of its cost."""

    name: Hashable
    part: Part
    steps: Sequence[float]


def worst(legs: Sequence[Leg], *, known: dict[Hashable, float] | None = None, processes: int = 1) -> float:
    """The worst relative error of the time left, from a tenth of the way on until a twentieth is left."""
    now, known = [1000.0], known or {}
    forecast = Forecast(processes, clock=lambda: now[0])
    for leg in legs:
        forecast.expect(leg.name, leg.part)
        forecast.known(leg.name, known.get(leg.name, 0.0))
    forecast.resume()
    whole = sum(sum(leg.steps) for leg in legs)
    end, errors = now[0] + whole, []
    for leg in legs:
        done = known.get(leg.name, 0.0)
        for seconds in leg.steps:
            now[0] += seconds
            done += leg.part.cost / (len(leg.steps) if leg.part.apart else leg.part.cost)
            if leg.part.apart:
                forecast.took(leg.name, seconds)
            else:
                forecast.worked(leg.name, done)
            if 0.1 * whole <= whole - (end - now[0]) <= 0.95 * whole:
                said = forecast.left()
                assert said is not None
                errors.append(abs(said * processes / (end - now[0]) - 1))
    assert len(errors) > 10
    return max(errors)


def leg(name: Hashable, kind: tuple[str, ...], steps: Sequence[float], like: tuple[str, ...] | None = None) -> Leg:
    return Leg(name, Part(kind, float(len(steps)), like), steps)


def test_units_of_uneven_cost_go_by_what_the_pilot_took_of_each() -> None:
    """A suite asked last takes ten times as long as the one asked first."""
    seconds = {"short": 0.1, "long": 1.0}
    pilot = [leg(("p", s), ("pilot", s, "none"), [t] * 10) for s, t in seconds.items()]
    asked = [leg(("e", s), ("evaluate", s, "none"), [t] * 90, ("pilot", s, "none")) for s, t in seconds.items()]
    assert worst(pilot + asked) < NEAR


def test_what_the_pilot_is_slower_by_is_learnt_from_the_first_units() -> None:
    """A small batch takes three times as long for a row as the grid's: that is known once some of these are timed."""
    ways = ("none", "int8", "snapkv")
    pilot = [leg(("p", w), ("pilot", "agent", w), [0.3] * 2) for w in ways]
    asked = [leg(("e", w), ("evaluate", "agent", w), [0.1] * 100, ("pilot", "agent", w)) for w in ways]
    assert worst(pilot + asked) < NEAR


def test_a_first_interval_that_was_a_start_is_no_rate() -> None:
    assert worst([leg("a", ("train", "dense"), [15.0] + [1.0] * 99), leg("b", ("train", "smd"), [1.1] * 100)]) < NEAR


def test_what_an_earlier_run_did_is_not_timed() -> None:
    """A run that is gone on with at four fifths: its rate is that of the last fifth alone."""
    arm = Leg("a", Part(("train", "dense"), 100.0), [2.0] * 20)
    assert worst([arm], known={"a": 80.0}) < 0.01


def test_the_start_of_an_engine_is_counted_as_often_as_it_comes_and_slows_no_row() -> None:
    legs = []
    for way in ("f32", "u4", "u8", "q8"):
        legs.append(Leg(("start", way), Part(("start", "openvino"), 1.0, apart=True), [40.0]))
        legs.append(leg(way, ("evaluate", "refusal", way), [0.5] * 200))
    assert worst(legs) < NEAR


def test_training_and_answers_after_it_stand_to_each_other_as_their_costs() -> None:
    arms = [Leg(arm, Part(("train", arm), 640.0), [0.03] * 640) for arm in ("dense", "naive")]
    asked = [leg(("e", s), ("evaluate", s, "none"), [0.032] * 1000, ("pilot", s, "none")) for s in ("math", "agent")]
    assert worst([*arms, *asked]) < NEAR


def test_several_processes_share_what_is_left() -> None:
    assert worst([leg("a", ("train", "dense"), [1.0] * 100)], processes=2) < 0.01


def test_what_another_process_did_shortens_what_is_left_and_changes_no_rate() -> None:
    now = [0.0]
    forecast = Forecast(clock=lambda: now[0])
    for name in ("mine", "its"):
        forecast.expect(name, Part(("train", name), 10.0))
    now[0] += 5.0
    forecast.worked("mine", 5.0)
    assert forecast.left() == pytest.approx(15.0)
    forecast.known("its", 8.0)
    assert forecast.left() == pytest.approx(7.0)


def test_nothing_is_said_before_anything_was_timed() -> None:
    forecast = Forecast()
    forecast.expect("a", Part(("train", "dense"), 10.0))
    assert forecast.left() is None
    assert time_left(None) == "time left not known yet"


def test_the_share_is_of_what_is_known_and_falls_where_the_rest_turns_out_to_be_slow() -> None:
    now = [0.0]
    forecast = Forecast(clock=lambda: now[0])
    forecast.expect("quick", Part(("evaluate", "a"), 10.0))
    forecast.expect("slow", Part(("evaluate", "b"), 10.0))
    shares = []
    for name, seconds in (("quick", 1.0), ("slow", 20.0)):
        for step in range(1, 11):
            now[0] += seconds
            forecast.worked(name, float(step))
            shares.append(forecast.share())
    assert shares[9] == pytest.approx(0.5)
    assert shares[10] < 0.2, "half of the work was a twentieth of the time"
    assert shares[10:] == sorted(shares[10:])
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(4.4, "about 4 s left"), (44, "about 45 s left"), (89, "about 90 s left"), (200, "about 3 min left"),
     (5400, "about 1.5 h left")],
)  # fmt: skip
def test_the_time_left_is_as_exact_as_a_forecast(seconds: float, said: str) -> None:
    assert time_left(seconds) == said


def test_a_line_now_and_then_says_how_far_how_long_and_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    forecast = Forecast(clock=lambda: now[0])
    forecast.expect("a", Part(("evaluate", "math"), 100.0))
    found = ["int8: no loss so far in 40 of 72 answers"]
    with RunBar(Console(file=said, width=40), forecast, lambda: found) as bar:
        for step in range(1, 71):
            now[0] += 1.0
            bar.worked("a", float(step), "asking: math under int8")
    assert said.getvalue().splitlines() == [
        f"{done}% done, {left}: asking: math under int8; {found[0]}"
        for done, left in ((20, "about 80 s left"), (40, "about 60 s left"), (60, "about 40 s left"))
    ]
