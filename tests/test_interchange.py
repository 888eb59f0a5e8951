"""Rollouts of another engine: what it writes is replayed, what contradicts itself is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conform.world import served, two_turns
from rollout_form import events as events_of
from rollout_form import write_rollouts
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from kvaudit.audit.cache.ledger import NEVER, save_ledgers
from kvaudit.audit.cli import app
from kvaudit.audit.policies import Dense, parse_policy
from kvaudit.audit.replay.interchange import Event, build_ledger, read_rollouts
from kvaudit.audit.replay.rollout_checks import RecordedRollouts, check_replayable
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import DataError

POLICIES = ["none", "streaming:budget=12,sink=2,chunk=16", "snapkv:budget=14,window=4,interval=5,chunk=16"]
Table = dict[str, Any]


def table(**changes: Any) -> Table:
    """Two layers of two heads, six tokens, two of them drawn; entry 1 leaves at query 4, entry 2 of layer 1 at 5."""
    both, without = [0, 2, 3], [0, 3, 4]
    row = {
        "ids": [5, 6, 7, 8, 9, 10],
        "prompt_length": 4,
        "logprobs": [-0.5, -1.25],
        "events": [
            {"query": 4, "kept": [[both, both], [both, both]]},
            {"query": 5, "kept": [None, [without, without]]},
        ],
    }
    head = {"format": "kvaudit.rollouts", "version": 1, "layers": 2, "kv_heads": 2}
    return {**head, "rollouts": [row]} | changes


def test_the_documented_example_reads_as_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "rollout-files.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (rollout,) = read_rollouts(write_file(tmp_path / "r.json", example)).rollouts
    assert rollout.evicted_at.tolist() == [
        [[NEVER, 4, 5, NEVER, NEVER, NEVER]],
        [[NEVER, NEVER, 4, NEVER, NEVER, NEVER]],
    ]


def write_file(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed_table(change: Callable[[Table, Table], Any]) -> Table:
    """The table after ``change(file, first rollout)``."""
    file = table()
    change(file, file["rollouts"][0])
    return file


def test_a_history_of_kept_sets_becomes_the_ledger(tmp_path: Path) -> None:
    (rollout,) = read_rollouts(write_file(tmp_path / "r.json", table())).rollouts
    one, two = [NEVER, 4, NEVER, NEVER, NEVER, NEVER], [NEVER, 4, 5, NEVER, NEVER, NEVER]
    assert rollout.evicted_at.tolist() == [[one, one], [two, two]]
    assert rollout.sampled.tolist() == [False] * 4 + [True] * 2
    assert rollout.sampler_logprobs.tolist() == [0, 0, 0, 0, -0.5, -1.25]
    assert (rollout.prompt_length, rollout.answer_start, rollout.retention) == (4, 4, 0.75)


def test_sampled_spans_name_the_turns(tmp_path: Path) -> None:
    file = changed_table(lambda _, row: row.update(sampled=[[4, 5], [5, 6]], prompt_length=3))
    (rollout,) = read_rollouts(write_file(tmp_path / "r.json", file)).rollouts
    assert (rollout.sampled.tolist(), rollout.prompt_length) == ([False] * 4 + [True] * 2, 3)


def test_policy_and_temperature_are_optional(tmp_path: Path) -> None:
    plain = read_rollouts(write_file(tmp_path / "r.json", table()))
    assert (plain.policy, plain.temperature) == (None, None)
    named = read_rollouts(write_file(tmp_path / "r.json", table(policy="none", temperature=0.5)))
    assert (named.policy, named.temperature) == (Dense(), 0.5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_our_own_rollouts_come_back_the_same_from_the_json_form(name: str, policy: str, tmp_path: Path) -> None:
    rollouts = tuple(two_turns(served(name, torch.float32), policy).rollouts)
    write_rollouts(tmp_path / "r.json", RecordedRollouts("here", rollouts, parse_policy(policy), 0.7))
    back = read_rollouts(tmp_path / "r.json")
    assert (back.policy, back.temperature, len(back.rollouts)) == (parse_policy(policy), 0.7, len(rollouts))
    for ours, theirs in zip(rollouts, back.rollouts, strict=True):
        for part in ("ids", "sampled", "sampler_logprobs", "evicted_at"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
        assert ours.prompt_length == theirs.prompt_length


def tensors(path: Path, policy: str, **swapped: torch.Tensor) -> Path:
    """Our rollouts in the safetensors form, the kept sets rebuilt by comparing every entry with every event."""
    rollouts = two_turns(served(dtype=torch.float32), policy).rollouts
    held: dict[str, torch.Tensor] = {}
    for n, rollout in enumerate(rollouts):
        times = sorted({t for t in rollout.evicted_at.flatten().tolist() if t != NEVER})
        kept = torch.zeros(len(times), *rollout.evicted_at.shape, dtype=torch.bool)
        for e, time in enumerate(times):
            kept[e, :, :, :time] = rollout.evicted_at[:, :, :time] > time
        held |= {f"{n}.ids": rollout.ids, f"{n}.sampled": rollout.sampled, f"{n}.kept": kept}
        held[f"{n}.logprobs"] = rollout.sampler_logprobs[rollout.sampled]
        held[f"{n}.query"] = torch.tensor(times, dtype=torch.int32)
    rows = [{"prompt_length": rollout.prompt_length} for rollout in rollouts]
    layers, heads, _ = rollouts[0].evicted_at.shape
    header = {"format": "kvaudit.rollouts", "version": 1, "layers": layers, "kv_heads": heads, "rollouts": rows}
    save_file(held | swapped, path, metadata={"kvaudit": json.dumps(header)})
    return path


def test_the_safetensors_form_gives_the_same_ledger(tmp_path: Path) -> None:
    back = read_rollouts(tensors(tmp_path / "r.safetensors", POLICIES[1]))
    for ours, theirs in zip(two_turns(served(dtype=torch.float32), POLICIES[1]).rollouts, back.rollouts, strict=True):
        assert torch.equal(ours.evicted_at, theirs.evicted_at)
        assert torch.equal(ours.sampler_logprobs, theirs.sampler_logprobs)


def test_a_ledger_file_is_read_as_it_is(tmp_path: Path) -> None:
    policy = parse_policy(POLICIES[1])
    rollouts = two_turns(served(dtype=torch.float32), POLICIES[1]).rollouts
    save_ledgers(tmp_path / "l.safetensors", rollouts, policy)
    back = read_rollouts(tmp_path / "l.safetensors")
    assert (back.policy, back.policy_hash) == (policy, policy.hash)
    assert all(torch.equal(a.evicted_at, b.evicted_at) for a, b in zip(rollouts, back.rollouts, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_the_kept_sets_of_a_ledger_give_it_back(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, 17)
    draw = torch.arange(1, 18) + torch.randint(0, 9, shape, generator=generator)
    ledger = torch.where((torch.rand(shape, generator=generator) < 0.5) & (draw <= 17), draw, NEVER).int()
    sets = [Event(one["query"], [membership(layer, 17) for layer in one["kept"]]) for one in events_of(ledger)]
    assert torch.equal(build_ledger(sets, shape), ledger)


def membership(heads: list[list[int]], tokens: int) -> torch.Tensor:
    return torch.stack([mask_of(entries, tokens)[0] for entries in heads])


def mask_of(entries: list[int], tokens: int = 6) -> torch.Tensor:
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, entries] = True
    return mask


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (
            [Event(3, [mask_of([0])]), Event(4, [mask_of([0, 1])])],
            r"event 1 \(query 4\), layer 0, head 0: entry 1 returns",
        ),
        ([Event(3, [mask_of([0, 3])])], "entry 3 is in the future"),
        ([Event(3, [mask_of([0])]), Event(3, [mask_of([0])])], "queries rise"),
        ([Event(7, [mask_of([0])])], "at most 6 tokens"),
        ([Event(0, [mask_of([])])], "queries rise"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(events: list[Event], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_ledger(events, (1, 1, 6))


def _event(row: Table, number: int = 0) -> Table:
    event: Table = row["events"][number]
    return event


MISTAKES: list[tuple[Callable[[Table, Table], Any], str]] = [
    (lambda _, row: _event(row, 1).update(kept=[None, [[0, 1], [0]]]), "entry 1 returns after it had left"),
    (lambda _, row: _event(row)["kept"][0].__setitem__(0, [0, 4]), "layer 0, head 0: entry 4 is in the future"),
    (lambda _, row: _event(row)["kept"][0].__setitem__(0, [0, 9]), "names an entry beyond its end in event 0, layer 0"),
    (lambda _, row: _event(row)["kept"][0].__setitem__(0, [0, 0]), "names an entry twice in event 0, layer 0, head 0"),
    (lambda _, row: _event(row)["kept"][0].__setitem__(0, [-1]), "kept.0.0.0 is '-1'"),
    (lambda _, row: _event(row)["kept"][0].__setitem__(0, [True]), "kept.0.0.0 is 'True'"),
    (lambda _, row: _event(row)["kept"].pop(), "has 1 layers in event 0, the file says 2"),
    (lambda _, row: _event(row)["kept"][1].pop(), "has 1 heads in event 0, layer 1, wanted 2"),
    (lambda _, row: row["events"].reverse(), "queries rise"),
    (lambda _, row: row["logprobs"].pop(), "rollout 0 has 1 log-probs for 2 sampled tokens"),
    (lambda _, row: row["ids"].pop(), "has 2 log-probs for 1 sampled tokens"),
    (lambda _, row: row["logprobs"].__setitem__(0, 0.5), "logprobs.0 is '0.5'"),
    (lambda _, row: row["logprobs"].__setitem__(0, None), "logprobs.0 is 'None'"),
    (lambda _, row: row.update(prompt_length=6), "has prompt_length 6 in 6 tokens"),
    (lambda _, row: row.update(prompt_length=0), "prompt_length is '0'"),
    (lambda _, row: row.update(sampled=[[4, 7]]), r"has the sampled span \[4, 7\] in 6 tokens"),
    (lambda _, row: row.update(sampled=[[5, 5]]), r"has the sampled span \[5, 5\]"),
    (lambda _, row: row.update(ids="567"), "rollouts.0.ids is '567'"),
    (lambda _, row: row.update(colour=1), "rollouts.0.colour"),
    # 4096 * 2^20 is 0 in 32 bits
    (
        lambda _, row: row.update(
            selection={"unit": 2**20, "layers": [0], "queries": [{"query": 4, "chosen": [[[4096]]]}]}
        ),
        "lets a query select what comes after it",
    ),
    (lambda whole, _: whole.update(version=2), "version is '2'"),
    (lambda whole, _: whole.update(format="other"), "format is 'other'"),
    (lambda whole, _: whole.update(rollouts=[]), "rollouts is"),
    (lambda whole, _: whole.pop("layers"), "layers: Field required"),
    (lambda whole, _: whole.update(layers=1024, kv_heads=1024, rollouts=[big_row()]), "cache entries, at most"),
    (lambda whole, _: whole.update(temperature=-1), "temperature is '-1'"),
]


def big_row() -> Table:
    """A few kilobytes that ask for gigabytes."""
    return {"ids": [1] * 2000, "prompt_length": 1, "logprobs": [-1.0] * 1999}


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_a_mistake_in_the_json_form_is_named(change: Callable[[Table, Table], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_rollouts(write_file(tmp_path / "r.json", changed_table(change)))


@pytest.mark.parametrize("content", ["", "[", '{"format": ', "[1]", "null", "[" * 100_000, '{"a": NaN}', "\x00"])
def test_a_file_that_is_no_json_table_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"r\.json"):
        read_rollouts(write_file(tmp_path / "r.json", content))


def test_log_probs_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    text = json.dumps(table()).replace("-1.25", "NaN")
    with pytest.raises(DataError, match=r"r\.json"):
        read_rollouts(write_file(tmp_path / "r.json", text))


def test_truncated_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    path = tensors(tmp_path / "r.safetensors", POLICIES[1])
    data = path.read_bytes()
    for content in (b"", data[:200], data[: len(data) // 2], b"\x80\x04K\x01."):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"r\.safetensors"):
            read_rollouts(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="not a ledger"):
        read_rollouts(path)
    with pytest.raises(DataError, match="do not exist"):
        read_rollouts(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("0.ids", torch.zeros(9), "rollout 0 has ids of another type than 1-dimensional torch.int64"),
        ("1.kept", torch.zeros(3, 3, 3, dtype=torch.bool), "has kept of another type than 4-dimensional torch.bool"),
        ("1.kept", torch.zeros(1, 1, 1, 1, dtype=torch.bool), r"has kept of shape \(1, 1, 1, 1\), wanted"),
        ("0.sampled", torch.zeros(4, dtype=torch.bool), "has 4 sampled flags for"),
        ("2.logprobs", torch.zeros(3), "rollout 2 has 3 log-probs for"),
    ],
)
def test_a_mistake_in_the_safetensors_form_is_named(name: str, value: torch.Tensor, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_rollouts(tensors(tmp_path / "r.safetensors", POLICIES[1], **{name: value}))


@pytest.fixture(scope="module")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the embedded model, as another engine would hand them over."""
    model, path = load_model("embedded"), tmp_path_factory.mktemp("engine") / "rollouts.json"
    policy = parse_policy("streaming:budget=24,sink=4,chunk=16")
    prompts = [list(model.chat.tokenizer("The sign: fox snow. " * n).input_ids) for n in (8, 12)]
    episode = Sampler(model, policy).open(prompts, [1, 2])
    episode.decode(Decoding(12, temperature=0.8))
    write_rollouts(path, RecordedRollouts("engine", tuple(episode.rollouts()), policy, 0.8))
    return path


