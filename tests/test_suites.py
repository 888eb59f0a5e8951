"""The contract of a suite: every registered one, or those of ``--suite-file``, is held to every test of this file.

A suite is found by walking the registry, so a new file is held here without an edit. What only one suite promises
stands in ``test_suites_grading.py``; that each of these tests can fail, in ``test_suites_wrong.py``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suite_world import (
    ANSWERS,
    CONSTANTS,
    ECHOES,
    FIRST_ITEMS,
    IN_CONTEXTS,
    SEED,
    Asked,
    ask,
    digest,
    grade,
    play,
    rows_from,
    text_of,
    words,
    write_rows,
)

from kvaudit.core.errors import SpecError
from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.records import Grade, Item, Outcome, Role
from kvaudit.core.spans import find_spans, span_error
from kvaudit.core.tool_forms.text import list_tools
from kvaudit.suites.base import PUBLISHED, SUITES

FOUND = {"solved", "capable"}  # facets for items with one right answer
CONSTANT = 0.55  # maximum score of a constant answer: half of the twins, plus chance
FEWEST = {"train": 30, "eval": 60}  # templates; a margin of 5 points needs 59 clusters, or a declared Suite.clusters
SENTENCE = 140  # tokens by which a passage of sentences may be shorter than its length
PINNED = Path(__file__).with_name("suite_versions.json")  # name -> version -> digest


class Said(NamedTuple):
    """An answer with its grade by each item."""

    name: str
    graded: list[Grade]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "asked" in metafunc.fixturenames:
        names = _under_test(metafunc.config.getoption("suite_file"))
        metafunc.parametrize("asked", [SUITES.get(name) for name in names], indirect=True, ids=names, scope="module")


@cache
def _under_test(file: Path | None) -> list[str]:
    # test_suites_check.py tests one-sided pools, for which a constant answer is right
    both = [name for name, suite in SUITES.all().items() if not suite.one_sided]
    names = [*both, *IN_CONTEXTS] if file is None else SUITES.load_file(file)
    if not names:
        raise pytest.UsageError(f"{file} brings no suite; subclass Suite with a name")
    return names


@pytest.fixture(scope="session")
def made_up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The folder of made-up rows; None for a suite of ``--suite-file``, which reads its own rows."""
    outside = request.config.getoption("suite_file") is not None
    return None if outside else write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest, made_up: Path | None) -> Iterator[Asked]:
    with rows_from(made_up):
        yield ask(request.param())


@pytest.fixture(scope="session")
def elsewhere(request: pytest.FixtureRequest, made_up: Path | None) -> dict[str, str]:
    """The digests computed by another process."""
    file = request.config.getoption("suite_file")
    script = [sys.executable, str(Path(__file__).with_name("suite_world.py")), *([str(file)] if file else [])]
    with rows_from(made_up):
        done = subprocess.run(script, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="session")
def pinned() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(PINNED.read_text())
    return table


def test_a_suite_says_what_it_is_and_where_it_comes_from(asked: Asked) -> None:
    suite = type(asked.suite)
    assert suite.kind in ("safety", "capability")
    assert all((suite.name, suite.version, suite.source, suite.licence, suite.__doc__))
    assert {item.suite for item in (*asked.train, *asked.eval)} == {suite.name}


def test_what_is_gated_by_default_is_asked_and_holds_harm_and_use(asked: Asked) -> None:
    gated = asked.suite.default_gate
    assert {*gated} <= {name for item in asked.eval for name in asked.suite.facets(item)}
    kinds = {FACETS[name].kind for name in gated}
    assert not gated or "safety" in kinds
    # nonsense does no harm; biographies has no other facet
    assert not gated or kinds != {"safety"} or gated == ("sided",)


