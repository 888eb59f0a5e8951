"""``python -m bench.template_steps``: row 4 of the calibration where a step ends, with more draws of fewer numbers.

How many broken templates still pass moves in steps with their number, and the rate of false passes is highest just
before one. So every design of the row is drawn beside its steps and at C_min; the calibration scans them all. Only the
score at the margin is computed, and no interval: the lower bound lies above the margin where it exceeds the quantile.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from scipy import special

from bench.calibration.case import FULL
from bench.calibration.checks import power, templates
from bench.calibration.checks.templates import TemplateCase
from bench.calibration.streams import blocks
from kvaudit.reports.stats.clustered import cr3_variance, many_totals
from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin, too_uneven
from kvaudit.reports.stats.tango import deff_floors, design_effects, tango_scores

# margin and level -> numbers of templates
STEPS = {
    (0.05, 0.05): (59, 76, 84, 88, 91, 119),
    (0.1, 0.05): (29, 41, 43, 45, 60),
    (0.05, 0.025): (72, 102, 104),
}


def stepping() -> Iterator[TemplateCase]:
    """The cases of row 4 at those numbers, those with most samples first."""
    every = [case for case in templates.cases(FULL) if (case.margin, case.alpha) in STEPS]
    for case in sorted(every, key=lambda case: -case.model.samples):
        enough = case.clusters >= clusters_required(case.margin, case.alpha)
        if enough and case.named and "zipf" not in case.sizes and case.clusters in STEPS[case.margin, case.alpha]:
            yield case


def passed(case: TemplateCase, *, seed: int, draws: int) -> float:
    """The share that the gate passes."""
    m, total = case.model, 0
    drawn = blocks(case.name, seed=seed, simulations=draws, clusters=case.clusters, items=case.items, sizes=case.sizes)
    quantile = float(special.stdtrit(case.clusters - 1, 1 - case.alpha))
    for block in drawn:
        counts = block.counts
        enough = effective_clusters(counts) >= clusters_required(case.margin, case.alpha) - 1e-9
        z = m.draw(block.rng, block.size, counts)
        if not enough or too_uneven(counts, case.margin, case.alpha):
            continue
        t = many_totals(z, counts)
        deff = design_effects(t, cr3_variance(t.residuals, t.counts), floor=deff_floors(z, m.samples, graded=m.graded))
        n = float(counts.sum()) / deff
        within = tango_scores(t.losses / deff, t.gains / deff, n, -case.margin) > quantile
        total += int(shows_margin(t.sums[within], counts, margin=case.margin, alpha=case.alpha).sum())
    return total / draws


def group(case: TemplateCase) -> str:
    """The figure that a case belongs to."""
    m = case.model
    what = "several samples" if m.samples > 1 else "scores between 0 and 1" if m.graded else "one sample"
    if m.among < 1:
        what = "only the largest fifth or half can break"
    return f"margin {100 * case.margin:g} pp, level {case.alpha:g}, {what}"


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=4000)
    asked, started = parser.parse_args(), time.process_time()
    for still in power.cases(FULL):
        rates = replace(still, simulations=asked.draws).rates(asked.seed)
        print(f"{still.design}, true drift {100 * still.model.drift:g} pp: PASS {rates['passed']:.4f}", flush=True)
    found: dict[str, list[tuple[float, str]]] = {}
    for case in stepping():
        rate = passed(case, seed=asked.seed, draws=asked.draws)
        print(f"{case.name}: {rate:.4f}", flush=True)
        found.setdefault(group(case), []).append((rate, case.name))
    for name, own in found.items():
        most, where = max(own)
        error = math.sqrt(max(most, 1 / asked.draws) * (1 - most) / asked.draws)
        print(f"{name}: {len(own)} cases, at most {most:.4f} (error {error:.4f}), {where}")
    print(f"{time.process_time() - started:.0f} core seconds")


if __name__ == "__main__":
    main()
