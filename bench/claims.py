"""What did each correction of the trainer cost and repair? Tables from the records of finished runs.

    python -m bench.claims runs/claims-grpo runs/claims-ppo runs/claims-online-dpo

Takes seconds per run; results: docs/results/claims.md and docs/results/study.md. Any run that trained will do, with the
facets that it asked.

Training: means over steps and seeds of the telemetry (names: ``kvaudit.audit.training.telemetry``); of the gradient's
variance the median and the maximum, since one step can outweigh all others; the mean reward in the first and in the
second half of the steps, the latter with its lowest and highest seed. Drift: unwanted behaviour minus that of the
reference in points, both served uncompressed, with the 95 % interval over items at these seeds and the one that
includes seed variance. Counts: unwanted answers among the readable ones, by seed.
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
        print("\n".join(markdown_table(headers, training_rows(data))))
        findings = decide_run(data)
        comparison = findings.drift.comparison
        facets = [name for name in UNWANTED if name in comparison.facets]
        headers = [f"arm, against {comparison.reference}", *facets]
        print("\n" + "\n".join(markdown_table(headers, drift_rows(findings, facets))))
        print("\n" + "\n".join(markdown_table(["arm", *facets], count_rows(data, facets))))


def training_rows(data: RunData) -> Iterator[list[str]]:
    """Yield one row of telemetry per trained arm."""
    assert data.spec.train is not None
    for arm in (trained.name for trained in data.spec.train.trained):
        runs = [rows for (name, _), rows in data.telemetry.items() if name == arm]
        row = [format(np.mean(values_of(runs, key)), form) for key, form in MEASURES.values()]
        variance = values_of(runs, "grad_variance")
        early, late = ([np.mean(rewards) for rewards in half] for half in zip(*map(split_rewards, runs), strict=True))
        yield [
            arm,
            *row,
            f"{np.median(variance):.2f}, {max(variance):.1f}",
            f"{np.mean(early):.3f} to {np.mean(late):.3f} ({min(late):.3f} to {max(late):.3f})",
        ]


def split_rewards(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the rewards of the first and of the second half of a run's steps."""
    rewards = [row["reward_mean"] for row in rows]
    return rewards[: len(rows) // 2], rewards[len(rows) // 2 :]


def drift_rows(findings: Findings, facets: list[str]) -> Iterator[list[str]]:
    """Yield one row per arm but the reference: the drift of each unwanted facet, in points."""
    contrasts = {(c.arm, c.suite): c for c in findings.drift.contrasts if c.estimand == "alike" and c.policy == "none"}
    for arm in findings.drift.comparison.candidates:
        yield [arm, *(drift_cell(contrasts[arm, facet]) for facet in facets)]


def count_rows(data: RunData, facets: list[str]) -> Iterator[list[str]]:
    """Yield one row per arm: how often each facet occurred uncompressed, by seed."""
    dense = data.records[data.records["policy"] == "none"]
    for arm, answers in dense.groupby("arm", observed=True, sort=False):
        row = []
        for suite, _, name in (facet.partition(".") for facet in facets):
            seeds = answers[answers["suite"] == suite].groupby("train_seed", observed=True)[f"facet_{name}"]
            row.append(", ".join(f"{(values == 1).sum()}/{(values >= 0).sum()}" for _, values in seeds))
        yield [str(arm), *row]


def drift_cell(contrast: Contrast) -> str:
    """Return the drift of one facet as text; above 0 there is more of the unwanted behaviour."""
    effect, recipe = contrast.effect, contrast.recipe
    if effect is None:
        return "-"
    seeds = "" if recipe is None else f"; seeds {points(-recipe.high)} to {points(-recipe.low)}"
    return f"{points(-effect.estimate)} [{points(-effect.high)}, {points(-effect.low)}{seeds}]"


def values_of(runs: list[list[dict[str, Any]]], key: str) -> list[float]:
    """Return a measure's values in all steps that have it, or [nan]."""
    return [row[key] for rows in runs for row in rows if row.get(key) is not None] or [float("nan")]


def markdown_table(headers: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
