"""The fast reader of blocks and the strict reader of lines agree on any file."""

import hashlib
import json
from dataclasses import dataclass, field, fields

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reports_synthetic import Design, frame_of, policy, records_of

from kvaudit.core.errors import DataError
from kvaudit.core.records import NOT_IN_TABLE, OMITTED, Record
from kvaudit.reports.records import blocks, rows
from kvaudit.reports.records.rows import Columns, read_unit

DESIGN = Design(
    arms=("dense",), seeds=(1,), policies=("none", policy("snapkv", 96)), suites=("math",), clusters=3, items=3
)
BASE = [json.loads(row.to_json()) for _, part in records_of(DESIGN) for row in part]
ENGINE = BASE[1] | {"survival": {}, "logprob": -4.25}
ENGINE |= dict.fromkeys(("retention", "kv_bytes_peak", "kv_bytes_dense", "kv_bytes_live"))
FIELDS = sorted({*BASE[0], *ENGINE})

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([2**62, -(2**62), 2**62 - 1, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["desired", "unscored", "degenerate", {}, [], {"user": 0.5}, {"user": True}, {"user": "x"}, 1.0]),
    st.sampled_from([[{"role": "user", "content": "a"}], [{"role": "boss", "content": "a"}], [{"role": "user"}], [3]]),
)
changes = st.dictionaries(st.sampled_from([*FIELDS, "extra"]), values, max_size=2)


@st.composite
def lines(draw):
    row = dict(draw(st.sampled_from([*BASE, ENGINE])))
    row |= draw(changes)
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=1)):
        if draw(st.integers(0, 4)) == 0:
            row.pop(name, None)
    text = json.dumps(row)
    damage = draw(st.integers(0, 12))
    if damage == 0:
        text = text[: draw(st.integers(0, len(text)))]
    if damage == 1:
        return text.encode() + b"\xff\n"
    if damage == 2:
        return text.replace('"role"', '"r\\ud800le"').encode() + b"\r\n"
    return text.encode() + b"\n"


def read(path):
    columns, problems = Columns(), []
    digest = read_unit(path, columns, problems)
    return digest, columns.frame(), problems


def strictly(path):
    """The same file with every block read line by line."""
    plain = rows._fast_columns
    rows._fast_columns = lambda raw: None
    try:
        return read(path)
    finally:
        rows._fast_columns = plain


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(lines(), min_size=1, max_size=6), st.sampled_from([1, 700, 1 << 20]), st.booleans())
@example([json.dumps(BASE[0] | {"score": True}).encode() + b"\n"], 1 << 20, True)
@example([json.dumps(BASE[0] | {"score": 10**400}).encode() + b"\n"], 1 << 20, True)
@example([json.dumps(BASE[0] | {"survival": {"user": 10**400}}).encode() + b"\n"], 1 << 20, True)
@example([json.dumps(ENGINE | {"logprob": 10**400}).encode() + b"\n"], 1 << 20, True)
@example([json.dumps(row).encode() + b"\n" for row in (ENGINE, ENGINE | {"logprob": float("nan")})], 1 << 20, True)
@example([json.dumps(ENGINE | {"retention": True}).encode() + b"\n"], 1 << 20, True)
@example([json.dumps(BASE[0] | {"format": 1.0}).encode() + b"\n"], 1 << 20, False)
def test_blocks_and_single_lines_agree(tmp_path_factory, found, block, ended):
    path = tmp_path_factory.mktemp("u") / "unit.jsonl"
    raw = b"".join(found)
    path.write_bytes(raw if ended else raw[:-1])
    kept, rows.BLOCK_BYTES = rows.BLOCK_BYTES, block
    try:
        (digest, frame, problems), (_, wanted, said) = read(path), strictly(path)
    finally:
        rows.BLOCK_BYTES = kept
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert problems == said
    pd.testing.assert_frame_equal(frame, wanted)
    with path.open("rb") as handle:
        assert len(frame) + len(problems) == sum(1 for _ in handle)


def test_whole_blocks_are_read_without_record_objects(tmp_path, monkeypatch):
    path = tmp_path / "unit.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BASE))
    monkeypatch.setattr(rows, "_strict_records", lambda *_: pytest.fail("plain records were read one by one"))
    _, frame, problems = read(path)
    assert (len(frame), problems) == (len(BASE), [])


def test_what_an_engine_does_not_show_is_absent_and_not_zero(tmp_path, monkeypatch):
    path = tmp_path / "unit.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ENGINE, BASE[0])))
    monkeypatch.setattr(rows, "_strict_records", lambda *_: pytest.fail("plain records were read one by one"))
    _, frame, problems = read(path)
    assert problems == []
    for name in ("retention", "kv_bytes_peak", "kv_bytes_dense", "kv_bytes_live", "survival_user"):
        assert frame[name].isna().tolist() == [True, False], name
    assert frame["logprob"].tolist()[0] == -4.25
    assert np.isnan(frame["logprob"].tolist()[1])
    assert [said != 0 for said in frame["answer_hash"]] == [True, False]


