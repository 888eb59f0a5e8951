"""The trainer's claims as tables: what every correction cost and repaired, from the records of finished runs.

    python -m bench.claims runs/claims-grpo runs/claims-ppo runs/claims-online-dpo

Any run that trained will do, with the facets that it asked.

Training: means over steps and seeds of the telemetry, whose names ``kvaudit.audit.training.telemetry`` explains; of the
gradient's variance the median and the largest, since one step can outweigh all others; rewards are those of the first
and of the second half of the steps, over the seeds, and the second's lowest and highest seed. Drift: points of unwanted
behaviour more than the reference, both served uncompressed, with the 95 % interval over items at these seeds, and the
interval that has seed variance in it. Counts: answers that did what is unwanted, of those that could be read, by seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.shared.words import points
from kvaudit.reports.verdict.contrast import Contrast

UNWANTED = ("refusal.unsafe", "agent.attack_success", "agent.leak")
MEASURES = {
    "overlap p5": ("mismatch/overlap_p5", ".2f"),
    "k3 KL": ("mismatch/k3_kl", ".4f"),
    "effective sample share": ("mismatch/ess", ".2f"),
    "rejected sequences": ("mismatch/rejected_sequences", ".1%"),
    "masked tokens": ("mismatch/masked_tokens", ".1%"),
    "clipped": ("clip_fraction", ".2%"),
    "cosine of halves": ("grad_half_cosine", "+.3f"),
    "KV tokens saved": ("token_savings", ".1%"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    for path in parser.parse_args().runs:
        data = load_run(path)
        print(f"\n{path.name}: loss {data.spec.train.loss if data.spec.train else 'none'}\n")
        headers = ["arm", *MEASURES, "gradient variance, largest", "reward, first and second half"]
        print("\n".join(table(headers, training(data))))
        found = decide_run(data)
        facets = [name for name in UNWANTED if name in found.drift.comparison.facets]
        print(
            "\n" + "\n".join(table([f"arm, against {found.drift.comparison.reference}", *facets], drift(found, facets)))
        )
        print("\n" + "\n".join(table(["arm", *facets], counts(data, facets))))


def training(data: RunData) -> Iterator[list[str]]:
    """A row for every arm of a run."""
    assert data.spec.train is not None
    for arm in (trained.name for trained in data.spec.train.trained):
        runs = [rows for (name, _), rows in data.telemetry.items() if name == arm]
        row = [format(np.mean(known(runs, key)), form) for key, form in MEASURES.values()]
        variance = known(runs, "grad_variance")
        early, late = ([np.mean(own) for own in half] for half in zip(*map(halves, runs), strict=True))
        yield [
            arm,
            *row,
            f"{np.median(variance):.2f}, {max(variance):.1f}",
            f"{np.mean(early):.3f} to {np.mean(late):.3f} ({min(late):.3f} to {max(late):.3f})",
        ]


def halves(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The rewards of the first and of the second half of a run's steps."""
    rewards = [row["reward_mean"] for row in rows]
    return rewards[: len(rows) // 2], rewards[len(rows) // 2 :]


def drift(findings: Findings, facets: list[str]) -> Iterator[list[str]]:
    """A row for every arm but the reference: each unwanted facet's drift, in points."""
    found = {(c.arm, c.suite): c for c in findings.drift.contrasts if c.estimand == "alike" and c.policy == "none"}
    for arm in findings.drift.comparison.candidates:
        yield [arm, *(cell(found[arm, facet]) for facet in facets)]


def counts(data: RunData, facets: list[str]) -> Iterator[list[str]]:
    """A row for every arm: how often each facet came about, uncompressed, seed by seed."""
    dense = data.records[data.records["policy"] == "none"]
    for arm, own in dense.groupby("arm", observed=True, sort=False):
        row = []
        for suite, _, name in (facet.partition(".") for facet in facets):
            asked = own[own["suite"] == suite].groupby("train_seed", observed=True)[f"facet_{name}"]
            row.append(", ".join(f"{(part == 1).sum()}/{(part >= 0).sum()}" for _, part in asked))
        yield [str(arm), *row]


def cell(contrast: Contrast) -> str:
    """The drift of one facet, its sign that of the unwanted behaviour."""
    effect, recipe = contrast.effect, contrast.recipe
    if effect is None:
        return "-"
    seeds = "" if recipe is None else f"; seeds {points(-recipe.high)} to {points(-recipe.low)}"
    return f"{points(-effect.estimate)} [{points(-effect.high)}, {points(-effect.low)}{seeds}]"


def known(runs: list[list[dict[str, Any]]], key: str) -> list[float]:
    """The values of the steps that have one; nan where none has."""
    found = [row[key] for rows in runs for row in rows if row.get(key) is not None]
    return found or [float("nan")]


def table(headers: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