def test_a_spec_may_ask_for_one_of_the_placements_alone(asked: Asked) -> None:
    assert {item.placement for item in asked.eval} <= set(asked.suite.placements)
    narrowed = type(asked.suite)()
    narrowed.placements = asked.suite.placements[-1:]
    items = narrowed.items("eval", 8, SEED, asked.tokens, words)
    assert {item.placement for item in items} == set(narrowed.placements)


def test_item_ids_are_unique(asked: Asked) -> None:
    ids = Counter(item.item_id for item in (*asked.train, *asked.eval))
    assert [name for name, count in ids.items() if count > 1] == []


def test_the_same_seed_gives_the_same_items_whatever_was_drawn_before(asked: Asked) -> None:
    random.seed(1)
    first = asked.suite.items("eval", 20, SEED, asked.tokens, words)
    random.seed(2)
    assert asked.suite.items("eval", 20, SEED, asked.tokens, words) == first


def test_a_larger_request_starts_with_the_same_items(asked: Asked) -> None:
    assert type(asked.suite)().items("eval", 20, SEED, asked.tokens, words) == asked.eval[:20]


def test_another_process_asks_and_grades_the_same(asked: Asked, elsewhere: dict[str, str]) -> None:
    found = digest(asked, FIRST_ITEMS)
    assert elsewhere[asked.suite.name] == found, "items or grades depend on a set's order, a clock or global draws"


def test_a_version_keeps_what_it_asks_and_how_it_grades(asked: Asked, pinned: dict[str, dict[str, str]]) -> None:
    suite, found = asked.suite, digest(asked)
    if suite.name not in pinned:
        pytest.skip(f"{suite.name} is new: pin {{{suite.version!r}: {found!r}}} in {PINNED.name} when numbers go out")
    wanted = pinned[suite.name].get(suite.version)
    assert found == wanted, f"items or grades of {suite.name} changed; raise its version and pin {found} in {PINNED}"


def test_tools_are_part_of_an_item_where_the_suite_says_so(asked: Asked) -> None:
    items = (*asked.train, *asked.eval)
    assert all(bool(item.tools) is (asked.suite.tool_form == "native") for item in items)
    for item in items:
        assert json.loads(json.dumps(item.tools)) == list(item.tools)
        calls = {call.call_id for message in item.messages for call in message.tool_calls}
        assert {message.tool_call_id for message in item.messages if message.tool_call_id} <= calls


def test_another_seed_asks_other_questions(asked: Asked) -> None:
    other = asked.suite.items("eval", 20, SEED + 1, asked.tokens, words)
    if asked.suite.rows("eval") is None:
        assert not {text_of(item) for item in other} & {text_of(item) for item in asked.eval}
    else:  # a limited suite asks all its rows in another order
        assert [text_of(item) for item in other] != [text_of(item) for item in asked.eval[:20]]


def test_asking_and_grading_reach_no_network(asked: Asked) -> None:
    """``conftest.py`` refuses sockets; new items and grades must not need them."""
    for item in asked.suite.items("eval", 4, SEED + 2, asked.tokens, words):
        grade(asked.suite, item, asked.suite.gold(item))


def test_gold_answers_score_one(asked: Asked) -> None:
    for item in asked.eval:
        result = grade(asked.suite, item, asked.suite.gold(item))
        assert (result.outcome, result.score, result.note) == (Outcome.DESIRED, 1.0, ""), item.item_id


def test_gold_answers_score_one_in_long_contexts(asked: Asked) -> None:
    for item in asked.suite.items("eval", 6, SEED, asked.tokens and 4096, words):
        assert grade(asked.suite, item, asked.suite.gold(item)).score == 1.0, item.item_id


def test_gold_answers_end_the_episode_within_its_turns(asked: Asked) -> None:
    suite = asked.suite
    for item in asked.eval:
        gold = suite.gold(item)
        assert 1 <= len(gold) <= suite.max_turns
        assert suite.step(item, play(suite, item, gold)) is None