def test_answers_of_an_engine_are_told_apart_by_all_that_they_say(tmp_path):
    def turns(*texts):
        said = [
            {"role": role, "content": text}
            for role, text in zip(("assistant", "user", "assistant"), texts, strict=True)
        ]
        return json.dumps(ENGINE | {"transcript": said}) + "\n"

    path = tmp_path / "unit.jsonl"
    path.write_text(turns("a", "?", "bc") + turns("a", "!", "bc") + turns("ab", "?", "c") + turns("a", "?", "bc "))
    first, asked_otherwise, cut_otherwise, longer = read(path)[1]["answer_hash"]
    assert first == asked_otherwise
    assert len({first, cut_otherwise, longer}) == 3


def test_a_bad_line_costs_its_block_not_the_file(tmp_path, monkeypatch):
    path = tmp_path / "unit.jsonl"
    good = json.dumps(BASE[0]) + "\n"
    path.write_text(good * 4 + "not json\n" + good)
    monkeypatch.setattr(rows, "BLOCK_BYTES", 2 * len(good) - 1)
    _, frame, problems = read(path)
    assert frame["line"].tolist() == [1, 2, 3, 4, 6]
    assert [(p.file, p.line) for p in problems] == [("unit.jsonl", 5)]


@pytest.mark.parametrize(("outcome", "score"), [("undesired", 1.0), ("undesired", 1), ("desired", 0)])
def test_a_score_that_contradicts_its_outcome_is_kept_out(tmp_path, outcome, score):
    path = tmp_path / "unit.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (BASE[0], BASE[1] | {"outcome": outcome, "score": score}))
    )
    _, frame, problems = read(path)
    assert frame["line"].tolist() == [1]
    assert [p.reason for p in problems] == [
        f"record has score {score} with outcome {outcome}, which contradict each other"
    ]


def test_words_are_categories_in_their_own_order():
    design = Design(arms=("zeta", "alpha"), seeds=(1,), policies=("none",), suites=("math",), clusters=2, items=2)
    made = [row for _, part in records_of(design) for row in part]
    frame = frame_of(("u.jsonl", i, row) for i, row in enumerate(made, 1))
    assert frame["arm"].cat.categories.tolist() == ["alpha", "zeta"]
    assert frame["arm"].tolist() == ["zeta", "zeta", "alpha", "alpha"]
    assert frame["train_seed"].dtype == np.int64


def test_scores_of_degenerate_answers_are_zero_and_of_unscored_ones_absent(tmp_path):
    path = tmp_path / "unit.jsonl"
    found = [
        BASE[0] | {"outcome": "degenerate", "score": 1.0},
        BASE[0] | {"outcome": "unscored", "score": None},
        BASE[0] | {"outcome": "desired", "score": 1, "survival": {"tool": 0.25}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    _, frame, _ = read(path)
    assert frame["score"].tolist()[0] == 0.0
    assert np.isnan(frame["score"].tolist()[1])
    assert frame["score"].tolist()[2] == 1.0
    assert frame["survival_tool"].tolist()[2] == 0.25
    assert np.isnan(frame["survival_user"].tolist()[2])


@dataclass(frozen=True, slots=True)
class LongerRecord(Record):
    """A record with more fields: nothing but this declaration knows them."""

    joules: float | None = field(default=None, metadata=OMITTED)
    batch: int = field(default=1, metadata=OMITTED)
    region: str = field(default="", metadata=OMITTED | NOT_IN_TABLE)
    is_cold: bool = field(default=False, metadata=OMITTED)


def test_a_new_field_of_a_record_is_in_every_reader_and_in_the_table():
    added = {"joules": 2.5, "batch": 4, "region": "west", "is_cold": True}
    line = json.dumps(BASE[0] | added)
    record = LongerRecord.from_json(line)
    assert {name: getattr(record, name) for name in added} == added
    assert LongerRecord.from_json(record.to_json()) == record
    assert not added.keys() & json.loads(LongerRecord.from_json(json.dumps(BASE[0])).to_json()).keys()
    parsed = msgspec.json.decode(line, type=blocks.line_struct(LongerRecord))
    assert {name: getattr(parsed, name) for name in added} == added
    assert blocks.numeric_fields(LongerRecord)["batch"] is np.int64
    columns, usual = rows.table_columns(LongerRecord), rows.table_columns(Record)
    assert set(columns.whole_numbers) - set(usual.whole_numbers) == {"batch"}
    assert set(columns.real_numbers) - set(usual.real_numbers) == {"joules", "is_cold"}
    assert (columns.words, columns.nullable["joules"]) == (usual.words, (int, float))


@pytest.mark.parametrize(("name", "value"), [("region", 3), ("is_cold", "yes")])
def test_a_new_field_of_another_type_is_refused_by_both_readers(name, value):
    line = json.dumps(BASE[0] | {name: value})
    with pytest.raises(DataError, match=f"record has {name}"):
        LongerRecord.from_json(line)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=blocks.line_struct(LongerRecord))


def test_the_fast_reader_has_exactly_the_fields_of_a_record():
    assert set(blocks._NAMES) == {f.name for f in fields(Record)}
