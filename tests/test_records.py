"""How a record is made: from whose answer it is, what was said, what a grader made of it, and what the cache held."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from test_layers import FILES, module_of

from kvaudit.core.errors import DataError
from kvaudit.core.records import (
    RECORD_FORMAT,
    CacheUse,
    Grade,
    Item,
    Message,
    Outcome,
    Record,
    Role,
    Serving,
    UngradedAnswer,
)
from kvaudit.reports.records.rows import check_record

SERVING = Serving("run", "sha", "dense", 3, "none", "hash", "math", "2", 192)
ITEM = Item("math", "math-1", "sums", (Message(Role.USER, "1+1?"),), 192, "front")
SPOKEN = UngradedAnswer(1, "stop", 9, 4, 0.5, (*ITEM.messages, Message(Role.ASSISTANT, "2")), logprob=-0.25)
RIGHT = Grade(Outcome.DESIRED, 1.0, facets={"solved": True})


def test_a_record_says_what_its_parts_say() -> None:
    record = Record.of(SERVING, ITEM, RIGHT, SPOKEN, CacheUse(0.5, {"user": 0.25}, 10, 20, 8))
    assert (record.arm, record.train_seed, record.suite, record.suite_version) == ("dense", 3, "math", "2")
    assert (record.item_id, record.cluster_id, record.placement) == ("math-1", "sums", "front")
    assert (record.sample_index, record.new_tokens, record.seconds, record.logprob) == (1, 4, 0.5, -0.25)
    assert (record.retention, record.survival, record.kv_bytes_live, record.spans) == (0.5, {"user": 0.25}, 8, {})
    assert (record.outcome, record.score, record.facets) == (Outcome.DESIRED, 1.0, {"solved": True})
    assert Record.from_json(record.to_json()) == record


def test_what_a_server_said_instead_of_an_answer_is_recorded_and_survives_another_grade() -> None:
    spoken = SPOKEN._replace(finish_reason="error", unanswered="status 400: <b>too long</b>")
    failed = Record.of(SERVING, ITEM, Grade(Outcome.UNSCORED, None), spoken, CacheUse())
    assert json.loads(failed.to_json())["unanswered"] == "status 400: <b>too long</b>"
    assert Record.from_json(failed.to_json()) == failed
    assert failed.with_grade("3", ITEM, RIGHT, unsure=False).unanswered == "status 400: <b>too long</b>"


def test_half_a_character_in_a_servers_words_is_shown_and_loses_no_record() -> None:
    spoken = SPOKEN._replace(finish_reason="error", unanswered="status 400: \ud800")
    failed = Record.of(SERVING, ITEM, Grade(Outcome.UNSCORED, None), spoken, CacheUse())
    line = json.dumps(json.loads(failed.to_json()))  # JSON can spell it, a file in UTF-8 cannot hold it
    assert check_record(Record.from_json(line)).unanswered == "status 400: ⟨U+D800⟩"


def test_a_record_with_an_answer_says_nothing_instead_of_it() -> None:
    line = Record.of(SERVING, ITEM, RIGHT, SPOKEN, CacheUse()).to_json()
    assert "unanswered" not in json.loads(line)
    with pytest.raises(DataError, match="record has unanswered '3', wanted text or no key"):
        Record.from_json(json.dumps({**json.loads(line), "unanswered": 3}))


def test_a_cache_that_nobody_shows_has_no_numbers() -> None:
    record = Record.of(SERVING, ITEM, RIGHT, SPOKEN, CacheUse())
    assert (record.retention, record.kv_bytes_peak, record.kv_bytes_dense, record.survival) == (None, None, None, {})


def test_an_answer_that_is_graded_again_stays_and_its_grade_is_another() -> None:
    old = replace(Record.of(SERVING, ITEM, RIGHT, SPOKEN, CacheUse()), format=1)
    wrong = Grade(Outcome.UNDESIRED, 0.0, "someone", facets={"solved": False})
    new = old.with_grade("3", replace(ITEM, cluster_id="other"), wrong, unsure=True)
    assert (new.suite_version, new.cluster_id, new.outcome, new.score) == ("3", "other", Outcome.UNDESIRED, 0.0)
    assert (new.judge, new.facets, new.unsure, new.format) == ("someone", {"solved": False}, True, RECORD_FORMAT)
    kept = {
        name: getattr(old, name)
        for name in ("suite_version", "cluster_id", "outcome", "score", "judge", "facets", "unsure", "format")
    }
    assert replace(new, **kept) == old


def test_a_line_that_nests_too_deeply_is_no_record() -> None:
    with pytest.raises(DataError, match="record is not JSON"):
        Record.from_json("[" * 200_000)


def test_a_record_is_made_in_one_place() -> None:
    """``Record.of``, which calls the class by another name."""
    assert [module_of(path) for path in FILES if re.search(r"\bRecord\(", path.read_text())] == []