def test_gold_answers_fit_the_tokens_of_an_answer(asked: Asked) -> None:
    for item in asked.eval:
        assert max(map(words, asked.suite.gold(item))) < asked.suite.max_new_tokens, item.item_id


@pytest.mark.parametrize("completion", ["", " \n"])
def test_an_empty_answer_never_counts(asked: Asked, completion: str) -> None:
    for item in asked.eval:
        result = grade(asked.suite, item, [completion])
        assert result.outcome is not Outcome.DESIRED, item.item_id
        assert result.score in (0.0, None), item.item_id


@pytest.fixture(scope="module")
def mindless(asked: Asked) -> list[Said]:
    """The grades of answers without understanding, computed once for several tests."""
    return without_understanding(asked)


def test_no_constant_answer_wins(mindless: list[Said]) -> None:
    for name, graded in mindless:
        assert sum(each.score or 0.0 for each in graded) <= CONSTANT * len(graded), name


def test_no_constant_answer_is_both_safe_and_of_use(mindless: list[Said]) -> None:
    """A constant answer that is good on every safety facet must not be good on any facet of usefulness."""
    for name, graded in mindless:
        shares = _good_shares(graded)
        safety = [share for facet, share in shares.items() if FACETS[facet].kind == "safety"]
        of_use = [
            s for facet, s in shares.items() if FACETS[facet].kind not in ("safety", "form") and FACETS[facet].wanted
        ]
        safe = min(safety, default=1.0) > CONSTANT
        assert not safe or max(of_use, default=0.0) <= CONSTANT, (name, shares)


def _good_shares(graded: Sequence[Grade]) -> dict[str, float]:
    """Return each facet's share of good values among eligible items; unreadable counts as not good."""
    found = defaultdict[str, list[bool]](list)
    for each in graded:
        for name, value in each.facets.items():
            found[name].append(value is FACETS[name].wanted)
    return {name: sum(good) / len(good) for name, good in found.items()}


@cache
def _few(items: tuple[str, ...]) -> frozenset[str]:
    """Return every fifth cluster; an odd stride keeps twins balanced."""
    return frozenset(list(dict.fromkeys(items))[::5])


def without_understanding(asked: Asked) -> list[Said]:
    """Return the grades of constant answers, of gold answers given to all items, and of echoes of the question.

    What stands around a row changes no grader, so that a context meets a few of the constants.
    """
    suite, few = asked.suite, _few(tuple(item.cluster_id for item in asked.eval))
    items = [item for item in asked.eval if item.cluster_id in few]
    golds = {suite.gold(item) for item in items[::9]}
    everything = tuple(" ".join(dict.fromkeys(turns)) for turns in zip_longest(*sorted(golds), fillvalue=""))
    constants = (*(ANSWERS if suite.context else CONSTANTS), suite.refusal)
    said = {*((answer,) * suite.max_turns for answer in constants), *golds, everything}
    tried = {str(each): [each] * len(items) for each in said}
    for name, echo in ECHOES.items():
        tried[f"echo of the {name}"] = [(echo(item),) * suite.max_turns for item in items]
    return [
        Said(name, [grade(suite, item, turns) for item, turns in zip(items, each, strict=True)])
        for name, each in tried.items()
    ]


def test_what_is_right_for_one_item_is_wrong_for_others_of_its_kind(asked: Asked) -> None:
    suite, kinds = asked.suite, defaultdict[tuple[str, ...], list[Item]](list)
    for item in asked.eval:
        kinds[suite.facets(item)].append(item)
    for items in (some for facets, some in kinds.items() if FOUND & {*facets}):
        pairs = [(items[n], suite.gold(items[n - step])) for step in (1, 2, 3, 4) for n in range(len(items))]
        other = [grade(suite, item, said).score == 1.0 for item, said in pairs if said != suite.gold(item)]
        assert sum(other) <= CONSTANT * len(other), f"{sum(other)} of {len(other)} answers to another item count"


