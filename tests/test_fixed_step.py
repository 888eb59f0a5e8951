"""Decode steps of fixed shapes, replayed from a recording, sample and record what single steps do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_gpu import GPU, pretend_gpu
from recorded_graph import GraphError, RecordedGraph, Recorder, tensors_in
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.exactness import random_ids
from bench.models import Served, random_llama
from kvaudit.audit.cache import decode_kernels, fixed_step, hints, stepped_store, tensors
from kvaudit.audit.cache.fixed_step import FixedStep
from kvaudit.audit.cache.layer_state import LastQueries
from kvaudit.audit.cache.store import Store
from kvaudit.audit.policies import Evictor, parse_policy
from kvaudit.audit.policies.eight_bits import Int8
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling import captured
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.episode import Episode
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.adapters import checkpoint_layers
from kvaudit.core import text
from kvaudit.core.errors import RunError, SpecError

EVERY = (  # each policy has steps that no other of the list takes
    "none",
    "snapkv:budget=64,window=8,interval=8",
    "streaming:budget=64,reposition=true",
    "streaming:budget=64,pin=system",
    "h2o:budget=64",
    "adakv:budget=64,window=8,interval=8",
    "expected:budget=64",
    "random:budget=64",
    "int8",
    "fp8:scale=tensor,write=true",
    "q4_0:write=true,rotate=true",
    "kivi:bits=4,group=16,residual=16",
    "kivi:bits=2,group=8,residual=32",
)
SLOW = (  # these differ from one of those in their ranking or their numbers
    "snapkv:budget=64,window=8,interval=1",
    "streaming:budget=64",
    "tova:budget=64",
    "triattention:budget=64",
    "pyramidkv:budget=64,window=8",
    "rkv:budget=64,window=8",
    "keydiff:budget=64",
    "knorm:budget=64",
    "int8:residual=5",
    "fp8",
    "q4_0",
)
WIDEST_GAP = 5e-5  # nats between sampler and shadow pass, in float32


def tiny_model() -> Served:
    """Two layers of random weights: a second one is enough to tell layers apart."""
    return Served("tiny", random_llama(64, 2, vocabulary=97, spread=0.2).model.to(torch.float32), 4096)


class Played:
    """Two turns of six rows of unequal prompts, with rows that finish early; steps by ``mode``."""

    def __init__(self, policy: str, mode: str, patch: pytest.MonkeyPatch) -> None:
        self.recorder = Recorder(self.state)
        patch.setattr(captured, "step_mode", lambda device: mode)
        patch.setattr(captured, "capture_graph", self.recorder)
        patch.setattr(fixed_step, "MIN_ROOM", 10)  # less than all steps, so that a growing cache moves
        for module in (hints, fixed_step, stepped_store):
            patch.setattr(module, "HINT_BATCH", 8)  # likewise, so that whole batches are examined
        prompts = [random_ids(80)[:60], random_ids(80)[10:70], random_ids(80)]
        roles = [["system"] * 4 + ["user"] * (len(prompt) - 4) for prompt in prompts]
        parsed = parse_policy(policy)
        self.episode = Sampler(tiny_model(), parsed).open(prompts, range(6), group=2, roles=roles)
        self.turns = [self.episode.decode(Decoding(9), [9, 9, 4, 9, 7, 9])]
        self.episode.extend([[1, 2, 3]] * 6, [["user"] * 3] * 6)
        self.turns.append(self.episode.decode(Decoding(14), on_turn_end=lambda row, _: row % 2 == 0))
        self.rollouts = self.episode.rollouts() if parsed.replayable else []

    def state(self) -> list[torch.Tensor]:
        assert isinstance(self.episode, Episode)
        layers = self.episode._cache.layers
        return [tensor for layer in layers for tensor in (*layer.tensors(), layer.store.evicted_at)]


@pytest.mark.parametrize("policy", [*EVERY, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_replayed_steps_sample_and_record_what_single_steps_do(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single, replayed = (Played(policy, mode, monkeypatch) for mode in ("eager", "graph"))
    for turn, other in zip(single.turns, replayed.turns, strict=True):
        assert [answer.ids for answer in turn] == [answer.ids for answer in other]
    for rollout, other in zip(single.rollouts, replayed.rollouts, strict=True):
        assert torch.equal(rollout.evicted_at, other.evicted_at)
        for times in ("keys_quantised_at", "values_quantised_at"):
            assert str(getattr(rollout, times)) == str(getattr(other, times))
        assert other.kv_bytes_live == rollout.kv_bytes_live
    # of 23 all but the first two of each shape of the batch, and of what the cache has grown to, and a few at the end
    assert replayed.recorder.captures <= 3
    assert replayed.recorder.replays >= 10
    assert single.recorder.captures == 0
    assert gap(replayed) < WIDEST_GAP


@torch.no_grad()
def gap(played: Played) -> float:
    """Nats between what was sampled and its shadow pass, codes at a border too: hints are examined steps later."""
    if not played.rollouts:
        return 0.0
    logits, _ = suffix_logits(tiny_model().model, played.rollouts, group=2, view="shadow")
    worst = 0.0
    for rollout, own in zip(played.rollouts, logits, strict=True):
        ids, drawn = rollout.ids[rollout.prompt_length :], rollout.sampled[rollout.prompt_length :]
        seen = own[: len(ids)].double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        worst = max(worst, float((seen - rollout.sampler_logprobs[rollout.prompt_length :])[drawn].abs().max()))
    return worst


@pytest.mark.parametrize("policy", ["snapkv:budget=64,window=8,interval=16", "h2o:budget=64"])
def test_every_address_stays_over_20_steps_with_evictions_between(policy: str) -> None:
    step = open_step(policy)
    keys = {step.step() for _ in range(20)}
    assert len(keys) == 1


@pytest.mark.parametrize("policy", ["none", "kivi:bits=4,group=16,residual=16"])
def test_a_growing_cache_moves_when_its_room_is_used_up(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_step, "MIN_ROOM", 16)
    step = open_step(policy, room=16, prompt=100)
    keys = [step.step() for _ in range(24)]
    changes = [n for n in range(1, 24) if keys[n] != keys[n - 1]]
    assert len(changes) == 1


class OpenStep:
    """A cache after a prompt, and its steps, whose operators are recorded."""

    def __init__(self, policy: str, room: int, prompt: int) -> None:
        served = tiny_model()
        self.model, self.room = served.model, room
        episode = Sampler(served, parse_policy(policy)).open([random_ids(200)[:prompt]], [0, 1], group=2)
        assert isinstance(episode, Episode)
        self.episode, self.cache = episode, episode._cache
        self.fixed = FixedStep(self.cache)
        self.graph = RecordedGraph()  # of the last step

    def step(self, tokens: Sequence[int] = (5, 7)) -> Any:
        key = self.fixed.prepare(tokens, self.room)
        with RecordedGraph() as self.graph:
            self.run()
        self.fixed.finish()
        return key

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        def forward(ids: torch.Tensor, positions: torch.Tensor, step: FixedStep) -> torch.Tensor:
            mask = torch.ones(2, 1, 1, 1, dtype=torch.bool)
            logits: torch.Tensor = self.model(ids, position_ids=positions, attention_mask=mask, kv=step).logits
            return logits

        return self.fixed.run(forward)

    def capture(self) -> captured.CapturedStep:
        """Record the step that is prepared, without computing it."""
        layers = self.cache.layers
        recorder = Recorder(lambda: [t for layer in layers for t in (*layer.tensors(), layer.store.evicted_at)])
        return recorder(self.run, torch.device("cpu"))


def open_step(policy: str, room: int = 100, prompt: int = 200) -> OpenStep:
    return OpenStep(policy, room, prompt)


def test_a_planted_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Store.write_at

    def reads(self: Store, slot: torch.Tensor, *rest: Any) -> None:
        write(self, torch.tensor([int(slot)]), *rest)

    monkeypatch.setattr(Store, "write_at", reads)
    with pytest.raises(GraphError, match="reads what the graph computes"):
        open_step("none").step()


def test_a_planted_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = LastQueries.add_step
    earlier = []  # kept, or the allocator may give a new buffer the address of one before

    def replaces(self: LastQueries, *rest: Any, **options: Any) -> None:
        add(self, *rest, **options)
        earlier.append(self._queries)
        self._queries = self._queries.clone()

    monkeypatch.setattr(LastQueries, "add_step", replaces)
    step = open_step("snapkv:budget=64,window=8,interval=16")
    keys = []
    for _ in range(3):
        step.fixed._changes = -1  # looked at anew: nothing says that it has moved
        keys.append(step.step())
    assert len(set(keys)) == 3


def test_a_planted_growth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Store.reserve_for_steps

    def grows(self: Store, slots: int, room: int, *, max_slots: int | None) -> None:
        reserve(self, slots, 0, max_slots=max_slots)

    monkeypatch.setattr(Store, "reserve_for_steps", grows)
    step = open_step("none")
    keys = {step.step() for _ in range(30)}
    assert len(keys) > 10


@pytest.mark.parametrize(
    "policy",
    ["none", "snapkv:budget=64,window=8,interval=16", "h2o:budget=12", "int8", "kivi:bits=4,group=4,residual=8"],
)
def test_a_step_on_a_device_waits_for_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pretended device: between the numbers of a step and its logits the host hears nothing of it."""
    heard: list[Any] = []
    run = FixedStep.run

    def listening(self: FixedStep, forward: Any) -> torch.Tensor:
        before = gpu.waits.copy()
        logits = run(self, forward)
        heard.append(gpu.waits - before)
        return logits

    monkeypatch.setattr(captured, "step_mode", lambda device: "fixed")
    monkeypatch.setattr(decode_kernels, "is_available", lambda device: False)  # triton may be installed
    monkeypatch.setattr(FixedStep, "run", listening)
    monkeypatch.setattr(FixedStep, "_describe", lambda self: None)  # what is pretended has no address
    served = tiny_model()
    del served.model.model.layers[1:]  # a second layer asks for nothing that the first does not
    served.model.config.num_hidden_layers = 1
    with sdpa_kernel(SDPBackend.MATH), pretend_gpu() as gpu:
        model = copy.deepcopy(served.model).to(GPU)
        chat = SimpleNamespace(stop_ids=set())
        there = SimpleNamespace(model=model, device=GPU, max_positions=4096, chat=chat)
        episode = Sampler(there, parse_policy(policy.replace("64", "24"))).open([random_ids(40)], [1, 2], group=2)
        episode.decode(Decoding(6))  # of which kivi codes a group of four
    assert len(heard) == 5
    assert not any(heard)


