"""Random schedules of a batch, whose steps are computed one by one, in fixed shapes, and replayed from recordings.

Models, policies and what rows are told are drawn; the room of a growing cache is made small, captures fail at times.
All ways to compute a step must sample and record the same, and the shadow pass must agree with what was sampled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conform import plays, world
from conform.policies import policies_for, small_policies
from recorded_graph import Recorder
from test_kv_models import EXACT
from transformers import AutoModelForCausalLM

from kvaudit.audit.cache import fixed_step, hints, stepped_store
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import Composed, Evictor, Policy, evictor_of, parse_policy
from kvaudit.audit.policies.kivi import Kivi
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling import captured
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.episode import Episode
from kvaudit.audit.sampling.sampler import ContinuousBatch, MixedEpisode, Sampler, join_episodes
from kvaudit.core.errors import RunError, SpecError

WORDS = 60  # tokens 8 .. WORDS are in the vocabulary of every model
CONFIGS = {**plays.FAMILIES, "mla": EXACT["mla"], "gpt-oss": world.CONFIGS["gpt-oss"]}
CODES = (
    "int8:residual=5,chunk=16",
    "fp8:chunk=5",
    "fp8:scale=tensor,write=true",
    "q4_0:write=true,rotate=true",
    "kivi:bits=4,group=4,residual=4",
    "kivi:bits=2,group=4,residual=12,chunk=16",
    "kivi:bits=4,group=8,residual=8",
)


class Bad(AssertionError):
    """Two ways to compute steps differ."""


@cache
def served(family: str, dtype: torch.dtype) -> SimpleNamespace:
    """A random model as the sampler wants it; 7 stops."""
    torch.manual_seed(0)
    own = {"attn_implementation": ATTENTION_NAME, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[family]), dtype=dtype, **own).eval()
    if dtype == torch.float64:
        world.exact_norms(model)
    chat = SimpleNamespace(stop_ids=frozenset({7}))
    return SimpleNamespace(model=model, chat=chat, device=torch.device("cpu"), max_positions=512)


# --- what is played ---------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """One operation: ``what`` is decode, extend, score, join or rollouts; what it needs is drawn from ``seed``."""

    what: str
    seed: int


@dataclass(frozen=True)
class Case:
    """A model, a policy, a first batch and operations."""

    family: str
    dtype: torch.dtype
    policy: str
    seed: int
    told: tuple[Told, ...]
    room: int  # of a growing cache
    graphs: int
    fewest: int
    failing: float  # share of captures that fail


def drawn_case(seed: int) -> Case:
    draw = random.Random(seed)
    family = draw.choice(sorted(CONFIGS))
    whats = ("decode", "decode", "decode", "decode", "extend", "score", "join", "rollouts")
    told = tuple(Told(draw.choice(whats), draw.randrange(10**6)) for _ in range(draw.randint(3, 9)))
    return Case(
        family=family,
        dtype=draw.choice((torch.float64, torch.float64, torch.float32)),
        policy=drawn_policy(draw, family),
        seed=draw.randrange(10**6),
        told=(Told("decode", draw.randrange(10**6)), *told, Told("decode", draw.randrange(10**6))),
        room=draw.choice((1, 3, 8, 40)),
        graphs=draw.choice((1, 2, 4)),
        fewest=draw.choice((0, 1, 8)),
        failing=draw.choice((0, 0, 0, 0.3)),
    )


def drawn_policy(draw: random.Random, family: str) -> str:
    """A policy alone, a composition or a mixture, perhaps with pins."""
    if draw.random() < 0.15:
        parts = {_policy(draw, family, pins=False) for _ in range(3)}
        return "|".join(sorted(parts))
    return _policy(draw, family, pins=True)


def _policy(draw: random.Random, family: str, *, pins: bool) -> str:
    while True:
        policy = parse_policy(draw.choice(CODES)) if draw.random() < 0.35 else draw.choice(_variants())
        evictor = evictor_of(policy)
        if evictor.needs_rotary and family in {"gpt2", "mla", "gpt-oss"}:
            continue
        if family == "mla" and not isinstance(policy, Composed) and policy.quantises:
            continue  # heads of values that do not split into the groups of some codes
        if family == "mla" and isinstance(policy, Composed):
            continue
        if pins and isinstance(policy, Evictor) and policy.evicts and draw.random() < 0.3:
            roles = draw.choice(("system", "system", "system/assistant", "tool"))
            try:
                policy = replace(policy, pin=roles, budget=48)
            except SpecError:
                continue
        return policy.canonical


@cache
def _variants() -> list[Policy]:
    return policies_for("variant", small_policies())


# --- how it is played -------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What the schedule knows of a row."""

    finished: bool = False
    cap: int = 0  # of its paused turn


