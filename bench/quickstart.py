"""Does docs/results/quickstart.md match what the default audit gives with this code?

    python -m bench.quickstart RUN        # write docs/results/quickstart.json, and the figures between the page's marks
    python -m bench.quickstart --check    # exit with 1 if page, figures and code are of different versions

Takes 2 seconds; ``make check`` runs the second. The figures hold the sha256 of every checkpoint and record file, so
that anybody who runs `make audit` can compare. The check needs no run: it compares the spec, the embedded model and the
versions of the suites with those of the figures, and the page with the figures.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.names import NAMES
from kvaudit.core.files import read_json, write_json
from kvaudit.core.records import Record
from kvaudit.core.spec import load_spec
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.suites.base import SUITES

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "examples" / "quickstart.yaml"
MODEL = ROOT / "kvaudit" / "audit" / "training" / "embedded" / "model.safetensors"
PAGE, FIGURES = ROOT / "docs" / "results" / "quickstart.md", ROOT / "docs" / "results" / "quickstart.json"
OPENING, CLOSING = "<!-- figures: python -m bench.quickstart RUN -->", "<!-- end of figures -->"
COUNTED = ("attack_success", "unsafe", "obeyed", "escaped", "leak")  # facets that are counted by seed, uncompressed


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--check"]:
        problems = list(problems_of_page())
        for problem in problems:
            print(f"{PAGE.name}: {problem}; run make audit, then python -m bench.quickstart runs/quickstart")
        return 1 if problems else 0
    (run,) = map(Path, arguments)
    figures = figures_of(run)
    write_json(FIGURES, figures)
    before, _, rest = PAGE.read_text().partition(OPENING)
    PAGE.write_text(f"{before}{OPENING}\n{page_block(figures)}\n{CLOSING}{rest.partition(CLOSING)[2]}")
    return 0


def problems_of_page() -> Iterator[str]:
    """Yield the differences between page, figures and code."""
    figures = read_json(FIGURES)
    for name, current in current_versions().items():
        if figures["code"].get(name) != current:
            yield f"its figures were made with {name} {figures['code'].get(name)}, the code has {current}"
    if f"{OPENING}\n{page_block(figures)}\n{CLOSING}" not in PAGE.read_text():
        yield "the text between its marks does not match the figures"


def current_versions() -> dict[str, Any]:
    """Return the versions of spec, model and suites that the default audit has with this code."""
    spec = load_spec(SPEC, NAMES)
    return {
        "spec": spec.sha256,
        "model.safetensors": sha256(MODEL),
        "suites": {name: SUITES.get(name).version for name in spec.evaluate.suites},
    }


def figures_of(run: Path) -> dict[str, Any]:
    """Return all figures of a run; raises DataError if the folder is no run."""
    data = load_run(run)
    verdict = decide_run(data).verdict
    gated = [d for d in verdict.decisions if d.gated]
    return {
        "code": current_versions(),
        "verdict": str(verdict.status),
        "recipe": str(verdict.recipe),
        "cells": {
            status: sum(str(d.status) == status for d in gated) for status in sorted({str(d.status) for d in gated})
        },
        "gated": [
            {
                "arm": d.arm,
                "policy": d.policy,
                "metric": d.suite,
                "reference": None if d.rates is None else round(100 * d.rates.reference, 1),
                "candidate": None if d.rates is None else round(100 * d.rates.candidate, 1),
                "drift": None
                if d.effect is None
                else [round(100 * x, 1) for x in (d.effect.estimate, d.effect.low, d.effect.high)],
                "status": str(d.status),
            }
            for d in gated
        ],
        "counts": facet_counts(run),
        "checkpoints": {
            f"{path.parent.parent.name}/{path.parent.name}": read_json(path)["sha256"]
            for path in sorted((run / "checkpoints").glob("*/*/provenance.json"))
        },
        "records": {path.name: sha256(path) for path in sorted((run / "records").glob("*.jsonl"))},
        "answers": {path.name: answers_sha256(path) for path in sorted((run / "records").glob("*.jsonl"))},
    }


def facet_counts(run: Path) -> dict[str, dict[str, list[int]]]:
    """Return facet -> arm -> how often it occurred uncompressed, by seed."""
    counts: dict[str, dict[str, dict[int, int]]] = {name: {} for name in COUNTED}
    for path in sorted((run / "records").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = Record.from_json(line)
            for name in COUNTED if record.policy == "none" else ():
                if name in record.facets:
                    seeds = counts[name].setdefault(record.arm, {})
                    seeds[record.train_seed] = seeds.get(record.train_seed, 0) + bool(record.facets[name])
    return {
        name: {arm: [seeds[s] for s in sorted(seeds)] for arm, seeds in arms.items()} for name, arms in counts.items()
    }


def answers_sha256(path: Path) -> str:
    """Return the sha256 of a unit's records without seconds and bytes, which depend on the machine."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stable = [{key: value for key, value in row.items() if key not in ("seconds", "kv_bytes_peak")} for row in rows]
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the block of the page -------------------------------------------------------------------------------------------


def page_block(figures: Mapping[str, Any]) -> str:
    """Return the figures in Markdown."""
    statuses = ", ".join(f"{count} {status}" for status, count in figures["cells"].items())
    parts = [
        f"Verdict: **{figures['verdict']}** (with seed variance {figures['recipe']}). Gated cells: {statuses}.",
        markdown_table(["cell", "dense", "arm", "drift, wanted direction", ""], map(_cell, _worst(figures["gated"]))),
        markdown_table(
            ["served uncompressed, by seed", *figures["counts"][COUNTED[0]]], map(_count, figures["counts"].items())
        ),
        f"`quickstart.json` holds the hashes of all checkpoints, of {len(figures['records'])} record files, and of the "
        "answers of each without `seconds` and `kv_bytes_peak`, which depend on the machine.",
    ]
    return "\n\n".join(parts)


def _worst(gated: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the failing cells, then those with the largest drops."""
    measured = [cell for cell in gated if cell["drift"]]
    return sorted(measured, key=lambda cell: (cell["status"] != "FAIL", cell["drift"][0]))[:8]


def _cell(cell: Mapping[str, Any]) -> list[str]:
    estimate, low, high = cell["drift"]
    name = f"{cell['arm']} @ {cell['policy'].partition(',')[0]}, {cell['metric']}"
    return [
        name,
        f"{cell['reference']} %",
        f"{cell['candidate']} %",
        f"{estimate:+} [{low:+}, {high:+}]",
        cell["status"],
    ]


def _count(row: tuple[str, Mapping[str, Sequence[int]]]) -> list[str]:
    name, arms = row
    return [name.replace("_", "\\_"), *(", ".join(map(str, seeds)) for seeds in arms.values())]


def markdown_table(headers: Sequence[str], rows: Any) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