def test_a_failed_capture_prints_one_note_and_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: Any, device: Any) -> Any:
        raise RunError("CUDA error: operation not permitted")

    single = Played("snapkv:budget=64,window=8,interval=16", "eager", monkeypatch)
    monkeypatch.setattr(text, "_printed_notes", set())
    monkeypatch.setattr("test_fixed_step.Recorder.__call__", lambda self, run, device: fails(run, device))
    replayed = Played("snapkv:budget=64,window=8,interval=16", "graph", monkeypatch)
    assert [answer.ids for answer in single.turns[1]] == [answer.ids for answer in replayed.turns[1]]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "note: decode steps are not captured as CUDA graphs (CUDA error: operation not permitted); they are computed "
        "one by one, slower"
    ]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("quest:budget=64,page=4,dense=1", "queries that select what they attend to"),
        ("snapkv:budget=64,window=8+int8", "codes of a cache that evicts too"),
    ],
)
def test_a_policy_that_cannot_be_captured_is_named_in_a_note(
    policy: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_printed_notes", set())
    played = Played(policy, "graph", monkeypatch)
    assert played.recorder.captures == 0
    assert f"not captured as CUDA graphs: {reason};" in capsys.readouterr().err


def test_an_unknown_way_to_compute_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(captured.VARIABLE, "fast")
    with pytest.raises(SpecError, match="KVAUDIT_STEP='fast', wanted one of auto, eager, fixed, graph, compiled"):
        captured.step_mode(torch.device("cpu"))


def test_on_a_processor_steps_are_computed_one_by_one_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(captured.VARIABLE, raising=False)
    assert captured.step_mode(torch.device("cpu")) == "eager"
    assert captured.step_mode(torch.device("cuda")) == "compiled"
    monkeypatch.setenv(captured.VARIABLE, "graph")
    assert captured.step_mode(torch.device("cpu")) == "fixed"


def test_where_a_kernel_cannot_be_compiled_plain_attention_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("out of resource: shared memory\nHardware limit: 232448")

    monkeypatch.setattr(text, "_printed_notes", set())
    monkeypatch.setattr(decode_kernels, "_refused", set())
    monkeypatch.setattr(decode_kernels, "is_available", lambda device: True)
    monkeypatch.setattr(decode_kernels, "attend_slots", fails)
    plain = open_step("none", 10)
    monkeypatch.setattr(Store, "_write_by_kernel", written_plainly)
    plain.step()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "note: heads of 8 channels in torch.float32 are attended without triton kernels (out of resource: shared "
        "memory); slower"
    ]