class FailingRecorder(Recorder):
    """Records, or refuses to, as a device does."""

    def __init__(self, state: Callable[[], list[torch.Tensor]], seed: int, failing: float) -> None:
        super().__init__(state)
        self._draw, self._failing = random.Random(seed), failing

    def __call__(self, run: Callable[[], torch.Tensor], device: torch.device) -> captured.CapturedStep:
        fails = self._draw.random()
        before = [(tensor, tensor.clone()) for tensor in self._state()]
        if fails < self._failing / 2:
            raise RunError("no capture today")
        done = super().__call__(run, device)
        if fails < self._failing:  # after Python has run through all of it
            for tensor, old in before:
                tensor.copy_(old)
            raise RunError("no capture in the end")
        return done


class Turn(NamedTuple):
    """A row's turn, sampled or scored."""

    row: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str


@dataclass
class Result:
    """What was sampled, in order, and the record of every row; or the error that ended it."""

    turns: list[Turn] = field(default_factory=list)
    rollouts: list[list[Rollout]] = field(default_factory=list)
    error: str | None = None
    captures: int = 0
    replays: int = 0


class Player:
    """Plays a case in one mode."""

    def __init__(self, case: Case, mode: str, patch: pytest.MonkeyPatch) -> None:
        self.case, self.loaded, self.result = case, served(case.family, case.dtype), Result()
        self.policy = parse_policy(case.policy)
        self.recorder = FailingRecorder(self.state, case.seed, case.failing)
        patch.setattr(captured, "step_mode", lambda device: mode)
        patch.setattr(captured, "capture_graph", self.recorder)
        patch.setattr(captured, "MAX_GRAPHS", case.graphs)
        patch.setattr(captured, "FEWEST_STEPS", case.fewest)
        patch.setattr(fixed_step, "MIN_ROOM", case.room)
        patch.setattr(fixed_step, "MAX_ROOM", case.room)
        for module in (hints, fixed_step, stepped_store):
            patch.setattr(module, "HINT_BATCH", 8)  # fewer than the steps of a turn, so that whole batches are examined
        self.opened: list[Any] = []
        self.rows: list[Row] = []
        self.draw = random.Random(case.seed)
        self.calls = 0

    def state(self) -> list[torch.Tensor]:
        return [
            tensor
            for episode in self.episodes()
            for layer in episode._cache.layers
            if layer.plan.has_entries
            for tensor in (*layer.tensors(), layer.store.evicted_at)
        ]

    def episodes(self) -> Iterator[Episode]:
        for own in self.opened:
            yield from [e for _, e in own._episodes.values()] if isinstance(own, MixedEpisode) else [own]

    def play(self) -> Result:
        try:
            episode = self.open(self.draw.choice((1, 2, 3)))
            for told in self.case.told:
                getattr(self, told.what)(episode, random.Random(told.seed))
                self.check_bytes()
            if any(row.cap for row in self.rows):
                self.decode(episode, random.Random(0), ends=True)
            if self.policy.replayable:
                self.result.rollouts.append(episode.rollouts())
        except (SpecError, RunError) as error:
            self.result.error = str(error)
        self.result.captures, self.result.replays = self.recorder.captures, self.recorder.replays
        return self.result

    def stream(self) -> Result:
        """Seven prompts to two rows each, three at once; every row has one to three turns."""
        draw, sampler = random.Random(self.case.seed), Sampler(self.loaded, self.policy)
        texts = [tokens(draw, draw.choice((3, 9, 20, 31))) for _ in range(7)]
        turns = [draw.randint(1, 3) for _ in range(14)]

        def opened(numbers: range) -> Any:
            seeds = list(range(2 * numbers.start, 2 * numbers.stop))
            episode = sampler.open([texts[n] for n in numbers], seeds, group=2)
            self.opened.append(episode)
            return episode

        def on_end(n: int, done: Completion) -> bool:
            self.result.turns.append(Turn(n, done.ids, done.logprobs, done.finish_reason))
            turns[n] -= 1
            return turns[n] > 0

        batch = ContinuousBatch(opened, len(texts), 3, 2)
        for episode in batch:
            self.opened = [episode]
            limits = [10 + n % 7 if left else 0 for n, left in enumerate(turns[: episode.rows])]
            episode.decode(Decoding(30), limits, lambda _, ids: ids[-1] % 9 == 3, on_end, batch.should_pause)
            self.check_bytes()
        self.result.rollouts.append(batch.rollouts())
        self.result.replays = self.recorder.replays
        return self.result

    def open(self, prompts: int) -> Any:
        draw, group = self.draw, self.draw.choice((1, 1, 2, 3))
        texts = [tokens(draw, draw.choice((1, 5, 14, 15, 16, 17, 30, 45))) for _ in range(prompts)]
        roles = [roles_of(draw, text) for text in texts]
        seeds = [draw.randrange(1000) for _ in range(prompts * group)]
        episode = Sampler(self.loaded, self.policy).open(texts, seeds, group=group, roles=roles)
        self.opened.append(episode)
        self.rows += [Row() for _ in seeds]
        return episode

    def check_bytes(self) -> None:
        """What a cache says to have allocated is what it has."""
        for episode in self.episodes():
            said = episode._cache.bytes
            if len(episode._cache.layers) and said != sum(layer.bytes for layer in episode._cache.layers):
                raise Bad("bytes of layers do not add up")
            for layer in episode._cache.layers:
                before = layer.bytes
                layer.update_bytes()
                if before != layer.bytes:
                    raise Bad(f"layer {layer.number} has {layer.bytes} bytes and says {before}")

    def decode(self, episode: Any, draw: random.Random, *, ends: bool = False) -> None:
        """Let rows take turns, paused ones too; ``ends``: these alone, to their end."""
        most = draw.choice((1, 4, 12, 30, 70))
        caps = []
        for row in self.rows:
            fresh = 0 if row.finished or draw.random() < 0.2 else draw.randint(1, most)
            caps.append(row.cap or (0 if ends else fresh))
        if not any(caps):
            return
        steps, every = 0, draw.choice((None, None, 1, 3, 10))
        stops, leaves = draw.choice((5, 9, 1000)), draw.choice((0.0, 0.0, 0.3, 0.8))
        ended = set[int]()

        def pause() -> bool:
            nonlocal steps
            steps += 1
            return every is not None and steps % every == 0

        def on_end(n: int, done: Completion) -> bool:
            self.result.turns.append(Turn(n, done.ids, done.logprobs, done.finish_reason))
            ended.add(n)
            self.rows[n].finished = random.Random(repr((n, done.ids))).random() < leaves
            return not self.rows[n].finished

        should_pause = None if every is None or ends else pause
        episode.decode(Decoding(30), caps, lambda _, ids: ids[-1] % stops == 3, on_end, should_pause)
        for n, row in enumerate(self.rows):
            row.cap = 0 if n in ended else caps[n]

    def extend(self, episode: Any, draw: random.Random) -> None:
        chunks = [[] if row.finished or row.cap else tokens(draw, draw.choice((0, 0, 1, 3, 17))) for row in self.rows]
        roles = [[draw.choice(("user", "user", "tool"))] * len(chunk) for chunk in chunks]
        episode.extend(chunks, roles)

    def score(self, episode: Any, draw: random.Random) -> None:
        if any(row.cap for row in self.rows):
            return
        answers = [[] if row.finished else tokens(draw, draw.choice((0, 1, 2, 9))) for row in self.rows]
        if not any(answers):
            return
        for n, found in enumerate(episode.score(answers)):
            if found is not None:
                self.result.turns.append(Turn(n, tuple(answers[n]), found.logprobs, str(found.greedy)))

    def join(self, episode: Any, draw: random.Random) -> None:
        if len(self.rows) > 9:
            return
        self.draw = draw
        other = self.open(1)
        if draw.random() < 0.6:
            own, self.rows = self.rows, self.rows[-other.rows :]
            caps = [draw.randint(1, 9) for _ in self.rows]
            done = other.decode(Decoding(30), caps, None, None, None if draw.random() < 0.5 else lambda: True)
            for row, cap, turn in zip(self.rows, caps, done, strict=True):
                row.cap = cap if turn is None else 0
            self.rows = own
        join_episodes(episode, other)
        self.opened.remove(other)

    def rollouts(self, episode: Any, draw: random.Random) -> None:
        if not any(row.cap for row in self.rows) and self.policy.replayable:
            self.result.rollouts.append(episode.rollouts())


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(8, WORDS) for _ in range(count)]


