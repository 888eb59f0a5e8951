"""How often does the gate pass a loss of exactly the margin, at the numbers of templates where that is most likely?

    python -m bench.template_steps [--seed 8] [--draws 4000]

Takes half a minute; results: docs/results/gate.md.

How many broken templates still pass moves in steps with the number of templates, and the rate of false passes is
highest just before a step. So every design of row 4 of the calibration is simulated beside its steps and at C_min, with
more draws; the calibration scans all numbers. No interval is computed: the lower bound lies above the margin if the
score at the margin exceeds the quantile.
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
STEPS = {(0.05, 0.05): (59, 76, 84, 88, 91, 119), (0.1, 0.05): (29, 41, 43, 45, 60), (0.05, 0.025): (72, 102, 104)}


def cases_at_steps() -> Iterator[TemplateCase]:
    """Yield the cases of row 4 at these numbers of templates, those with most samples first."""
    cases = [case for case in templates.cases(FULL) if (case.margin, case.alpha) in STEPS]
    for case in sorted(cases, key=lambda case: -case.model.samples):
        enough = case.clusters >= clusters_required(case.margin, case.alpha)
        if enough and case.named and "zipf" not in case.sizes and case.clusters in STEPS[case.margin, case.alpha]:
            yield case


def pass_rate(case: TemplateCase, *, seed: int, draws: int) -> float:
    """Return the share of audits that the gate passes."""
    m, total = case.model, 0
    drawn_blocks = blocks(
        case.name, seed=seed, simulations=draws, clusters=case.clusters, items=case.items, sizes=case.sizes
    )
    quantile = float(special.stdtrit(case.clusters - 1, 1 - case.alpha))
    for block in drawn_blocks:
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


def group_name(case: TemplateCase) -> str:
    """Return the figure of the calibration to which a case belongs."""
    m = case.model
    kind = "several samples" if m.samples > 1 else "scores between 0 and 1" if m.graded else "one sample"
    if m.among < 1:
        kind = "only the largest fifth or half can break"
    return f"margin {100 * case.margin:g} pp, level {case.alpha:g}, {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=4000)
    options, started = parser.parse_args(), time.process_time()
    for power_case in power.cases(FULL):
        passed = replace(power_case, simulations=options.draws).rates(options.seed)["passed"]
        drift = f"{power_case.design}, true drift {100 * power_case.model.drift:g} pp"
        print(f"{drift}: PASS {passed:.4f}", flush=True)
    groups: dict[str, list[tuple[float, str]]] = {}
    for case in cases_at_steps():
        rate = pass_rate(case, seed=options.seed, draws=options.draws)
        print(f"{case.name}: {rate:.4f}", flush=True)
        groups.setdefault(group_name(case), []).append((rate, case.name))
    for name, rates in groups.items():
        highest, case_name = max(rates)
        error = math.sqrt(max(highest, 1 / options.draws) * (1 - highest) / options.draws)
        print(f"{name}: {len(rates)} cases, at most {highest:.4f} (error {error:.4f}), {case_name}")
    print(f"{time.process_time() - started:.0f} core seconds")


if __name__ == "__main__":
    main()
