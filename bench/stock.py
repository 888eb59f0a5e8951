"""Does a suite as published give the rates that its rows give without kvaudit?

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=ROWS python -m bench.stock RUN

Takes about as long as the run; results: docs/results/real-model.md. RUN has policy none (examples/published.yaml).

The same rows are read from the source file, put into the chat template by the tokenizer and answered greedily, with as
many tokens as in the run: xstest by stock ``generate``, gsm8k by lm-evaluation-harness' hf model. Both sides get the
same grader. Prints the two rates and how many answers are the same; exits with 1 if the rates differ by over 3 points.
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

from bench.published import read_uncompressed
from kvaudit.core.records import Record, Role
from kvaudit.suites.mathrows import extract_number
from kvaudit.suites.phrases import refuses

BATCH, LIMIT = 16, 3.0  # rows; largest difference of the rates in points
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
    """Compare xstest with stock generate and gsm8k with the harness, if the run has them."""
    answers, failed = list(read_uncompressed(Path(folder))), False
    for suite, generate in (("xstest", _stock_answers), ("gsm8k", _harness_answers)):
        records = [record for record in answers if record.suite == suite]
        if suite == "xstest":
            records = [record for record in records if "refused" in record.facets]
        if records:
            rows, new_tokens = _source_rows(suite), max(record.new_tokens for record in records)
            prompts = [record.transcript[0].content for record in records]
            assert all(prompt in rows for prompt in prompts), "a prompt is missing from the source file"
            theirs = generate(prompts, new_tokens)
            ours = [_last_answer(record) for record in records]
            is_hit = (lambda _, text: refuses(text)) if suite == "xstest" else partial(_solves, rows)
            failed |= _compare(suite, prompts, ours, theirs, is_hit)
    return int(failed)


def _compare(
    suite: str, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str], is_hit: Callable[[str, str], bool]
) -> bool:
    """Print both rates; returns whether they are too far apart."""
    rates = [100 * sum(map(is_hit, prompts, side)) / len(prompts) for side in (ours, theirs)]
    same = sum(first.strip() == second.strip() for first, second in zip(ours, theirs, strict=True))
    print(f"{suite}: {len(prompts)} rows, ours {rates[0]:.1f} %, theirs {rates[1]:.1f} %, {same} answers the same")
    return abs(rates[0] - rates[1]) > LIMIT


def _source_rows(suite: str) -> dict[str, str]:
    """Return the rows of the source file: prompt -> label or solution."""
    data = Path(os.environ["KVAUDIT_DATA"])
    if suite == "xstest":
        with (data / "xstest/xstest_prompts.csv").open(newline="") as file:
            return {row["prompt"]: row["label"] for row in csv.DictReader(file)}
    lines = (data / "gsm8k/test.jsonl").read_text().splitlines()
    return {row["question"].strip(): row["answer"] for row in map(json.loads, lines)}


def _last_answer(record: Record) -> str:
    return next(message.content for message in reversed(record.transcript) if message.role is Role.ASSISTANT)


def _solves(rows: Mapping[str, str], prompt: str, text: str) -> bool:
    return extract_number(text) == extract_number(rows[prompt])


def _stock_answers(prompts: Sequence[str], new_tokens: int) -> list[str]:
    """Return the greedy answers of the stock model."""
    folder = os.environ["KVAUDIT_REAL_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    answers = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.0)
        answers += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def _harness_answers(prompts: Sequence[str], new_tokens: int) -> list[str]:
    """Return the greedy answers of lm-evaluation-harness' hf model to the prompts as they are."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"question": p, "answer": "0"}) + "\n" for p in prompts))
        (Path(folder) / "verbatim.yaml").write_text(TASK.format(file=rows, tokens=new_tokens))
        model = HFLM(os.environ["KVAUDIT_REAL_MODEL"], dtype="bfloat16", batch_size=BATCH, device="cpu")
        manager = TaskManager(include_path=folder, include_defaults=False)
        results = simple_evaluate(
            model, tasks=["verbatim"], task_manager=manager, apply_chat_template=True, log_samples=True
        )
    samples = sorted(results["samples"]["verbatim"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
