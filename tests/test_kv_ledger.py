"""The ledger file: what is written comes back, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvaudit.audit.cache.hints import pack_hints
from kvaudit.audit.cache.ledger import NEVER, Rollout, batch_ledger, load_ledgers, save_ledgers
from kvaudit.audit.policies import parse_policy, quantiser_of
from kvaudit.core.errors import DataError

POLICY = parse_policy("streaming:budget=64")


def rollout(tokens: int = 200, layers: int = 4, heads: int = 2) -> Rollout:
    evicted_at = torch.full((layers, heads, tokens), NEVER, dtype=torch.int32)
    evicted_at[:, :, 5:9] = 70
    return Rollout(
        ids=torch.arange(tokens),
        prompt_length=60,
        sampled=torch.arange(tokens) >= 60,
        sampler_logprobs=-torch.rand(tokens) * (torch.arange(tokens) >= 60),
        evicted_at=evicted_at,
        kv_bytes_peak=1000,
        kv_bytes_dense=2000,
        retention=0.5,
        answer_start=60,
    )


def test_ledger_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step-0.safetensors"
    sha256 = save_ledgers(path, [rollout(), rollout(80)], POLICY)
    loaded, policy = load_ledgers(path, sha256=sha256)
    assert policy == POLICY
    assert [len(r.ids) for r in loaded] == [200, 80]
    assert torch.equal(loaded[0].evicted_at, rollout().evicted_at)
    assert (loaded[1].prompt_length, loaded[1].retention) == (60, 0.5)


def test_ledgers_of_several_rows_are_filled_up_to_the_longest() -> None:
    short, long = rollout(150), rollout(200)
    both = batch_ledger([short, long])
    assert both.evicted_at.shape == (2, 4, 2, 200)
    assert torch.equal(both.evicted_at[0, :, :, :150], short.evicted_at)
    assert bool((both.evicted_at[0, :, :, 150:] == NEVER).all())
    assert both.ids is not None
    assert both.ids[0, 149:152].tolist() == [int(short.ids[149]), -1, -1]
    assert torch.equal(both.ids[1], long.ids)
    assert (both.codec, both.keys_quantised_at, both.experts, both.hints) == (None, None, None, ())


def test_ledgers_of_rows_that_were_stored_otherwise_are_not_joined() -> None:
    with pytest.raises(DataError, match="stored by different quantisers; replay them separately"):
        batch_ledger([rollout(), coded()])


def test_equal_ledgers_have_equal_hashes(tmp_path: Path) -> None:
    same = [replace(rollout(), sampler_logprobs=torch.zeros(200)) for _ in range(2)]
    hashes = {save_ledgers(tmp_path / f"{n}.safetensors", same, POLICY) for n in range(6)}
    assert len(hashes) == 1


def test_changed_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.safetensors"
    sha256 = save_ledgers(path, [rollout()], POLICY)
    tensors = load_file(path)
    tensors["0.evicted_at"][0, 0, 0] = 61
    save_file(tensors, path, metadata={"kvaudit": "{}"})
    with pytest.raises(DataError, match="it was changed"):
        load_ledgers(path, sha256=sha256)


def test_truncated_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.safetensors"
    with pytest.raises(DataError, match="does not exist"):
        load_ledgers(path)
    save_ledgers(path, [rollout()], POLICY)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a readable safetensors"):
        load_ledgers(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="not a ledger of format 1"):
        load_ledgers(path)


def test_impossible_eviction_is_damage(tmp_path: Path) -> None:
    bad = rollout()
    bad.evicted_at[0, 0, 50] = 50
    save_ledgers(tmp_path / "ledger.safetensors", [bad], POLICY)
    with pytest.raises(DataError, match="before its own query"):
        load_ledgers(tmp_path / "ledger.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": torch.arange(200) > 60}, "token 60 has a log-prob and was not sampled"),
        ({"answer_start": 201}, "do not fit its 200 tokens"),
        ({"answer_start": 20}, "do not fit its 200 tokens"),
        ({"retention": 1.5}, "do not fit its 200 tokens"),
    ],
)
def test_numbers_that_contradict_each_other_are_damage(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "ledger.safetensors"
    save_ledgers(path, [replace(rollout(), **change)], POLICY)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        load_ledgers(path)


def test_the_file_takes_two_bytes_per_entry_and_nine_per_token(tmp_path: Path) -> None:
    path, tokens, layers, heads = tmp_path / "ledger.safetensors", 4000, 8, 2
    save_ledgers(path, [rollout(tokens, layers, heads)], POLICY)
    assert path.stat().st_size < 2 * layers * heads * tokens + 9 * tokens + 1500


def test_a_ledger_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    path, first = tmp_path / "ledger.safetensors", rollout()
    names = ("ids", "sampled", "sampler_logprobs", "evicted_at")
    scalars = {name: getattr(first, name) for name in ("prompt_length", "answer_start", "kv_bytes_peak")}
    scalars |= {"kv_bytes_dense": 2000, "retention": 0.5}
    header = {"format": 1, "policy": POLICY.canonical, "policy_hash": POLICY.hash, "rollouts": [scalars]}
    tensors = {f"0.{name}": getattr(first, name).contiguous() for name in names}
    save_file(tensors, path, metadata={"kvaudit": json.dumps(header)})
    (read,), _ = load_ledgers(path)
    assert torch.equal(read.evicted_at, first.evicted_at)
    assert torch.equal(read.ids, first.ids)


def coded(tokens: int = 200) -> Rollout:
    times = torch.arange(1, tokens + 1, dtype=torch.int32)
    words = pack_hints(torch.tensor([3, 4, 90_000]), torch.tensor([0, 15, 7]))
    codec = quantiser_of(parse_policy("int8"))
    return replace(rollout(tokens), codec=codec, keys_quantised_at=times, values_quantised_at=times, hints=words)


def test_codes_at_a_border_come_back_as_written(tmp_path: Path) -> None:
    save_ledgers(tmp_path / "ledger.safetensors", [coded(), rollout()], parse_policy("int8"))
    (first, second), _ = load_ledgers(tmp_path / "ledger.safetensors")
    assert first.hints is not None
    assert torch.equal(first.hints, coded().hints)
    assert second.hints is None


def test_a_ledger_of_the_second_format_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.safetensors"
    save_ledgers(path, [replace(coded(), hints=None)], parse_policy("int8"))
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvaudit"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    save_file(tensors, path, metadata={"kvaudit": json.dumps(header | {"format": 2})})
    (read,), _ = load_ledgers(path)
    assert torch.equal(read.keys_quantised_at, coded().keys_quantised_at)
    assert read.hints is None


@pytest.mark.parametrize("words", [torch.tensor([48, 0]), torch.zeros(1, 2)], ids=["named-twice", "shape"])
def test_codes_at_a_border_out_of_order_are_damage(tmp_path: Path, words: torch.Tensor) -> None:
    bad = replace(coded(), hints=words.to(torch.uint16))
    save_ledgers(tmp_path / "ledger.safetensors", [bad], parse_policy("int8"))
    with pytest.raises(DataError, match="the hints are not in order"):
        load_ledgers(tmp_path / "ledger.safetensors")


def test_the_keys_of_a_row_come_back_as_written(tmp_path: Path) -> None:
    keyed = replace(rollout(), row_keys=(3, 2**63 - 1))
    save_ledgers(tmp_path / "ledger.safetensors", [keyed, rollout()], POLICY)
    (first, second), _ = load_ledgers(tmp_path / "ledger.safetensors")
    assert (first.row_keys, second.row_keys) == ((3, 2**63 - 1), None)


def test_the_pins_of_a_row_come_back_as_written(tmp_path: Path) -> None:
    rollouts = [replace(rollout(), pinned=((0, 3), (5, 6))), replace(rollout(), pinned=()), rollout()]
    save_ledgers(tmp_path / "ledger.safetensors", rollouts, POLICY)
    found, _ = load_ledgers(tmp_path / "ledger.safetensors")
    assert [one.pinned for one in found] == [((0, 3), (5, 6)), (), None]


@pytest.mark.parametrize(
    "change",
    [
        {"answer_start": -1},
        {"answer_start": "x"},
        {"kv_bytes_peak": None},
        {"retention": "x"},
        {"codec": []},
        {"codec": "none"},
        {"more": 1},
        {"row_keys": [1]},
        {"row_keys": [1, 2**63]},
        {"pinned": 1},
        {"pinned": [[3, 3]]},
    ],
)
def test_a_header_of_the_wrong_kind_is_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "ledger.safetensors"
    save_ledgers(path, [rollout()], POLICY)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvaudit"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    header["rollouts"][0] |= change
    save_file(tensors, path, metadata={"kvaudit": json.dumps(header)})
    with pytest.raises(DataError, match="is damaged"):
        load_ledgers(path)
    header = {**header, "format": True}
    save_file(tensors, path, metadata={"kvaudit": json.dumps(header)})
    with pytest.raises(DataError, match="not a ledger of format"):
        load_ledgers(path)


def test_a_header_of_endless_brackets_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.safetensors"
    save_file({"0.ids": torch.zeros(1)}, path, metadata={"kvaudit": "[" * 100_000})
    with pytest.raises(DataError, match="not a ledger of format"):
        load_ledgers(path)


SHORT = {
    "ids": torch.arange(4, dtype=torch.int32),
    "sampled": torch.tensor([False, False, True, True]),
    "sampler_logprobs": torch.tensor([0.0, 0.0, -1.0, -1.0]),
    "evicted_at": torch.full((1, 1, 4), 9, dtype=torch.int32),
}
SCALARS = {"prompt_length": 2, "answer_start": 2, "kv_bytes_peak": 0, "kv_bytes_dense": 0, "retention": 1.0}
CHOICES = {"choosing": torch.tensor([2, 3], dtype=torch.int32), "chosen": torch.tensor([[[[0], [1]]]]).int()}


def load_short(path: Path, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> Rollout:
    header = {"format": 3, "policy": "none", "policy_hash": "", "rollouts": [SCALARS | scalars]}
    stored = {f"0.{name}": tensor for name, tensor in (SHORT | tensors).items()}
    save_file(stored, path, metadata={"kvaudit": json.dumps(header)})
    return load_ledgers(path)[0][0]


def test_a_short_ledger_and_one_with_choices_are_read(tmp_path: Path) -> None:
    assert load_short(tmp_path / "a.safetensors", {}, {}).ids.tolist() == [0, 1, 2, 3]
    read = load_short(tmp_path / "b.safetensors", CHOICES, {"selection": {"unit": 1, "layers": [0]}})
    assert read.selection is not None
    assert read.selection.chosen.flatten().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("tensors", "scalars", "message"),
    [
        ({"ids": torch.tensor(1).int()}, {}, "another shape than its 1 tokens"),
        ({"ids": torch.zeros(4, 2).int()}, {}, "another shape than its 8 tokens"),
        ({"sampled": torch.tensor(True)}, {}, "another shape than its 4 tokens"),
        ({"sampled": torch.ones(3, 4, dtype=torch.bool)}, {}, "another shape than its 4 tokens"),
        ({"sampler_logprobs": -torch.ones(3, 4)}, {}, "another shape than its 4 tokens"),
        (
            {"keys_quantised_at": torch.tensor(9).int(), "values_quantised_at": torch.full((4,), 9).int()},
            {"codec": "int8"},
            "another shape than its 4 tokens",
        ),
        ({"experts": torch.zeros(4, 1, 0, dtype=torch.uint8)}, {}, r"experts \(4, 1, 0\) do not fit 4 tokens"),
        # 4096 * 2^20 is 0 in 32 bits
        (CHOICES | {"chosen": CHOICES["chosen"] * 4096}, {"selection": {"unit": 2**20, "layers": [0]}}, "after it"),
        (CHOICES, {"selection": {"unit": 2**70, "layers": [0]}}, "in whole numbers below 2.31"),
        (
            CHOICES | {"evicted_at": torch.zeros(1, 0, 4).int(), "chosen": CHOICES["chosen"].repeat(1, 2, 1, 1)},
            {"selection": {"unit": 1, "layers": [1]}},
            "has choices in layers",
        ),
    ],
)
def test_tensors_of_a_forged_shape_or_size_are_one_line(
    tmp_path: Path, tensors: dict[str, torch.Tensor], scalars: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_short(tmp_path / "ledger.safetensors", tensors, scalars)


@pytest.mark.parametrize("name", ["ids", "sampled", "sampler_logprobs", "evicted_at"])
def test_a_tensor_of_another_type_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ledger.safetensors"
    save_ledgers(path, [rollout()], POLICY)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    tensors[f"0.{name}"] = tensors[f"0.{name}"].to(torch.float64)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(DataError, match=f"is damaged .{name} of rollout 0 holds torch.float64"):
        load_ledgers(path)