def roles_of(draw: random.Random, text: list[int]) -> list[str]:
    system = min(draw.choice((0, 2, 4)), len(text) - 1)
    return ["system"] * system + ["user"] * (len(text) - system)


# --- what must be equal -----------------------------------------------------------------------------------------------


EQUAL = ("retention", "answer_start", "kv_bytes_live", "kv_bytes_dense", "pinned", "row_keys")
TENSORS = ("ids", "sampled", "evicted_at", "keys_quantised_at", "values_quantised_at", "experts")


def compare(case: Case, single: Result, other: Result) -> bool:
    """Return whether two results are equal to the end; raise Bad where they differ before rounding let them part.

    It does so where it decides a draw.
    """
    if single.error != other.error:
        raise Bad(f"errors {single.error!r} and {other.error!r}")
    for turn, its in zip(single.turns, other.turns, strict=False):
        if part_in_turn(case, turn, its):
            return False
    if len(single.turns) != len(other.turns) or len(single.rollouts) != len(other.rollouts):
        raise Bad("turns or rollouts are missing")
    for rollouts, others in zip(single.rollouts, other.rollouts, strict=True):
        for n, (one, two) in enumerate(zip(rollouts, others, strict=True)):
            compare_rollouts(n, one, two)
            if case.dtype == torch.float64 and not alike(one.hints, two.hints):
                raise Bad(f"hints of row {n}")
            if case.dtype == torch.float64 and (one.sampler_logprobs - two.sampler_logprobs).abs().max() > 1e-5:
                raise Bad(f"log-probs of row {n}")
    return True