def run_verify(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", "verify", *map(str, words)])


def test_rollouts_of_elsewhere_are_verified_with_their_model(engine_file: Path) -> None:
    done = run_verify("--rollouts", engine_file, "--model", "embedded")
    assert done.exit_code == 0, done.output
    assert "explained: no token is off" in done.stdout


def test_an_engine_whose_policy_is_not_ours_is_held_to_its_history_alone(engine_file: Path, tmp_path: Path) -> None:
    file = json.loads(engine_file.read_text()) | {"policy": None}
    done = run_verify("--rollouts", write_file(tmp_path / "r.json", file), "--model", "embedded")
    assert (done.exit_code, "policy      not named" in done.stdout) == (0, True)
    file["rollouts"][0]["events"] = []
    done = run_verify("--rollouts", write_file(tmp_path / "r.json", file), "--model", "embedded")
    assert (done.exit_code, "not explained: rollout 0, token" in done.stdout) == (3, True)


def _resized(file: Table, key: str, value: int) -> Table:
    """As if of a model with another number of layers or heads."""
    for row in file["rollouts"]:
        for event in row["events"]:
            if key == "layers":
                event["kept"] = event["kept"][:1] * value
            else:
                event["kept"] = [heads[:1] * value for heads in event["kept"]]
    return file | {key: value}


@pytest.mark.parametrize(("key", "got"), [("layers", "1 layers of 2 KV heads"), ("kv_heads", "4 layers of 1 KV heads")])
def test_another_model_s_rollouts_are_refused(key: str, got: str, engine_file: Path, tmp_path: Path) -> None:
    path = write_file(tmp_path / "r.json", _resized(json.loads(engine_file.read_text()), key, 1))
    done = run_verify("--rollouts", path, "--model", "embedded")
    assert done.exit_code == 2
    assert f"rollout 0 has {got}, the model 4 layers of 2 KV heads: it is of another model" in done.stderr


def test_token_ids_beyond_the_model_are_refused(engine_file: Path, tmp_path: Path) -> None:
    file = json.loads(engine_file.read_text())
    file["rollouts"][1]["ids"][3] = 973
    done = run_verify("--rollouts", write_file(tmp_path / "r.json", file), "--model", "embedded")
    assert (done.exit_code, "rollout 1 has token ids outside the model's 973" in done.stderr) == (2, True)


def test_more_tokens_than_positions_are_refused() -> None:
    loaded = served(dtype=torch.float32)
    recorded = RecordedRollouts("here", tuple(two_turns(loaded, "none").rollouts), Dense())
    longest = max(len(rollout.ids) for rollout in recorded.rollouts)
    check_replayable(recorded, loaded.model.config, longest)
    with pytest.raises(DataError, match=f"{longest} tokens, the model {longest - 1} positions"):
        check_replayable(recorded, loaded.model.config, longest - 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_length": "40"}, "class 'str'"),
        ({"prompt_length": 0}, "prompt_length 0"),
        ({"prompt_length": 41}, "sampled tokens in its prompt"),
        ({"sampled": torch.zeros(74, dtype=torch.bool)}, "or none at all"),
        ({"sampled": torch.zeros(74)}, "torch.float32, torch.float32"),
        ({"sampler_logprobs": torch.zeros(73)}, r"log-probs or ledger of \[73, 74\]"),
        ({"keys_quantised_at": torch.zeros(1, 74, dtype=torch.int32)}, "quantisation times of another shape"),
        ({"values_quantised_at": torch.zeros(74)}, "quantisation times of another shape"),
        ({"experts": torch.zeros(74, 1, 0, dtype=torch.int16)}, r"has experts of shape \(74, 1, 0\)"),
    ],
)
def test_rollouts_of_another_make_are_refused(changes: Table, words: str) -> None:
    loaded = served(dtype=torch.float32)
    first = two_turns(loaded, "int8:residual=3,chunk=16").rollouts[0]
    assert (len(first.ids), first.prompt_length) == (74, 40)
    check_replayable(RecordedRollouts("here", (first,), parse_policy("int8")), loaded.model.config, 512)
    with pytest.raises(DataError, match=words):
        check_replayable(
            RecordedRollouts("here", (replace(first, **changes),), parse_policy("int8")), loaded.model.config, 512
        )


