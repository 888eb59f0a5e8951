"""The published page of the default audit, held to what the code prints.

    python -m bench.quickstart RUN      writes docs/results/quickstart.json, and the figures between the page's marks
    python -m bench.quickstart --check  exits with 1 where page, figures and code are not of one version

The figures hold the sha256 of every checkpoint and record file, so that anybody who runs `make audit` can tell whether
it was the same. The check needs no run: it compares the spec, the model that ships and the versions of the suites with
those of the figures, and the page with the figures.
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
SPEC, MODEL = (
    ROOT / "examples" / "quickstart.yaml",
    ROOT / "kvaudit" / "audit" / "training" / "embedded" / "model.safetensors",
)
PAGE, FIGURES = ROOT / "docs" / "results" / "quickstart.md", ROOT / "docs" / "results" / "quickstart.json"
OPENING, CLOSING = "<!-- figures: python -m bench.quickstart RUN -->", "<!-- end of figures -->"
COUNTED = ("attack_success", "unsafe", "obeyed", "escaped", "leak")  # by seed, where nothing was compressed


def main(arguments: Sequence[str]) -> int:
    """Write the figures of a run, or check what is written."""
    if arguments == ["--check"]:
        problems = list(faults())
        for problem in problems:
            print(f"{PAGE.name}: {problem}; run make audit, then python -m bench.quickstart runs/quickstart")
        return 1 if problems else 0
    (run,) = map(Path, arguments)
    figures = figures_of(run)
    write_json(FIGURES, figures)
    before, _, rest = PAGE.read_text().partition(OPENING)
    PAGE.write_text(f"{before}{OPENING}\n{block(figures)}\n{CLOSING}{rest.partition(CLOSING)[2]}")
    return 0


def faults() -> Iterator[str]:
    """How page, figures and code part."""
    figures = read_json(FIGURES)
    for name, now in now_of().items():
        if figures["code"].get(name) != now:
            yield f"its figures are of {name} {figures['code'].get(name)}, the code has {now}"
    if f"{OPENING}\n{block(figures)}\n{CLOSING}" not in PAGE.read_text():
        yield "what stands between its marks is not what the figures give"


def now_of() -> dict[str, Any]:
    """What a run of the default audit would be of, by the code as it is."""
    spec = load_spec(SPEC, NAMES)
    return {
        "spec": spec.sha256,
        "model.safetensors": sha256(MODEL),
        "suites": {name: SUITES.get(name).version for name in spec.evaluate.suites},
    }


def figures_of(run: Path) -> dict[str, Any]:
    """Everything that the page says of a run; raises DataError for one that is no run."""
    data = load_run(run)
    verdict = decide_run(data).verdict
    gated = [d for d in verdict.decisions if d.gated]
    return {
        "code": now_of(),
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
        "counts": counts(run),
        "checkpoints": {
            f"{path.parent.parent.name}/{path.parent.name}": read_json(path)["sha256"]
            for path in sorted((run / "checkpoints").glob("*/*/provenance.json"))
        },
        "records": {path.name: sha256(path) for path in sorted((run / "records").glob("*.jsonl"))},
        "answers": {path.name: answers(path) for path in sorted((run / "records").glob("*.jsonl"))},
    }


def counts(run: Path) -> dict[str, dict[str, list[int]]]:
    """facet -> arm -> how often it happened, by seed, where nothing was compressed."""
    found: dict[str, dict[str, dict[int, int]]] = {name: {} for name in COUNTED}
    for path in sorted((run / "records").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = Record.from_json(line)
            for name in COUNTED if record.policy == "none" else ():
                if name in record.facets:
                    seeds = found[name].setdefault(record.arm, {})
                    seeds[record.train_seed] = seeds.get(record.train_seed, 0) + bool(record.facets[name])
    return {
        name: {arm: [seeds[s] for s in sorted(seeds)] for arm, seeds in arms.items()} for name, arms in found.items()
    }


def answers(path: Path) -> str:
    """sha256 of what was answered, how it was graded and what the cache held; without how long it took."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key not in ("seconds", "kv_bytes_peak")} for row in rows]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the block of the page -------------------------------------------------------------------------------------------


def block(figures: Mapping[str, Any]) -> str:
    """The figures in Markdown."""
    told = ", ".join(f"{count} {status}" for status, count in figures["cells"].items())
    parts = [
        f"Verdict: **{figures['verdict']}** (with seed variance {figures['recipe']}). Gated cells: {told}.",
        table(["cell", "dense", "arm", "drift, wanted direction", ""], map(_cell, _worst(figures["gated"]))),
        table(["served uncompressed, by seed", *figures["counts"][COUNTED[0]]], map(_count, figures["counts"].items())),
        f"`quickstart.json` holds the hashes of all checkpoints, of {len(figures['records'])} record files, and of the "
        "answers of each without `seconds` and `kv_bytes_peak`, which depend on the machine.",
    ]
    return "\n\n".join(parts)


def _worst(gated: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that fail, then the largest drops."""
    known = [cell for cell in gated if cell["drift"]]
    return sorted(known, key=lambda cell: (cell["status"] != "FAIL", cell["drift"][0]))[:8]


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


def table(headers: Sequence[str], rows: Any) -> str:
    """A table of Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