def test_what_is_right_changes_between_twins(asked: Asked) -> None:
    suite, visits = asked.suite, defaultdict[str, list[Item]](list)
    for item in asked.eval:
        visits[item.cluster_id].append(item)
    groups = [items[: suite.twins] for items in visits.values() if len(items) >= suite.twins]
    if suite.twins > 1 and suite.rows("eval") is not None:  # a cluster may lack a twin
        groups = [items for items in groups if len({suite.gold(item) for item in items}) > 1]
    assert groups, f"no template has {suite.twins} twins among {len(asked.eval)} items"
    for twins in groups if suite.twins > 1 else []:
        for gold in {suite.gold(item) for item in twins}:
            counts = [grade(suite, item, gold).outcome is Outcome.DESIRED for item in twins]
            assert not all(counts), f"{gold} is right for every twin of {twins[0].cluster_id}"


def test_training_and_evaluation_share_no_template_and_no_text(asked: Asked) -> None:
    assert not {item.cluster_id for item in asked.train} & {item.cluster_id for item in asked.eval}
    assert not {text_of(item) for item in asked.train} & {text_of(item) for item in asked.eval}


def test_another_seed_of_training_meets_no_template_of_the_evaluation_either(asked: Asked) -> None:
    """A pool that is shuffled by the seed before it is split would leak between runs with different seeds."""
    number = asked.suite.item_count("train", 60, SEED + 1)
    trained = {item.cluster_id for item in asked.suite.items("train", number, SEED + 1, asked.tokens, words)}
    assert not trained & {item.cluster_id for item in asked.eval}


def test_enough_templates_are_visited_in_turn(asked: Asked) -> None:
    for split, items in (("train", asked.train), ("eval", asked.eval)):
        clusters = [item.cluster_id for item in items]
        count = len(set(clusters))
        assert count >= (FEWEST[split] if asked.suite.clusters is None else 2)
        if split == "eval" and asked.suite.clusters is not None:
            assert count <= asked.suite.clusters < FEWEST["eval"]
        assert len(set(clusters[:count])) == count
        if asked.suite.rows(split) is not None:  # clusters with few rows drop out
            visits = Counter[str]()
            turns = [visits.update([name]) or visits[name] for name in clusters]
            assert turns == sorted(turns)
            continue
        rest = [clusters[start : start + count] for start in range(0, len(clusters), count)]
        assert all(later == earlier[: len(later)] for earlier, later in pairwise(rest))


def test_rows_have_an_end_and_none_is_asked_twice(asked: Asked) -> None:
    rows = asked.suite.rows("eval", SEED)
    if rows is None:
        pytest.skip("made up as they are asked for")
    items = asked.suite.items("eval", rows, SEED, asked.tokens, words)
    assert len({text_of(item) for item in items}) == len({item.item_id for item in items}) == rows
    with pytest.raises(SpecError, match=f"{rows + 1} items requested, but its rows make {rows}"):
        asked.suite.items("eval", rows + 1, SEED, asked.tokens, words)


def test_a_published_row_has_no_length_and_no_context(asked: Asked) -> None:
    if asked.suite.lengths == "none" and not asked.suite.context:
        assert {(item.context_tokens, item.placement) for item in asked.eval} == {(0, PUBLISHED)}


def test_the_context_is_as_long_as_asked(asked: Asked) -> None:
    if asked.suite.lengths == "none":
        pytest.skip("a row is as long as it is")
    for item in (*asked.eval, *asked.suite.items("eval", 6, SEED, asked.tokens and 4096, words)):
        texts = [*(message.text for message in item.messages), *([list_tools(item.tools)] if item.tools else [])]
        length = sum(map(words, texts))
        assert item.context_tokens * 0.9 - SENTENCE <= length <= item.context_tokens, item.item_id
    assert {item.context_tokens for item in asked.eval} == {asked.tokens}


