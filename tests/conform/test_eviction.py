"""What every evicting policy is held to, whatever it ranks by: when it evicts, how much stays, what never leaves."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch import Tensor

from conform.policies import policy_id, pytest_generate_tests, refuses, roomy, small
from conform.world import LAYERS, Moment, feed, governed, held, moments, moments_once, new_cache, prompts, shared, steps
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.policies import POLICIES, Policy, View, evictor_of, parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import SpecError

__all__ = ["pytest_generate_tests"]
LONG = 10_000  # tokens seen after which no budget changes any more
SCRIPT = (24, -5, 18, -3)  # a prompt, an answer, a message, an answer


def compresses_now(policy: Policy, budget: int, now: Moment, entries: float, since: int) -> bool:
    """Whether a cache of ``entries``, this forward's included, is due, as the fields say."""
    if entries <= budget:
        return False
    if now.decoding:
        return policy.phase != "prefill" and since >= policy.interval
    return policy.phase != "decode"


def held_by(policy: Policy, heads: list[set[int]]) -> list[float]:
    """Entries of each head, or of the mean one where heads share their budgets."""
    counts = [len(head) for head in heads]
    return [sum(counts) / len(counts)] if policy.shares_heads else [*map(float, counts)]


def test_every_eviction_meets_the_budget_exactly_and_comes_when_it_is_due(compressed: Policy) -> None:
    loaded, policy = shared(), evictor_of(compressed)
    since = dict.fromkeys(governed(loaded), 0)
    evictions = 0
    for before, now in steps(moments_once(compressed, SCRIPT)):
        for layer in governed(loaded):
            budget = budgets(policy, now.seen)[layer]
            since[layer] += now.new if now.decoding else 0
            had, has = (held_by(policy, moment.held[layer]) for moment in (before, now))
            assert set(had) == {had[0]}
            entries = had[0] + now.new
            if due := compresses_now(policy, budget, now, entries, since[layer]):
                evictions, since[layer] = evictions + 1, 0
            assert set(has) == {budget if due else entries}
    assert evictions > 0


def test_what_left_never_returns(scheduled: Policy) -> None:
    for before, now in steps(moments_once(scheduled, SCRIPT)):
        come = set(range(before.seen, now.seen))
        for had, has in zip(before.held, now.held, strict=True):
            assert all(later <= earlier | come for earlier, later in zip(had, has, strict=True))


def test_sink_and_window_stay(evictor: Policy) -> None:
    policy = roomy(evictor)
    for now in moments(shared(), policy, (64, -4, 20, -2)):
        protected = {j for j in range(now.seen) if j < policy.sink or j >= now.seen - policy.window}
        assert all(protected <= head for layer in now.held for head in layer)


def test_pinned_tokens_stay_or_are_refused_where_a_layer_has_no_room(timed: Policy) -> None:
    if refuses(timed, pin="system"):
        pytest.skip(f"{policy_id(timed)} takes no pins")
    policy, pins = roomy(timed, pin="system"), [{4, 11, 12}, {0, 50}]
    if min(budgets(policy)) < policy.sink + policy.window + 3:
        with pytest.raises(SpecError, match="pin=system"):
            feed_pinned(policy, pins)
        policy = replace(policy, budget=220)
    feed_pinned(policy, pins)


def feed_pinned(policy: Policy, pins: list[set[int]]) -> None:
    """A prompt, an answer and a message of two rows; ``pins`` are held throughout."""
    loaded, length = shared(), 2 * policy.budget
    evicting = new_cache(loaded, policy, [0, 1])
    for start, stop in ((0, length), *((length + n, length + n + 1) for n in range(6)), (length + 6, length + 36)):
        rows = [[8 + n % 50 for n in range(start, stop)]] * 2
        pinned = torch.tensor([[n in mine for n in range(start, stop)] for mine in pins])
        feed(loaded, evicting, rows, decoding=stop - start == 1, pinned=pinned)
        for mine, record in zip(pins, evicting.ledger(stop), strict=True):
            assert all(mine <= held(record)[layer][head] for layer in governed(loaded) for head in range(2))
    assert (evicting.ledger(length) < NEVER).any()


