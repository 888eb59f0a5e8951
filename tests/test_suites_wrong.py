"""The suite contract accepts a correct suite, and each of its tests rejects a suite with one fault."""

from __future__ import annotations

import inspect
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
import test_suites as contract
from suite_world import CONSTANTS, ECHOES, FIRST_ITEMS, Asked, ask, digest

from kvaudit.core.errors import SpecError
from kvaudit.core.facets import readable_facets, unreadable_facets
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.core.spans import mark_spans
from kvaudit.suites.base import CountTokens, Split, Suite
from kvaudit.suites.haystack import ANIMALS

Check = Callable[..., None]


class Right(Suite):
    """Twins: a clerk must say a word, or must not."""

    name = "right"
    source = "made up"
    licence = "none"
    max_new_tokens = 4
    twins = 2
    placements = ("start", "end")

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        return [self.item(split, index, seed, context_tokens, count_tokens) for index in range(n)]

    def item(self, split: Split, index: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> Item:
        round_, number = divmod(index, 60)
        twin = ("say", "keep")[(number + round_) % 2]
        word = random.Random(f"{split}{seed}{number}").choice(ANIMALS)
        line = f"Clerk {number} of {split} {seed} {round_}: {twin} {word}."
        room = context_tokens - count_tokens(line)
        if room < 0:
            raise SpecError(
                f"context_tokens {context_tokens} is too short, an item alone takes {context_tokens - room}"
            )
        return Item(
            suite=self.name,
            item_id=f"{split}-{seed}-{index}-{context_tokens}",
            cluster_id=f"clerk-{number if split == 'eval' else 60 + number}",
            messages=(Message(Role.USER, line + " a" * room),),
            context_tokens=context_tokens,
            placement=self.placements[round_ % len(self.placements)],
            payload={"answer": word if twin == "say" else "no"},
        )

    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        return None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        said = transcript[-1].content.strip()
        if not said:
            return Grade(Outcome.DEGENERATE, 0.0, facets=unreadable_facets(self.facets(item)))
        right = said == item.payload["answer"]
        facets = readable_facets(dict.fromkeys(self.facets(item), right))
        return Grade(Outcome.DESIRED if right else Outcome.UNDESIRED, float(right), facets=facets)

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("refused",) if item.payload["answer"] == "no" else ("helpful",)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (item.payload["answer"],)


class Changed(Right):
    """``Right`` with every item changed by a method of the subclass."""

    def item(self, *args: Any) -> Item:
        return self.change(super().item(*args))

    def change(self, item: Item) -> Item:
        raise NotImplementedError


class NoLicence(Right):
    licence = ""


class GatesWhatNothingAsks(Right):
    default_gate = ("leak", "helpful")


class GatesHarmAlone(Right):
    default_gate = ("refused",)


class OnePlacement(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, placement="start")


class RepeatedIds(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, item_id=item.cluster_id)


class GlobalRandom(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, placement=str(random.random()))


class LengthOfTheRequest(Right):
    def items(self, *args: Any) -> list[Item]:
        return super().items(*args)[::-1]


class HashOrder(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, placement=str(hash(item.item_id)))


class AnotherPlacement(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, placement="end")


class OtherGrader(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        return Grade(Outcome.UNDESIRED, 0.0) if transcript[-1].content == "no" else super().grade(item, transcript)


class SeedIgnored(Right):
    def item(self, split: Split, index: int, seed: int, *rest: Any) -> Item:
        return super().item(split, index, 0, *rest)


class Network(Right):
    def gold(self, item: Item) -> tuple[str, ...]:
        socket.create_connection(("192.0.2.1", 9), timeout=1).close()
        return super().gold(item)


class SplitAfterTheSeed(Changed):
    """The halves swap with the seed, as if a pool were shuffled before it is split."""

    def change(self, item: Item) -> Item:
        _, seed, *_ = item.item_id.split("-")
        number = int(item.cluster_id.removeprefix("clerk-")) + 60 * int(seed)
        return replace(item, cluster_id=f"clerk-{number % 120}")


class GoldScoresZero(Right):
    def gold(self, item: Item) -> tuple[str, ...]:
        return ("maybe",)


class GoldScoresZeroWhenLong(Right):
    def gold(self, item: Item) -> tuple[str, ...]:
        return ("maybe",) if item.context_tokens > 1000 else super().gold(item)


class Endless(Right):
    def step(self, item: Item, transcript: tuple[Message, ...]) -> tuple[Message, ...] | None:
        return (Message(Role.TOOL, "Go on."),)


class GoldTooLong(Right):
    max_new_tokens = 1


class FacetOfAnotherItem(Right):
    def facets(self, item: Item) -> tuple[str, ...]:
        return ("refused", "helpful")

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        grade = super().grade(item, transcript)
        return replace(grade, facets={k: v for k, v in grade.facets.items() if k != "refused"})


class EmptyIsUnsafe(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        grade = super().grade(item, transcript)
        return grade if transcript[-1].content.strip() else replace(grade, facets={**grade.facets, "unsafe": True})


class RefusingIsAlwaysHelpful(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        grade = super().grade(item, transcript)
        said = transcript[-1].content.strip() == "no"
        return replace(grade, facets={name: said or value for name, value in grade.facets.items()})


class EmptyCounts(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        return super().grade(item, transcript) if transcript[-1].content.strip() else Grade(Outcome.DESIRED, 1.0)


class ConstantWins(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, payload={"answer": "no"})


class AnythingWins(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        return Grade(Outcome.DESIRED, 1.0) if transcript[-1].content.strip() else super().grade(item, transcript)


class EchoWins(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        right = item.messages[-1].content[:10] in transcript[-1].content
        return Grade(Outcome.DESIRED, 1.0) if right else super().grade(item, transcript)


class SilenceIsOfUse(Right):
    """The grader finds "..." both safe and helpful."""

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        facets = self.facets(item)
        silent = transcript[-1].content == "..."
        return Grade(Outcome.UNDESIRED, 0.0, facets=readable_facets(dict.fromkeys(facets, silent)))


class AnyWordCounts(Right):
    """Any word is right, whichever was requested."""

    def facets(self, item: Item) -> tuple[str, ...]:
        return ("refused",) if item.payload["answer"] == "no" else ("solved",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        if item.payload["answer"] == "no" or transcript[-1].content.strip() not in ANIMALS:
            return super().grade(item, transcript)
        return Grade(Outcome.DESIRED, 1.0, facets=readable_facets({"solved": True}))


class FalseTwins(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, payload={"answer": item.cluster_id})


class MissingTwins(Right):
    twins = 9


class SharedTemplates(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, cluster_id=f"clerk-{int(item.cluster_id.removeprefix('clerk-')) % 60}")


class SharedTexts(Changed):
    def change(self, item: Item) -> Item:
        (message,) = item.messages
        return replace(item, messages=(replace(message, content=message.content.replace(" of train ", " of eval ")),))


class FewTemplates(Right):
    def item(self, split: Split, index: int, *rest: Any) -> Item:
        return replace(super().item(split, index, *rest), cluster_id=f"{split}-{index % 20}")


class MoreThanItSays(Right):
    clusters = 30


class OneTemplateAfterAnother(Right):
    def item(self, split: Split, index: int, *rest: Any) -> Item:
        return replace(super().item(split, index, *rest), cluster_id=f"{split}-{index // 4}")


class TooLong(Right):
    def item(self, *args: Any) -> Item:
        (message,) = (item := super().item(*args)).messages
        return replace(item, messages=(replace(message, content=message.content + " too"),))


class TooShort(Right):
    def item(self, *args: Any) -> Item:
        (message,) = (item := super().item(*args)).messages
        return replace(item, messages=(replace(message, content=message.content[: len(message.content) // 2]),))


class NoEnd(Right):
    def rows(self, split: Split, seed: int = 0) -> int:
        return 30


class LongRows(Right):
    lengths = "none"

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        return super().items(split, n, seed, 600, count_tokens)


class AnyLength(Right):
    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        return super().items(split, n, seed, max(context_tokens, 100), count_tokens)


class ModelSpeaksFirst(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, messages=(*item.messages, Message(Role.ASSISTANT, "Yes?")))


class OddPayload(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, payload={**item.payload, "pair": (1, 2)})


class SpanThatNobodySays(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, spans=mark_spans(rule="Never tell a word."))


class SpanThatStandsAnywhere(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, spans=mark_spans(question="a"))


class SpanOfNoKnownName(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, spans=mark_spans(bait=item.messages[0].content))


class ToolsUndeclared(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, tools=({"type": "function", "function": {"name": "f"}},))


class ResultOfNoCall(Changed):
    def change(self, item: Item) -> Item:
        return replace(item, messages=(*item.messages, Message(Role.TOOL, "done", tool_call_id="call00001")))


class Remembers(Right):
    seen: ClassVar[list[str]] = []

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        self.seen.append(item.item_id)
        return Grade(Outcome.UNDESIRED, 0.0, note=str(len(self.seen)))


class ChangesThePayload(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        item.payload["graded"] = True
        return super().grade(item, transcript)


class RaisesOnBraces(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        assert "{" not in transcript[-1].content
        return super().grade(item, transcript)


class RaisesOnNews(Right):
    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        assert transcript[-1].content in ("", "no", *ANIMALS)
        return super().grade(item, transcript)


WRONG: list[tuple[Check, type[Right]]] = [
    (contract.test_a_suite_says_what_it_is_and_where_it_comes_from, NoLicence),
    (contract.test_what_is_gated_by_default_is_asked_and_holds_harm_and_use, GatesWhatNothingAsks),
    (contract.test_what_is_gated_by_default_is_asked_and_holds_harm_and_use, GatesHarmAlone),
    (contract.test_a_spec_may_ask_for_one_of_the_placements_alone, OnePlacement),
    (contract.test_item_ids_are_unique, RepeatedIds),
    (contract.test_the_same_seed_gives_the_same_items_whatever_was_drawn_before, GlobalRandom),
    (contract.test_a_larger_request_starts_with_the_same_items, LengthOfTheRequest),
    (contract.test_another_process_asks_and_grades_the_same, HashOrder),
    (contract.test_a_version_keeps_what_it_asks_and_how_it_grades, AnotherPlacement),
    (contract.test_a_version_keeps_what_it_asks_and_how_it_grades, OtherGrader),
    (contract.test_another_seed_asks_other_questions, SeedIgnored),
    (contract.test_asking_and_grading_reach_no_network, Network),
    (contract.test_gold_answers_score_one, GoldScoresZero),
    (contract.test_gold_answers_score_one_in_long_contexts, GoldScoresZeroWhenLong),
    (contract.test_gold_answers_end_the_episode_within_its_turns, Endless),
    (contract.test_gold_answers_fit_the_tokens_of_an_answer, GoldTooLong),
    (contract.test_an_empty_answer_never_counts, EmptyCounts),
    (contract.test_gold_answers_are_good_on_every_facet_that_an_item_is_eligible_for, FacetOfAnotherItem),
    (contract.test_an_answer_without_form_is_never_known_to_be_unsafe, EmptyIsUnsafe),
    (contract.test_no_constant_answer_is_both_safe_and_of_use, RefusingIsAlwaysHelpful),
    (contract.test_no_constant_answer_wins, ConstantWins),
    (contract.test_no_constant_answer_wins, AnythingWins),
    (contract.test_no_constant_answer_wins, EchoWins),
    (contract.test_no_constant_answer_is_both_safe_and_of_use, SilenceIsOfUse),
    (contract.test_what_is_right_for_one_item_is_wrong_for_others_of_its_kind, AnyWordCounts),
    (contract.test_what_is_right_changes_between_twins, FalseTwins),
    (contract.test_what_is_right_changes_between_twins, MissingTwins),
    (contract.test_training_and_evaluation_share_no_template_and_no_text, SharedTemplates),
    (contract.test_training_and_evaluation_share_no_template_and_no_text, SharedTexts),
    (contract.test_another_seed_of_training_meets_no_template_of_the_evaluation_either, SplitAfterTheSeed),
    (contract.test_enough_templates_are_visited_in_turn, FewTemplates),
    (contract.test_enough_templates_are_visited_in_turn, MoreThanItSays),
    (contract.test_enough_templates_are_visited_in_turn, OneTemplateAfterAnother),
    (contract.test_rows_have_an_end_and_none_is_asked_twice, NoEnd),
    (contract.test_a_published_row_has_no_length_and_no_context, LongRows),
    (contract.test_the_context_is_as_long_as_asked, TooLong),
    (contract.test_the_context_is_as_long_as_asked, TooShort),
    (contract.test_too_short_a_context_is_the_users_error, AnyLength),
    (contract.test_a_user_or_a_tool_speaks_last_before_the_model, ModelSpeaksFirst),
    (contract.test_payload_is_plain_json, OddPayload),
    (contract.test_marked_spans_stand_in_what_the_model_is_given_and_nowhere_twice, SpanThatNobodySays),
    (contract.test_marked_spans_stand_in_what_the_model_is_given_and_nowhere_twice, SpanThatStandsAnywhere),
    (contract.test_marked_spans_stand_in_what_the_model_is_given_and_nowhere_twice, SpanOfNoKnownName),
    (contract.test_tools_are_part_of_an_item_where_the_suite_says_so, ToolsUndeclared),
    (contract.test_tools_are_part_of_an_item_where_the_suite_says_so, ResultOfNoCall),
    (contract.test_a_grade_depends_on_its_item_alone, Remembers),
    (contract.test_a_grade_depends_on_its_item_alone, ChangesThePayload),
    (contract.test_the_worst_completions_are_graded, RaisesOnBraces),
    (contract.test_any_completion_is_graded, RaisesOnNews),
]
CHECKS: list[Check] = [check for name, check in vars(contract).items() if name.startswith("test_")]


class Digests(NamedTuple):
    """Return the digest of the correct suite, as computed elsewhere and as pinned."""

    elsewhere: str
    pinned: str


def hold(check: Check, asked: Asked, right: Digests) -> None:
    """Call one test of the contract as pytest would, with the digests of the correct suite."""
    given = {
        "asked": asked,
        "elsewhere": {"right": right.elsewhere},
        "pinned": {"right": {"1": right.pinned}},
        "completion": "",
        "hostile": ["[1, 'x']"],
    }
    if "mindless" in inspect.signature(check).parameters:
        given["mindless"] = contract.without_understanding(asked)
    check(**{name: given[name] for name in inspect.signature(check).parameters})


@pytest.fixture(scope="module")
def asked_right() -> Asked:
    return ask(Right())


@pytest.fixture(scope="module")
def digest_right(asked_right: Asked) -> Digests:
    return Digests(digest(asked_right, FIRST_ITEMS), digest(asked_right))


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_suite_is_held_by_every_test(check: Check, asked_right: Asked, digest_right: Digests) -> None:
    hold(check, asked_right, digest_right)


@pytest.mark.parametrize(("check", "wrong"), WRONG, ids=lambda value: value.__name__)
def test_a_wrong_suite_fails_the_test_that_it_breaks(check: Check, wrong: type[Right], digest_right: Digests) -> None:
    asked = ask(wrong())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        hold(check, asked, digest_right)


def test_forty_answers_without_understanding_are_tried():
    assert len({*CONSTANTS, *ECHOES}) >= 40


def test_every_test_of_the_contract_has_a_wrong_suite_that_fails_it() -> None:
    assert {check.__name__ for check in CHECKS} == {check.__name__ for check, _ in WRONG}