def part_in_turn(case: Case, one: Turn, two: Turn) -> bool:
    """Whether two turns are equal up to a draw that rounding decided; raise Bad if they differ otherwise."""
    bound = 1e-4 if case.dtype == torch.float32 else 1e-8
    pairs = zip(zip(one.ids, one.logprobs, strict=True), zip(two.ids, two.logprobs, strict=True), strict=False)
    for (a, logprob), (b, its_logprob) in pairs:
        if a != b and case.dtype == torch.float32:
            return True
        if a == b and abs(logprob - its_logprob) > bound:
            raise Bad(f"log-probs {logprob} and {its_logprob} of row {one.row}")
    if one._replace(logprobs=()) != two._replace(logprobs=()):
        raise Bad(f"turns {one} and {two}")
    return False


def compare_rollouts(n: int, one: Rollout, two: Rollout) -> None:
    for name in TENSORS:
        if not alike(getattr(one, name), getattr(two, name)):
            raise Bad(f"{name} of row {n}")
    for name in EQUAL:
        if getattr(one, name) != getattr(two, name):
            raise Bad(f"{name} of row {n}: {getattr(one, name)} and {getattr(two, name)}")
    chosen = [() if own.selection is None else tuple(vars(own.selection).values()) for own in (one, two)]
    if len(chosen[0]) != len(chosen[1]) or not all(map(alike, *chosen)):
        raise Bad(f"selection of row {n}")


