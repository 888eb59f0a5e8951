"""What happens if the code of an lm-evaluation-harness task raises, prints, exits, sleeps, or returns no text?

    python -m bench.attack tasks

Takes some minutes and needs lm-eval; results: docs/results/attack.md. Each must give one line that names the task, or
an unscored answer, and the task beside it must be asked and graded as usual.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.attack.trial import PATIENCE, Trial, expect
from kvaudit.core.errors import AuditError
from kvaudit.core.records import Message, Outcome, Role
from kvaudit.suites.base import SUITES

ROWS = 8
PLAIN: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "ask",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1},
}
# what a task's function does with a document, or with a document and answers
ACTS = {
    "raises": "raise RuntimeError('a\\nb \\x1b[31m')",
    "raises_what_cannot_be_shown": "raise Unshowable()",
    "ends": "sys.exit(0)",
    "ends_with_words": "sys.exit('bye')",
    "interrupts_itself": "raise GeneratorExit",
    "recurses": "return recurses(*given)",
    "none": "return None",
    "number": "return 3",
    "many": "return ['a', 'b']",
    "mapping": "return {'a': 1}",
    "bytes_": "return b'ab'",
    "half": "return 'half of a character: \\ud800'",
    "empty": "return ''",
    "nul": "return 'a\\0b'",
    "control": "return '\\x1b]0;title\\x07 \\u202e right to left'",
    "not_a_number": "return {'exact_match': float('nan')}",
    "endless": "return {'exact_match': float('inf')}",
    "huge": "return {'exact_match': 10 ** 400}",
    "complex_": "return {'exact_match': 1j}",
    "unhashable": "return {'exact_match': [{}]}",
    "another": "return {'another': 1.0}",
    "nothing": "return {}",
    "true": "return {'exact_match': True}",
    "text": "return {'exact_match': '1'}",
    "prints": "print('a line', file=sys.stderr); return given[0]['ask'] if len(given) == 1 else {'exact_match': 1.0}",
}
HEAD = """
import sys
class Unshowable(Exception):
    def __str__(self): sys.exit(0)
"""
PLACES = ("doc_to_text", "doc_to_target", "process_results", "process_docs")
SLEEPER = """
import sys, time
from kvaudit.suites import task_family
task_family.time_limit.__wrapped__.__defaults__ = (1.0,)
from kvaudit.suites.base import SUITES
from kvaudit.core.records import Message, Role
suite = SUITES.get("lm-eval:plain")()
item = suite.items("eval", 1, 0, 0, len)[0]
suite._task.task.process_results = lambda *_: time.sleep(3600)
print(suite.grade(item, (*item.messages, Message(Role.ASSISTANT, "x"))).note)
"""


def trials(folder: Path) -> Iterator[Trial]:
    """Yield a trial for every act in every function of a task."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    os.environ["KVAUDIT_LM_EVAL_TASKS"] = str(folder)
    _write_tasks(folder)
    yield Trial("the plain task", partial(_check_grades, "plain", Outcome.DESIRED))
    for place, act in itertools.product(PLACES, ACTS):
        yield Trial(f"{place} {act}", partial(_check_survival, f"{place}_{act}"))
    yield Trial("a metric that sleeps for ever", _check_sleeper)
    yield Trial("the plain task afterwards", partial(_check_grades, "plain", Outcome.DESIRED))


def _write_tasks(folder: Path) -> None:
    rows = [{"ask": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    acts = [f"def {name}(*given):\n    {act}\n" for name, act in ACTS.items()]
    (folder / "acts.py").write_text(HEAD + "".join(acts), encoding="utf-8")
    config = PLAIN | {"task": "plain", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    plain = yaml.safe_dump(config)
    (folder / "plain.yaml").write_text(plain, encoding="utf-8")
    for place, act in itertools.product(PLACES, ACTS):
        lines = [line for line in plain.splitlines() if not line.startswith((f"{place}:", "task:"))]
        text = "\n".join([*lines, f"task: {place}_{act}", f"{place}: !function acts.{act}"])
        (folder / f"{place}_{act}.yaml").write_text(text, encoding="utf-8")


def _check_survival(name: str) -> None:
    """Check that the task is refused in one line, or its answers are graded."""
    try:
        _check_grades(name)
    except AuditError as error:
        expect("\n" not in str(error) and "\x1b" not in str(error), f"more than one plain line: {error!r}")
        expect(name in str(error) and "unknown" not in str(error), f"the task is not named: {error}")


def _check_grades(name: str, expected: Outcome | None = None) -> None:
    suite = SUITES.get(f"lm-eval:{name}")()
    for item in suite.items("eval", ROWS, 0, 0, len):
        answer = suite.gold(item)[0] if expected else "x"
        graded = suite.grade(item, (*item.messages, Message(Role.ASSISTANT, answer)))
        expect(expected in (None, graded.outcome), f"the outcome is {graded.outcome}")
        expect(graded.score is None or 0 <= graded.score <= 1, f"the score is {graded.score}")


def _check_sleeper() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SLEEPER], capture_output=True, text=True, timeout=100 * PATIENCE, check=False
    )
    expect("the metric took over" in result.stdout, f"{result.stdout} {result.stderr[-200:]}")
