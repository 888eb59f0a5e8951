"""Queries that choose what they attend to: recorded, replayed, held to the policy, read from elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conform.stepwise import stepwise_logits
from conform.world import DEEP, feed, gap, ledger_of, new_cache, prompts, served, shared, two_turns
from rerun_world import verify
from rollout_form import write_rollouts
from safetensors.torch import save_file
from torch import Tensor

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import NEVER, Rollout, load_ledgers, save_ledgers
from kvaudit.audit.cache.selection import Selection, slot_mask, unit_mask
from kvaudit.audit.policies import View, parse_policy
from kvaudit.audit.policies.quest import Quest
from kvaudit.audit.replay.interchange import read_rollouts
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.replay.rollout_checks import RecordedRollouts, check_replayable
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import DataError, SpecError

QUEST = "quest:budget=16,page=4,dense=1,chunk=16"


def played(text: str = QUEST, **options: Any) -> Any:
    return two_turns(shared(DEEP), text, **options)


def test_drawn_tokens_choose_and_given_ones_see_everything() -> None:
    for rollout, length in zip(played().rollouts, (40, 23, 9), strict=True):
        made = rollout.selection
        assert made is not None
        assert (made.unit, made.layers, made.chosen.shape[1]) == (4, (1, 2), 4)  # per query head
        queries = made.queries.tolist()
        assert queries[:6] == list(range(length, length + 6))  # the seventh drawn token enters with the message
        assert all(rollout.sampled[query] for query in queries)
        assert (rollout.evicted_at == NEVER).all()
        assert ((made.chosen >= 0).sum(-1) == torch.tensor([min(4, query // 4 + 1) for query in queries])).all()
        assert (made.chosen.amax(-1) == made.queries // 4).all(), "the query's own page is always among them"


def test_memory_is_that_of_the_dense_cache_and_the_extremes_of_every_page() -> None:
    caches = [new_cache(shared(DEEP), parse_policy(text)) for text in (QUEST, "none")]
    for evicting in caches:
        feed(shared(DEEP), evicting, prompts(40))
        feed(shared(DEEP), evicting, [[9]], decoding=True)
    config = shared(DEEP).model.config
    heads = 2 * config.num_key_value_heads  # of the two layers that choose
    of_a_page = 2 * heads * config.head_dim * 8  # lowest and highest, float64
    assert caches[0].bytes - caches[1].bytes == 12 * of_a_page  # 41 tokens in 11 pages, and a place for padding
    assert caches[0].retention().tolist() == [1.0]


def test_extremes_that_are_kept_are_those_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over prompts of unlike length, members of a group, a second turn and rows that come from another cache."""
    compared, choose = [], Quest.choose

    def watched(policy: Quest, view: View) -> Tensor:
        assert view.extremes is not None
        pages = int(view.seen.max() - 1) // policy.page + 1
        reached = torch.arange(pages) <= (view.seen[:, None] - 1) // policy.page  # [B, pages]
        for kept, found in zip(view.extremes, policy._extremes_of(view, pages), strict=True):
            own, wanted = (part[:, :, :pages].transpose(1, 2)[reached].float() for part in (kept, found))
            assert torch.equal(own, wanted)
        compared.append(pages)
        return choose(policy, view)

    monkeypatch.setattr(Quest, "choose", watched)
    played(group=2)
    caches = [new_cache(shared(DEEP), parse_policy(QUEST)) for _ in range(2)]
    for cache, length in zip(caches, (9, 40), strict=True):
        feed(shared(DEEP), cache, prompts(length))
    caches[0].join(caches[1])
    feed(shared(DEEP), caches[0], [[9], [7]], decoding=True)
    assert len(compared) > 20
    assert max(compared) > 11