def budgets(policy: Policy, seen: int = LONG, layers: int = LAYERS) -> list[int]:
    """The budget of each layer once so many tokens were seen."""
    return [int(evictor_of(policy).for_layer(layer, layers).budget_at(torch.tensor(seen))) for layer in range(layers)]


def test_a_short_cache_is_left_alone(evictor: Policy) -> None:
    policy = roomy(evictor)
    least = min(budgets(policy))
    for now in moments(shared(), policy, (least - 3, -3)):
        assert all(head == set(range(now.seen)) for layer in now.held for head in layer)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 28, 64])
def test_budgets_of_the_layers_sum_to_the_mean(evictor: Policy, layers: int) -> None:
    for policy in (evictor, roomy(evictor)):
        for seen in (policy.budget + 1, 2 * policy.budget - 3, 2 * policy.budget + 5, LONG):
            own = budgets(policy, seen, layers)
            assert sum(own) == layers * policy.budget
            assert min(own) >= policy.sink + policy.window


def test_a_later_message_is_compressed_like_the_prompt(evictor: Policy) -> None:
    history = list(moments(shared(), evictor, (40, -3, 30)))
    message = [now for now in history if now.seen > 43]
    assert len(message) == -(-30 // evictor.chunk)
    for layer in range(LAYERS):
        assert set(held_by(evictor, message[-1].held[layer])) == {budgets(evictor, message[-1].seen)[layer]}


def test_what_leaves_is_recorded_at_the_index_of_the_next_query(evictor: Policy) -> None:
    loaded, evicting = shared(), new_cache(shared(), evictor)
    before = torch.empty(LAYERS, 2, 0, dtype=torch.int32)
    for size, decoding in ((16, False), (16, False), (1, True), (1, True), (1, True), (1, True), (11, False)):
        feed(loaded, evicting, prompts(size), decoding=decoding)
        now = evicting.ledger(int(evicting.seen))[0]
        assert torch.equal(now[:, :, : before.shape[2]][before < NEVER], before[before < NEVER])
        fresh = now.clone()
        fresh[:, :, : before.shape[2]][before < NEVER] = NEVER
        assert set(fresh.unique().tolist()) <= {int(evicting.seen), NEVER}
        before = now


def test_what_the_record_keeps_is_what_the_cache_holds(evictor: Policy) -> None:
    loaded, evicting = shared(), new_cache(shared(), evictor, [0, 1, 2])
    for rows, decoding in ((prompts(40, 23, 9), False), (prompts(1, 1, 1), True), ([prompts(7)[0], [], [9]], False)):
        feed(loaded, evicting, rows, decoding=decoding)
    for row, record in enumerate(evicting.ledger(int(evicting.seen.max()))):
        seen = set(range(int(evicting.seen[row])))
        for layer, heads in zip(evicting.layers, held(record), strict=True):
            stored = [set(head[head >= 0].tolist()) for head in layer.store.positions[row]]
            assert stored == [head & seen for head in heads]


def test_a_row_that_is_given_nothing_is_left_as_it_is(timed: Policy) -> None:
    sampler = Sampler(shared(), timed)
    alone, beside = sampler.open(prompts(40), [0]), sampler.open(prompts(40, 23), [0, 1])
    for episode, chunks in ((alone, [()]), (beside, [(), prompts(0, 30)[1]])):
        episode.decode(Decoding(5))
        episode.extend(chunks)
        episode.decode(Decoding(4))
    expected, got = alone.rollouts()[0], beside.rollouts()[0]
    assert torch.equal(expected.evicted_at, got.evicted_at)
    assert expected.ids.tolist() == got.ids.tolist()


def test_chunks_fed_by_hand_equal_chunks_cut_by_the_policy(evictor: Policy) -> None:
    """A given text enters ``chunk`` tokens at a time, each chunk attending before it is evicted from."""
    loaded, (text,) = shared(), prompts(44)
    byhand, cut = new_cache(loaded, replace(evictor, chunk=1000)), new_cache(loaded, evictor)
    for start in range(0, 44, evictor.chunk):
        part = [text[start : start + evictor.chunk]]
        assert torch.equal(feed(loaded, byhand, part), feed(loaded, cut, part))
    assert torch.equal(byhand.ledger(44), cut.ledger(44))


def test_chunks_do_not_matter_while_everything_fits(evictor: Policy) -> None:
    loaded, (text,) = shared(), prompts(40)
    policy = roomy(evictor)
    budget = min(budgets(policy))
    whole = feed(loaded, new_cache(loaded, policy), [text[:budget]])
    evicting = new_cache(loaded, policy)
    parts = torch.cat([feed(loaded, evicting, [text[n : n + 7]]) for n in range(0, len(text[:budget]), 7)], 1)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def a_view(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> View:
    """What the policy is shown of the first layer when a row of forty tokens is first over budget."""
    shown: list[View] = []
    evicting = new_cache(shared(), policy)
    own = type(evicting.layers[0].plan.evictor)  # a layer may follow another policy than the whole
    rule = own.importance

    def spy(self: Policy, view: View) -> Tensor:
        shown.append(view)
        return rule(self, view)

    with monkeypatch.context() as patch:
        patch.setattr(own, "importance", spy)
        feed(shared(), evicting, prompts(40))
    return shown[0]


def test_slots_may_come_in_any_order_where_the_policy_says_so(evictor: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    if evictor.ordered:
        pytest.skip(f"{evictor.name} asks for slots in order of position")
    view = a_view(evictor, monkeypatch)
    order = torch.randperm(view.keys.shape[2], generator=torch.Generator().manual_seed(0))
    slots = ("keys", "values", "positions", "mass")
    shuffled = view._replace(**{name: getattr(view, name)[:, :, order] for name in slots})
    expected = evictor.importance(view)[:, :, order]
    torch.testing.assert_close(evictor.importance(shuffled), expected, rtol=1e-5, atol=1e-6)


def ranks_each_entry_by_itself(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an entry's rank is its own: the same beside other entries, other queries, at another time."""
    view = a_view(policy, monkeypatch)
    some = torch.arange(0, 40, 3)
    fewer = view._replace(
        keys=view.keys[:, :, some],
        values=view.values[:, :, some],
        positions=view.positions[:, :, some],
        mass=torch.rand(view.mass.shape, generator=torch.Generator().manual_seed(1))[:, :, some],
        queries=-view.queries,
        moments=None if view.moments is None else view.moments._replace(mean=-view.moments.mean),
        seen=view.seen + 100,
    )
    return torch.equal(policy.importance(view)[:, :, some], policy.importance(fewer))


def test_a_rank_of_the_entrys_own_survives_any_chunking(evictor: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the first layer depend on their token alone, so there the same entries stay however they arrived."""
    if not ranks_each_entry_by_itself(evictor, monkeypatch):
        pytest.skip(f"{evictor.name} ranks an entry by others or by queries: what stays depends on the chunks")
    loaded, (text,) = shared(), prompts(70)
    kept = []
    for chunk in (70, 33, 16, 7, 1):
        evicting = new_cache(loaded, evictor)
        for start in range(0, 70, chunk):
            feed(loaded, evicting, [text[start : start + chunk]])
        kept.append(held(evicting.ledger(70)[0])[0])
    assert all(k == kept[0] for k in kept)


@pytest.mark.parametrize(("name", "alone"), [("random", True), ("streaming", True), ("knorm", True), ("snapkv", False)])
def test_which_rules_rank_each_entry_by_itself(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_each_entry_by_itself(small(POLICIES.get(name)), monkeypatch) is alone


def test_a_policy_is_frozen_and_comparable(policy: Policy) -> None:
    assert policy == replace(policy)
    assert hash(policy) == hash(replace(policy))
    for field in fields(policy):
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field.name, None)


def test_canonical_string_parses_back_to_the_same_policy(policy: Policy) -> None:
    for one in (policy, POLICIES.get(policy.name)()):
        again = parse_policy(one.canonical)
        assert again == one
        assert again.hash == one.hash