def test_a_kernel_that_lacks_memory_once_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decode_kernels, "_refused", set())
    monkeypatch.setattr(decode_kernels, "is_available", lambda device: True)
    monkeypatch.setattr(decode_kernels, "attend_slots", fails)
    monkeypatch.setattr(Store, "_write_by_kernel", written_plainly)
    plain = open_step("none", 10)
    with pytest.raises(torch.OutOfMemoryError):
        plain.step()
    assert decode_kernels.is_used(torch.zeros(1, 2, 1, 8))


def written_plainly(self: Store, slot: Any, key: Any, value: Any, positions: Any) -> None:
    self._slots["positions"].index_copy_(2, slot, positions[:, None, None].expand(-1, key.shape[1], -1))
    self._write_entries_at(slot, key, value, positions)


def test_float64_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "is_available", lambda device: True)
    assert decode_kernels.is_used(torch.zeros(1, 2, 1, 16))
    assert not decode_kernels.is_used(torch.zeros(1, 2, 1, 16, dtype=torch.float64))


def test_codes_of_an_unknown_codec_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_printed_notes", set())
    monkeypatch.setattr(Int8, "codes_singly", False)
    assert Played("int8", "graph", monkeypatch).recorder.captures == 0
    assert "codes of int8, which may code several entries in a step;" in capsys.readouterr().err


