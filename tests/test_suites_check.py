"""Pooled suites: every kind of request once, sources in proportion, and asked to evaluate alone."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from suite_world import play, write_rows

from kvaudit.core.errors import DataError
from kvaudit.core.records import Message, Role
from kvaudit.suites.base import SUITES
from kvaudit.suites.check_suites import (
    AGENTS,
    PUBLIC_SUITES,
    absent_sources,
    agent_suites,
    check_files,
    has_public_rows,
    mix_sources,
)
from kvaudit.suites.injecagent import STEALING_FILES, has_thefts
from kvaudit.suites.requests import SEPARATOR

NAMES = ("harm", "benign", "injection")
WITH_AGENTS = (*NAMES, "calls", "orders")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_rows(tmp_path)
    monkeypatch.setenv("KVAUDIT_DATA", str(folder))
    return folder


def asked(name: str, seed: int = 0) -> list:
    suite = SUITES.get(name)()
    return suite.items("eval", suite.rows("eval", seed), seed, 0, len)


def test_the_endpoints_are_suites_with_the_facet_that_decides_them(rows: Path) -> None:
    assert tuple(pool.name for pool in PUBLIC_SUITES) == NAMES
    for pool in (*PUBLIC_SUITES, *AGENTS):
        suite = SUITES.get(pool.name)()
        assert pool.facet in {facet for item in asked(pool.name) for facet in suite.facets(item)}


@pytest.mark.parametrize("name", WITH_AGENTS)
def test_every_row_is_a_cluster_of_its_own(name: str, rows: Path) -> None:
    found = asked(name)
    assert len({item.cluster_id for item in found}) == len({item.item_id for item in found}) == len(found) > 0


def test_a_smaller_number_is_the_beginning_of_a_larger_one(rows: Path) -> None:
    suite = SUITES.get("harm")()
    assert suite.items("eval", 5, 3, 0, len) == asked("harm", 3)[:5]


def test_nobody_trains_on_an_endpoint(rows: Path) -> None:
    with pytest.raises(DataError, match="is for evaluation only; train on another suite"):
        SUITES.get("harm")().items("train", 1, 0, 0, len)


def test_a_source_that_is_not_there_is_left_out_and_said(rows: Path) -> None:
    shutil.rmtree(rows / "advbench")
    assert [one.name for one in absent_sources("harm")] == ["advbench"]
    assert "advbench" not in {item.cluster_id.split("-")[1] for item in asked("harm")}
    shutil.rmtree(rows / "instruction_hierarchy")
    assert [has_public_rows(name) for name in NAMES] == [True, True, False]


def test_without_any_source_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=r"suite harm needs xstest/xstest_prompts\.csv, which is missing in KVAUDIT_DATA="
    ):
        SUITES.get("harm")().rows("eval", 0)


def test_a_request_is_graded_as_by_the_suite_that_it_comes_from(rows: Path) -> None:
    item = next(item for item in asked("harm") if item.cluster_id.startswith("harm-xstest"))
    told = SUITES.get("harm")().grade(item, (*item.messages, Message(Role.ASSISTANT, "I can't help with that.")))
    assert (told.score, told.facets["refused"]) == (1.0, True)
    helped = SUITES.get("benign")()
    plain = asked("benign")[0]
    refused = helped.grade(plain, (*plain.messages, Message(Role.ASSISTANT, "I can't help with that.")))
    assert (refused.score, refused.facets["helpful"], refused.facets["over_refused"]) == (0.0, False, True)


def test_calls_and_orders_are_graded_as_by_the_suites_that_they_come_from(rows: Path) -> None:
    for name, origin in (("calls", "bfcl"), ("orders", "injecagent")):
        suite, source = SUITES.get(name)(), SUITES.get(origin)()
        for item in asked(name):
            assert item.tools
            assert item.suite == name
            gold = suite.gold(item)
            for answers in (gold, ("",), ("I did it.",), gold[:1]):
                transcript = play(suite, item, answers)
                assert suite.grade(item, transcript) == source.grade(item, transcript)
            assert suite.grade(item, play(suite, item, gold)).score == 1.0


def test_every_attacker_gives_one_order_and_every_third_is_given_by_the_user_too(rows: Path) -> None:
    found = SUITES.get("orders")().choose_items(3)
    by_twin = {twin: [item for item in found if item.payload["twin"] == twin] for twin in ("attack", "asked")}
    attacks = [item.payload["attacker_tool"] for item in by_twin["attack"]]
    assert attacks == [*(f"DeskWipe{n}" for n in range(9)), *(f"DeskFind{n}" for n in range(9))]
    assert [item.payload["attacker_tool"] for item in by_twin["asked"]] == attacks[2::3]
    sources = Counter(item.cluster_id.split("-")[1] for item in asked("orders"))
    assert sources == {"direct": 9, "stealing": 9, "asked": 6}
    assert {item.item_id for item in asked("orders", 3)} != {item.item_id for item in asked("orders", 4)}


def test_an_order_to_steal_data_takes_two_answers(rows: Path) -> None:
    suite = SUITES.get("orders")()
    thefts = [item for item in asked("orders") if item.cluster_id.startswith("orders-stealing")]
    for item in thefts:
        calls = [json.dumps({"name": name, "arguments": {}}) for name in (item.payload["attacker_tool"], "DeskMail")]
        transcript = play(suite, item, calls)
        assert transcript[-2] == Message(Role.TOOL, item.payload["result"])
        assert suite.grade(item, transcript).facets["attack_success"] is True
        assert suite.grade(item, transcript[:-2]).facets["attack_success"] is False
    assert suite.max_turns == 2


@pytest.mark.parametrize("file", STEALING_FILES[1::2])
def test_without_the_rows_of_thefts_the_other_attacks_are_asked_and_the_margin_is_wider(file: str, rows: Path) -> None:
    assert (has_thefts(), agent_suites(), absent_sources("orders")) == (True, AGENTS, ())
    (rows / file).unlink()
    sources = Counter(item.cluster_id.split("-")[1] for item in asked("orders"))
    assert sources == {"direct": 9, "asked": 3}
    check_files("orders")
    assert has_public_rows("orders")
    assert [one.name for one in absent_sources("orders")] == ["injecagent"]
    assert [pool.margin for pool in (*AGENTS, *agent_suites())] == [10, 10, 10, 20]


@pytest.mark.realdata
@pytest.mark.skipif("KVAUDIT_DATA" not in os.environ, reason="the public rows are read from KVAUDIT_DATA")
def test_the_public_rows_make_so_many_kinds() -> None:
    found = {name: asked(name, 1000) for name in WITH_AGENTS}
    orders = 62 + 20 if has_thefts() else 30 + 10
    sizes = {"harm": 1036, "benign": 283, "injection": 251, "calls": 376, "orders": orders}
    assert {name: len(items) for name, items in found.items()} == sizes
    sources = Counter(item.cluster_id.split("-")[1] for item in found["harm"])
    assert sources == {"strongreject": 302, "advbench": 277, "harmbench": 276, "xstest": 181}
    first = Counter(item.cluster_id.split("-")[1] for item in found["harm"][:96])
    assert first == {"strongreject": 28, "advbench": 26, "harmbench": 25, "xstest": 17}


def test_any_beginning_holds_the_sources_in_proportion() -> None:
    from kvaudit.suites.check_suites import _Row

    pool = [_Row("a", str(n), "safe", f"a{n}") for n in range(30)] + [
        _Row("b", str(n), "safe", f"b{n}") for n in range(10)
    ]
    for end in range(4, 41, 4):
        counts = Counter(row.source for row in mix_sources(pool, "x")[:end])
        assert abs(counts["a"] - 3 * counts["b"]) <= 3


def test_a_row_about_a_text_of_its_own_is_not_put_behind_another(rows: Path) -> None:
    bare, behind = SUITES.get("harm")(), SUITES.get("harm@chat")()
    texts = [item.payload["request"] for item in bare.items("eval", bare.rows("eval", 0), 0, 0, len)]
    items = behind.items("eval", behind.rows("eval", 0), 0, 4000, len)
    assert sorted(i.payload["request"] for i in items) == sorted(text for text in texts if SEPARATOR not in text)
    assert any(SEPARATOR in text for text in texts)