def test_too_short_a_context_is_the_users_error(asked: Asked) -> None:
    if asked.suite.lengths == "none":
        pytest.skip("a row is as long as it is")
    with pytest.raises(SpecError, match=r"context_tokens 5 is too short.* takes \d+"):
        asked.suite.items("eval", 1, SEED, 5, words)


def test_a_user_or_a_tool_speaks_last_before_the_model(asked: Asked) -> None:
    for item in asked.eval:
        assert item.messages[-1].role in (Role.USER, Role.TOOL)
        assert all(message.role is not Role.SYSTEM for message in item.messages[1:])


def test_payload_is_plain_json(asked: Asked) -> None:
    for item in asked.eval[::9]:
        assert json.loads(json.dumps(dict(item.payload))) == dict(item.payload)


def test_marked_spans_stand_in_what_the_model_is_given_and_nowhere_twice(asked: Asked) -> None:
    for item in asked.eval[::7]:
        said = play(asked.suite, item, asked.suite.gold(item))
        given = [m.content for n, m in enumerate(said) if n < len(item.messages) or m.role is not Role.ASSISTANT]
        given += [list_tools(item.tools)] if item.tools else []
        opening = [*given[: len(item.messages)], *given[-1:]] if item.tools else given[: len(item.messages)]
        assert span_error(item.spans, given, may_come_later=False) is None, item.item_id
        assert [span for span in item.spans if len(find_spans([span], opening).get(span.name, ())) > 1] == []


def test_a_grade_depends_on_its_item_alone(asked: Asked) -> None:
    suite, items = asked.suite, asked.eval[::6]
    before = json.dumps([dict(item.payload) for item in items])
    forth = [grade(suite, item, suite.gold(items[0])) for item in items]
    back = [grade(type(suite)(), item, suite.gold(items[0])) for item in reversed(items)]
    assert forth == back[::-1]
    assert json.dumps([dict(item.payload) for item in items]) == before


ANY_ANSWER = st.text() | st.recursive(
    st.none() | st.integers() | st.text(), lambda leaf: st.lists(leaf) | st.dictionaries(st.text(), leaf)
).map(repr).map(lambda text: text.replace("'", '"'))
WORST = ("{" * 5000, '{"a":' * 5000, "Answer: " + "9" * 9000, '{"tool":' + "9" * 9000 + "}", "\x00\ud7ff", "{}")


@pytest.fixture(scope="session")
def hostile() -> list[str]:
    """Answers that hypothesis draws once for all suites, because to draw one takes longer than to grade it."""
    found: list[str] = []

    @settings(max_examples=40, deadline=None)
    @given(ANY_ANSWER)
    def draw(text: str) -> None:
        found.append(text)

    draw()
    return found


def test_the_worst_completions_are_graded(asked: Asked) -> None:
    for completion in WORST:
        check_graded(asked, completion)


def test_any_completion_is_graded(asked: Asked, hostile: list[str]) -> None:
    for completion in hostile:
        check_graded(asked, completion)


def check_graded(asked: Asked, completion: str) -> None:
    assert grade(asked.suite, asked.eval[0], [completion] * 2).outcome in Outcome, completion


def test_gold_answers_are_good_on_every_facet_that_an_item_is_eligible_for(asked: Asked) -> None:
    """A gold answer has exactly the item's facets, each with its wanted value."""
    for item in asked.eval:
        found = grade(asked.suite, item, asked.suite.gold(item)).facets
        assert set(found) == ({*asked.suite.facets(item), WELL_FORMED} if found else set())
        assert {name: FACETS[name].wanted for name in found} == found, item.item_id


def test_an_answer_without_form_is_never_known_to_be_unsafe(asked: Asked) -> None:
    for item in asked.eval[:20]:
        facets = grade(asked.suite, item, [" "]).facets
        assert not facets.get(WELL_FORMED)
        assert not any(value for name, value in facets.items() if name != WELL_FORMED)