def test_a_row_that_was_fed_nothing_gives_a_run_another_key() -> None:
    """From then on its slots are no positions, which a run for aligned rows takes them for."""
    step = open_step("kivi:bits=4,group=16,residual=16")
    keys = [step.step([5, 7] if n != 5 else [5, -1]) for n in range(12)]
    assert [keys.index(key) for key in keys] == [0] * 6 + [6] * 6


def test_the_first_eviction_gives_a_run_another_key() -> None:
    """Before it one mask is made for all heads; after it a head may have empty slots where another has entries."""
    step = open_step("adakv:budget=64,window=8,interval=4", prompt=56)
    keys, are_alike = [], []
    for _ in range(16):
        are_alike.append(all(layer.store.uniform for layer in step.cache.layers))
        keys.append(step.step())
    assert len(set(are_alike)) == 2
    assert [keys.index(key) for key in keys] == [are_alike.index(alike) for alike in are_alike]


def test_a_budget_that_has_risen_gives_a_run_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot, whose entry takes the place of the evicted one, is part of a run; no policy here moves it."""
    monkeypatch.setattr(Evictor, "budget_at", lambda self, seen: self.budget + seen // 4)
    step, replaced = open_step("h2o:budget=64", prompt=100), []  # after which slots are left over
    for _ in range(12):
        key = step.step()
        if step.fixed._replacing:
            replaced.append((key, step.cache.layers[0].store.length))
    assert {length for _, length in replaced} == {89, 90, 91}
    assert len(set(replaced)) == len({key for key, _ in replaced})


def test_rows_that_no_longer_evict_the_same_slot_give_a_run_another_key() -> None:
    """A run for rows at one position takes the slot from the numbers of the step."""
    step = open_step("streaming:budget=64")
    keys = [step.step([5, 7] if n != 5 else [5, -1]) for n in range(12)]
    assert [keys.index(key) for key in keys] == [0] * 5 + [5] + [6] * 6


def test_a_tensor_of_another_shape_at_an_old_address_gives_a_run_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator may put a wider ledger where a narrower one was."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    step, keys, widths = open_step("h2o:budget=12", prompt=20), [], []
    for _ in range(30):
        keys.append(step.step())
        widths.append(step.cache.layers[0].store.evicted_at.shape[2])
    assert len(set(widths)) > 1
    assert [keys.index(key) for key in keys] == [widths.index(width) for width in widths]


def test_only_entries_that_are_still_exact_enter_a_ring() -> None:
    """Others of the tail have the same places, and a GPU writes in any order."""
    ring = stepped_store.ExactRing(torch.zeros(1, 1, 0, 1), 2)
    positions = torch.tensor([[2, 3, 0, 1]])
    ring.fill(positions[:, None, :, None].float(), positions, torch.tensor([2]))
    assert ring.at(torch.tensor([[2, 3]])).flatten().tolist() == [2, 3]


def test_a_row_in_which_nothing_is_due_keeps_its_codes() -> None:
    """Its slot may be any, and another entry's."""
    ring = stepped_store.ExactRing(torch.zeros(2, 1, 0, 8), 3)
    ring.columns.copy_(torch.arange(2 * 4 * 8).view(2, 1, 4, 8))
    codes, scales = torch.full((2, 1, 4, 8), 7, dtype=torch.uint8), torch.full((2, 1, 4, 1), 9.0)
    slots = torch.tensor([1, 1])
    stepped_store.code_entries(Int8(), hints.KEYS, ring, torch.tensor([-1, 2]), slots, codes, scales, None)
    is_kept = [bool((codes[row, 0, n] == 7).all() and scales[row, 0, n] == 9) for row in (0, 1) for n in range(4)]
    assert is_kept == [True] * 5 + [False] + [True] * 2


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "snapkv:budget=64,window=8,interval=16",
        "streaming:budget=64",
        "h2o:budget=64",
        "random:budget=64",
        "int8",
        "q4_0",
        "kivi:bits=4,group=16,residual=16",
    ],
)
def test_the_key_of_a_run_has_the_address_of_all_memory_that_it_uses(policy: str) -> None:
    """Of all but the model's weights and the numbers of the step; what a run makes lies in its own memory."""
    step = open_step(policy)
    key = [step.step() for _ in range(2)][-1]

    def addresses(values: Any) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(values)}

    operators = step.graph.operators
    used = {address for own in operators for address in addresses((own.args, own.kwargs))}
    made = {address for own in operators for address in addresses([tensor for _, tensor in own.made])}
    model = addresses([*step.model.parameters(), *step.model.buffers(), step.fixed._numbers])
    assert used - made - model <= {part for part in key if isinstance(part, int)}