def alike(one: Any, two: Any) -> bool:
    """Whether two parts of a record are equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return bool(one == two)


@torch.no_grad()
def check_shadow(case: Case, result: Result) -> None:
    """The shadow pass computes what was sampled, from the last record of every row."""
    last = result.rollouts[-1] if result.rollouts else []
    rows = [rollout for rollout in last if len(rollout.ids) > rollout.prompt_length]
    # a mixture's rows may be of several codecs, which no pass mixes
    for codec in list(dict.fromkeys(rollout.codec for rollout in rows)):
        together = [rollout for rollout in rows if rollout.codec == codec]
        logits, _ = suffix_logits(served(case.family, case.dtype).model, together, group=1, view="shadow")
        for rollout, own in zip(together, logits, strict=True):
            suffix, drawn = slice(rollout.prompt_length, None), rollout.sampled[rollout.prompt_length :]
            seen = own[: len(drawn)].double().log_softmax(-1).gather(1, rollout.ids[suffix][:, None])[:, 0]
            gap = (seen - rollout.sampler_logprobs[suffix].double())[drawn].abs()
            if len(gap) and float(gap.max()) > 5e-5:
                raise Bad(f"shadow pass is off by {float(gap.max())}")


def check(seed: int, patch: pytest.MonkeyPatch) -> Result:
    case = drawn_case(seed)
    try:
        single = Player(case, "eager", patch).play()
        check_shadow(case, single)
        for mode in ("graph", "fixed"):
            other = Player(case, mode, patch).play()
            # of equal records the shadow pass is the same
            if not compare(case, single, other) or case.dtype == torch.float32:
                check_shadow(case, other)
            if mode == "graph":
                replayed = other
    except BaseException as error:
        error.add_note(f"draw {seed}: {case}")
        raise
    return replayed


# of the first 48 those which go where no other goes: a way through audit/, a family, a code, one operation upon another
SEEDS = (0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 17, 19, 20, 21, 22)
SEEDS += (23, 25, 26, 27, 28, 29, 32, 34, 35, 37, 38, 39, 40, 41, 42, 43, 45, 47)


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))])
def test_random_schedules_are_sampled_and_recorded_alike(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [check(seed, monkeypatch) for seed in SEEDS[block::9]]
    assert sum(result.replays for result in found) > (20 if block == 0 else 0)


def test_a_key_that_tells_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_step.FixedStep, "_describe", lambda self: 1)
    case = replace(drawn_case(0), family="llama", policy="h2o:budget=16,window=4,interval=3", failing=0.0, room=3)
    case = replace(case, dtype=torch.float64, told=(Told("decode", 5), Told("decode", 6), Told("decode", 7)))
    single = Player(case, "eager", monkeypatch).play()
    with pytest.raises((Bad, IndexError, RuntimeError)):
        compare(case, single, Player(case, "graph", monkeypatch).play())


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        (0, "kivi:bits=4,group=4,residual=4"),
        pytest.param(1, "snapkv:budget=16,window=4,interval=3", marks=pytest.mark.slow),
    ],
)
def test_prompts_that_enter_a_running_batch_are_sampled_alike(
    seed: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(drawn_case(seed), family="gemma3", policy=policy, dtype=torch.float64, failing=0.0, fewest=1)
    single, replayed = (Player(case, mode, monkeypatch).stream() for mode in ("eager", "graph"))
    check_shadow(case, single)
    assert compare(case, single, replayed)


def test_a_codec_whose_exact_entries_grow_in_number_is_replayed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """No codec here has more of them than its residual at any time; one of somebody else's may."""

    def keys_until(self: Kivi, before: int, seen: int) -> int:  # whole groups, of what is more than the residual
        return before + max(seen - before - self.residual, 0) // self.group * self.group

    monkeypatch.setattr(Kivi, "keys_until", keys_until)
    case = replace(drawn_case(6), family="llama", policy="kivi:bits=4,group=8,residual=8", failing=0.0, room=40)
    case = replace(case, dtype=torch.float64, told=(Told("decode", 53), Told("decode", 54)), fewest=1)
    single, other = (Player(case, mode, monkeypatch).play() for mode in ("eager", "graph"))
    assert compare(case, single, other)
    assert other.replays


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", range(10))
def test_many_random_schedules(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check(seed, monkeypatch)
