"""Verification: a checkpoint's own rollouts are explained, and nothing that was tampered with is.

That a record of any policy is: ``conform/test_shadow.py``, which plays them all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conform.policies import policy_id, small_policies
from conform.world import DEEP, prompts, shared, two_turns
from rerun_world import verify
from training_world import config, play_for_parity, sha256, sharp, silent
from typer.testing import CliRunner, Result

from kvaudit.audit.cache.hints import pack_hints, unpack_hints
from kvaudit.audit.cache.layers import LayerPlan, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout, load_ledgers, save_ledgers
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.cli import app
from kvaudit.audit.policies import Policy, parse_policy, quantiser_of
from kvaudit.audit.policies.snapkv import AdaKV
from kvaudit.audit.replay.ranking_check import REQUIRED_AGREEMENT, ChoiceCount, check_ranking, repeat_choices
from kvaudit.audit.replay.rollout_checks import RecordedRollouts, eviction_breach, quantisation_breach
from kvaudit.audit.rerun.measure import checkpoint_rollouts
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training import grpo, rollouts

FINAL = Path("ledgers", "final.safetensors")


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A compressed and a dense arm after one step; weights so sharp that one entry moves a log-prob."""
    out, base = tmp_path_factory.mktemp("verify"), sharp(tiny_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        return {
            arm: grpo.train(config(arm=arm, steps=1, ledger_every=1, context_tokens=360), base, out / arm, silent)
            for arm in ("smd", "dense")
        }


@pytest.fixture
def copied(trained: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(trained["smd"], tmp_path / "copy")


def verified(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", "verify", *map(str, words)])


def refused(*words: object) -> str:
    done = verified(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    return line


def rewritten(folder: Path, change: Callable[[list[Rollout]], None], policy: str | None = None) -> Path:
    """The checkpoint with other final rollouts, its hashes made to fit."""
    rollouts, named = load_ledgers(folder / FINAL)
    change(rollouts)
    save_ledgers(folder / FINAL, rollouts, parse_policy(policy) if policy else named)
    return rehashed(folder)


def rehashed(folder: Path, **config: Any) -> Path:
    story = json.loads((folder / "provenance.json").read_text())
    story["ledgers"]["final.safetensors"] = sha256(folder / FINAL)
    story["config"] |= config
    (folder / "provenance.json").write_text(json.dumps(story))
    return folder


@pytest.mark.parametrize("arm", ["smd", "dense"])
def test_a_checkpoint_explains_its_own_final_rollouts(arm: str, trained: dict[str, Path]) -> None:
    done = verified(trained[arm])
    assert done.exit_code == 0, done.output
    assert "rollouts    8 of " in done.stdout
    assert "explained: no token is off by more than 0.001 nats" in done.stdout
    line = r"policy agrees with 100\.00 % of \d+ evictions; lowest: rollout 0, 100\.00 %"
    assert re.search({"smd": line, "dense": "choices     not compared: the policy keeps every entry"}[arm], done.stdout)


def test_the_ledger_explains_what_the_dense_view_does_not(trained: dict[str, Path]) -> None:
    found = verify(load_model(str(trained["smd"])), checkpoint_rollouts(trained["smd"])[0])
    assert found.shadow.largest < 2e-4
    assert abs(found.shadow.kl) < 1e-5
    assert 0 <= found.shadow.k3 < 1e-8
    assert found.dense.largest > 0.5
    assert found.dense.k3 > 1e-3


def test_the_numbers_are_those_of_their_definitions(trained: dict[str, Path]) -> None:
    """Rollout by rollout, token by token, from one plain forward of the dense arm's model."""
    loaded, recorded = load_model(str(trained["dense"])), checkpoint_rollouts(trained["dense"])[0]
    shifted = [replace(r, sampler_logprobs=r.sampler_logprobs - 0.5 * r.sampled) for r in recorded.rollouts]
    found = verify(loaded, replace(recorded, rollouts=tuple(shifted)))
    gaps = []
    for rollout in shifted:
        with torch.no_grad():
            table = loaded.model(rollout.ids[None]).logits[0].double().log_softmax(-1)
        for token in rollout.sampled.nonzero()[:, 0].tolist():
            gaps.append(float(rollout.sampler_logprobs[token] - table[token - 1, rollout.ids[token]]))
    assert len(gaps) == found.tokens
    assert found.dense.kl == pytest.approx(sum(gaps) / len(gaps), abs=1e-5) == pytest.approx(-0.5, abs=1e-4)
    assert found.dense.mean == pytest.approx(0.5, abs=1e-4)
    assert found.dense.largest == pytest.approx(max(map(abs, gaps)), abs=1e-4)
    assert found.dense.k3 == pytest.approx(2.718281828**0.5 - 0.5 - 1, abs=1e-4)


def test_a_tampered_token_is_caught_by_the_replay(copied: Path) -> None:
    def other_token(rollouts: list[Rollout]) -> None:
        rollouts[2].ids[rollouts[2].prompt_length + 1] ^= 1

    done = verified(rewritten(copied, other_token))
    assert done.exit_code == 3
    assert re.search(r"not explained: rollout 2, token \d+ is recorded at -\S+ nats, the ledger gives -", done.stdout)


def test_a_tampered_prompt_token_is_caught_by_the_replay(copied: Path) -> None:
    def other_prompt(rollouts: list[Rollout]) -> None:
        rollouts[5].ids[1] ^= 1

    done = verified(rewritten(copied, other_prompt))
    assert (done.exit_code, "not explained: rollout 5, token" in done.stdout) == (3, True)


def test_a_tampered_log_prob_is_caught_and_located(copied: Path) -> None:
    token = 0

    def better(rollouts: list[Rollout]) -> None:
        nonlocal token
        token = rollouts[3].prompt_length + 4
        rollouts[3].sampler_logprobs[token] -= 0.01

    done = verified(rewritten(copied, better))
    assert (done.exit_code, f"not explained: rollout 3, token {token} is recorded" in done.stdout) == (3, True)


def test_a_tampered_mask_entry_is_caught_by_the_replay_and_by_the_count(copied: Path) -> None:
    entry = 0

    def kept(rollouts: list[Rollout]) -> None:
        nonlocal entry
        ledger = rollouts[1].evicted_at
        entry = int((ledger[0, 0] == rollouts[1].prompt_length).nonzero()[-1])
        ledger[0, 0, entry] = NEVER

    done = verified(rewritten(copied, kept))
    assert done.exit_code == 3
    by_replay, by_count = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert "rollout 1, token" in by_replay
    assert re.search(r"rollout 1, layer 0: head 0 keeps 97 entries after query \d+, budget 96", by_count)


def test_two_entries_that_swap_places_are_caught_by_the_replay_and_by_the_ranking(copied: Path) -> None:
    def swap(rollouts: list[Rollout]) -> None:
        ledger = rollouts[0].evicted_at[1, 0]
        early, late = 40, rollouts[0].prompt_length - 20
        ledger[[early, late]] = ledger[[late, early]]
        assert ledger[early] != ledger[late]

    done = verified(rewritten(copied, swap))
    assert done.exit_code == 3
    by_replay, by_rank = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert "rollout 0, token" in by_replay
    assert re.search(
        r"the policy agrees with 96\.83 % of the evictions of rollout 0; expected at least 100\.00 %", by_rank
    )


TAMPERED = [
    ("streaming:budget=95,sink=4,window=8", "rollout 0, layer 0: head 0 keeps 96 entries after query"),
    ("streaming:budget=96,sink=4,window=93", "policy streaming: budget=96 is below sink"),
    ("streaming:budget=96,sink=5,window=8", "layer 0: one of the first 5 entries was evicted"),
    ("streaming:budget=96,sink=4,window=8,phase=decode", "streaming evicts nothing before query"),
    ("streaming:budget=96,sink=4,window=8,phase=prefill", "streaming evicts nothing from there on"),
    ("none", ", none keeps every entry"),
]


@pytest.mark.parametrize(("policy", "words"), [case for case in TAMPERED if "93" not in case[0]])
def test_a_tampered_policy_is_caught_by_its_own_rules(policy: str, words: str, copied: Path) -> None:
    """The provenance is made to agree, so that nothing but the ledger speaks against the name."""
    rewritten(copied, lambda _: None, policy)
    arm = {"arm": "dense"} if policy == "none" else {}
    done = verified(rehashed(copied, policy=parse_policy(policy).canonical, **arm))
    assert done.exit_code == 3
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert words in line


def test_a_policy_that_never_came_into_action_is_caught(trained: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(trained["dense"], tmp_path / "dense")
    policy = "streaming:budget=96,sink=4,window=8"
    rewritten(folder, lambda _: None, policy)
    done = verified(rehashed(folder, policy=parse_policy(policy).canonical, arm="smd"))
    assert (done.exit_code, "entries after query" in done.stdout) == (3, True)


def test_a_policy_other_than_the_trained_one_is_caught(copied: Path) -> None:
    """Plausible for the ledger: a window of 7 where 8 entries were kept."""
    done = verified(rewritten(copied, lambda _: None, "streaming:budget=96,sink=4,window=7"))
    assert (done.exit_code, "the checkpoint was trained with streaming:budget=96" in done.stdout) == (3, True)


@pytest.mark.parametrize("policy", ["knorm:budget=96,window=8", "tova:budget=96,sink=4,window=8", "random:budget=96"])
def test_a_renamed_policy_is_caught_by_its_choices(policy: str, copied: Path) -> None:
    """Every count is right: the ledger of one ranking under the name of another."""

    def keyed(rollouts: list[Rollout]) -> None:
        rollouts[:] = [replace(rollout, row_keys=(1, 2)) for rollout in rollouts]

    rewritten(copied, keyed, policy)
    done = verified(rehashed(copied, policy=parse_policy(policy).canonical))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert done.exit_code == 3
    assert re.search(r"the policy agrees with [1-8]\d\.\d\d % of the evictions of rollout \d; expected at least", line)


def test_random_is_not_ranked_again_without_the_keys_of_its_rows(copied: Path) -> None:
    rewritten(copied, lambda _: None, "random:budget=96")
    done = verified(rehashed(copied, policy=parse_policy("random:budget=96").canonical))
    assert "not compared: random draws by the keys of rows, which the record does not hold" in done.stdout


def test_a_policy_string_that_is_not_of_its_hash_is_caught(copied: Path) -> None:
    whole = (copied / FINAL).read_bytes()
    (copied / FINAL).write_bytes(whole.replace(b"window=8,", b"window=7,", 1))
    done = verified(rehashed(copied, policy="streaming:budget=96,sink=4,window=7,interval=1,phase=both,chunk=1024"))
    assert done.exit_code == 3
    assert re.search(r"not explained: the ledger names .*window=7,.* whose hash is \w{12}, and the hash", done.stdout)


@pytest.mark.parametrize("name", ["ledgers/final.safetensors", "ledgers/step-1.safetensors", "model.safetensors"])
def test_a_changed_file_is_refused_by_its_hash(name: str, copied: Path) -> None:
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{name}' has sha256" in refused(copied)


def test_a_tolerance_of_zero_calls_rounding_unexplained(trained: dict[str, Path]) -> None:
    assert verified(trained["smd"], "--tolerance", 0).exit_code == 3
    assert verified(trained["smd"], "--tolerance", 0.001).exit_code == 0


def test_a_small_gap_on_every_token_is_caught_by_the_mean(copied: Path) -> None:
    def shifted(rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            rollout.sampler_logprobs[rollout.sampled] -= 0.0005

    done = verified(rewritten(copied, shifted))
    assert done.exit_code == 3
    assert re.search(
        r"not explained: tokens are off by 5\.0e-04 nats on average, rounding explains at most 0\.0001", done.stdout
    )


def test_a_count_replays_that_many(trained: dict[str, Path]) -> None:
    assert "rollouts    3 of " in verified(trained["smd"], "--rollouts", 3).stdout
    assert "--rollouts is 9, but the checkpoint has 8" in refused(trained["smd"], "--rollouts", 9)


def test_another_temperature_explains_nothing(trained: dict[str, Path]) -> None:
    assert verified(trained["smd"], "--temperature", 0.7).exit_code == 3


def test_folders_without_rollouts_are_refused(tiny_folder: Path, copied: Path) -> None:
    assert "holds no provenance.json; give the folder of a finished checkpoint" in refused(tiny_folder)
    story = json.loads((copied / "provenance.json").read_text())
    (copied / "provenance.json").write_text(json.dumps(story | {"ledgers": {}}))
    assert "keeps no ledgers/final.safetensors; train it again with ledger_every above 0" in refused(copied)


def test_a_checkpoint_and_its_own_model_are_named_in_one_way_only(trained: dict[str, Path]) -> None:
    assert "there is nothing to verify" in refused()
    assert "there is nothing to verify" in refused("--rollouts", "3", "--model", "embedded")
    assert "with its own weights and rollouts" in refused(trained["smd"], "--model", "embedded")
    assert "unknown dtype 'float33'" in refused(trained["smd"], "--dtype", "float33")


CODES = "kivi:bits=4,group=8,residual=8"
QUANTISED = f"streaming:budget=96,sink=4,window=8+{CODES}"


@pytest.fixture(scope="module")
def coded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rollouts were evicted from and quantised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        settings = config(arm="smd", policy=QUANTISED, steps=1, context_tokens=360)
        return grpo.train(settings, sharp(tiny_folder), tmp_path_factory.mktemp("coded") / "smd", silent)


def test_quantised_rollouts_are_explained(coded: Path) -> None:
    done = verified(coded)
    assert done.exit_code == 0, done.output
    found = verify(load_model(str(coded)), checkpoint_rollouts(coded)[0])
    assert found.dense.largest > 0.5 > 1000 * found.shadow.largest


@pytest.mark.parametrize("table", ["keys_quantised_at", "values_quantised_at"])
def test_a_tampered_quantisation_time_is_caught(table: str, coded: Path, tmp_path: Path) -> None:
    def later(rollouts: list[Rollout]) -> None:
        rollouts[4] = replace(rollouts[4], **{table: torch.full_like(getattr(rollouts[4], table), NEVER)})

    done = verified(rewritten(shutil.copytree(coded, tmp_path / "copy"), later))
    *_, by_count = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert done.exit_code == 3
    assert f"rollout 4, the {table.partition('_')[0]} of entry 0 are quantised at {NEVER}, due at" in by_count


def test_a_tampered_codec_is_caught_by_the_replay(coded: Path, tmp_path: Path) -> None:
    def coarser(rollouts: list[Rollout]) -> None:
        rollouts[:] = [replace(rollout, codec=replace(rollout.codec, bits=2)) for rollout in rollouts]

    folder = shutil.copytree(coded, tmp_path / "copy")
    policy = parse_policy(QUANTISED.replace("bits=4", "bits=2"))
    rewritten(folder, coarser, policy.canonical)
    done = verified(rehashed(folder, policy=policy.canonical))
    by_replay, by_border = [line for line in done.stdout.splitlines() if line.startswith("not explained")]
    assert (done.exit_code, "is recorded at" in by_replay, "by more than rounding" in by_border) == (3, True, True)


def test_a_log_prob_off_by_two_thousandths_is_seen_under_codes_too(coded: Path, tmp_path: Path) -> None:
    def shifted(rollouts: list[Rollout]) -> None:
        token = int((rollouts[3].sampler_logprobs < -0.01).nonzero()[-1])
        rollouts[3].sampler_logprobs[token] += 0.002

    done = verified(rewritten(shutil.copytree(coded, tmp_path / "copy"), shifted))
    assert done.exit_code == 3
    assert "not explained: rollout 3, token" in done.stdout


def test_a_forged_code_is_named_and_moves_nothing(coded: Path, tmp_path: Path) -> None:
    def forged(rollouts: list[Rollout]) -> None:
        assert rollouts[2].hints is not None
        index, low = unpack_hints(rollouts[2].hints)
        more = torch.cat([index, torch.tensor([12_345])]), torch.cat([low, torch.tensor([9])])
        rollouts[2] = replace(rollouts[2], hints=pack_hints(*more))

    folder = rewritten(shutil.copytree(coded, tmp_path / "copy"), forged)
    found = verify(load_model(str(folder)), checkpoint_rollouts(folder)[0])
    assert found.shadow == verify(load_model(str(coded)), checkpoint_rollouts(coded)[0]).shadow
    done = verified(folder)
    assert done.exit_code == 3
    assert re.search(
        r"not explained: rollout 2, layer \d: a recorded code differs from the replay by more than rounding;",
        done.stdout,
    )


def test_a_codec_that_is_not_the_policy_s_is_caught(coded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(coded, tmp_path / "copy")
    policy = QUANTISED.partition("+")[0]
    rewritten(folder, lambda _: None, policy)
    done = verified(rehashed(folder, policy=parse_policy(policy).canonical))
    assert done.exit_code == 3
    assert re.search(r"the ledger was quantised by kivi:\S+, the policy names nothing", done.stdout)


def test_quantisation_is_due_after_the_forwards_that_turns_and_chunks_make() -> None:
    """A prompt of three in chunks of two, one drawn token fed with three given ones, two more drawn."""
    policy = parse_policy("int8:chunk=2")
    plain = ledger({}, tokens=9)
    due = torch.tensor([2, 2, 3, 5, 5, 7, 7, 8, NEVER], dtype=torch.int32)
    rollout = replace(
        plain,
        prompt_length=3,
        sampled=torch.tensor([False] * 3 + [True] + [False] * 3 + [True] * 2),
        codec=quantiser_of(policy),
        keys_quantised_at=due,
        values_quantised_at=due,
    )
    assert quantisation_breach(rollout, policy) is None
    early = due.clone()
    early[6] = 6
    words = quantisation_breach(replace(rollout, values_quantised_at=early), policy)
    assert words == "the values of entry 6 are quantised at 6, due at 7"


@pytest.mark.parametrize("text", ["snapkv:budget=11,window=4,interval=3", "fp8", "kivi:group=4,residual=8"])
def test_given_tokens_before_the_first_and_after_the_last_answer_are_explained(text: str) -> None:
    """The prompt enters by itself, and codes of the last given token are in no column of the replay."""
    loaded, policy = shared(dtype=torch.float32, spread=0.2), parse_policy(text)
    model = SimpleNamespace(model=loaded.model, dtype=torch.float32, max_positions=512)
    for seed in range(3):
        episode = Sampler(loaded, policy).open(prompts(12), [seed])
        episode.extend(prompts(3))
        episode.decode(Decoding(8))
        episode.extend(prompts(6 + seed))
        found = verify(model, RecordedRollouts("x", tuple(episode.rollouts()), policy))  # type: ignore[arg-type]
        assert found.explained, (found.breach, found.ranked)


def test_pinned_entries_are_no_choice_of_the_policy_s() -> None:
    loaded, policy = shared(), parse_policy("knorm:budget=16,sink=0,window=4,chunk=16,pin=system")
    roles = ["system"] * 6 + ["user"] * 34
    episode = Sampler(loaded, policy).open(prompts(40), [0], roles=[roles])
    episode.decode(Decoding(12))
    (rollout,) = episode.rollouts()
    assert again(loaded, rollout, policy) == again(loaded, rollout, replace(policy, pin="system/tool"))
    assert again(loaded, rollout, policy).repeated == again(loaded, rollout, policy).evicted
    assert again(loaded, rollout, replace(policy, pin="")).repeated < again(loaded, rollout, policy).evicted


def test_pages_that_queries_chose_are_chosen_again_and_those_beside_them_are_not() -> None:
    loaded, policy = shared(DEEP, torch.float32), parse_policy("quest:budget=12,page=4,dense=1,chunk=16")
    for rollout in two_turns(loaded, policy, lengths=(40, 33)).rollouts:
        made = again(loaded, rollout, policy)
        assert made.repeated == made.evicted > 50
        assert share(again(loaded, with_next_pages(rollout), policy)) < REQUIRED_AGREEMENT[torch.float32]


def with_next_pages(rollout: Rollout) -> Rollout:
    """The first page of every list taken for the one behind it, where that is not in the list."""
    assert rollout.selection is not None
    chosen = rollout.selection.chosen.clone()
    first, second = chosen[..., 0], chosen[..., 1]
    chosen[..., 0] = torch.where(first + 1 < second, first + 1, first)
    return replace(rollout, selection=replace(rollout.selection, chosen=chosen))


def test_heads_that_share_a_budget_are_held_to_it_under_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, spec = shared("llama-gqa", torch.float32), "adakv:budget=16,sink=0,window=4,kernel=3,interval=3,chunk=16"
    policy, own = parse_policy(f"{spec},pin=system"), AdaKV.capacities

    def moved(policy: AdaKV, rank: Any, budgets: Any) -> Any:
        return own(policy, rank, budgets) + torch.tensor([1, -1])

    def drawn() -> Rollout:
        episode = Sampler(loaded, policy).open(prompts(40), [0], roles=[["system"] * 6 + ["user"] * 34])
        episode.decode(Decoding(12))
        return episode.rollouts()[0]

    honest = drawn()
    assert honest.pinned == ((0, 6),)
    assert share(again(loaded, honest, policy)) == 1.0
    assert share(again(loaded, replace(honest, pinned=()), policy)) < REQUIRED_AGREEMENT[torch.float32]
    with monkeypatch.context() as patch:
        patch.setattr(AdaKV, "capacities", moved)
        forged = drawn()
    assert eviction_breach(forged, layer_plans(loaded.model.config, policy)) is None
    assert share(again(loaded, forged, policy)) < REQUIRED_AGREEMENT[torch.float32]
    unpinned = check_ranking(loaded.model, [replace(honest, pinned=None)], policy)
    assert unpinned == "pins change how adakv shares a budget among heads, and the record has no pins"


ALIKE = [
    replace(policy, budget=16, sink=2, window=4, interval=3)
    for policy in small_policies()
    if policy.evicts and policy.for_layer(0, 3).budget == policy.budget
]


@pytest.mark.parametrize(
    "policy",  # each is held against all the others
    [pytest.param(p, marks=[pytest.mark.slow] * (n % 3 > 0), id=policy_id(p)) for n, p in enumerate(ALIKE)],
)
def test_a_renamed_policy_chooses_other_victims(policy: Policy) -> None:
    """Same budget, schedule and protection: only the ranking, or how many a head keeps, tells them apart."""
    loaded = shared("llama-gqa", torch.float32)
    (rollout,) = two_turns(loaded, policy, lengths=(40,)).rollouts
    keyed = replace(rollout, row_keys=rollout.row_keys or (0, 0))
    possible = [other for other in ALIKE if eviction_breach(rollout, layer_plans(loaded.model.config, other)) is None]
    shares = {other.name: share(again(loaded, keyed, other)) for other in possible}
    assert shares.pop(policy.name) == 1.0
    assert max(shares.values(), default=0.0) < REQUIRED_AGREEMENT[torch.float32]


def again(loaded: Any, rollout: Rollout, policy: Policy) -> ChoiceCount:
    return repeat_choices(loaded.model, rollout, policy, find_rotary(loaded.model, policy))


def share(made: ChoiceCount) -> float:
    return made.repeated / made.evicted


def ledger(evicted: dict[int, int], tokens: int = 12, prompt: int = 6) -> Rollout:
    """One layer, one head: entries that left, by the first query that missed them."""
    evicted_at = torch.full((1, 1, tokens), NEVER, dtype=torch.int32)
    for entry, query in evicted.items():
        evicted_at[0, 0, entry] = query
    sampled = torch.arange(tokens) >= prompt
    return Rollout(
        torch.zeros(tokens, dtype=torch.int64), prompt, sampled, torch.zeros(tokens), evicted_at, 0, 0, 1.0, prompt
    )


@pytest.mark.parametrize(
    ("policy", "evicted", "words"),
    [
        ("streaming:budget=4,sink=1", {1: 6, 2: 6, 3: 7, 4: 8, 5: 9, 6: 10, 7: 11}, None),
        ("streaming:budget=4,sink=1,interval=3", {1: 6, 2: 6, 3: 9, 4: 9, 5: 9}, None),
        ("streaming:budget=4,sink=1,interval=3", {1: 6, 2: 6}, "head 0 keeps 7 entries after query 8, budget 4"),
        ("streaming:budget=4,sink=1,interval=3", {}, "head 0 keeps 6 entries after query 5, budget 4"),
        ("streaming:budget=4,sink=1,phase=prefill", {1: 6, 2: 6}, None),
        ("streaming:budget=4,sink=1,phase=decode", {1: 7, 2: 7, 3: 7, 4: 8, 5: 9, 6: 10, 7: 11}, None),
        (
            "streaming:budget=4,sink=1,window=3,phase=prefill",
            {1: 6, 3: 6},
            "entry 3 was evicted at query 6, the last 3 are",
        ),
        ("streaming:budget=4,sink=1,window=3,phase=prefill", {1: 6, 2: 6}, None),
        ("none", {3: 9}, "entry 3 left the cache after query 8, none keeps every entry"),
        (
            "streaming:budget=4,sink=1,interval=3",
            {1: 6, 2: 6, 3: 8, 4: 8, 5: 10, 6: 10},  # interval 2
            "entry 3 left the cache after query 7, streaming evicts nothing before query 8",
        ),
        (
            "streaming:budget=4,sink=1,chunk=5",
            {1: 6, 2: 6, 3: 7, 4: 8, 5: 9, 6: 10, 7: 11},  # in one chunk
            "head 0 keeps 5 entries after query 4, budget 4",
        ),
        (
            "streaming:budget=4,sink=1,phase=prefill",
            {1: 6, 2: 6, 3: 7},
            "entry 3 left the cache after query 6, streaming evicts nothing from there on",
        ),
    ],
)
def test_a_ledger_is_held_to_the_counts_of_its_policy(policy: str, evicted: dict[int, int], words: str | None) -> None:
    found = eviction_breach(ledger(evicted), [LayerPlan(parse_policy(policy), None)])
    assert (found is None) if words is None else (words in (found or ""))


@pytest.mark.parametrize(
    ("flipped", "words"),
    [
        (8, "entry 4 left the cache after query 7, streaming evicts nothing before query 8"),
        (11, "entry 7 left the cache after query 10, streaming evicts nothing before query 11"),
    ],
)
def test_a_drawn_token_declared_given_is_caught_by_the_schedule(flipped: int, words: str) -> None:
    """It would have entered with the drawn token before it, in one forward and with one eviction for both."""
    honest = ledger({1: 6, 2: 6, 3: 7, 4: 8, 5: 9, 6: 10, 7: 11})
    plans = [LayerPlan(parse_policy("streaming:budget=4,sink=1"), None)]
    assert eviction_breach(honest, plans) is None
    honest.sampled[flipped] = False
    assert eviction_breach(honest, plans) == f"layer 0: {words}"


def test_a_given_token_declared_drawn_is_caught_by_the_schedule() -> None:
    """Prompt of six, two drawn, three given behind the second of them, one drawn."""
    turns = ledger({1: 6, 2: 6, 3: 7, 4: 11, 5: 11, 6: 11, 7: 11})
    turns.sampled[8:11] = False
    plans = [LayerPlan(parse_policy("streaming:budget=4,sink=1"), None)]
    assert eviction_breach(turns, plans) is None
    turns.sampled[8] = True
    assert eviction_breach(turns, plans) == "layer 0: head 0 keeps 5 entries after query 7, budget 4"


@pytest.mark.parametrize(
    ("entry", "query", "words"),
    [
        (1, 8, "entry 1 of head 0 leaves at query 8, due by the layer's sliding window of 4: at query 6"),
        (3, NEVER, "entry 3 of head 0 leaves never, due by the layer's sliding window of 4: at query 8"),
        (9, 11, "entry 9 of head 0 leaves at query 11, due by the layer's sliding window of 4: never"),
    ],
)
def test_a_sliding_layer_is_held_to_its_own_window(entry: int, query: int, words: str) -> None:
    """Whatever the policy keeps elsewhere: pinned or well ranked, what falls out of the window has left."""
    due = {0: 6, 1: 6, 2: 7, 3: 8, 4: 9, 5: 10, 6: 11}
    plans = [LayerPlan(parse_policy("streaming:budget=4,sink=0"), 4)]
    assert eviction_breach(ledger(due), plans) is None
    assert eviction_breach(ledger(due | {entry: query}), plans) == f"layer 0: {words}"
