"""Policies: names, fields and hashes, what is refused, and what a draw or a pyramid has to be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from test_policies_oracles import view
from transformers import LlamaConfig

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.evict import keep_mask
from kvaudit.audit.policies import POLICIES, Policy, parse_policy
from kvaudit.core.errors import SpecError, UnknownName


def test_a_plug_in_that_is_no_kind_of_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Policy):
        name = "odd"

    monkeypatch.setattr(POLICIES, "_classes", {"odd": Odd})
    with pytest.raises(
        SpecError, match="policy odd of test_policies subclasses Policy directly; subclass one of Evictor, Quant"
    ):
        parse_policy("odd")


def test_hash_is_of_the_meaning_not_the_spelling() -> None:
    assert parse_policy("streaming: sink=4 ,budget=64").hash == parse_policy("streaming:budget=64").hash
    assert parse_policy("streaming:budget=64").hash != parse_policy("streaming:budget=65").hash
    assert parse_policy("none").canonical == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streamin", "Did you mean 'streaming'?"),
        ("streaming:budge=3", "Did you mean 'budget'?"),
        ("streaming:budget", "not field=value"),
        ("streaming:budget=many", "wanted int"),
        ("streaming:budget=8,budget=9", "given twice"),
        ("streaming:budget=2", "below sink + window = 4 + 0"),
        ("snapkv:budget=8", "below sink + window = 0 + 32"),
        ("snapkv:kernel=4", "odd"),
        ("snapkv:pool=median", "pool=median, wanted one of max, avg"),
        ("h2o:phase=never", "prefill, decode, both"),
        ("pyramidkv:budget=64,window=32,sink=2", "does not fit the last layer"),
        ("triattention:mode=per_layer", "mode=per_layer, wanted one of union, per_head, per_layer_perhead"),
        ("triattention:horizon=0", "horizon=0, wanted an integer of at least 1"),
        ("adakv:alpha=1.5", "alpha=1.5, wanted a share from 0 to 1"),
        ("adakv:alpha=nan", "alpha=nan, wanted a share from 0 to 1"),
        ("none:budget=3", "field of policy none"),
        ("tova@3", "a weight is a share of a mixture, such as snapkv:budget=96@3|none"),
        ("tova@3+kivi|none", "weight '3+kivi', wanted a whole number at the end, such as tova@3"),
        ("tova@-1|none", "weight '-1', wanted a whole number"),
        ("tova@|none", "weight '', wanted a whole number"),
        (f"tova@{'9' * 5000}|none", "wanted a whole number"),
        ("tova@0|none", "weights 0, 1; wanted a whole number from 1"),
        ("random:interval=0", "at least 1"),
        ("streaming:pin=judge", "role in pin of policy streaming"),
        ("streaming:reposition=maybe", "wanted true or false"),
        ("streaming:reposition=true,pin=system", "takes no pin"),
        ("streaming:budget=64+snapkv:budget=64", "one evicting policy and one quantising policy"),
        ("kivi+int8", "one evicting policy and one quantising policy"),
        ("none+kivi", "one evicting policy and one quantising policy"),
        ("kivi:bits=3", "wanted one of 2, 4"),
        ("kivi:residual=33", "no multiple of group=32"),
        ("fp8:format=e3m4", "wanted one of e4m3, e5m2"),
        ("int8:budget=3", "field of policy int8"),
        ("int8:skip_layers=first", "skip_layers=first, wanted numbers of layers, from 0, such as 0/1/23"),
        ("int8:skip_layers=-1", "wanted numbers of layers"),
        ("tova+int8:skip_layers=0", "skip_layers cannot be combined with an evicting policy"),
        ("q4_0:write=true,residual=8", "leave residual at 0"),
        ("streaming|", "unknown policy ''"),
    ],
)
def test_bad_policy_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_policy(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("none", {"name": "none"}),
        ("snapkv:budget=96,window=8,pool=avg", {"name": "snapkv", "budget": 96, "window": 8, "pool": "avg"}),
        ("rkv:weight=0.25", {"name": "rkv", "weight": 0.25}),
        ("streaming:reposition=true", {"name": "streaming", "reposition": True}),
        ("streaming:pin=system/tool", {"name": "streaming", "pin": ["system", "tool"]}),
        ("q4_0:skip_layers=0/1", {"name": "q4_0", "skip_layers": [1, 0, 1]}),
        ("int8:skip_layers=0", {"name": "int8", "skip_layers": 0}),
        ("tova+kivi:bits=2", {"compose": ["tova", {"name": "kivi", "bits": 2}]}),
        ("kivi+tova", {"compose": ["tova", "kivi"]}),
        ("tova:budget=64@3|none", {"mixture": [{"name": "tova", "budget": 64}, "none"], "weights": [3, 1]}),
        ("tova+int8@2|none@6|h2o@2", {"mixture": ["tova+int8", "none", "h2o"], "weights": [1, 3, 1]}),
        ("tova|none|h2o+int8", {"mixture": ["tova", "none", {"compose": ["h2o", "int8"]}]}),
    ],
)
def test_text_and_yaml_give_the_same_object_and_its_canonical_form_gives_it_again(
    text: str, mapping: dict[str, object]
) -> None:
    policy = parse_policy(text)
    assert parse_policy(mapping) == policy
    parsed = parse_policy(policy.canonical)
    assert parsed == policy
    assert parsed.hash == policy.hash == parse_policy(mapping).hash


def test_different_policies_have_different_hashes() -> None:
    texts = [
        "tova",
        "kivi",
        "tova+kivi",
        "tova|kivi",
        "kivi|tova",
        "tova@2|kivi",
        "tova|kivi@2",
        "tova+int8",
        "tova:pin=system",
        "kivi:bits=2",
        "kivi:skip_layers=0",
        "q4_0",
    ]
    assert len({parse_policy(text).hash for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"budget": 3}, "write name:"),
        ({"name": "tova", "mixture": ["tova", "none"]}, "write name:"),
        ({"mixture": ["tova"]}, "two or more policies"),
        ({"compose": "tova+kivi"}, "two or more policies"),
        ({"mixture": ["tova|none", "kivi"]}, "a mixture inside a mixture"),
        (
            {"mixture": ["tova", "none"], "weights": [3]},
            "a mixture of 2 policies with weights 3; wanted a whole number",
        ),
        ({"mixture": ["tova", "none"], "weights": [3, 0.5]}, "weights 3, 0.5"),
        ({"mixture": ["tova", "none"], "weights": [True, 0]}, "weights True, 0"),
        ({"mixture": ["tova", "none"], "weights": 3}, "wanted a whole number for each policy"),
        ({"compose": ["tova", "kivi"], "weights": [3, 1]}, "compose: [...] alone"),
        ({"mixture": ["tova@3", "none"]}, "a weight is a share of a mixture"),
        ({"name": "tova", "budget": [3]}, "wanted int"),
        ({"name": "tova", "budget": None}, "wanted int"),
        ({"name": "tova", "budget": True}, "wanted int"),
    ],
)
def test_bad_yaml_is_one_clear_line(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_policy(mapping)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mixture_draws_each_part_about_equally_from_the_request_alone() -> None:
    policy = parse_policy("tova|none|h2o")
    names = [policy.drawn(key).name for key in range(900)]
    assert names == [policy.drawn(key).name for key in range(900)]
    assert {name: abs(names.count(name) - 300) < 60 for name in names} == {"tova": True, "none": True, "h2o": True}


def test_equal_weights_are_no_weights() -> None:
    plain = parse_policy("tova|none")
    assert parse_policy("tova@4|none@4") == plain
    assert plain.canonical.count("@") == 0
    assert parse_policy("tova:budget=64|none").hash == parse_policy("tova:budget=64@2|none@2").hash == "37831ffd6b4f"
    drawn = [parse_policy("tova|none|h2o").drawn(key).name for key in range(12)]
    assert "".join(name[0] for name in drawn) == "hntnntnhnhtn"


def test_a_weight_is_a_share_of_requests() -> None:
    policy = parse_policy("tova@7|none@2|h2o")
    names = [policy.drawn(key).name for key in range(10_000)]
    shares = [names.count(name) for name in ("tova", "none", "h2o")]
    assert shares == [7026, 1979, 995]
    assert all(abs(share - wanted) < 5 * 46 for share, wanted in zip(shares, (7000, 2000, 1000), strict=True))


def test_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(UnknownName) as caught:
        parse_policy("lru")
    assert str(caught.value).endswith("Known: " + ", ".join(sorted(POLICIES.all())))


def test_ties_go_to_the_earlier_position_after_sink_and_window() -> None:
    positions = torch.arange(10)[None, None].int()
    policy = parse_policy("h2o:budget=5,sink=1,window=2")
    kept = keep_mask(torch.zeros(1, 1, 10), positions, torch.tensor([10]), policy)
    assert kept[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 8, 9]


def test_random_is_uniform_and_differs_by_seed_row_layer_and_head() -> None:
    positions = torch.arange(4000)[None, None].expand(2, 2, -1).int()
    v = view(0)._replace(positions=positions)
    draws = {}
    for seed in (0, 1):
        policy = parse_policy(f"random:seed={seed}")
        for layer in (0, 1):
            for (b, h), row in zip(
                np.ndindex(2, 2), policy.importance(v._replace(layer=layer)).flatten(0, 1), strict=True
            ):
                draws[seed, layer, b, h] = row.numpy() / 2**24
    for row in draws.values():
        assert abs(row.mean() - 0.5) < 0.02  # 4.4 standard errors
        assert abs(np.quantile(row, 0.1) - 0.1) < 0.02
    correlations = np.corrcoef(list(draws.values()))[np.triu_indices(len(draws), 1)]
    assert np.abs(correlations).max() < 0.07


def test_random_ignores_the_rows_beside_it() -> None:
    v, policy = view(0), parse_policy("random:seed=5")
    alone = v._replace(positions=v.positions[1:], entry_keys=v.entry_keys[1:])
    assert torch.equal(policy.importance(v)[1:], policy.importance(alone))


@pytest.mark.parametrize(("budget", "layers"), [(512, 32), (37, 5), (64, 3), (100, 1)])
def test_pyramid_budgets_fall_and_sum_to_the_mean(budget: int, layers: int) -> None:
    policy = parse_policy(f"pyramidkv:budget={budget},window=8")
    budgets = [policy.for_layer(layer, layers).budget for layer in range(layers)]
    assert sum(budgets) == layers * budget
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(budgets))
    if layers == 32:
        assert (budgets[0], budgets[-1]) == (8 + 983, 8 + 25)  # 2 * 504 - 25.2 and 504 / 20


def test_pyramid_budgets_on_short_prompts_are_those_of_the_authors() -> None:
    """Uniform below 2 (budget - window) = 114 tokens; above, the first layer has no more than there is."""
    policy = parse_policy("pyramidkv:budget=61,window=4")

    def budgets(seen: int) -> list[int]:
        return [int(policy.for_layer(layer, 4).budget_at(torch.tensor(seen))) for layer in range(4)]

    assert budgets(97) == budgets(113) == [61, 61, 61, 61]
    assert budgets(114) == [114, 79, 43, 8]
    assert budgets(116) == budgets(1000) == [115, 79, 43, 7]


@pytest.mark.parametrize(("tokens", "held"), [(60, [60] * 4), (97, [61] * 4), (120, [115, 79, 43, 7])])
def test_the_pyramid_holds_what_the_authors_keep_of_a_prompt(tokens: int, held: list[int]) -> None:
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, hidden_size=16)
    evicting = EvictingCache(config, parse_policy("pyramidkv:budget=61,window=4"), torch.tensor([0]))
    evicting.begin(torch.arange(tokens)[None], decoding=False)
    for layer in range(4):
        x = torch.randn(1, 2, tokens, 8, generator=torch.Generator().manual_seed(layer))
        evicting.attend(AttentionCall(layer, x, x, x, 1.0))
    assert [layer.store.length for layer in evicting.layers] == held


@pytest.mark.parametrize(
    ("alpha", "wide", "narrow"),
    [(0.2, 16, 8), (0.0, 17, 7), (0.5, 15, 9), (1.0, 12, 12)],  # .8 * 13 + .2 * 8 = 12 beyond the window of 4
)
def test_a_head_of_spread_attention_keeps_what_a_sharp_one_does_not_need(alpha: float, wide: int, narrow: int) -> None:
    policy = parse_policy(f"adakv:budget=12,window=4,alpha={alpha}")
    scores = torch.zeros(1, 2, 24)
    scores[0, 0, :13], scores[0, 1, :3] = 0.05, 0.2
    scores[0, 1, 3:] = 0.01
    positions = torch.arange(24)[None, None].expand(1, 2, 24).int()
    kept = keep_mask(scores, positions, torch.tensor([24]), policy)
    assert kept.sum(-1).tolist() == [[wide, narrow]]
    assert bool(kept[:, :, -4:].all())


def test_adakv_without_sharing_is_snapkv() -> None:
    v = view(3)
    kept = [
        keep_mask(policy.importance(v), v.positions, v.seen, policy)
        for policy in map(parse_policy, ("adakv:budget=9,window=4,alpha=1", "snapkv:budget=9,window=4"))
    ]
    assert torch.equal(*kept)