@pytest.mark.parametrize(("length", "unit"), [(1, 4), (7, 4), (8, 4), (9, 4), (5, 1)])
def test_slots_at_the_position_of_their_number_are_seen_as_those_at_any(length: int, unit: int) -> None:
    most = length // unit + 1
    lists = torch.randint(-1, -(-length // unit), (3, 4, 1, 2), generator=torch.Generator().manual_seed(length))
    seen = slot_mask(lists, length, unit, most)
    assert torch.equal(seen, unit_mask(lists, torch.arange(length).expand(3, -1), unit, most))
    wanted = [[p // unit in row for p in range(length)] for row in lists.flatten(0, 2).tolist()]
    assert seen.flatten(0, 2).tolist() == wanted


@pytest.mark.parametrize("lengths", [(8, 8), (40, 40), (9, 40), (8, 10, 9)])
def test_rows_choose_alike_beside_others_and_alone(lengths: tuple[int, ...]) -> None:
    """Rows of one length take the short way to what they see; one beside longer ones cannot, and may alone."""
    together = two_turns(shared(DEEP), QUEST, lengths=lengths, short=True)
    assert gap(shared(DEEP), together, "shadow") < 1e-12
    for row, rollout in enumerate(together.rollouts):
        (alone,) = two_turns(shared(DEEP), QUEST, lengths=lengths, short=True, only=row).rollouts
        assert alone.selection is not None
        assert rollout.selection is not None
        assert torch.equal(alone.selection.queries, rollout.selection.queries)
        count = alone.selection.chosen.shape[3]
        assert torch.equal(alone.selection.chosen, rollout.selection.chosen[..., :count])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_sets_may_be_shared_by_all_heads_or_by_a_group(heads: int) -> None:
    """Sparse indexers name single keys for all heads, other rules for each KV head: all are as written out."""
    (rollout,) = two_turns(shared(DEEP), QUEST, lengths=(22,), short=True).rollouts
    generator = torch.Generator().manual_seed(heads)
    queries = torch.tensor([3, 9, 24, 25], dtype=torch.int32)  # of the prompt too
    lists = [[[sorted({int(q), *torch.randint(0, int(q) + 1, (2,), generator=generator).tolist()}) for q in queries]
              for _ in range(heads)] for _ in range(2)]  # fmt: skip
    chosen = torch.tensor([[[[*own, -1, -1][:3] for own in head] for head in layer] for layer in lists])
    rollout = replace(rollout, selection=Selection(1, (0, 2), queries, chosen.to(torch.int32)))
    model = shared(DEEP).model
    with torch.no_grad():
        expected = stepwise_logits(model, rollout)
        with shadow(model, ledger_of(rollout)):
            torch.testing.assert_close(model(rollout.ids[None]).logits[0], expected, rtol=0, atol=1e-12)
        logits, _ = suffix_logits(model, [rollout, rollout], group=2, view="shadow")
    torch.testing.assert_close(logits[1], expected[21:-1], rtol=0, atol=1e-12)


def moved(rollout: Rollout, n: int = 5) -> Rollout:
    """The rollout with one head of one query attending to another page."""
    made = rollout.selection
    assert made is not None
    chosen = made.chosen.clone()
    free = sorted({*range(int(made.queries[n]) // 4)} - {*chosen[1, 2, n].tolist()})
    chosen[1, 2, n, 0] = free[-1]
    chosen[1, 2, n] = chosen[1, 2, n].sort().values
    return replace(rollout, selection=replace(made, chosen=chosen))


def test_one_page_off_is_seen_in_the_log_probs() -> None:
    history = played(lengths=(40,))
    assert gap(shared(DEEP), history, "shadow") < 1e-12
    assert gap(shared(DEEP), history._replace(rollouts=[moved(history.rollouts[0])]), "shadow") > 1e-3


def verified(rollout: Rollout, policy: str | None = QUEST) -> Any:
    loaded = SimpleNamespace(**vars(shared(DEEP)), dtype=torch.float64)
    return verify(loaded, RecordedRollouts("here", (rollout,), policy and parse_policy(policy)))


def test_verify_counts_what_was_chosen() -> None:
    (rollout,) = played(lengths=(40,)).rollouts
    made = rollout.selection
    assert made is not None
    assert verified(rollout).explained
    assert not verified(moved(rollout)).token_explained
    fewer = made.chosen.clone()
    fewer[0, 1, 3, -1] = -1
    for change, words in (
        ({"selection": replace(made, chosen=fewer)}, "layer 1, head 1: query 43 selects 3 units, the policy 4"),
        ({"selection": made.until(60)}, "query 68 attends to everything"),
        ({"selection": None}, "query 40 attends to everything"),
        ({"selection": replace(made, layers=(0, 2))}, "layers [0, 2] select units of 4 entries"),
    ):
        assert words in verified(replace(rollout, **change)).breach
    assert "under the policy they attend to everything" in verified(rollout, "none").breach
    assert verified(rollout, None).breach is None


def test_members_of_a_group_agree_on_what_their_prompt_attended_to() -> None:
    rollouts = played(group=2, lengths=(40,)).rollouts
    early = Selection(4, (1,), torch.tensor([7], dtype=torch.int32), torch.tensor([[[[0]]]], dtype=torch.int32))
    with pytest.raises(DataError, match="rollout 1 attended to other keys of its prompt"):
        suffix_logits(shared(DEEP).model, [rollouts[0], replace(rollouts[1], selection=early)], group=2, view="shadow")


def test_files_keep_what_was_chosen(tmp_path: Path) -> None:
    (rollout,) = played(only=0).rollouts
    save_ledgers(tmp_path / "r.safetensors", [rollout], parse_policy(QUEST))
    write_rollouts(tmp_path / "r.json", RecordedRollouts("here", (rollout,), parse_policy(QUEST)))
    (kept,), policy = load_ledgers(tmp_path / "r.safetensors")
    assert policy == parse_policy(QUEST)
    same(kept.selection, rollout.selection)
    same(read_rollouts(tmp_path / "r.json").rollouts[0].selection, rollout.selection)
    same(read_rollouts(as_tensors(tmp_path, rollout)).rollouts[0].selection, rollout.selection)


def same(one: Selection | None, other: Selection | None) -> None:
    assert one is not None
    assert other is not None
    assert (one.unit, one.layers) == (other.unit, other.layers)
    assert torch.equal(one.queries, other.queries)
    assert torch.equal(one.chosen, other.chosen)


def as_tensors(folder: Path, rollout: Rollout) -> Path:
    """The safetensors interchange form of one rollout, written by hand."""
    made, tokens = rollout.selection, len(rollout.ids)
    assert made is not None
    row = {"prompt_length": rollout.prompt_length, "selection": {"unit": made.unit, "layers": list(made.layers)}}
    head = {"format": "kvaudit.rollouts", "version": 1, "layers": 3, "kv_heads": 2, "rollouts": [row]}
    tensors: dict[str, Tensor] = {
        "0.ids": rollout.ids,
        "0.sampled": rollout.sampled,
        "0.logprobs": rollout.sampler_logprobs[rollout.sampled],
        "0.query": torch.zeros(0, dtype=torch.int32),
        "0.kept": torch.zeros(0, 3, 2, tokens, dtype=torch.bool),
        "0.choosing": made.queries,
        "0.chosen": made.chosen.contiguous(),
    }
    save_file(tensors, folder / "x.safetensors", metadata={"kvaudit": json.dumps(head)})
    return folder / "x.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made["queries"][0]["chosen"][0][0].append(50), "comes after it"),
        (lambda made: made["queries"][0]["chosen"][0].pop(), "other layers or heads"),
        (lambda made: made["queries"][0]["chosen"][0][0].clear(), "or nothing"),
        (lambda made: made["queries"][0]["chosen"][0][0].insert(0, 10), "twice, or not in order"),
        (lambda made: made["queries"][0].update(query=400), "do not rise"),
        (lambda made: made.update(layers=[1, 7]), "choices in layers [1, 7]"),
        (lambda made: made.update(unit=0), "greater than or equal to 1"),
    ],
)
def test_choices_that_cannot_be_are_refused_in_one_line(change: Any, words: str, tmp_path: Path) -> None:
    (rollout,) = played(only=0).rollouts
    write_rollouts(tmp_path / "r.json", RecordedRollouts("here", (rollout,), None))
    table = json.loads((tmp_path / "r.json").read_text())
    change(table["rollouts"][0]["selection"])
    (tmp_path / "r.json").write_text(json.dumps(table))
    with pytest.raises(DataError) as caught:
        read_rollouts(tmp_path / "r.json")
    assert words in str(caught.value)


def test_a_query_that_chose_only_what_had_left_is_refused() -> None:
    (rollout,) = played(only=0).rollouts
    gone = rollout.evicted_at.clone()
    gone[1, :, 0] = 30
    early = Selection(1, (1,), torch.tensor([45], dtype=torch.int32), torch.tensor([[[[0]]]], dtype=torch.int32))
    recorded = RecordedRollouts("here", (replace(rollout, evicted_at=gone, selection=early),), None)
    with pytest.raises(DataError, match="selected only evicted entries"):
        check_replayable(recorded, shared(DEEP).model.config, 512)


def test_generate_with_left_padding_is_replayed() -> None:
    model = served("gemma3").model
    ids = torch.tensor([[0] * 13 + prompts(17)[0], prompts(30)[0]])
    mask = (ids > 0).long()
    past = CompressedCache.for_model(model, QUEST)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, attention_mask=mask)
    out = model.generate(ids, past_key_values=past, return_dict_in_generate=True, output_logits=True, **options)
    whole = torch.cat([mask, torch.ones(2, 12, dtype=torch.int64)], 1)
    with torch.no_grad(), shadow(model, past.ledger):
        replayed = model(out.sequences, attention_mask=whole).logits[:, 29:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), replayed, rtol=1e-6, atol=1e-6)


def test_masks_of_a_long_replay_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    history = played()
    whole = gap(shared(DEEP), history, "shadow")
    monkeypatch.setattr("kvaudit.audit.cache.attention.MASK_ELEMENTS", 1 << 10)
    assert max(whole, gap(shared(DEEP), history, "shadow")) < 1e-12


def test_quest_takes_no_partner() -> None:
    for text in (f"{QUEST}+int8", f"streaming:budget=64+{QUEST}"):
        with pytest.raises(SpecError, match="a composition is one evicting policy and one quantising policy"):
            parse_policy(text)


def test_a_row_that_is_fed_nothing_chooses_nothing() -> None:
    evicting = new_cache(shared(DEEP), parse_policy(QUEST), [0, 1])
    feed(shared(DEEP), evicting, prompts(20, 20))
    feed(shared(DEEP), evicting, [[9], []], decoding=True)
    first, second = evicting.selections() or ()
    assert first is not None
    assert (first.queries.tolist(), second) == ([20], None)


def test_a_row_that_chose_nothing_has_no_record_and_is_kept(tmp_path: Path) -> None:
    """One row stops at its first token while the other goes on; and a model of which no layer chooses."""
    for text in ("quest:budget=4,page=3,dense=0", "quest:budget=4,page=3,dense=3"):
        policy = parse_policy(text)
        episode = Sampler(shared(DEEP), policy).open(prompts(12, 9), [0, 1])
        episode.decode(Decoding(5), [1, 5])
        rollouts = episode.rollouts()
        assert rollouts[0].selection is None
        assert (rollouts[1].selection is None) == text.endswith("dense=3")
        save_ledgers(tmp_path / "a.safetensors", rollouts, policy)
        assert [r.selection is None for r in load_ledgers(tmp_path / "a.safetensors")[0]] == [
            r.selection is None for r in rollouts
        ]
        write_rollouts(tmp_path / "a.json", RecordedRollouts("x", tuple(rollouts), policy))
        assert len(read_rollouts(tmp_path / "a.json").rollouts) == 2
