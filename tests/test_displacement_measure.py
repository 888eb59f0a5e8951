"""Distances between distributions and trajectories of records: literal numbers, and the sampler's own log-probs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer
from training_world import sharp

from kvaudit.audit.again.teacher_forcing import (
    ForcedEpisode,
    Refusal,
    StepLogits,
    UnitDistances,
    again,
    dense_logits,
    distances,
    log_odds,
    served_logits,
)
from kvaudit.audit.again.trajectories import NOTHING, Trajectory, Turn, batches, first_tokens, trajectory
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.evaluate import row_seed
from kvaudit.audit.sampling.chat import Chat, Rendered
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.core.errors import DataError
from kvaudit.core.records import Message, Outcome, Record, Role
from kvaudit.suites.base import SUITES

TIGHT = "streaming:budget=32,sink=4,window=8"
ROOMY = "streaming:budget=4000,sink=4,window=8"


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


def made_up(item: str, cluster: str, *lengths: int, start: int = 40) -> Trajectory:
    """A prompt, then answers and replies in turn, of so many tokens; ``lengths`` ends with an answer."""
    parts = [tuple((start + 7 * n + 13 * i) % 200 for i in range(length)) for n, length in enumerate(lengths)]
    turns = [
        Turn(parts[n], Rendered(parts[n + 1], ("user",) * len(parts[n + 1])) if n + 1 < len(parts) else NOTHING)
        for n in range(1, len(parts), 2)
    ]
    return Trajectory(item, cluster, 5, Rendered(parts[0], ("user",) * len(parts[0])), tuple(turns))


BATCH = [made_up("a", "x", 50, 6, 9, 4), made_up("b", "x", 60, 8, start=9), made_up("c", "y", 45, 3, 20, 7, 2, 5)]


def test_two_tokens_by_hand() -> None:
    reference = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    candidate = torch.log(torch.tensor([[0.6, 0.4], [0.2, 0.8]]))
    found = distances(reference, candidate, torch.tensor([1, 0]))
    by_hand = [0.9 * math.log(1.5) + 0.1 * math.log(0.25), 0.9 * math.log(4.5) + 0.1 * math.log(0.125)]
    assert found.kl.tolist() == pytest.approx(by_hand, abs=1e-7)
    assert found.kl.tolist() == pytest.approx([0.226289, 1.145725], abs=1e-6)
    assert found.same.tolist() == [True, False]
    assert found.change.tolist() == pytest.approx([0.3, -0.7], abs=1e-7)


def test_a_unit_of_two_tokens_by_hand() -> None:
    one = Trajectory("i", "c", 0, Rendered((3,), ("user",)), (Turn((1, 0), NOTHING),))
    seen = [
        StepLogits([0, 0], [0, 1], torch.log(torch.tensor(rows)))
        for rows in ([[0.9, 0.1], [0.9, 0.1]], [[0.6, 0.4], [0.2, 0.8]])
    ]
    tally = UnitDistances(Refusal(1, frozenset({"i"})))
    tally.add([one], [seen[0]], iter([seen[1]]))
    row = tally.row()
    low, high = 0.2262891, 1.1457255
    assert row["sequences"] == [["c", 2, pytest.approx((low + high) / 2, abs=1e-6)]]
    assert row["median_kl"] == pytest.approx((low + high) / 2, abs=1e-6)
    assert row["p99_kl"] == pytest.approx(low + 0.99 * (high - low), abs=1e-6)
    assert row["max_kl"] == pytest.approx(high, abs=1e-6)
    assert row["same_top1"] == 0.5
    assert row["rms_dp"] == pytest.approx(math.sqrt((0.09 + 0.49) / 2))
    assert row["refusal_margin"] == pytest.approx(math.log(0.4 / 0.6) - math.log(0.1 / 0.9), abs=1e-6)


def test_log_odds_are_those_of_the_probability() -> None:
    logits = torch.log(torch.tensor([0.8, 0.15, 0.05])) + 3
    assert log_odds(logits, 0) == pytest.approx(math.log(4), abs=1e-6)
    assert math.isfinite(log_odds(torch.tensor([500.0, 0.0]), 0))  # a probability that rounds to 1


def test_a_token_without_any_probability_adds_nothing() -> None:
    reference, candidate = torch.tensor([[0.0, -math.inf]]), torch.log(torch.tensor([[0.5, 0.5]]))
    assert distances(reference, candidate, torch.tensor([0])).kl.tolist() == pytest.approx([math.log(2)])


def test_logits_that_are_no_numbers_are_named() -> None:
    one = Trajectory("i", "c", 0, Rendered((3,), ("user",)), (Turn((1,), NOTHING),))
    seen = StepLogits([0], [0], torch.tensor([[0.0, 1.0]]))
    with pytest.raises(DataError, match="no finite numbers"):
        UnitDistances(None).add([one], [seen], iter([StepLogits([0], [0], torch.tensor([[0.0, math.nan]]))]))


def kl(model: LoadedModel, seen: object, batch: list[Trajectory] = BATCH) -> float:
    tally = UnitDistances(None)
    tally.add(batch, dense_logits(model, batch), seen)  # type: ignore[arg-type]
    return float(tally.row()["max_kl"])


def test_a_model_against_itself_is_rounding(model: LoadedModel) -> None:
    assert kl(model, dense_logits(model, BATCH)) < 1e-12
    assert kl(model, served_logits(model, parse_policy("none"), BATCH)) < 1e-6
    assert kl(model, again(model, BATCH)) < 1e-6


def test_a_policy_that_evicts_nothing_is_none_and_one_that_evicts_is_not(model: LoadedModel) -> None:
    assert kl(model, served_logits(model, parse_policy(ROOMY), BATCH)) < 1e-6
    assert kl(model, served_logits(model, parse_policy(TIGHT), BATCH)) > 1e-2


def test_a_mixture_serves_each_row_under_the_policy_it_draws(model: LoadedModel) -> None:
    policy = parse_policy(f"{TIGHT}|{ROOMY}")
    rows = [Trajectory(one.item_id, one.cluster_id, seed, one.prompt, one.turns) for seed, one in enumerate(BATCH * 2)]
    drawn = {policy.drawn(one.seed) for one in rows}
    assert len(drawn) == 2
    for seed, one in enumerate(rows):
        own = list(served_logits(model, policy.drawn(seed), [one]))
        mixed = [s for s in served_logits(model, policy, rows) if seed in s.rows]
        assert len(own) == len(mixed)
        for a, b in zip(own, mixed, strict=True):
            torch.testing.assert_close(b.logits[b.rows.index(seed)], a.logits[0], rtol=1e-4, atol=1e-3)


def test_led_along_what_it_sampled_a_model_gives_the_log_probs_it_sampled_with(model: LoadedModel) -> None:
    """Under eviction, over two turns with a reply between them: the cache is compressed at the same moments."""
    policy, prompts = parse_policy(TIGHT), [list(range(10, 70)), list(range(30, 110))]
    decoding, replies = Decoding(9, temperature=1.0), [list(range(5, 25)), list(range(50, 60))]
    free = Sampler(model, policy).open(prompts, [1, 2])
    drawn = [free.decode(decoding)]
    free.extend(replies)
    drawn.append(free.decode(decoding))
    forced = ForcedEpisode(model, policy, prompts, [1, 2], 1, None)
    for number, completions in enumerate(drawn):
        answers = [one.ids for one in completions if one is not None]
        found: list[list[float]] = [[], []]
        for rows, logits in forced.force(answers):
            for row, values in zip(rows, logits.double().log_softmax(-1), strict=True):
                found[row].append(float(values[answers[row][len(found[row])]]))
        for row, one in enumerate(completions):
            assert one is not None
            assert found[row] == pytest.approx(one.logprobs, abs=1e-5)
        if number == 0:
            forced.extend(replies)


def test_an_answer_that_goes_on_without_a_reply_is_one_answer(model: LoadedModel) -> None:
    """The last token of the first part is fed before the second is predicted."""
    prompts, answer = [list(range(10, 60))], [7, 50, 9, 120, 33]

    def logits(*parts: list[int]) -> torch.Tensor:
        episode = ForcedEpisode(model, parse_policy(TIGHT), prompts, [1], 1, None)
        return torch.cat([seen for part in parts for _, seen in episode.force([part])])

    torch.testing.assert_close(logits(answer[:2], answer[2:]), logits(answer))


def test_every_token_of_the_answers_is_predicted_and_nothing_else() -> None:
    one = made_up("a", "x", 5, 2, 3, 4)
    assert one.scored == (5, 6, 10, 11, 12, 13)
    assert len(one.ids) == 14


def test_sequences_are_whole_and_come_template_after_template() -> None:
    rows = [made_up(f"i{n}", "x" if n < 3 else "y", 4, 10) for n in range(6)]
    four, three = first_tokens(rows, 40), first_tokens(rows[::-1], 39)
    assert [len(found) for found in (four, three, first_tokens(rows, 1), first_tokens(rows, 1000))] == [4, 3, 1, 6]
    assert four[:3] == three  # whatever order they come in
    assert four[0].cluster_id == four[2].cluster_id != four[1].cluster_id == four[3].cluster_id


def test_a_part_of_the_sequences_does_not_go_by_their_names() -> None:
    """Twins of which one name always sorts first: about half of either are taken."""
    rows = [made_up(f"t{n}-{twin}", f"t{n}", 4, 10) for n in range(100) for twin in ("allowed", "forbidden")]
    chosen = first_tokens(rows, 1000)
    assert len({one.cluster_id for one in chosen}) == 100
    assert 35 <= sum(one.item_id.endswith("forbidden") for one in chosen) <= 65
    low = sum(int(one.cluster_id[1:]) < 50 for one in first_tokens(rows, 300))
    assert 7 <= low <= 23


def test_batches_hold_like_lengths_within_both_limits() -> None:
    rows = [made_up(f"i{n}", "x", length, 4) for n, length in enumerate((30, 10, 11, 12))]
    found = batches(rows, tokens=32, logits=10**9, vocabulary=10)
    assert [[one.item_id for one in batch] for batch in found] == [["i1", "i2"], ["i3"], ["i0"]]
    # two rows that answer at other places hold 5 columns of 10 numbers each
    found = batches(rows, tokens=10**9, logits=100, vocabulary=10)
    assert [[one.item_id for one in batch] for batch in found] == [["i1", "i2"], ["i3"], ["i0"]]


def record(*messages: tuple[str, str], finish: str = "stop") -> Record:
    return Record(
        **{"run": "r", "checkpoint": "0" * 64, "arm": "base", "train_seed": 0, "policy": "none", "policy_hash": "h"},
        **{"suite": "math", "suite_version": "1", "item_id": "i", "cluster_id": "c", "context_tokens": 9},
        **{"placement": "p", "sample_index": 0, "outcome": Outcome.DESIRED, "score": 1.0, "finish_reason": finish},
        **{"prompt_tokens": 1, "new_tokens": 1, "retention": 1.0, "survival": {}, "kv_bytes_peak": 1},
        **{"kv_bytes_dense": 1, "seconds": 0.0, "judge": "programmatic"},
        transcript=tuple(Message(Role(role), text) for role, text in messages),
    )


def text_of(chat: Chat, ids: tuple[int, ...]) -> str:
    return str(chat.tokenizer.decode(list(ids)))


def test_a_transcript_becomes_the_tokens_of_the_conversation() -> None:
    chat = Chat(byte_tokenizer())
    one = trajectory(record(("user", "q"), ("assistant", "ab"), ("tool", "t"), ("assistant", "c")), chat, 1000)
    assert one is not None
    whole = (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
        "<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )
    assert text_of(chat, one.ids) == whole
    assert text_of(chat, tuple(one.ids[place] for place in one.scored)) == "ab<|im_end|>c<|im_end|>"
    assert len(one.scored) == 5


def test_an_answer_cut_off_at_its_length_has_no_end() -> None:
    chat = Chat(byte_tokenizer())
    one = trajectory(record(("user", "q"), ("assistant", "ab"), finish="length"), chat, 1000)
    assert one is not None
    assert text_of(chat, tuple(one.ids[place] for place in one.scored)) == "ab"
    assert trajectory(record(("user", "q"), ("assistant", ""), finish="length"), chat, 1000) is None


@pytest.mark.parametrize(
    "messages",
    [(), (("user", "q"),), (("assistant", "a"),), (("user", "q"), ("assistant", "a"), ("assistant", "b")),
     (("user", "q"), ("assistant", "a"), ("user", "q")), (("user", "q"), ("assistant", 3))],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(messages: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(DataError, match="holds no conversation of questions and answers"):
        trajectory(record(*messages), Chat(byte_tokenizer()), 1000)


def test_the_embedded_models_recorded_answers_are_the_tokens_it_sampled() -> None:
    """Two turns and tool results included; the row's seed is the one that it was sampled with."""
    model, suite = load_model(), SUITES.get("agent")()
    items = suite.items("eval", 8, 1000, 192, model.chat.count_tokens)
    seeds = [row_seed(1000, item, 0) for item in items]
    played = play(Sampler(model, parse_policy("none")), [(suite, item) for item in items], Decoding(8, 0.0), seeds)
    assert any(len(row.transcript) > 3 for row in played)
    for row, seed in zip(played, seeds, strict=True):
        messages = tuple((str(message.role), message.content) for message in row.transcript)
        made = record(*messages, finish=row.finish_reason)
        found = trajectory(
            Record(
                **{**{n: getattr(made, n) for n in Record.__slots__}, "suite": "agent", "item_id": row.item.item_id}
            ),
            model.chat,
            1000,
        )
        assert found is not None
        assert list(found.ids) == row.rollout.ids.tolist()
        assert [bool(flag) for flag in row.rollout.sampled] == [n in found.scored for n in range(len(found.ids))]
        assert found.seed == seed
