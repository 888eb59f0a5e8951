"""Policies by their text: compositions, mixtures and mappings are matched to what the records hold."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports_synthetic import Design, build, run_spec

from kvaudit.core.policy_names import match_policies, policy_text, short_names
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.verdict import Status

SNAP = "snapkv:budget=96,sink=0,window=8,chunk=64"
KIVI = "kivi:bits=4,group=32"
BOTH = f"{SNAP}+{KIVI}"
DRAWN = f"{SNAP}|none"
WEIGHTED = f"{SNAP}@3|none"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("snapkv:budget=96", "snapkv:budget=96"),
        ({"name": "none"}, "none"),
        ({"name": "snapkv", "budget": 96, "dense": True}, "snapkv:budget=96,dense=true"),
        ({"name": "snapkv", "pin": ["system", "tool"]}, "snapkv:pin=system/tool"),
        ({"compose": [{"name": "snapkv", "budget": 96}, "kivi"]}, "snapkv:budget=96+kivi"),
        ({"mixture": [{"compose": ["snapkv", "kivi"]}, "none"]}, "snapkv+kivi|none"),
        ({"mixture": ["snapkv", "none"], "weights": [3, 1]}, "snapkv@3|none@1"),
        (7, "7"),
    ],
)
def test_a_mapping_is_its_text(value, text):
    assert policy_text(value) == text


def test_a_mapping_that_holds_itself_ends():
    loop: dict = {}
    loop["compose"] = [loop, loop]
    assert len(policy_text(loop)) < 2000


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ("snapkv:budget=96", SNAP),
        ("snapkv:budget=96+kivi", BOTH),
        ("kivi:bits=4+snapkv", BOTH),  # in any order
        ("snapkv|none", DRAWN),
        ("snapkv:budget=64+kivi", "snapkv:budget=64+kivi"),  # not among the known: stays
        ("none|snapkv", "none|snapkv"),
        ("snapkv@2|none@2", DRAWN),
        ("snapkv@6|none@2", WEIGHTED),
        ("none@3|snapkv", "none@3|snapkv"),
        ("kivi:bits=2+snapkv", "kivi:bits=2+snapkv"),
    ],
)
def test_parts_are_matched_one_by_one(asked, known):
    assert match_policies([asked], ["none", BOTH, DRAWN, WEIGHTED, SNAP, KIVI]) == [known]


def test_short_names_of_compositions_and_mixtures():
    assert list(short_names(["none", SNAP, BOTH, DRAWN, WEIGHTED]).values()) == [
        "none",
        "snapkv 96",
        "snapkv 96 + kivi 4 bit",
        "snapkv 96 | none",
        "snapkv 96 @3 | none",
    ]
    twins = short_names([BOTH, BOTH.replace("group=32", "group=64")])
    assert list(twins.values()) == ["snapkv 96 + kivi 4 bit group=32", "snapkv 96 + kivi 4 bit group=64"]


@given(st.lists(st.text("ab:=,+|@1 ", max_size=12), max_size=4, unique=True))
def test_every_known_policy_matches_itself(known):
    assert match_policies(known, known) == known
    assert set(short_names(known)) == set(known)


def test_a_spec_with_a_composition_as_a_mapping_gates_its_records(tmp_path):
    design = Design(
        arms=("dense", "smd"),
        seeds=(1,),
        policies=("none", BOTH),
        suites=("refusal",),
        items=600,
        clusters=100,
        seed_sd=0,
    )
    data = load_run(build(tmp_path / "run", design))
    mapping = {"compose": [{"name": "snapkv", "budget": 96}, "kivi"]}
    row = data.spec.written()
    row["evaluate"]["policies"] = ["none", mapping]
    row["gate"] |= {"primary": [mapping], "estimands": ["alike"]}
    verdict = decide_run(dataclasses.replace(data, spec=run_spec(row))).verdict
    assert {(d.policy, d.status) for d in verdict.decisions if d.gated} == {(BOTH, Status.PASS)}
