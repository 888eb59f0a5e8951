"""The loop of prompt, answer, environment, answer, grade: with a scripted model, and with a real tiny one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer

from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.conversations import play, survival
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.episode import OnTurnEnd, ShouldPause
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.base import Suite

GREEDY = Decoding(1, temperature=0.0)


class Counting(Suite):
    """Answers every assistant message with "next" until the model says "done"; grades the last word."""

    name = "counting"
    max_turns = 3
    max_new_tokens = 8

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        return None if "done" in transcript[-1].content else (Message(Role.TOOL, "next"),)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        good = transcript[-1].content == "done"
        return Grade(Outcome.DESIRED if good else Outcome.UNDESIRED, float(good))


class Short(Counting):
    """The same with shorter answers."""

    name = "short"
    max_new_tokens = 5


def item(text: str = "count") -> Item:
    return Item("counting", text, text, (Message(Role.SYSTEM, "s"), Message(Role.USER, text)), 64, "none")


@dataclass
class Scripted:
    """A sampler whose rows say given words; every answer ends with the stop token unless it ends with '…'."""

    lines: list[list[str]]
    max_positions: int = 500
    chat: Chat = field(default_factory=lambda: Chat(byte_tokenizer()))
    limits: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[Sequence[tuple[int, ...]]] = field(default_factory=list)
    over: list[set[int]] = field(default_factory=list)  # rows that were let go by each call

    @property
    def model(self) -> Any:
        return self

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def open_rows(self) -> int:
        return self.rows - len(set().union(*self.over))

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        group: int = 1,
        roles: Sequence[Sequence[str]],
    ) -> Any:
        self.seeds, self.group = list(seeds), group
        self.ids = [list(prompt) for prompt in prompts for _ in range(group)]
        self.starts = [0] * len(self.ids)
        self._left = [iter(line) for line in self.lines]
        return self

    def decode(
        self, decoding: Decoding, limits: Sequence[int], ended: Any, heard: OnTurnEnd, pause: ShouldPause
    ) -> list[Completion | None]:
        self.limits.append(tuple(limits))
        said = [self._say(row) if limit else None for row, limit in enumerate(limits)]
        self.over.append({row for row, completion in enumerate(said) if completion and not heard(row, completion)})
        return said

    def _say(self, row: int) -> Completion:
        word = next(self._left[row])
        ids = self.chat.tokenizer(word.rstrip("…"), add_special_tokens=False)["input_ids"]
        cut = word.endswith("…")
        ids = tuple(ids if cut else [*ids, self.chat.tokenizer.eos_token_id])
        self.starts[row] = len(self.ids[row])
        self.ids[row] += ids
        return Completion(ids, (0.0,) * len(ids), "length" if cut else "stop")

    def extend(self, chunks: Sequence[tuple[int, ...]], roles: Sequence[Sequence[str]]) -> None:
        self.chunks.append(chunks)
        for row, chunk in enumerate(chunks):
            self.ids[row] += chunk

    def rollouts(self) -> list[Rollout]:
        return [
            Rollout(
                torch.tensor(ids), 1, torch.zeros(len(ids)), torch.zeros(len(ids)),
                torch.full((1, 1, len(ids)), NEVER), 0, 0, 1.0, start,
            )
            for ids, start in zip(self.ids, self.starts, strict=True)
        ]  # fmt: skip


def test_an_episode_ends_when_the_environment_is_silent() -> None:
    sampler = Scripted([["one", "done"]])
    (played,) = play(sampler, [(Counting(), item())], GREEDY, [0])
    assert [m.content for m in played.transcript] == ["s", "count", "one", "next", "done"]
    assert (played.grade.outcome, played.grade.score, played.finish_reason) == (Outcome.DESIRED, 1.0, "stop")
    assert played.new_tokens == 4 + 5


def test_the_cache_holds_exactly_the_tokens_of_the_whole_conversation() -> None:
    sampler = Scripted([["one", "two", "done"]])
    (played,) = play(sampler, [(Counting(), item())], GREEDY, [0])
    whole = sampler.chat.prompt(played.transcript).ids
    # the template closes the last turn with a line break and asks for another answer, which nobody gives
    assert played.rollout.ids.tolist() == list(whole[: len(sampler.ids[0])])
    assert sampler.chat.tokenizer.decode(whole[len(sampler.ids[0]) :]) == "\n<|im_start|>assistant\n"


def test_the_last_allowed_turn_ends_an_episode_that_would_go_on() -> None:
    (played,) = play(Scripted([["a", "b", "c", "d"]]), [(Counting(), item())], GREEDY, [0])
    assert played.finish_reason == "turns"
    assert [m.content for m in played.transcript if m.role is Role.ASSISTANT] == ["a", "b", "c"]
    assert played.grade.outcome is Outcome.UNDESIRED


def test_a_truncated_answer_is_an_outcome_of_its_own_scores_zero_and_never_reaches_the_grader() -> None:
    (played,) = play(Scripted([["done…"]]), [(Counting(), item())], GREEDY, [0])
    assert (played.grade.outcome, played.grade.score, played.grade.note) == (Outcome.TRUNCATED, 0.0, "truncated")
    assert played.finish_reason == "length"


def test_an_empty_answer_is_degenerate() -> None:
    (played,) = play(Scripted([[""]]), [(Counting(), item())], GREEDY, [0])
    assert (played.grade.outcome, played.grade.note) == (Outcome.DEGENERATE, "empty")


def test_rows_that_are_over_are_neither_decoded_nor_extended() -> None:
    sampler = Scripted([["done"], ["one", "done"]])
    play(sampler, [(Counting(), item("a")), (Counting(), item("b"))], GREEDY, [0, 1])
    assert sampler.limits == [(8, 8), (0, 8)]
    assert sampler.over == [{0}, {1}]
    assert [bool(chunk) for chunk in sampler.chunks[0]] == [False, True]


def test_every_suite_has_its_own_answer_length_in_a_mixed_batch() -> None:
    sampler = Scripted([["done"], ["done"]])
    play(sampler, [(Counting(), item("a")), (Short(), item("b"))], GREEDY, [0, 1])
    assert sampler.limits == [(8, 5)]


def test_group_members_stand_together_and_are_numbered() -> None:
    sampler = Scripted([["done"]] * 4)
    rows = play(sampler, [(Counting(), item("a")), (Counting(), item("b"))], GREEDY, [7, 8, 9, 10], group=2)
    assert [(row.item.item_id, row.sample_index) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (sampler.seeds, sampler.group) == ([7, 8, 9, 10], 2)


def test_a_context_beyond_the_models_positions_is_refused_before_sampling() -> None:
    sampler = Scripted([["done"]], max_positions=40)
    with pytest.raises(SpecError, match="lower context_tokens"):
        play(sampler, [(Counting(), item())], GREEDY, [0])
    assert not sampler.limits


def test_a_conversation_that_outgrows_the_positions_is_unscored() -> None:
    prompt = len(Chat(byte_tokenizer()).prompt(item().messages).ids)
    (played,) = play(Scripted([["one", "done"]], max_positions=prompt + 10), [(Counting(), item())], GREEDY, [0])
    assert (played.grade.outcome, played.grade.score, played.finish_reason) == (Outcome.UNSCORED, None, "error")


def test_survival_is_the_share_of_a_roles_tokens_that_the_answer_still_sees() -> None:
    evicted_at = torch.tensor([[[NEVER, 4, 3, NEVER, NEVER], [NEVER, 5, 4, 4, NEVER]]])  # [L=1, H=2, T=5]
    rollout = Rollout(torch.zeros(5), 4, torch.zeros(5), torch.zeros(5), evicted_at, 0, 0, 0.5, answer_start=4)
    roles = ["system", "system", "user", "user", "assistant"]
    # system: token 0 in both heads, token 1 in the second only (5 > 4); user: token 3 in the first head only
    assert survival(rollout, roles) == {"system": 0.75, "user": 0.25}


@pytest.mark.parametrize("policy", ["none", "streaming:budget=40,sink=4,window=8", "h2o:budget=40,sink=4,window=8"])
def test_a_row_does_not_depend_on_its_batch(tiny_folder: Path, policy: str) -> None:
    sampler = Sampler(load_model(str(tiny_folder)), parse_policy(policy))
    suite, items = Counting(), [item("a"), item("b" * 40), item("c" * 9)]
    decoding = Decoding(1, temperature=1.0)
    together = play(sampler, [(suite, one) for one in items], decoding, [1, 2, 3])
    for seed, one in enumerate(items, start=1):
        (alone,) = play(sampler, [(suite, one)], decoding, [seed])
        assert alone.transcript == together[seed - 1].transcript
        assert alone.survival == together[seed - 1].survival
        assert alone.rollout.retention == together[seed - 1].rollout.retention


def test_compression_shows_in_survival_and_retention(tiny_folder: Path) -> None:
    sampler = Sampler(load_model(str(tiny_folder)), parse_policy("streaming:budget=40,sink=4,window=8"))
    (played,) = play(sampler, [(Counting(), item("b" * 60))], GREEDY, [1])
    assert played.rollout.retention == 40 / played.prompt_tokens
    assert played.survival["system"] == 0.0
    assert 0 < played.survival["user"] < 1
