"""A suite as published against its rows asked without us: stock ``generate``, or lm-evaluation-harness' own hf model.

Run: KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=ROWS python -m bench.stock RUN
RUN has policy none (examples/published.yaml). The same rows are read from the source file, put into the chat template
by the tokenizer itself and answered greedily, as many tokens as the run gave; both sides are graded by the same words.
Prints the two rates, how many answers are alike to the letter, and exits with 1 where a rate is off by more than 3
points.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.published import records
from kvaudit.core.records import Record, Role
from kvaudit.suites.mathrows import extract_number
from kvaudit.suites.phrases import refuses

ROWS, MOST = 16, 3.0  # rows at once; points between the rates
TASK = """\
task: verbatim
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], do_sample: false, max_gen_toks: {tokens}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def main(folder: str) -> int:
    """Compare xstest with stock generate and gsm8k with lm-eval's hf model, where the run has them."""
    found, failed = list(records(Path(folder))), False
    for suite, judged, asked in (("xstest", _refuses, _generated), ("gsm8k", None, _harness)):
        own = [record for record in found if record.suite == suite]
        if suite == "xstest":
            own = [record for record in own if "refused" in record.facets]
        if own:
            rows, most = _source(suite), max(record.new_tokens for record in own)
            prompts = [record.transcript[0].content for record in own]
            assert all(prompt in rows for prompt in prompts), "a prompt is no row of the source"
            theirs = asked(prompts, most)
            ours = [_said(record) for record in own]
            right = judged or partial(_solves, rows)
            failed |= _told(suite, prompts, ours, theirs, right)
    return int(failed)


def _told(
    suite: str, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str], right: Callable[[str, str], bool]
) -> bool:
    """Print how both sides did; whether they are too far apart."""
    rates = [100 * sum(map(right, prompts, side)) / len(prompts) for side in (ours, theirs)]
    alike = sum(one.strip() == other.strip() for one, other in zip(ours, theirs, strict=True))
    print(f"{suite}: {len(prompts)} rows, ours {rates[0]:.1f} %, theirs {rates[1]:.1f} %, {alike} answers alike")
    return abs(rates[0] - rates[1]) > MOST


def _source(suite: str) -> dict[str, str]:
    """The rows of the source file, and what is right of them."""
    data = Path(os.environ["KVAUDIT_DATA"])
    if suite == "xstest":
        with (data / "xstest/xstest_prompts.csv").open(newline="") as file:
            return {row["prompt"]: row["label"] for row in csv.DictReader(file)}
    lines = (data / "gsm8k/test.jsonl").read_text().splitlines()
    return {row["question"].strip(): row["answer"] for row in map(json.loads, lines)}


def _said(record: Record) -> str:
    return next(message.content for message in reversed(record.transcript) if message.role is Role.ASSISTANT)


def _refuses(_: str, text: str) -> bool:
    return refuses(text)


def _solves(rows: Mapping[str, str], prompt: str, text: str) -> bool:
    return extract_number(text) == extract_number(rows[prompt])


def _generated(prompts: Sequence[str], most: int) -> list[str]:
    """Greedy answers of the stock model."""
    folder = os.environ["KVAUDIT_REAL_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    answers = []
    for start in range(0, len(texts), ROWS):
        batch = tokenizer(texts[start : start + ROWS], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=most, do_sample=False, repetition_penalty=1.0)
        answers += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def _harness(prompts: Sequence[str], most: int) -> list[str]:
    """Greedy answers of lm-evaluation-harness' hf model to a task that asks the rows as they are."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"question": p, "answer": "0"}) + "\n" for p in prompts))
        (Path(folder) / "verbatim.yaml").write_text(TASK.format(file=rows, tokens=most))
        model = HFLM(os.environ["KVAUDIT_REAL_MODEL"], dtype="bfloat16", batch_size=ROWS, device="cpu")
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = simple_evaluate(
            model, tasks=["verbatim"], task_manager=manager, apply_chat_template=True, log_samples=True
        )
    samples = sorted(found["samples"]["verbatim"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
