"""Tasks of lm-evaluation-harness over rows in a folder: the package is the real one, and no hub is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

ANIMALS = ("wolf", "bear", "moose", "koala", "adder", "beetle", "camel", "dingo", "eagle", "ferret")
CODES = ("island", "forest", "olive", "river", "candle", "bridge", "garden", "window", "planet", "silver")
SYSTEM = "You guard the door list. If a rule forbids the answer, say only: I must refuse. Else copy the code line."
TAKE_FIRST = {"function": "take_first"}
PLAIN: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "description": "system",
    "doc_to_text": "user",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 2},
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "options",
    "doc_to_target": "right",
    "generation_kwargs": None,
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
TASKS: dict[str, dict[str, Any]] = {
    "door": {},
    "door_shots": {"num_fewshot": 2, "fewshot_split": "train", "training_split": "train"},
    "door_stop": {"generation_kwargs": {"until": ["code", "."], "max_gen_toks": 12}},
    "door_wrong": {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": False}]},
    "door_filtered": {
        "filter_list": [
            {"name": "as-said", "filter": [TAKE_FIRST]},
            {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(\w+)\.$"}, TAKE_FIRST]},
        ]
    },
    "door_choice": CHOICE,
    "door_text": {"output_type": "loglikelihood", "metric_list": None},
    "door_rolling": {"output_type": "loglikelihood_rolling", "metric_list": None},
    "door_bleu": {"metric_list": [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]},
    "door_copies": {"test_split": "copies"},
    "door_shots_copies": {
        "test_split": "copies", "num_fewshot": 2, "fewshot_split": "train", "training_split": "train"
    },
    "door_begun": {"gen_prefix": "The code:"},
    "door_often": {"repeats": 3},
    "door_code": {"unsafe_code": True},
    "door_lost": {"dataset_path": "nobody/has-this", "dataset_kwargs": None},
}  # fmt: skip


def row(number: int) -> dict[str, Any]:
    names = [ANIMALS[(number + step) % 10] for step in range(4)]
    codes = [CODES[(3 * number + step) % 10] for step in range(4)]
    lines = [f"The code: {name} {code}." for name, code in zip(names, codes, strict=True)]
    return {
        "system": SYSTEM,
        "user": "\n".join([*lines, f"Tell me the code of {names[number % 4]}."]),
        "answer": lines[number % 4],
        "options": [*lines, "I must refuse."],
        "right": number % 4,
        "place": f"place-{number % 3}",
    }


def write_tasks(folder: Path, rows: int = 12) -> Path:
    """The tasks and their rows: ``rows`` to evaluate, four to train on, eight near copies of one, and four others."""
    for split, numbers in (("test", range(rows)), ("train", range(100, 104))):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in numbers))
    near = [
        {**row(0), "user": row(0)["user"].replace("Tell ", f"{word}{' ' * n}")}
        for n in range(1, 5)
        for word in ("Tell", "TELL")
    ]
    copies = near + [row(n) for n in range(1, 5)]
    (folder / "copies.jsonl").write_text("".join(json.dumps(one) + "\n" for one in copies))
    files = {split: str(folder / f"{split}.jsonl") for split in ("test", "train", "copies")}
    for name, changes in TASKS.items():
        config = {**PLAIN, "dataset_kwargs": {"data_files": files}, **changes, "task": name}
        config = {key: value for key, value in config.items() if value is not None}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    (folder / "doors.yaml").write_text(yaml.safe_dump({"group": "doors", "task": ["door", "door_choice"]}))
    return folder


def settle(folder: Path) -> None:
    """Let the data library keep its files in a folder of ours, before it is imported; quietly."""
    os.environ["HF_DATASETS_CACHE"] = str(folder)
