"""The triton kernels of a decode step give what plain attention gives: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvaudit.audit.cache import decode_kernels
from kvaudit.audit.cache.codes import decode_keys, decode_tokens, encode_groups, encode_tokens, pack, unpack
from kvaudit.audit.cache.decode_kernels import (
    CodedPart,
    attend_codes,
    attend_slots,
    is_available,
    write_entry,
)
from kvaudit.audit.policies import Quantiser, parse_policy

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not is_available(DEVICE), reason="needs triton, and a GPU or the variable TRITON_INTERPRET"
)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative to the largest output


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(is_available(DEVICE), reason="the tests below run in this process")
@pytest.mark.timeout(900)
def test_interpreted_kernels_pass_the_tests_below() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_triton_there_are_no_kernels() -> None:
    if find_spec("triton") is None:
        assert not is_available(torch.device("cuda"))
    assert is_available(torch.device("meta")) == (INTERPRETS and find_spec("triton") is not None)


@pytest.fixture(autouse=True)
def _repaired_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair triton 3.6's interpreter: bounds of loops under numpy 2.4, and products of bfloat16."""
    if not INTERPRETS or find_spec("triton") is None:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # it would multiply the bits
        wide = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)
    monkeypatch.setattr(builder, "create_dot", dot_of_numbers)