@pytest.mark.parametrize("extra", [{"policy": "\x1b[31mnone"}, {"\x1b[31m\u202ekey": 1}, {"format": "\x1b[31m"}])
def test_hostile_names_are_shown_not_obeyed(extra: Table, engine_file: Path, tmp_path: Path) -> None:
    file = json.loads(engine_file.read_text()) | extra
    done = run_verify("--rollouts", write_file(tmp_path / "r.json", file), "--model", "embedded")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.isprintable()


def test_a_ledger_whose_log_probs_are_no_numbers_is_refused(engine_file: Path, tmp_path: Path) -> None:
    rollouts = list(read_rollouts(engine_file).rollouts)
    for value in (float("nan"), 0.5, float("-inf")):
        broken = rollouts[1].sampler_logprobs.clone()
        broken[-1] = value
        policy = parse_policy("streaming:budget=24,sink=4,chunk=16")
        save_ledgers(tmp_path / "l.safetensors", [rollouts[0], replace(rollouts[1], sampler_logprobs=broken)], policy)
        done = run_verify("--rollouts", tmp_path / "l.safetensors", "--model", "embedded", "--temperature", 0.8)
        assert done.exit_code == 2
        assert "rollout 1 has log-prob" in done.stderr


def test_a_small_file_cannot_claim_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of header that ask for gigabytes are refused before anything is made."""
    huge = table(layers=1024, kv_heads=1024)
    huge["rollouts"][0] |= {"ids": [5] * 3000, "logprobs": [-1.0] * 2996, "events": []}
    with pytest.raises(DataError, match="3145728000 cache entries, at most 268435456 can be read; split the file"):
        read_rollouts(write_file(tmp_path / "r.json", huge))
    monkeypatch.setattr("kvaudit.audit.replay.interchange._MOST_STEPS", 1 << 20)
    slow = table(layers=1, kv_heads=64)
    slow["rollouts"][0] |= {"ids": [5] * 2000, "logprobs": [-1.0] * 1996}
    slow["rollouts"][0]["events"] = [{"query": n + 1, "kept": [[[]] * 64]} for n in range(9)]
    with pytest.raises(DataError, match="its events look at 1152000 entries, at most 1048576 are followed"):
        read_rollouts(write_file(tmp_path / "r.json", slow))
