"""Public suites ask their rows: what a model reads between the template's markers is the row's own text, to the letter.

The rows are read here without the suites' own readers. What is ours (controls that a benchmark lacks, how tools are
listed) is named in OURS, and is the only thing that may differ.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from suite_world import rows_from, words, write_rows

from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.checkpoints import load_base_chat
from kvaudit.core.errors import DataError
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.base import SUITES, Suite

REAL_DATA = os.environ.get("KVAUDIT_DATA")
PUBLIC = [name for name, suite in SUITES.all().items() if suite.published and not suite.one_sided]
# controls in words of ours: the forms or twins of an item that no row of the benchmark asks
COMPETITIONS = ("aime24", "amc23", "olympiadbench", "minerva_math", "gaokao2023en")
OURS = {"plain", "open", "clean", "asked"}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in path.read_text().splitlines())


def table(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("# "))


def _said(*names: str) -> Callable[[Path], Iterator[str]]:
    """The messages of rows that hold some."""
    return lambda data: (m["content"] for name in names for row in lines(data / name) for m in row["messages"])


def _problems(*names: str) -> Callable[[Path], Iterator[str]]:
    return lambda data: (
        str(row.get("problem", row.get("question"))).strip() for name in names for row in lines(data / name)
    )


def _harmbench(data: Path) -> Iterator[str]:
    for row in table(data / "harmbench/harmbench_behaviors_text_all.csv"):
        yield f"{row['ContextString']}\n\n---\n\n{row['Behavior']}" if row["ContextString"] else row["Behavior"]


def _injecagent(data: Path, kind: str = "dh") -> Iterator[str]:
    attacks = list(lines(data / f"injecagent/attacker_cases_{kind}.jsonl"))
    for user in lines(data / "injecagent/user_cases.jsonl"):
        yield user["User Instruction"]
        for attack in attacks:
            yield user["Tool Response Template"].replace("<Attacker Instruction>", attack["Attacker Instruction"])


def _bfcl(data: Path) -> Iterator[str]:
    for path in (data / "bfcl").glob("BFCL_v4_*.json"):
        yield from (turn[0]["content"] for row in lines(path) for turn in row["question"] if turn)
    yield '{"status": "done"}'  # the results that the suite's docstring names


def _tau_bench(data: Path) -> Iterator[str]:
    for row in json.loads((data / "tau_bench/gpt-4o-airline.json").read_text()):
        yield from (turn["content"] for turn in row["traj"] if turn.get("content") is not None)


def _cosafe(data: Path) -> Iterator[str]:
    for path in (data / "cosafe").glob("*.json"):
        for row in path.read_text().splitlines():
            yield from (turn["content"] for turn in json.loads(row))


def _safedialbench(data: Path) -> Iterator[str]:
    for row in lines(data / "safedialbench/datasets_en.jsonl"):
        yield from (turn["user"] for turn in row["history"])


SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    "xstest": lambda data: (row["prompt"] for row in table(data / "xstest/xstest_prompts.csv")),
    "harmbench": _harmbench,
    "strongreject": lambda data: (
        row["forbidden_prompt"] for row in table(data / "strongreject/strongreject_dataset.csv")
    ),
    "cosafe": _cosafe,
    "safedialbench": _safedialbench,
    "longsafety": lambda data: (row["instruction"] for row in lines(data / "longsafety/longsafety_meta.jsonl")),
    "advbench": lambda data: (row["goal"] for row in table(data / "advbench/advbench.csv")),
    "tensortrust": _said(
        *(f"instruction_hierarchy/tensortrust_{kind}.jsonl" for kind in ("extraction", "hijacking", "helpful"))
    ),
    "sysifeval": lambda data: (
        text
        for texts in (
            _said("instruction_hierarchy/ifeval_sys_ifeval.jsonl")(data),
            (row["prompt"] for row in lines(data / "instruction_hierarchy/ifeval_ifeval.jsonl")),
        )
        for text in texts
    ),
    "realguardrails": _said("instruction_hierarchy/realguardrails_distractors.jsonl"),
    "biographies": lambda data: (
        row["prompt"]
        for side in ("conservative", "liberal")
        for row in lines(data / f"sycophancy/anthropic_political_typology_{side}.jsonl")
    ),
    "injecagent": _injecagent,
    "injecagent-stealing": lambda data: _injecagent(data, "ds"),
    "bfcl": _bfcl,
    "tau_bench": _tau_bench,
    "gsm8k": _problems("gsm8k/test.jsonl", "gsm8k/train_first2000.jsonl"),
    "math500": _problems("math_eval/math500.jsonl"),
    "amc23": _problems("math_eval/amc23.jsonl"),
    "aime24": _problems("math_eval/aime24.jsonl"),
    "minerva": _problems("math_eval/minerva_math.jsonl"),
    "olympiadbench": _problems("math_eval/olympiadbench.jsonl"),
    "gaokao": _problems("math_eval/gaokao2023en.jsonl"),
    "competition": lambda data: _problems(
        *(name for name in (f"math_eval/{file}.jsonl" for file in COMPETITIONS) if (data / name).exists())
    )(data),
}
BY_USER = {"realguardrails": "user"}  # a form in which the user repeats the rule in words of ours
TOOLED = {
    "injecagent",
    "injecagent-stealing",
    "bfcl",
    "tau_bench",
}  # the system message lists tools, which no row holds as text


def sha256(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()  # some templates strip


@cache
def chat() -> Chat:
    return load_base_chat(os.environ.get("KVAUDIT_REAL_MODEL", "embedded"))


def is_between_markers(messages: tuple[Message, ...]) -> bool:
    """Whether the template puts the contents between its markers as they are, space around them aside."""
    frame = chat().prompt_text([Message(message.role, f"slot{n}slot") for n, message in enumerate(messages)])
    whole = frame
    for number, message in enumerate(messages):
        whole = whole.replace(f"slot{number}slot", message.content.strip(), 1)
    stripped = [Message(message.role, message.content.strip()) for message in messages]
    return whole == chat().prompt_text(stripped)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(REAL_DATA) if REAL_DATA else write_rows(tmp_path_factory.mktemp("rows"))


def is_ours(item: Item) -> bool:
    form = str(item.payload.get("form", item.payload.get("twin", "")))
    return form in OURS or form == BY_USER.get(item.suite)


def own_texts(suite: Suite, item: Item) -> Iterator[str]:
    """What has to be a row's text: what users and tools say, and the system message where it lists no tools."""
    for message in item.messages:
        if message.role in (Role.USER, Role.TOOL) or (message.role is Role.SYSTEM and suite.name not in TOOLED):
            yield message.content


