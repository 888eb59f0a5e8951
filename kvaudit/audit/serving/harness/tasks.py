"""Our suites as tasks of lm-evaluation-harness, for any of its models: YAML, rows, and the suite's own grader.

    DIR/kvaudit_refusal.yaml     the task
    DIR/kvaudit_refusal.jsonl    its rows: prompt, cluster_id, and what the suite needs to grade
    DIR/utils.py                 reads the rows and grades, by importing this file

A task of the harness is one prompt of a system and a user message and one answer, so what takes several turns, or opens
in the middle of a dialogue, stays out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvaudit.audit.sampling.exchange import graded
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.files import write_output
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.base import SUITES, Suite

UTILS = '''"""Written by kvaudit: the rows beside this file, graded by the suite that made them."""

from pathlib import Path

from kvaudit.audit.serving.harness.tasks import read_rows, results  # noqa: F401 - the tasks name both


def documents(rows, **_):
    return read_rows(Path(__file__).with_name(rows))
'''
_FUNCTIONS = "custom_dataset: !function utils.documents\nprocess_results: !function utils.results\n"
_OPENINGS = ((Role.USER,), (Role.SYSTEM, Role.USER))


class WrittenTask(NamedTuple):
    """One task that was written: how many items it holds, and how many of the suite stayed out."""

    name: str
    items: int
    left_out: int


def write_tasks(folder: Path, suite: Suite, items: Sequence[Item]) -> list[WrittenTask]:
    """Write a suite's items as a task, or as two where some give options; raises SpecError and RunError."""
    one_turn = [item for item in items if suite.max_turns == 1 or suite.options(item)]
    fit = [item for item in one_turn if tuple(message.role for message in item.messages) in _OPENINGS]
    if not fit:
        why = "opens in the middle of a dialogue" if one_turn else f"takes {suite.max_turns} turns"
        raise SpecError(f"suite {suite.name} {why}, and a task of the harness is one question and one answer")
    write_output(folder / "utils.py", UTILS)
    kinds = {False: f"kvaudit_{suite.name}", True: f"kvaudit_{suite.name}_choice"}
    written = []
    for chooses, name in kinds.items():
        own = [item for item in fit if bool(suite.options(item)) is chooses]
        if own:
            rows = "".join(json.dumps(_row(suite, item), ensure_ascii=False) + "\n" for item in own)
            write_output(folder / f"{name}.jsonl", rows)
            text = yaml.safe_dump(_config(name, suite, own, chooses=chooses), sort_keys=False) + _FUNCTIONS
            write_output(folder / f"{name}.yaml", text)
            written.append(WrittenTask(name, len(own), 0))
    return [written[0]._replace(left_out=len(items) - len(fit)), *written[1:]]


def read_rows(path: Path) -> dict[str, Any]:
    """The documents of a task, as the harness wants them."""
    from datasets import Dataset

    # not by splitlines, to which what JSON leaves as it is (U+2028 in somebody's prose) ends a line too
    lines = path.read_text(encoding="utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}


def results(document: dict[str, Any], answers: Sequence[Any]) -> dict[str, float]:
    """The metrics of one document: the suite's score, and every facet that the answer can be read for.

    An answer that the suite leaves unscored has none. That an answer was cut off is not known here.
    """
    suite = SUITES.get(document["suite"])()
    if suite.version != document["suite_version"]:
        raise DataError(
            f"rows of suite {suite.name} are of version {document['suite_version']}, this kvaudit has {suite.version}; "
            "write them again with kvaudit harness tasks"
        )
    item = _item(document)
    answer = answers[0]
    if document["options"]:
        worth = suite.weigh(item, [logprob for logprob, _greedy in answers])
        # the option that weighs most is the answer
        answer = document["options"][max(range(len(worth)), key=worth.__getitem__)]
    grade = graded(suite, item, (*item.messages, Message(Role.ASSISTANT, answer)), "stop")
    facets = {name: float(value) for name, value in grade.facets.items() if value is not None}
    return facets if grade.score is None else {"score": grade.score, **facets}


def _row(suite: Suite, item: Item) -> dict[str, Any]:
    texts = {str(message.role): message.content for message in item.messages}
    return {
        "suite": suite.name,
        "suite_version": suite.version,
        "item_id": item.item_id,
        "cluster_id": item.cluster_id,
        "placement": item.placement,
        "context_tokens": item.context_tokens,
        "system": texts.get("system", ""),
        "user": texts["user"],
        "gold": suite.gold(item)[0],
        "options": list(suite.options(item)),
        "payload": json.dumps(dict(item.payload)),  # as text: rows of one table must all have the same fields
    }


def _item(document: dict[str, Any]) -> Item:
    system = (Message(Role.SYSTEM, document["system"]),) if document["system"] else ()
    return Item(
        suite=document["suite"],
        item_id=document["item_id"],
        cluster_id=document["cluster_id"],
        messages=(*system, Message(Role.USER, document["user"])),
        context_tokens=document["context_tokens"],
        placement=document["placement"],
        payload=json.loads(document["payload"]),
    )


def _config(name: str, suite: Suite, items: Sequence[Item], *, chooses: bool) -> dict[str, Any]:
    """The task but for its functions; where the harness wants a text, the name of a column stands for its value."""
    facets = dict.fromkeys(name for item in items for name in (*suite.facets(item), WELL_FORMED))
    better = {"score": True, **{name: FACETS[name].wanted for name in facets}}
    answer: dict[str, Any] = {"doc_to_choice": "options", "target_delimiter": ""}
    if not chooses:
        settings = {"until": list(suite.until), "max_gen_toks": suite.max_new_tokens}
        answer = {"generation_kwargs": {**settings, "do_sample": False, "temperature": 0.0}}
    return {
        "task": name,
        "tag": "kvaudit",
        "dataset_kwargs": {"rows": f"{name}.jsonl"},
        "test_split": "test",
        "output_type": "multiple_choice" if chooses else "generate_until",
        "description": "system",
        "doc_to_text": "user",
        "doc_to_target": "gold",
        **answer,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": higher} for metric, higher in better.items()
        ],
        "metadata": {"version": suite.version},
    }
