"""The reward of every arm during training, and the mismatch of probabilities between sampler and learner."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from kvaudit.core.alarms import ALARMS, Bound, alarm_key
from kvaudit.core.text import inline
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.canvas import Drawing, add_grid, legend_line, new_figure, save, series_style
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent, plural, scientific
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.verdict.verdict import Decided

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 160  # steps kept of a curve, at most
LOWEST_DRAWN = 1e-16
_COLUMNS = 3
_MOST_ARMS = 3  # arms named in the line about alarms


@dataclass(frozen=True)
class Curve:
    """The training log of one arm: by step, the mean, lowest and highest value of every quantity over the seeds."""

    arm: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]
    lowest: dict[str, tuple[float | None, ...]]
    highest: dict[str, tuple[float | None, ...]]
    mean: dict[str, float]  # over all seeds and steps
    first: dict[str, float]  # mean over seeds of the first tenth of the steps
    last: dict[str, float]  # mean over seeds of the last tenth of the steps
    largest: dict[str, float]  # over all seeds and steps


def curves(telemetry: Mapping[tuple[str, int], list[dict[str, Any]]], arms: Sequence[str]) -> tuple[Curve, ...]:
    """Return the curve of every arm that has training telemetry, in the order of ``arms``, then by name."""
    names = sorted({arm for arm, _ in telemetry}, key=lambda a: (arms.index(a) if a in arms else len(arms), a))
    return tuple(_curve(arm, {seed: rows for (a, seed), rows in telemetry.items() if a == arm}) for arm in names)


def _curve(arm: str, runs: Mapping[int, list[dict[str, Any]]]) -> Curve:
    steps = sorted({int(row["step"]) for rows in runs.values() for row in rows})
    rows = [row for seed_rows in runs.values() for row in seed_rows]
    keys = sorted({key for row in rows for key, value in row.items() if key != "step" and _is_number(value)})
    tables = {key: _table(runs, steps, key) for key in keys}  # [S, steps]
    kept = sorted(set(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).astype(int))) if steps else []
    tenth = max(1, len(steps) // 10)
    return Curve(
        arm=arm,
        seeds=tuple(sorted(runs)),
        steps=tuple(steps[i] for i in kept),
        series={key: _over_seeds(table[:, kept], np.nanmean) for key, table in tables.items()},
        lowest={key: _over_seeds(table[:, kept], np.nanmin) for key, table in tables.items()},
        highest={key: _over_seeds(table[:, kept], np.nanmax) for key, table in tables.items()},
        mean=_summary(tables, np.nanmean, slice(None)),
        first=_summary(tables, np.nanmean, slice(0, tenth)),
        last=_summary(tables, np.nanmean, slice(-tenth, None)),
        largest=_summary(tables, np.nanmax, slice(None)),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(runs: Mapping[int, list[dict[str, Any]]], steps: list[int], key: str) -> Array:
    column = {step: i for i, step in enumerate(steps)}
    table = np.full((len(runs), len(steps)), np.nan)
    for row_number, seed in enumerate(sorted(runs)):
        for row in runs[seed]:
            if _is_number(row.get(key)):
                table[row_number, column[int(row["step"])]] = row[key]
    return table


def _over_seeds(table: Array, reduce: Any) -> tuple[float | None, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps without a value in any seed give None
        values = reduce(table, axis=0)
    return tuple(float(v) if math.isfinite(v) else None for v in values)


def _summary(tables: Mapping[str, Array], reduce: Any, window: slice) -> dict[str, float]:
    windows = {key: table[:, window] for key, table in tables.items()}
    return {key: float(reduce(values)) for key, values in windows.items() if not np.isnan(values).all()}


Curves = tuple[Curve, ...]


class _View(NamedTuple):
    key: str
    title: str
    log: bool


VIEWS = (
    _View("reward_mean", "reward", False),
    _View("mismatch/max_abs_gap", "largest |log p sampler - learner|", True),
    _View("mismatch/k3_kl", "mismatch KL (k3), nats", True),
    _View("mismatch/ess", "effective sample share", False),
    _View("mismatch/overlap_p5", "overlap, 5th percentile", False),
    _View("entropy", "entropy, nats", False),
)


class TrainingSection(Section[Curves]):
    name = "training"
    title = "Training"
    explain = (
        "Reward, and how much the probabilities of the sampler and the learner differed (lines: mean over seeds, "
        "bands: lowest to highest)."
    )
    order = 290
    depth = Depth.DISCLOSURE
    figures = ("training",)
    keys: ClassVar = {"curves": 110}
    remarks_at = 60

    def compute(self, inputs: Inputs) -> Curves | None:
        return curves(inputs.data.telemetry, inputs.decided.comparison.arms) or None

    def of_arm(self, value: Curves, arm: str, reference: str) -> Curves:
        return tuple(curve for curve in value if curve.arm in (arm, reference))

    def tables(self, value: Curves, decided: Decided) -> Iterator[Table]:
        yield _reward_table(value)
        yield _mismatch_table(value, decided.comparison.reference)

    def notes(self, value: Curves, decided: Decided) -> Iterator[str]:
        yield (
            "Gap: largest difference of log-probabilities of one token, over all steps and seeds. The gap of the "
            "uncompressed arm is the effect of rounding alone."
        )
        yield from _alarms(value)

    def finding(self, value: Curves, decided: Decided) -> str:
        gaps = {c.arm: c.largest["mismatch/max_abs_gap"] for c in value if "mismatch/max_abs_gap" in c.largest}
        if not gaps:
            return f"{plural(len(value), 'arm')}."
        arm = max(gaps, key=lambda arm: gaps[arm])
        return f"{plural(len(value), 'arm')}; largest sampler-learner gap in {arm}: {scientific(gaps[arm])} nats."

    def remarks(self, value: Curves, decided: Decided) -> Iterator[str]:
        """Yield a remark that names the arms whose training raised an alarm."""
        if arms := [inline(curve.arm) for curve in value if any(_active_alarms(curve))]:
            more = f" and {plural(len(arms) - _MOST_ARMS, 'more arm')}" if len(arms) > _MOST_ARMS else ""
            yield f"ALARM in training: {', '.join(arms[:_MOST_ARMS])}{more}; see Training for what to do."

    def draw(self, value: Curves, decided: Decided) -> Iterator[Drawing | None]:
        """Yield a figure with a panel for each measured quantity (``VIEWS``: reward, mismatch, ...) that an arm has."""
        from matplotlib.ticker import FuncFormatter, NullFormatter

        views = [view for view in VIEWS if any(_has_points(curve, view) for curve in value)]
        if not views:
            return
        columns = min(_COLUMNS, len(views))
        lines = -(-len(views) // columns)
        figure = new_figure(0.4 + 3.0 * columns, 0.4 + 2.3 * lines)
        panels = figure.subplots(lines, columns, squeeze=False)
        for panel in panels.flat[len(views) :]:
            panel.set_visible(False)
        for panel, view in zip(panels.flat, views, strict=False):
            for curve in value:
                _draw_curve(panel, curve, view, decided.comparison.arms)
            panel.set_title(view.title)
            panel.set_xlabel("step")
            if view.log:
                panel.set_yscale("log")
                panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
                panel.yaxis.set_minor_formatter(NullFormatter())
            add_grid(panel)
        styles = {curve.arm: series_style(decided.comparison.arms, curve.arm) for curve in value}
        handles = [legend_line(inline(arm), color=hue, linestyle=line) for arm, (hue, _, line) in styles.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=5)
        yield save(figure, "training", "Reward and sampler-learner mismatch of every arm over training steps.")


def _active_alarms(curve: Curve) -> Iterator[tuple[Bound, float]]:
    """Yield every alarm that an arm raised in training: the bound, and the share of training steps beyond it."""
    for bound in ALARMS.values():
        share = curve.mean.get(alarm_key(bound.name), 0.0)
        if share > 0:
            yield bound, share


def _alarms(arms: Curves) -> Iterator[str]:
    for bound in ALARMS.values():
        shares = [(curve.arm, share) for curve in arms for alarm, share in _active_alarms(curve) if alarm is bound]
        if shares:
            text = ", ".join(f"{inline(arm)} {percent(share)}" for arm, share in shares)
            yield f"ALARM {bound.sentence}. In {text} of the steps. What to do: {bound.remedy}."


def _reward_table(arms: Curves) -> Table:
    headers = ["arm", "seeds", "reward, first to last"]
    headers += ["effective sample share", "overlap p5", "masked tokens", "rejected sequences", "entries saved"]
    rows = []
    for curve in arms:
        reward = f"{scientific(curve.first.get('reward_mean'))} to {scientific(curve.last.get('reward_mean'))}"
        row = [curve.arm, str(len(curve.seeds)), reward]
        row += [scientific(curve.last.get(f"mismatch/{name}")) for name in ("ess", "overlap_p5")]
        shares = ("mismatch/masked_tokens", "mismatch/rejected_sequences", "token_savings")
        rows.append([*row, *(percent(curve.last.get(name)) for name in shares)])
    return table_of(headers, rows)


def _mismatch_table(arms: Curves, reference: str) -> Table:
    gaps = {curve.arm: scientific(curve.largest.get("mismatch/max_abs_gap")) for curve in arms}
    headers = ["arm", "steps", "largest gap, nats", f"{reference}'s own (rounding floor)"]
    rows = []
    for curve in arms:
        row = [curve.arm, str(curve.steps[-1]) if curve.steps else "0", gaps[curve.arm], gaps.get(reference, "-")]
        rows.append([*row, *(scientific(summary.get("mismatch/k3_kl")) for summary in (curve.mean, curve.largest))])
    return table_of([*headers, "k3 KL, mean", "k3 KL, largest"], rows)


def _has_points(curve: Curve, view: _View) -> bool:
    values = [v for v in curve.series.get(view.key, ()) if v is not None]
    return any(v > 0 for v in values) if view.log else bool(values)


def _draw_curve(panel: Axes, curve: Curve, view: _View, arms: tuple[str, ...]) -> None:
    if view.key not in curve.series:
        return
    hue, _, line = series_style(arms, curve.arm)
    middle, low, high = (
        [_value(v, view.log) for v in table[view.key]] for table in (curve.series, curve.lowest, curve.highest)
    )
    panel.plot(curve.steps, middle, color=hue, linestyle=line, linewidth=1.4)
    panel.fill_between(curve.steps, low, high, color=hue, alpha=0.13, linewidth=0)


def _value(value: float | None, log: bool) -> float:
    if value is None:
        return math.nan
    return max(value, LOWEST_DRAWN) if log else value