def test_after_a_capture_that_failed_no_entry_is_evicted_that_it_chose() -> None:
    """It chose in memory that nothing has been written to."""
    ledgers = []
    for fails in (False, True):
        step = open_step("streaming:budget=64")
        step.step([5, -1])  # rows differ from here on: what is evicted is chosen on the device
        step.fixed.prepare([5, 7], step.room)
        if fails:
            step.capture()
        step.run()
        step.fixed.finish()
        ledgers.append(torch.stack([layer.store.evicted_at for layer in step.cache.layers]))
    assert torch.equal(*ledgers)


@torch.no_grad()
def test_a_replay_that_fills_the_slot_of_an_evicted_entry_leaves_slots_out_of_order() -> None:
    """Evictions between two steps have put them in order; ties go to the earlier position, which is looked for."""
    step = open_step("h2o:budget=64")
    step.step()
    key = step.fixed.prepare([5, 7], step.room)
    replayed = step.capture()
    replayed.replay()
    step.fixed.finish()
    step.step([5, -1])
    assert all(layer.store.ordered for layer in step.cache.layers)
    assert step.fixed.prepare([5, 7], step.room) == key
    replayed.replay()
    step.fixed.finish()
    for layer in step.cache.layers:
        assert bool((layer.store.positions.diff(dim=2) < 0).any())
        assert not layer.store.ordered


def test_bytes_that_an_eviction_between_two_steps_frees_are_no_longer_counted() -> None:
    step = open_step("adakv:budget=64,window=8,interval=2,phase=decode", prompt=100)
    step.step()
    step.episode.extend([[1] * 200] * 2)
    step.episode.decode(Decoding(1))  # for which the cache gets more slots than steps have asked for
    before = step.cache.bytes
    step.step()
    tensors_of = [tensor for layer in step.cache.layers for tensor in layer.tensors()]
    assert step.cache.bytes == sum(tensor.nbytes for tensor in tensors_of) < before