class Step:
    """One decode step: random entries in some slots, at positions that differ by row and head."""

    def __init__(
        self, seed: int, heads: int, group: int, slots: int, size: int, *, batch: int = 3, value_size: int | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.keys = torch.randn(batch, heads, slots, size)
        self.values = torch.randn(batch, heads, slots, value_size or size)
        self.query = torch.randn(batch, heads * group, size)
        self.sinks = torch.randn(heads * group)
        order = torch.rand(batch, heads, slots).argsort(-1)
        self.positions = torch.where(torch.rand(batch, heads, slots) < 0.3, -1, order).int()
        # the first row is fed nothing, the others do not see all
        self.query_positions = torch.randint(slots // 2, slots, (batch,))
        self.query_positions[0] = -1

    def to(self, dtype: torch.dtype) -> Step:
        for name in ("keys", "values", "query"):
            setattr(self, name, getattr(self, name).to(DEVICE, dtype))
        for name in ("sinks", "positions", "query_positions"):
            setattr(self, name, getattr(self, name).to(DEVICE))
        return self

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5


def plain(step: Step, keys: Tensor, values: Tensor, window: int | None = None, *, sinks: bool = False) -> Tensor:
    """Return the output in float64."""
    batch, heads, slots, _ = keys.shape
    group = step.query.shape[1] // heads
    keys, values, query = keys.double(), values.double(), step.query.double()
    positions = step.positions.expand(batch, heads, slots)
    newest = step.query_positions[:, None, None]
    seen = (positions >= 0) & (positions <= newest)
    if window is not None:
        seen &= newest - positions < window
    logits = torch.einsum("bhgd,bhkd->bhgk", query.view(batch, heads, group, -1), keys) * step.scaling
    weights = logits.exp() * seen[:, :, None]
    total = weights.sum(-1, keepdim=True)
    if sinks:
        total = total + step.sinks.double().exp().view(heads, group, 1)
    shares = torch.where(total > 0, weights / total, 0)
    return torch.einsum("bhgk,bhkd->bhgd", shares, values).flatten(1, 2)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    gap = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert gap < TOLERANCES[dtype], f"{gap:.1e}"


# --- exact entries ----------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("heads", "group", "slots", "size"),
    [
        (2, 1, 130, 16),
        (1, 2, 257, 64),
        (2, 3, 33, 80),
        (1, 5, 700, 64),
        (3, 8, 16, 80),
        (1, 4, 1, 128),
        (2, 7, 300, 96),
    ],
)
def test_exact_entries_are_attended(heads: int, group: int, slots: int, size: int, dtype: torch.dtype) -> None:
    step = Step(slots, heads, group, slots, size).to(dtype)
    for window, sinks in ((None, False), (None, True), (slots // 3 + 1, False), (slots // 3 + 1, True)):
        found = attend_slots(
            step.query,
            step.keys,
            step.values,
            step.positions,
            step.query_positions,
            step.scaling,
            step.sinks if sinks else None,
            window,
        )
        assert_close(found, plain(step, step.keys, step.values, window, sinks=sinks), dtype)
        assert not found[0].any()


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_layouts_and_sizes_may_differ(dtype: torch.dtype) -> None:
    step = Step(1, 2, 4, 300, 64, value_size=48).to(dtype)
    step.positions = step.positions[:, :1]  # alike in all heads
    wanted = plain(step, step.keys, step.values)
    # slots before heads, in a buffer that has more of them; the query as a model's projection lays it out
    wide = torch.full((3, 310, 2, 64), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, :300] = step.keys.transpose(1, 2)
    keys = wide.transpose(1, 2)[:, :, :300]
    positions = torch.zeros(3, 1, 310, dtype=torch.int32, device=DEVICE)
    positions[:, :, :300] = step.positions
    query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    newest = step.query_positions.int()[:, None].expand(3, 2).contiguous()[:, 0]  # as a column of position_ids
    found = attend_slots(query, keys, step.values, positions[:, :, :300], newest, step.scaling)
    assert_close(found, wanted, dtype)


@needs_kernels
def test_slots_that_are_not_seen_may_hold_anything() -> None:
    step = Step(2, 2, 2, 300, 64).to(torch.float32)
    wanted = plain(step, step.keys, step.values)
    unseen = (step.positions < 0) | (step.positions > step.query_positions[:, None, None])
    for part, number in ((step.keys, torch.nan), (step.values, torch.inf)):
        part[unseen] = number
    found = attend_slots(step.query, step.keys, step.values, step.positions, step.query_positions, scaling=step.scaling)
    assert_close(found, wanted, torch.float32)


@needs_kernels
def test_large_logits_neither_overflow_nor_vanish() -> None:
    step = Step(3, 1, 2, 300, 64).to(torch.float32)
    step.keys *= 30
    found = attend_slots(step.query, step.keys, step.values, step.positions, step.query_positions, step.scaling)
    shares = (plain(step, step.keys, step.values) - found.double()).abs().max()
    assert shares < 2e-4  # the logits themselves are rounded
    assert found.isfinite().all()


# --- codes ------------------------------------------------------------------------------------------------------------

CODECS = (
    "int8",
    "fp8",
    "fp8:format=e5m2",
    "fp8:scale=token",
    "q4_0",
    "q4_0:group=20",
    "kivi:bits=4,group=32,residual=32",
    "kivi:bits=2,group=16,residual=32",
    "int8:scale=head,scales=0.02/0.03",
)
KINDS = {"int8": "int8", "kivi": "unsigned", "q4_0": "q4"}


def coded(codec: Quantiser, part: int, exact: Tensor, positions: Tensor, done: Tensor) -> tuple[CodedPart, Tensor]:
    """Return ``exact`` [B, H, C, D] as codes below ``done`` [B], and what the project's own functions read of it."""
    batch, heads, slots, _ = exact.shape
    is_coded = (positions >= 0) & (positions < done[:, None, None])
    groups, ring = None, torch.full_like(exact, torch.nan)
    fixed = codec.fixed_scales(0, part, heads)
    if part == 0 and codec.key_group:
        codes, groups, table = encode_groups(exact, is_coded, codec)
        parameters = table.transpose(3, 4).flatten(3)  # [B, H, G, P * D]
        of_entries = torch.stack([table[b, h, groups[b, h].clamp(min=0)] for b in range(batch) for h in range(heads)])
        packed = pack(codes, codec.bits)
        decoded = decode_keys(unpack(packed, codec.bits), of_entries.view(batch, heads, slots, -1, 2), codec)
        groups = groups.to(torch.int16)
    else:
        codes, by_token = encode_tokens(exact, codec, None if fixed is None else fixed.to(exact))
        packed = pack(codes, codec.bits)
        decoded = decode_tokens(unpack(packed, codec.bits), by_token, codec)
        parameters = by_token.flatten(3) if fixed is None else fixed.to(exact)
    kind = KINDS.get(codec.name) or codec.format  # type: ignore[attr-defined]
    # what is read from its code is not in the ring, and the other way round
    row, head, slot = ((positions >= 0) & ~is_coded).nonzero().unbind(1)
    ring[row, head, positions[row, head, slot].long()] = exact[row, head, slot]
    packed[~is_coded] = 255
    read = torch.where(is_coded[..., None], decoded, exact)
    return CodedPart(packed, parameters, ring, done, kind, codec.bits, groups), read


@needs_kernels
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (16, torch.float32),
        (80, torch.float32),
        (128, torch.float32),
        (64, torch.float16),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("spec", CODECS)
def test_codes_are_attended(spec: str, size: int, dtype: torch.dtype) -> None:
    codec = parse_policy(spec)
    assert isinstance(codec, Quantiser)
    group = getattr(codec, "group", size)
    if size % min(group, size):
        pytest.skip("heads do not split into such groups")
    step = Step(size, 2, 2, 280, size).to(dtype)
    done = torch.tensor([200, 130, 0], device=DEVICE)
    (keys, read_keys), (values, read_values) = (
        coded(codec, part, exact, step.positions, done) for part, exact in enumerate((step.keys, step.values))
    )
    found = attend_codes(
        step.query, keys, values, step.positions, step.query_positions, step.scaling, step.sinks, window=150
    )
    assert_close(found, plain(step, read_keys, read_values, 150, sinks=True), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("size", "group"), [(128, 32), (128, 16), (64, 64), (64, 8), (80, 40)])
def test_rows_of_a_table_belong_to_runs_of_slots(size: int, group: int, dtype: torch.dtype) -> None:
    codec = parse_policy(f"kivi:bits=4,group={group},residual={group}")
    assert isinstance(codec, Quantiser)
    step = Step(group, 2, 3, 330, size).to(dtype)
    # the first row is fed nothing, the last has codes alone but for its newest entries
    step.positions = torch.arange(330, dtype=torch.int32, device=DEVICE)[None, None].repeat(3, 2, 1)
    step.positions[1, :, 300:] = -1
    step.query_positions = torch.tensor([-1, 299, 329], device=DEVICE)
    done = torch.tensor([0, 160, 320], device=DEVICE)
    (keys, read_keys), (values, read_values) = (
        coded(codec, part, exact, step.positions, done) for part, exact in enumerate((step.keys, step.values))
    )
    assert keys.groups is not None
    row = torch.arange(330, device=DEVICE) // group
    assert all((keys.groups[b, :, :count] == row[:count]).all() for b, count in enumerate(done.tolist()))
    # no row of the table after the last is read
    keys = keys._replace(parameters=keys.parameters[:, :, : 320 // group], run=group)
    if size != 80:  # whose tiles are neither within runs nor made of them
        keys = keys._replace(groups=torch.full_like(keys.groups, 9999))
    for window in (None, 250):
        found = attend_codes(step.query, keys, values, step.positions, step.query_positions, step.scaling, None, window)
        assert_close(found, plain(step, read_keys, read_values, window), dtype)


@needs_kernels
@pytest.mark.parametrize("scan", [512, 32])
def test_recent_entries_lie_in_a_ring(scan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "_SCAN", scan)
    places = 48
    step = Step(5, 2, 2, 280, 64).to(torch.float32)
    step.positions = torch.arange(280, dtype=torch.int32, device=DEVICE)[None, None].repeat(3, 2, 1)
    step.query_positions = torch.tensor([-1, 279, 279], device=DEVICE)
    done = torch.tensor([279, 240, 232], device=DEVICE)
    parts, read = [], []
    for part, exact in enumerate((step.keys, step.values)):
        found, numbers = coded(parse_policy("int8"), part, exact, step.positions, done)  # type: ignore[arg-type]
        ring = torch.full((3, 2, places, 64), torch.nan, device=DEVICE)
        for slot in range(280 - places, 280):
            ring[:, :, slot % places] = exact[:, :, slot]
        parts.append(found._replace(ring=ring))
        read.append(numbers)
    found = attend_codes(step.query, *parts, step.positions, step.query_positions, step.scaling)
    assert_close(found, plain(step, *read), torch.float32)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "bits", "torch_type"),
    [
        ("int8", 8, torch.int8),
        ("e4m3", 8, torch.float8_e4m3fn),
        ("e5m2", 8, torch.float8_e5m2),
        ("unsigned", 8, torch.uint8),
        ("unsigned", 4, None),
        ("unsigned", 2, None),
        ("q4", 4, None),
    ],
)
def test_every_byte_is_decoded(kind: str, bits: int, torch_type: torch.dtype | None) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 1, 16, 16)
    numbers = unpack(codes, bits).float() - (8 if kind == "q4" else 0)
    if torch_type is not None:
        numbers = codes.view(torch_type).float()
    size = numbers.shape[-1]
    scale = torch.ones(1, 1, 16, 2 if kind == "unsigned" else 1, device=DEVICE)
    scale[..., 1:] = 0.5
    numbers = numbers + (0.5 if kind == "unsigned" else 0)
    # each slot is seen by one row alone, so that the output is its value
    positions = torch.full((16, 1, 16), -1, dtype=torch.int32, device=DEVICE)
    positions[torch.arange(16), 0, torch.arange(16)] = 0
    part = CodedPart(codes, scale, codes.new_zeros(1, 1, 1, size, dtype=torch.float32), codes[0, 0, 0, :1], kind, bits)
    part = CodedPart(*(x.expand(16, *x.shape[1:]) if isinstance(x, Tensor) else x for x in part))
    part = part._replace(done=torch.ones(16, dtype=torch.int64, device=DEVICE))
    query = torch.zeros(16, 1, size, device=DEVICE)
    clean = part._replace(codes=torch.zeros_like(part.codes))
    found = attend_codes(query, clean, part, positions, torch.zeros(16, dtype=torch.int64, device=DEVICE), 1.0)
    # the interpreter takes the codes of NaN and infinity for numbers
    same = numbers[0, 0].isfinite() if INTERPRETS else ...
    torch.testing.assert_close(found[:, 0][same], numbers[0, 0][same], rtol=0, atol=0, equal_nan=True)


# --- writing ----------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("places", [None, 7])
def test_an_entry_is_written_into_its_slot(places: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    buffers = tuple(torch.randn(3, 2, places or 20, size, device=DEVICE).to(dtype) for size in (80, 64))
    # a step's entries as a model's projections lay them out
    entries = tuple(torch.randn(3, 1, 2, size, device=DEVICE).to(dtype).transpose(1, 2) for size in (80, 64))
    positions = torch.arange(20, dtype=torch.int32, device=DEVICE)[None, None].repeat(3, 2, 1)
    mass = torch.rand(3, 2, 20, device=DEVICE)
    newest, slot = torch.tensor([40, -1, 12], device=DEVICE), 17
    wanted = [buffer.clone() for buffer in buffers]
    for buffer, entry in zip(wanted, entries, strict=True):
        for row, position in enumerate(newest.tolist()):
            if not places or position >= 0:
                buffer[row, :, position % places if places else slot] = entry[row, :, 0]
    wanted_positions, wanted_mass = positions.clone(), mass.clone()
    wanted_positions[:, :, slot], wanted_mass[:, :, slot] = newest[:, None].int(), 0
    at = torch.tensor([slot], device=DEVICE)
    write_entry(buffers, positions, entries, newest, at, mass, in_rings=places is not None)
    assert all(torch.equal(found, entry) for found, entry in zip(buffers, wanted, strict=True))
    assert torch.equal(positions, wanted_positions)
    assert torch.equal(mass, wanted_mass)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_captured_step_follows_what_its_inputs_hold() -> None:
    step = Step(7, 2, 4, 3000, 128).to(torch.bfloat16)
    slot = torch.tensor([5], device=DEVICE)
    key, value = (torch.randn(3, 2, 1, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def run() -> Tensor:
        write_entry((step.keys, step.values), step.positions, (key, value), step.query_positions, slot)
        return attend_slots(step.query, step.keys, step.values, step.positions, step.query_positions, step.scaling)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for place in (17, 2999):
        slot.fill_(place)
        step.query_positions.copy_(torch.tensor([2000 + place, -1, 100]))
        step.query.normal_()
        graph.replay()
        assert int(step.positions[0, 0, place]) == 2000 + place
        assert_close(found, plain(step, step.keys, step.values), torch.bfloat16)
