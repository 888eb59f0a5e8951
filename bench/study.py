"""The map of the study (docs/study.md) from the records of a finished sweep: tables, and a figure.

    python -m bench.study runs/study-map runs/study-math --figure docs/results/study.png

Drifts are points of desired behaviour, below zero worse, with the 95 % interval over items at these seeds; bold where
the interval that has seed variance in it leaves out 0 as well. Regimes stand in the order of what serving costs the
dense arm, summed over the suites' scores. Overlap, what is saved and reward are means over steps and seeds of the
telemetry.
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

from bench.claims import counts, halves, known, table
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
OBEYED = "agent.obeyed"  # orders that do count
SUITES = ("refusal", "agent", "math")
AGENT, FORM, ESCAPED = "agent", "well_formed", "agent.escaped"
METRICS = (*SUITES, *SAFETY, "agent.leak", ESCAPED, OBEYED, f"{AGENT}.{FORM}")
LOSSLESS = 0.02  # of a suite's score: what the reference may lose under a policy that is called nearly lossless
STABLE = 0.86  # of the overlap's fifth percentile: a line that training is said to want


class Map:
    """A sweep's contrasts at one length, by what was trained under which policy."""

    def __init__(self, found: Findings, data: RunData, context: int) -> None:
        assert data.spec.train is not None, f"{data.run} trained nothing"
        self.found, self.train, self.context = found, data.spec.train, context
        records = data.records
        self.data = replace(data, records=records[records["context_tokens"] == context])
        self.reference = found.drift.comparison.reference
        here = [c for c in found.drift.contrasts if c.context_tokens == context]
        self._contrasts = {(c.estimand, c.arm, c.policy, c.suite): c for c in here}

    @classmethod
    def of(cls, folder: Path) -> list[Map]:
        """A map for every length that was asked."""
        data = load_run(folder)
        found = decide_run(data)
        return [cls(found, data, context) for context in found.drift.comparison.contexts]

    @property
    def policies(self) -> tuple[str, ...]:
        """All that rollouts were sampled under: of a sweep several."""
        return self.train.policies or (self.train.policy,)

    @property
    def title(self) -> str:
        """The run, and how long its prompts are."""
        return f"{self.data.spec.name}, {self.context} tokens"

    @cached_property
    def regimes(self) -> list[str]:
        """The policies, cheapest to serve first."""
        return sorted(self.policies, key=self.cost)

    @cached_property
    def suites(self) -> list[str]:
        """Those that were asked."""
        asked = set(self.data.records["suite"])
        return [suite for suite in SUITES if suite in asked]

    @cached_property
    def labels(self) -> dict[str, str]:
        """What each policy is called."""
        return short_names(self.policies)

    @cached_property
    def arms(self) -> list[TrainedArm]:
        """All that was trained under a policy, in the order of the spec's arms and of the regimes."""
        trained = [arm for arm in self.train.trained if arm.name != self.reference]
        order = {name: place for place, name in enumerate(self.train.arms)}
        return sorted(trained, key=lambda arm: (order[arm.recipe], self.regimes.index(arm.policy)))

    def cost(self, policy: str) -> float:
        """What serving under a policy costs the reference, in score units summed over the suites."""
        return -sum(effect.estimate for effect in self._serving(policy) if effect)

    def lossless(self, policy: str) -> bool:
        """Whether the reference loses two points of no suite under it."""
        return all(effect is not None and effect.estimate >= -LOSSLESS for effect in self._serving(policy))

    def _serving(self, policy: str) -> list[Effect | None]:
        found = (self.serving(policy, suite) for suite in self.suites)
        return [None if contrast is None else contrast.effect for contrast in found]

    def serving(self, policy: str, metric: str) -> Contrast | None:
        """The reference under a policy against itself uncompressed; None where nothing was asked under it."""
        return self._contrasts.get(("serving", self.reference, policy, metric))

    def alike(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """An arm against the reference, both uncompressed."""
        return self._contrasts.get(("alike", arm.name, DENSE_POLICY, metric))

    def deployed(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """An arm under the policy it was trained under, against the reference uncompressed."""
        return self._contrasts.get(("deployed", arm.name, arm.policy, metric))

    def amplified(self, arm: TrainedArm, metric: str) -> Contrast | None:
        """Training less serving: an arm uncompressed against the reference under the policy of the arm."""
        return self._contrasts.get(("amplification", arm.name, arm.policy, metric))

    def telemetry(self, name: str) -> list[list[dict[str, Any]]]:
        """The steps of every seed of an arm."""
        return [rows for (arm, _), rows in self.data.telemetry.items() if arm == name]

    def mean(self, name: str, key: str) -> float:
        """A measure of an arm over all steps and seeds."""
        return fmean(known(self.telemetry(name), key))

    def rewards(self, name: str) -> list[float]:
        """The mean reward of every seed's second half of steps."""
        return [fmean(halves(rows)[1]) for rows in self.telemetry(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, help="a PNG to write")
    parser.add_argument("--answers", type=Path, help="a Parquet file to write: every answer's score and facets")
    asked = parser.parse_args()
    maps = [each for folder in asked.runs for each in Map.of(folder)]
    for each in maps:
        print(f"\n## {each.title}: verdict of the run {each.found.verdict.status}\n")
        for title, headers, rows in tables(each):
            print(f"\n### {title}\n\n" + "\n".join(table(headers, rows)))
    if asked.answers:
        pd.concat(map(answers, maps)).to_parquet(asked.answers, index=False, compression="zstd")
    if asked.figure:
        drawn(maps).savefig(asked.figure, dpi=110, metadata={"Software": None})


def answers(own: Map) -> pd.DataFrame:
    """A row for every answer: who was asked what, its score and facets; no text."""
    records = own.data.records
    facets = [name for name in map(str, records) if name.startswith("facet_") and records[name].ge(0).any()]
    keys = ["arm", "train_seed", "policy", "suite", "context_tokens", "cluster_id", "item_id", "score"]
    return records[[*keys, *facets]]


def tables(own: Map) -> Iterator[tuple[str, list[str], Iterator[list[str]]]]:
    """Title, headers and rows of each table."""
    metrics = [metric for metric in METRICS if own.alike(own.arms[0], metric)]
    against = [metric_label(own.found.comparison, metric) for metric in metrics]
    yield "What serving costs the dense arm", ["policy", *against, "nearly lossless"], serving(own, metrics)
    yield (
        "How rollouts were sampled",
        ["arm", "overlap p5", "k3 KL", "rejected sequences", "KV tokens saved", "reward, second half, by seed"],
        sampling(own),
    )
    for title, contrast in (
        (f"Trained under it, served uncompressed, against {own.reference}", own.alike),
        (f"Trained and served under it, against {own.reference} uncompressed", own.deployed),
        ("Amplification: what training costs less what serving costs", own.amplified),
    ):
        rows = ([arm.name, *(cell(contrast(arm, metric)) for metric in metrics)] for arm in own.arms)
        yield title, ["arm", *against], rows
    facets = [metric for metric in (*SAFETY, OBEYED, ESCAPED) if metric in metrics]
    yield (
        "Answers that did it, of those that could be read, by seed, uncompressed",
        ["arm", *facets],
        counts(own.data, facets),
    )
    yield "Scores by seed, uncompressed, in percent", ["arm", *own.suites], scores(own)
    if AGENT in own.suites:
        yield "Answers of agents that have a form, by seed, in percent", ["arm", FORM], formed(own)
        kinds = sorted(set(_agents(own)["kind"]))
        title = "Agents by kind of task, uncompressed: mean score in percent, and seed by seed"
        yield title, ["arm", *kinds], by_kind(own, kinds)
    for facet in (metric for metric in SAFETY if metric in metrics):
        title = f"{facet}: the templates whose answers did it, uncompressed, the commonest of trained arms first"
        yield title, ["arm", "templates", "answers of each"], templates(own, facet)


def scores(own: Map) -> Iterator[list[str]]:
    """A row for every arm: the mean score of each suite, seed by seed."""
    for arm, asked in _uncompressed(own).groupby("arm", observed=True, sort=False):
        means = asked.groupby(["suite", "train_seed"], observed=True)["score"].mean()
        yield [str(arm), *(_percents(means[suite]) for suite in own.suites)]


def formed(own: Map) -> Iterator[list[str]]:
    """A row for every arm: how many answers of agents have a form, seed by seed."""
    for arm, asked in _agents(own).groupby("arm", observed=True, sort=False):
        yield [str(arm), _percents(asked.groupby("train_seed")[f"facet_{FORM}"].mean())]


def by_kind(own: Map, kinds: list[str]) -> Iterator[list[str]]:
    """A row for every arm: how agents fare with a clean errand, an attack, an order that counts, and so on."""
    for arm, asked in _agents(own).groupby("arm", observed=True, sort=False):
        means = asked.groupby(["kind", "train_seed"])["score"].mean()
        each = (means[kind] for kind in kinds)
        yield [str(arm), *(f"{100 * seeds.mean():.1f} ({_percents(seeds, 0)})" for seeds in each)]


def _percents(shares: pd.Series[float], digits: int = 1) -> str:
    return ", ".join(f"{100 * share:.{digits}f}" for share in shares)


def _uncompressed(own: Map) -> pd.DataFrame:
    return own.data.records[own.data.records["policy"] == DENSE_POLICY]


def _agents(own: Map) -> pd.DataFrame:
    """The answers of agents, each with its kind of task, which the item's name ends with."""
    asked = _uncompressed(own)
    asked = asked[asked["suite"] == AGENT]
    return asked.assign(kind=asked["item_id"].astype(str).str.rpartition("-")[2])


def templates(own: Map, facet: str) -> Iterator[list[str]]:
    """A row for every arm: on how many templates a facet came about, and how often on the five most common."""
    suite, _, name = facet.partition(".")
    records = own.data.records
    did = records[(records["policy"] == DENSE_POLICY) & (records["suite"] == suite) & (records[f"facet_{name}"] == 1)]
    most = did[did["arm"] != BASE_ARM]["cluster_id"].value_counts().index[:5]
    for arm, asked in did.groupby("arm", observed=True, sort=False):
        counted = asked["cluster_id"].value_counts()
        yield [str(arm), str((counted > 0).sum()), ", ".join(f"{each}: {counted.get(each, 0)}" for each in most)]


def serving(own: Map, metrics: list[str]) -> Iterator[list[str]]:
    """A row for every policy."""
    for policy in own.regimes:
        cells = (cell(own.serving(policy, metric)) for metric in metrics)
        yield [own.labels[policy], *cells, "yes" if own.lossless(policy) else "no"]


def sampling(own: Map) -> Iterator[list[str]]:
    """A row for every arm: how far sampler and learner were apart, and what was earned."""
    for name in (own.reference, *(arm.name for arm in own.arms)):
        rewards = own.rewards(name)
        yield [
            name,
            f"{own.mean(name, 'mismatch/overlap_p5'):.3f}",
            f"{own.mean(name, 'mismatch/k3_kl'):.4f}",
            f"{own.mean(name, 'mismatch/rejected_sequences'):.1%}",
            f"{own.mean(name, 'token_savings'):.1%}",
            f"{fmean(rewards):.3f} ({', '.join(format(reward, '.3f') for reward in rewards)})",
        ]


def cell(contrast: Contrast | None) -> str:
    """A drift with its interval, or why there is none."""
    if contrast is None:
        return "not asked"
    if contrast.effect is None:
        return ", ".join(reason.code for reason in contrast.reasons)
    effect, recipe = contrast.effect, contrast.recipe
    estimate = points(effect.estimate)
    if recipe and not recipe.low <= 0 <= recipe.high:
        estimate = f"**{estimate}**"
    return f"{estimate} [{points(effect.low)}, {points(effect.high)}]"


def drawn(maps: list[Map]) -> Figure:
    """A row a run: both safety facets by regime, then how rollouts were sampled."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 3.9 * len(maps)), layout="constrained")
        grid = figure.subplots(len(maps), 3, squeeze=False, width_ratios=[1.2, 1.2, 1.1])
        for row, own in zip(grid, maps, strict=True):
            for axes, metric in zip(row, SAFETY, strict=False):
                _facet(axes, own, metric)
            _rewards(row[2], own)
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


def _facet(axes: Axes, own: Map, metric: str) -> None:
    """Points more of what is unwanted: the dense arm served, each recipe uncompressed (full) and under its policy."""
    axes.axhline(0, color="black", linewidth=0.8)
    _marks(axes, own, [own.serving(policy, metric) for policy in own.regimes], 0, f"{own.reference}, served under it")
    recipes = [recipe for recipe in own.train.arms if recipe != own.reference]
    for place, recipe in enumerate(recipes, 1):
        for contrast, full in ((own.alike, True), (own.deployed, False)):
            found = {arm.policy: contrast(arm, metric) for arm in own.arms if arm.recipe == recipe}
            label = recipe if full else ""
            _marks(
                axes,
                own,
                [found.get(policy) for policy in own.regimes],
                place + (0 if full else 0.35),
                label,
                full=full,
            )
    _named(axes, own)
    axes.set_title(f"{own.title}: {metric}", loc="left", fontsize=9)
    axes.set_ylabel("points more than dense")


def _marks(axes: Axes, own: Map, found: list[Contrast | None], place: float, label: str, full: bool = True) -> None:
    width = len(own.train.arms) + 0.8
    colour, marker = PALETTE[int(place) % len(PALETTE)], MARKERS[int(place) % len(MARKERS)]
    for at, contrast in enumerate(found):
        if contrast is None or contrast.effect is None:
            continue
        effect = contrast.effect
        x, y = at + (place - (width - 1.8) / 2) / width, -100 * effect.estimate
        axes.plot(
            [x, x], [-100 * effect.high, -100 * effect.low], color=colour, linewidth=1.1, alpha=1 if full else 0.5
        )
        axes.plot(
            x, y, marker, color=colour, markersize=4.5, markerfacecolor=colour if full else "white", label=label or None
        )
        label = ""


def _rewards(axes: Axes, own: Map) -> None:
    """What every seed's rollouts earned at last; p5 of the overlap beside the names."""
    dense = own.rewards(own.reference)
    axes.axhspan(min(dense), max(dense), color=PALETTE[0], alpha=0.25, linewidth=0)
    recipes = [recipe for recipe in own.train.arms if recipe != own.reference]
    for place, recipe in enumerate(recipes, 1):
        for arm in (arm for arm in own.arms if arm.recipe == recipe):
            x = own.regimes.index(arm.policy) + (place - len(recipes) / 2) / (len(recipes) + 2)
            rewards = own.rewards(arm.name)
            axes.plot([x] * len(rewards), rewards, MARKERS[place], color=PALETTE[place], markersize=3.5, alpha=0.8)
    _named(axes, own)
    axes.set_title("late reward of rollouts by seed; band: dense", loc="left", fontsize=9)


def _named(axes: Axes, own: Map) -> None:
    """The regimes below, with naive's p5, after a line where it falls under what training is said to want."""
    naive = {arm.policy: arm.name for arm in own.arms if arm.recipe == "naive"}
    overlap = [own.mean(naive[policy], "mismatch/overlap_p5") for policy in own.regimes]
    names = [f"{own.labels[policy]}\np5 {p5:.2f}" for policy, p5 in zip(own.regimes, overlap, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlim(-0.6, len(names) - 0.4)
    for at, p5 in enumerate(overlap):
        if p5 < STABLE:
            axes.axvspan(at - 0.5, at + 0.5, color=PALETTE[1], alpha=0.07, linewidth=0)
    add_grid(axes)


if __name__ == "__main__":
    main()
