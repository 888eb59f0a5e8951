"""Does training on compressed rollouts harm alignment? Tables and a figure of the study from a finished sweep.

    python -m bench.study runs/study-map runs/study-math --figure docs/results/study.png

Takes some seconds per run; results: docs/results/study.md (design: docs/study.md).

Drifts are points of desired behaviour, below zero worse, with the 95 % interval over items at these seeds; bold if the
interval that includes seed variance excludes 0 too. Regimes are policies, sorted by what serving under them costs the
dense arm, summed over the suites' scores. Overlap, savings and reward are means over steps and seeds of the telemetry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.claims import count_rows, markdown_table, split_rewards, values_of
from kvaudit.core.policy_names import DENSE_POLICY, short_names
from kvaudit.core.spec_train import BASE_ARM, TrainedArm
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.shared.canvas import MARKERS, PALETTE, add_grid
from kvaudit.reports.sections.shared.words import metric_label, points
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.verdict.contrast import Contrast

SAFETY = ("refusal.unsafe", "agent.attack_success")
OBEYED = "agent.obeyed"  # legitimate orders
SUITES = ("refusal", "agent", "math")
AGENT, FORM, ESCAPED = "agent", "well_formed", "agent.escaped"
METRICS = (*SUITES, *SAFETY, "agent.leak", ESCAPED, OBEYED, f"{AGENT}.{FORM}")
LOSSLESS = 0.02  # the most that the reference loses of a suite's score under a nearly lossless policy
STABLE = 0.86  # the overlap's fifth percentile below which training is said to become unstable


class StudyMap:
    """The contrasts of a sweep at one length, by trained arm and policy."""

    def __init__(self, findings: Findings, data: RunData, context: int) -> None:
        assert data.spec.train is not None, f"{data.run} trained nothing"
        self.findings, self.train, self.context = findings, data.spec.train, context
        records = data.records
        self.data = replace(data, records=records[records["context_tokens"] == context])
        self.reference = findings.drift.comparison.reference
        contrasts = [c for c in findings.drift.contrasts if c.context_tokens == context]
        self._contrasts = {(c.estimand, c.arm, c.policy, c.suite): c for c in contrasts}

    @classmethod
    def of(cls, folder: Path) -> list[StudyMap]:
        """Return one map for each length of a run."""
        data = load_run(folder)
        findings = decide_run(data)
        return [cls(findings, data, context) for context in findings.drift.comparison.contexts]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies under which rollouts were sampled; several in a sweep."""
        return self.train.policies or (self.train.policy,)

    @property
    def title(self) -> str:
        """The run's name and the length of its prompts."""
        return f"{self.data.spec.name}, {self.context} tokens"

    @cached_property
    def regimes(self) -> list[str]:
        """The policies, cheapest to serve first."""
        return sorted(self.policies, key=self.cost)

    @cached_property
    def suites(self) -> list[str]:
        """The evaluated suites."""
        evaluated = set(self.data.records["suite"])
        return [suite for suite in SUITES if suite in evaluated]

    @cached_property
    def labels(self) -> dict[str, str]:
        """A short name for each policy."""
        return short_names(self.policies)

    @cached_property
    def arms(self) -> list[TrainedArm]:
        """The trained arms but the reference, in the order of the spec's arms and of the regimes."""
        trained = [arm for arm in self.train.trained if arm.name != self.reference]
        order = {name: place for place, name in enumerate(self.train.arms)}
        return sorted(trained, key=lambda arm: (order[arm.recipe], self.regimes.index(arm.policy)))

    def cost(self, policy: str) -> float:
        """Return what serving under a policy costs the reference, in score units summed over the suites."""
        return -sum(effect.estimate for effect in self._serving(policy) if effect)

    def lossless(self, policy: str) -> bool:
        """Return whether the reference loses at most LOSSLESS of every suite's score under the policy."""
        return all(effect is not None and effect.estimate >= -LOSSLESS for effect in self._serving(policy))

    def _serving(self, policy: str) -> list[Effect | None]:
        contrasts = (self.serving(policy, suite) for suite in self.suites)
        return [None if contrast is None else contrast.effect for contrast in contrasts]

    def serving(self, policy: str, metric: str) -> Contrast | None:
        """Return the contrast of the reference under a policy with itself uncompressed, if evaluated."""
        return self._contrasts.get(("serving", self.reference, policy, metric))

    def alike(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """Return the contrast of an arm with the reference, both uncompressed."""
        return self._contrasts.get(("alike", arm.name, DENSE_POLICY, metric))

    def deployed(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """Return the contrast of an arm under its training policy with the uncompressed reference."""
        return self._contrasts.get(("deployed", arm.name, arm.policy, metric))

    def amplified(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """Return the contrast of an uncompressed arm with the reference under the arm's policy: training - serving."""
        return self._contrasts.get(("amplification", arm.name, arm.policy, metric))

    def telemetry(self, name: str) -> list[list[dict[str, Any]]]:
        """Return the steps of every seed of an arm."""
        return [rows for (arm, _), rows in self.data.telemetry.items() if arm == name]

    def mean(self, name: str, key: str) -> float:
        """Return the mean of a measure of an arm over all steps and seeds."""
        return fmean(values_of(self.telemetry(name), key))

    def rewards(self, name: str) -> list[float]:
        """Return each seed's mean reward in the second half of the steps."""
        return [fmean(split_rewards(rows)[1]) for rows in self.telemetry(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, help="a PNG to write")
    parser.add_argument("--answers", type=Path, help="a Parquet file to write: every answer's score and facets")
    options = parser.parse_args()
    maps = [study for folder in options.runs for study in StudyMap.of(folder)]
    for study in maps:
        print(f"\n## {study.title}: verdict of the run {study.findings.verdict.status}\n")
        for title, headers, rows in tables(study):
            print(f"\n### {title}\n\n" + "\n".join(markdown_table(headers, rows)))
    if options.answers:
        pd.concat(map(answer_table, maps)).to_parquet(options.answers, index=False, compression="zstd")
    if options.figure:
        draw_figure(maps).savefig(options.figure, dpi=110, metadata={"Software": None})


def answer_table(study: StudyMap) -> pd.DataFrame:
    """Return a row per answer: arm, seed, policy, item, score and facets, without text."""
    records = study.data.records
    facets = [name for name in map(str, records) if name.startswith("facet_") and records[name].ge(0).any()]
    keys = ["arm", "train_seed", "policy", "suite", "context_tokens", "cluster_id", "item_id", "score"]
    return records[[*keys, *facets]]


def tables(study: StudyMap) -> Iterator[tuple[str, list[str], Iterator[list[str]]]]:
    """Yield the title, headers and rows of each table."""
    metrics = [metric for metric in METRICS if study.alike(study.arms[0], metric)]
    against = [metric_label(study.findings.comparison, metric) for metric in metrics]
    yield "What serving costs the dense arm", ["policy", *against, "nearly lossless"], serving_rows(study, metrics)
    yield (
        "How rollouts were sampled",
        ["arm", "overlap p5", "k3 KL", "rejected sequences", "KV tokens saved", "reward, second half, by seed"],
        sampling_rows(study),
    )
    for title, contrast in (
        (f"Trained under it, served uncompressed, against {study.reference}", study.alike),
        (f"Trained and served under it, against {study.reference} uncompressed", study.deployed),
        ("Amplification: what training costs less what serving costs", study.amplified),
    ):
        rows = ([arm.name, *(drift_cell(contrast(arm, metric)) for metric in metrics)] for arm in study.arms)
        yield title, ["arm", *against], rows
    facets = [metric for metric in (*SAFETY, OBEYED, ESCAPED) if metric in metrics]
    yield (
        "Answers that did it, of those that could be read, by seed, uncompressed",
        ["arm", *facets],
        count_rows(study.data, facets),
    )
    yield "Scores by seed, uncompressed, in percent", ["arm", *study.suites], score_rows(study)
    if AGENT in study.suites:
        yield "Answers of agents that have a form, by seed, in percent", ["arm", FORM], form_rows(study)
        kinds = sorted(set(_agent_answers(study)["kind"]))
        title = "Agents by kind of task, uncompressed: mean score in percent, and seed by seed"
        yield title, ["arm", *kinds], kind_rows(study, kinds)
    for facet in (metric for metric in SAFETY if metric in metrics):
        title = f"{facet}: the templates whose answers did it, uncompressed, the commonest of trained arms first"
        yield title, ["arm", "templates", "answers of each"], template_rows(study, facet)


def score_rows(study: StudyMap) -> Iterator[list[str]]:
    """Yield one row per arm: the mean score of each suite by seed."""
    for arm, answers in _uncompressed_answers(study).groupby("arm", observed=True, sort=False):
        means = answers.groupby(["suite", "train_seed"], observed=True)["score"].mean()
        yield [str(arm), *(_percents(means[suite]) for suite in study.suites)]


def form_rows(study: StudyMap) -> Iterator[list[str]]:
    """Yield one row per arm: the share of well-formed agent answers by seed."""
    for arm, answers in _agent_answers(study).groupby("arm", observed=True, sort=False):
        yield [str(arm), _percents(answers.groupby("train_seed")[f"facet_{FORM}"].mean())]


def kind_rows(study: StudyMap, kinds: list[str]) -> Iterator[list[str]]:
    """Yield one row per arm: the agent's mean score by kind of task (clean errand, attack, legitimate order, ...)."""
    for arm, answers in _agent_answers(study).groupby("arm", observed=True, sort=False):
        means = answers.groupby(["kind", "train_seed"])["score"].mean()
        by_seed = (means[kind] for kind in kinds)
        yield [str(arm), *(f"{100 * seeds.mean():.1f} ({_percents(seeds, 0)})" for seeds in by_seed)]


def _percents(shares: pd.Series[float], digits: int = 1) -> str:
    return ", ".join(f"{100 * share:.{digits}f}" for share in shares)


def _uncompressed_answers(study: StudyMap) -> pd.DataFrame:
    return study.data.records[study.data.records["policy"] == DENSE_POLICY]


def _agent_answers(study: StudyMap) -> pd.DataFrame:
    """Return the agent's answers with their kind of task, the last part of the item's id."""
    answers = _uncompressed_answers(study)
    answers = answers[answers["suite"] == AGENT]
    return answers.assign(kind=answers["item_id"].astype(str).str.rpartition("-")[2])


def template_rows(study: StudyMap, facet: str) -> Iterator[list[str]]:
    """Yield one row per arm: on how many templates a facet occurred, and how often on the five most common."""
    suite, _, name = facet.partition(".")
    records = study.data.records
    hits = records[(records["policy"] == DENSE_POLICY) & (records["suite"] == suite) & (records[f"facet_{name}"] == 1)]
    common = hits[hits["arm"] != BASE_ARM]["cluster_id"].value_counts().index[:5]
    for arm, answers in hits.groupby("arm", observed=True, sort=False):
        counted = answers["cluster_id"].value_counts()
        yield [
            str(arm),
            str((counted > 0).sum()),
            ", ".join(f"{template}: {counted.get(template, 0)}" for template in common),
        ]


def serving_rows(study: StudyMap, metrics: list[str]) -> Iterator[list[str]]:
    """Yield one row per policy: what serving under it costs the reference."""
    for policy in study.regimes:
        cells = (drift_cell(study.serving(policy, metric)) for metric in metrics)
        yield [study.labels[policy], *cells, "yes" if study.lossless(policy) else "no"]


def sampling_rows(study: StudyMap) -> Iterator[list[str]]:
    """Yield one row per arm: the mismatch of sampler and learner, savings and rewards."""
    for name in (study.reference, *(arm.name for arm in study.arms)):
        rewards = study.rewards(name)
        yield [
            name,
            f"{study.mean(name, 'mismatch/overlap_p5'):.3f}",
            f"{study.mean(name, 'mismatch/k3_kl'):.4f}",
            f"{study.mean(name, 'mismatch/rejected_sequences'):.1%}",
            f"{study.mean(name, 'token_savings'):.1%}",
            f"{fmean(rewards):.3f} ({', '.join(format(reward, '.3f') for reward in rewards)})",
        ]


def drift_cell(contrast: Contrast | None) -> str:
    """Return a drift with its interval as text, or the reason why there is none."""
    if contrast is None:
        return "not evaluated"
    if contrast.effect is None:
        return ", ".join(reason.code for reason in contrast.reasons)
    effect, recipe = contrast.effect, contrast.recipe
    estimate = points(effect.estimate)
    if recipe and not recipe.low <= 0 <= recipe.high:
        estimate = f"**{estimate}**"
    return f"{estimate} [{points(effect.low)}, {points(effect.high)}]"


def draw_figure(maps: list[StudyMap]) -> Figure:
    """Draw one row per map: both safety facets by regime, and the late rewards."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 3.9 * len(maps)), layout="constrained")
        grid = figure.subplots(len(maps), 3, squeeze=False, width_ratios=[1.2, 1.2, 1.1])
        for row, study in zip(grid, maps, strict=True):
            for axes, metric in zip(row, SAFETY, strict=False):
                _draw_facet(axes, study, metric)
            _draw_rewards(row[2], study)
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside upper center",
            ncols=len(names),
            frameon=False,
            title=f"95 % intervals; colour, full: served uncompressed, hollow: under its policy; shaded: p5 < {STABLE}",
        )
    return figure


def _draw_facet(axes: Axes, study: StudyMap, metric: str) -> None:
    """Draw how much more unwanted behaviour there is: the dense arm served under each policy, and each recipe."""
    axes.axhline(0, color="black", linewidth=0.8)
    _draw_marks(
        axes,
        study,
        [study.serving(policy, metric) for policy in study.regimes],
        0,
        f"{study.reference}, served under it",
    )
    recipes = [recipe for recipe in study.train.arms if recipe != study.reference]
    for place, recipe in enumerate(recipes, 1):
        for contrast, full in ((study.alike, True), (study.deployed, False)):
            contrasts = {arm.policy: contrast(arm, metric) for arm in study.arms if arm.recipe == recipe}
            label = recipe if full else ""
            _draw_marks(
                axes,
                study,
                [contrasts.get(policy) for policy in study.regimes],
                place + (0 if full else 0.35),
                label,
                full=full,
            )
    _label_regimes(axes, study)
    axes.set_title(f"{study.title}: {metric}", loc="left", fontsize=9)
    axes.set_ylabel("points more than dense")


def _draw_marks(
    axes: Axes, study: StudyMap, contrasts: list[Contrast | None], place: float, label: str, full: bool = True
) -> None:
    width = len(study.train.arms) + 0.8
    colour, marker = PALETTE[int(place) % len(PALETTE)], MARKERS[int(place) % len(MARKERS)]
    for position, contrast in enumerate(contrasts):
        if contrast is None or contrast.effect is None:
            continue
        effect = contrast.effect
        x, y = position + (place - (width - 1.8) / 2) / width, -100 * effect.estimate
        axes.plot(
            [x, x], [-100 * effect.high, -100 * effect.low], color=colour, linewidth=1.1, alpha=1 if full else 0.5
        )
        axes.plot(
            x, y, marker, color=colour, markersize=4.5, markerfacecolor=colour if full else "white", label=label or None
        )
        label = ""


def _draw_rewards(axes: Axes, study: StudyMap) -> None:
    """Draw the late reward of every seed."""
    dense = study.rewards(study.reference)
    axes.axhspan(min(dense), max(dense), color=PALETTE[0], alpha=0.25, linewidth=0)
    recipes = [recipe for recipe in study.train.arms if recipe != study.reference]
    for place, recipe in enumerate(recipes, 1):
        for arm in (arm for arm in study.arms if arm.recipe == recipe):
            x = study.regimes.index(arm.policy) + (place - len(recipes) / 2) / (len(recipes) + 2)
            rewards = study.rewards(arm.name)
            axes.plot([x] * len(rewards), rewards, MARKERS[place], color=PALETTE[place], markersize=3.5, alpha=0.8)
    _label_regimes(axes, study)
    axes.set_title("late reward of rollouts by seed; band: dense", loc="left", fontsize=9)


def _label_regimes(axes: Axes, study: StudyMap) -> None:
    """Label the regimes with naive's p5 of the overlap, and shade those below STABLE."""
    naive = {arm.policy: arm.name for arm in study.arms if arm.recipe == "naive"}
    overlap = [study.mean(naive[policy], "mismatch/overlap_p5") for policy in study.regimes]
    names = [f"{study.labels[policy]}\np5 {p5:.2f}" for policy, p5 in zip(study.regimes, overlap, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlim(-0.6, len(names) - 0.4)
    for position, p5 in enumerate(overlap):
        if p5 < STABLE:
            axes.axvspan(position - 0.5, position + 0.5, color=PALETTE[1], alpha=0.07, linewidth=0)
    add_grid(axes)


if __name__ == "__main__":
    main()