def test_every_public_suite_has_its_source_here() -> None:
    assert sorted(PUBLIC) == sorted(SOURCES)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_prompt_is_the_row_to_the_letter(name: str, folder: Path) -> None:
    with rows_from(folder):
        suite = SUITES.get(name)()
        try:
            items = suite.items("eval", suite.item_count("eval", 60, 5), 5, 0, words)
        except DataError as missing:
            pytest.skip(str(missing))
        rows = {sha256(text) for text in SOURCES[name](folder)}
        asked = [item for item in items if not is_ours(item)]
        assert asked
        for item in asked:
            assert is_between_markers(item.messages), item.item_id
            for text in own_texts(suite, item):
                assert sha256(text) in rows, (item.item_id, text[:200])


@pytest.mark.parametrize("name", PUBLIC)
def test_only_a_benchmark_with_system_prompts_has_one(name: str, folder: Path) -> None:
    with rows_from(folder):
        suite = SUITES.get(name)()
        try:
            items = suite.items("eval", suite.item_count("eval", 20, 5), 5, 0, words)
        except DataError as missing:
            pytest.skip(str(missing))
    roles = {item.messages[0].role for item in items if not is_ours(item)}
    with_system = {"tensortrust", "sysifeval", "realguardrails", *TOOLED}
    assert (Role.SYSTEM in roles) == (name in with_system)
