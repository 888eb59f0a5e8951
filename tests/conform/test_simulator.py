"""The product against a simulator that shares nothing with it: sampler, public cache and both shadow passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import kvaudit.audit.cache.cache
import kvaudit.audit.replay.learner_pass
from conform import agreement
from conform.agreement import Disagreement, gap
from conform.plays import SHARED_FIELDS, Conversation, Part, Play, plays
from conform.policies import pytest_generate_tests
from conform.rules import RULES, Undetermined
from kvaudit.audit.cache.layers import LayerPlan
from kvaudit.audit.cache.rows import Schedule
from kvaudit.audit.policies import POLICIES, Policy, parse_policy
from kvaudit.audit.policies.snapkv import AdaKV

__all__ = ["pytest_generate_tests"]
EXACT = 1e-12  # nats, in float64
FAST, SLOW = 3, 297  # plays of every policy
# a play prints whole, and to shrink one would take minutes
CALM = settings(derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
CALM = settings(CALM, suppress_health_check=list(HealthCheck))


@dataclass
class Tally:
    """How many plays agreed, how many no rule decides, and the largest gap in nats."""

    plays: int = 0
    left_out: int = 0
    largest: float = 0.0


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    total = Tally()
    yield total
    if not total.plays:
        return
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\nsimulator: {total.plays} configurations agree, largest gap {total.largest:.1e} nats; "
            f"{total.left_out} more hang on a difference that float32 cannot see"
        )


def test_sampler_and_shadow_equal_the_simulator(policy: Policy, tally: Tally, request: pytest.FixtureRequest) -> None:
    if policy.name not in RULES and request.config.getoption("policy_file"):
        pytest.skip(f"policy {policy.name} is not of this project and has no rule in tests/conform/rules.py")
    hold(policy.name, FAST, tally)


def test_mixtures_equal_the_simulator(tally: Tally) -> None:
    hold("mixture", FAST, tally)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sampler_and_shadow_equal_the_simulator_at_length(policy: Policy, tally: Tally) -> None:
    hold(policy.name, SLOW, tally)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mixtures_equal_the_simulator_at_length(tally: Tally) -> None:
    hold("mixture", SLOW, tally)


def hold(name: str, examples: int, tally: Tally) -> None:
    """Play random configurations of a policy, the same ones every time."""
    require_rule(name)

    @settings(CALM, max_examples=examples)
    @given(plays(name))
    def one(play: Play) -> None:
        try:
            found = gap(play)
        except Undetermined:
            tally.left_out += 1
            return
        tally.plays += 1
        tally.largest = max(tally.largest, found)
        assert found < EXACT

    one()


STREAMING = {"name": "streaming", "budget": 10, "sink": 2, "window": 0, "interval": 1, "phase": "both", "chunk": 1000}


@pytest.mark.parametrize(
    ("family", "fields", "length"),
    [("llama", STREAMING, 11), ("gemma3", {"name": "none", "chunk": 1000}, 8)],
    ids=["budget", "the model's own window"],
)
def test_a_prompt_may_exceed_what_is_kept_by_one_token(family: str, fields: dict[str, Any], length: int) -> None:
    """The newest token takes the place of the one that is evicted, and must be known for the next one to be found."""
    turns = (((12,), (3,)), ((6,), (0,)))
    for tokens in (length - 1, length, length + 1):
        play = Conversation(
            family, (Part(fields, None),), (1,), (3,), 5, (frozenset(),), lengths=(tokens,), group=1, turns=turns
        )
        assert gap(play) < EXACT


def require_rule(name: str) -> None:
    """Fail where the simulator knows nothing of a registered policy, or of one of its fields."""
    if name == "mixture":
        return
    if name not in RULES:
        pytest.fail(f"policy {name} has no simulator rule; write one in tests/conform/rules.py, whose head says how")
    shared = SHARED_FIELDS if RULES[name].rank else {"chunk", "skip_layers"} if RULES[name].code else {"chunk"}
    known = {*RULES[name].draws, *shared}
    unknown = sorted(set(POLICIES.get(name).field_names()) - known)
    if unknown:
        pytest.fail(f"the simulator rule of policy {name} draws no {', '.join(unknown)}; see tests/conform/rules.py")


# --- the test tested ------------------------------------------------------------------------------------------------


def test_a_policy_without_a_rule_or_with_an_unknown_field_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "knorm")
    with pytest.raises(pytest.fail.Exception, match="knorm has no simulator rule"):
        require_rule("knorm")
    monkeypatch.setitem(RULES, "rkv", RULES["rkv"]._replace(draws={"kernel": (3,)}))
    with pytest.raises(pytest.fail.Exception, match="rkv draws no weight"):
        require_rule("rkv")


def conversation(
    *, family: str = "llama", codec: dict[str, Any] | None = None, pins: tuple[int, ...] = (), **fields: Any
) -> Conversation:
    """A prompt of 20 tokens, an answer of 4, a message of 6 and an answer of 3 under one policy."""
    usual = {"name": "keydiff", "budget": 12, "sink": 1, "window": 2, "interval": 3, "phase": "both", "chunk": 8}
    part = Part(fields if fields.get("name") == "quest" else usual | fields, codec)
    turns = (((4,), (6,)), ((3,), (0,)))
    return Conversation(family, (part,), (1,), (3,), 5, (frozenset(pins),), lengths=(20,), group=1, turns=turns)


LOOKS = {"name": "snapkv", "window": 4, "kernel": 3, "pool": "max"}
CODES = {"name": "int8", "residual": 3, "scale": "token", "chunk": 8}
BLOCKS = {"name": "q4_0", "group": 4, "residual": 0, "write": True, "rotate": False, "chunk": 8}
SEES_ALL = LayerPlan(parse_policy("none"), None)
NOTHING = {"name": "none"}
PAGES = {"name": "quest", "budget": 12, "page": 3, "dense": 1, "chunk": 8}
SHARED = {**LOOKS, "name": "adakv", "alpha": 0.2, "pin": "system"}
AGREED = set[str]()  # policies of these plays that were played as said, and need not be again
OFF_BY_ONE = [
    ({}, "interval=3", "interval=4"),
    ({}, "budget=12", "budget=13"),
    ({}, "sink=1", "sink=2"),
    ({}, "window=2", "window=3"),
    ({}, "chunk=8", "chunk=9"),
    ({}, "phase=both", "phase=prefill"),
    (LOOKS, "kernel=3", "kernel=5"),
    (LOOKS, "pool=max", "pool=avg"),
    ({**NOTHING, "codec": CODES}, "residual=3", "residual=4"),
    ({**NOTHING, "codec": {**CODES, "skip_layers": "0"}}, "skip_layers=0", "skip_layers=1"),
    ({**NOTHING, "codec": BLOCKS}, "group=4", "group=8"),
    ({**NOTHING, "codec": BLOCKS}, "rotate=false", "rotate=true"),
    (PAGES, "page=3", "page=4"),
    (PAGES, "budget=12", "budget=15"),
    (PAGES, "dense=1", "dense=2"),
    ({**SHARED, "pins": (2, 3, 9)}, "budget=12", "budget=13"),
    ({**SHARED, "pins": (2, 3, 9)}, "alpha=0.2", "alpha=0.8"),
]


@pytest.mark.parametrize(("fields", "said", "done"), OFF_BY_ONE, ids=[done for _, _, done in OFF_BY_ONE])
def test_a_cache_with_another_setting_than_stated_is_caught(
    fields: dict[str, Any], said: str, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = conversation(**fields)
    text = play.policy
    if text not in AGREED:
        assert gap(play) < EXACT
        AGREED.add(text)
    assert said in text
    monkeypatch.setattr(Play, "policy", text.replace(said, done))
    assert gap_alone(play, monkeypatch) > 1e-6


def gap_alone(play: Play, monkeypatch: pytest.MonkeyPatch) -> float:
    """What log-probs alone say of a play in which other entries left, or were chosen, than the simulator says."""
    found: list[Disagreement] = []

    def noted(compare: Callable[..., None]) -> Callable[..., None]:
        def compared(*sides: Any) -> None:
            try:
                compare(*sides)
            except Disagreement as error:
                found.append(error)

        return compared

    for name in ("same_departures", "same_choices"):
        monkeypatch.setattr(agreement, name, noted(getattr(agreement, name)))
    largest = gap(play)
    assert found or play.parts[0].evictor["name"] == "none"
    return largest


def test_a_head_that_keeps_one_entry_of_another_s_beside_its_pins_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    play, own = conversation(**SHARED, pins=(2, 3, 9)), AdaKV.capacities
    assert gap(play) < EXACT

    def moved(policy: AdaKV, rank: Any, budgets: Any) -> Any:
        counts = own(policy, rank, budgets).clone()
        counts[:, 0] += 1
        counts[:, 1] -= 1
        return counts

    monkeypatch.setattr(AdaKV, "capacities", moved)
    with pytest.raises(Disagreement, match="the simulator says"):
        gap(play)


def test_an_eviction_one_query_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: dict[Schedule, list[bool]] = {}
    is_due = Schedule.are_due

    def late(schedule: Schedule, *more: Any, **asked: Any) -> list[bool]:
        now = is_due(schedule, *more, **asked)
        if schedule in waiting:
            return waiting.pop(schedule)
        if any(now):
            waiting[schedule] = now
        return [False] * len(now)

    play = conversation()
    monkeypatch.setattr(Schedule, "are_due", late)
    assert gap_alone(play, monkeypatch) > 1e-6


def test_a_sliding_window_that_sampler_and_shadow_both_ignore_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    play = conversation(family="gemma3", name="none")
    assert gap(play) < EXACT
    plans = kvaudit.audit.cache.cache.layer_plans

    def without_windows(config: Any, policy: Policy) -> list[LayerPlan]:
        return [plan if plan.sliding_window is None else SEES_ALL for plan in plans(config, policy)]

    for module in (kvaudit.audit.cache.cache, kvaudit.audit.replay.learner_pass):
        monkeypatch.setattr(module, "layer_plans", without_windows)
    assert gap(play) > 1e-6