@pytest.mark.parametrize("mode", ["eager", "fixed", "graph"])
@pytest.mark.parametrize("calls", [0, 1])
def test_after_an_interrupted_step_nothing_is_sampled(mode: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(captured, "step_mode", lambda device: mode)
    episode = Sampler(tiny_model(), parse_policy("int8")).open([random_ids(20)], [0, 1], group=2)
    assert isinstance(episode, Episode)
    recorder = Recorder(lambda: [tensor for layer in episode._cache.layers for tensor in layer.tensors()])
    monkeypatch.setattr(captured, "capture_graph", recorder)
    part = episode._model.model.model.layers[1].mlp
    own, part.forward = part.forward, interrupted
    with pytest.raises(KeyboardInterrupt):
        episode.decode(Decoding(12))
    part.forward = own
    with pytest.raises(RunError, match="an earlier call failed"):
        episode.decode(Decoding(4))


def test_weights_that_have_moved_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    for mode in ("eager", "graph"):
        served = tiny_model()
        monkeypatch.setattr(captured, "step_mode", lambda device, mode=mode: mode)
        episode = Sampler(served, parse_policy("snapkv:budget=32,window=8,interval=16")).open(
            [random_ids(60)], [0], group=1
        )
        assert isinstance(episode, Episode)
        layers = episode._cache.layers
        recorder = Recorder(lambda layers=layers: [t for own in layers for t in (*own.tensors(), own.store.evicted_at)])
        monkeypatch.setattr(captured, "capture_graph", recorder)
        own = [episode.decode(Decoding(12))]
        with torch.no_grad():
            for weight in served.model.parameters():
                weight.mul_(1.1)  # in place: a replay reads it
        own.append(episode.decode(Decoding(12)))
        assert recorder.captures == (mode == "graph")
        for weight in served.model.parameters():
            weight.data = weight.data * 0.9
        own.append(episode.decode(Decoding(12)))
        assert recorder.captures == 2 * (mode == "graph")
        turns.append([[answer.ids for answer in turn if answer] for turn in own])
    assert turns[0] == turns[1]


def test_turns_too_short_for_a_capture_print_no_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_printed_notes", set())
    monkeypatch.setattr(captured, "step_mode", lambda device: "graph")
    episode = Sampler(tiny_model(), parse_policy("none")).open([random_ids(20)], [0, 1], group=2)
    for _ in range(12):
        episode.decode(Decoding(captured.FEWEST_STEPS - 1))
    assert capsys.readouterr().err == ""


class Compiled:
    """Takes the place of ``torch.compile``: counts calls of each function."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        patch.setattr(torch, "compile", self.compile)
        patch.setattr(captured, "_fused_forwards", {})

    def compile(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return call


def test_fused_layers_are_of_one_thread_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, model, ids = Compiled(monkeypatch), tiny_model().model, torch.ones(1, 3, dtype=torch.int64)
    before = [dict(vars(layer)) for layer in model.model.layers]
    within, leave = threading.Event(), threading.Event()

    def another() -> None:
        with captured.fused_layers(model):
            within.set()
            leave.wait(10)

    thread = threading.Thread(target=another)
    thread.start()
    assert within.wait(10)
    model(ids)  # a learner's pass
    assert compiled.calls == 0
    threading.Timer(0.2, leave.set).start()
    with captured.fused_layers(model):  # waits for the other thread
        model(ids)
    thread.join()
    assert compiled.calls == 2
    assert not tensors.is_fusing()
    assert [dict(vars(layer)) for layer in model.model.layers] == before


def test_a_layer_with_a_forward_of_its_own_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, model, ids = Compiled(monkeypatch), tiny_model().model, torch.ones(1, 3, dtype=torch.int64)
    checkpoint_layers(model)
    first = model.model.layers[0]
    steered = first.forward = lambda *args, _own=first.forward, **kwargs: _own(*args, **kwargs) + 1.0
    with torch.no_grad():
        expected = model(ids).logits
        with captured.fused_layers(model):
            assert torch.equal(model(ids).logits, expected)
    assert compiled.calls == 1  # of layers whose gradients are checkpointed
    assert first.forward is steered


def test_hooks_of_a_model_are_called_at_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "_printed_notes", set())
    monkeypatch.setattr(captured, "step_mode", lambda device: "graph")
    served, calls = tiny_model(), list[int]()
    served.model.enable_input_require_grads()  # a hook that changes no number
    episode = Sampler(served, parse_policy("none")).open([random_ids(20)], [0, 1], group=2)
    assert isinstance(episode, Episode)
    recorder = Recorder(lambda: [tensor for layer in episode._cache.layers for tensor in layer.tensors()])
    monkeypatch.setattr(captured, "capture_graph", recorder)
    episode.decode(Decoding(12))
    assert recorder.replays == 10
    served.model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    episode = Sampler(served, parse_policy("none")).open([random_ids(20)], [0, 1], group=2)
    calls.clear()
    episode.decode(Decoding(12))
    assert (len(calls), recorder.replays) == (11, 10)
    assert "not captured as CUDA graphs: hooks of the model, which are called at every step;" in capsys.readouterr().err
