"""How many items, templates and samples a margin takes before a run is made. Pure.

Power and sizes are the formulas of ``stats.power`` (Miller 2024 times a design effect) with t quantiles at the planned
number of templates; C_min and the blind spot are those of the gate. Priors go in, never a finished run's own result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from audit.core.errors import SpecError
from reports.gate.rules import margin_of
from reports.stats import power as kernels
from reports.stats.rule import blind_spot, clusters_required

DEFAULT_CORRELATION = 0.1  # of paired differences inside a template, where nothing is known
DEFAULT_SAMPLING_SHARE = 0.5  # gave the power of 1, 4 and 8 samples that was simulated for decoding at temperature 1
_ARMS = 2  # reference and candidate
SECONDS_PER_HOUR = 3600.0
_MOST = 10**12  # items; beyond, a size says nothing


@dataclass(frozen=True)
class Design:
    """What is planned. ``margin``, ``drift`` and ``discordance`` in score units, a loss below 0; ``rate`` in answers
    per second.

    ``discordance``: share of items whose single answers differ between the arms. ``sampling_share``: part of that
    variance which is decoding noise, so that more samples shrink it. ``correlation``: ICC of the paired difference.
    """

    margin: float
    discordance: float
    clusters: int
    items_per_cluster: int = 5
    samples: int = 1
    sampling_share: float = DEFAULT_SAMPLING_SHARE
    policies: int = 1
    arms: int = _ARMS
    correlation: float = DEFAULT_CORRELATION
    drift: float = 0.0
    alpha: float = 0.05
    power: float = 0.8
    rate: float | None = None

    @property
    def items(self) -> int:
        """N of one suite at one length."""
        return self.clusters * self.items_per_cluster


@dataclass(frozen=True)
class Sizes:
    """What a design buys, and what it would take. ``margin`` is that of the design, in score units.

    ``needed_items`` reach the asked power at the design's cluster size, ``needed_clusters`` also C_min.
    """

    design: Design
    deff: float
    error: float  # standard error of the drift
    power: float  # P(lower bound above the margin) at the assumed drift
    passes: float  # the same, 0 below C_min
    detects: float | None  # P(upper bound below 0) at a drop of the margin; None where too few items differ for one
    smallest_margin: float  # that these items pass with the asked power; 0 where a gain passes any
    detectable: float  # smallest drop found with the asked power
    half_width: float  # of the two-sided 95 % interval
    required_clusters: int  # C_min
    blind_spot: float
    needed_items: int
    needed_clusters: int
    answers: int  # of the planned design, over all arms and policies
    needed_answers: int
    seconds: float | None
    needed_seconds: float | None


def plan_sizes(design: Design) -> Sizes:
    """Power and sizes of a design. Raises SpecError for numbers that cannot be."""
    _check(design)
    df = design.clusters - 1
    variance = _variance(design, design.drift)
    deff = float(kernels.design_effect(design.correlation, design.items_per_cluster))
    error = float(kernels.standard_error(design.items, variance, deff=deff))
    chance = float(
        kernels.power(design.items, design.margin, variance, deff=deff, drift=design.drift, alpha=design.alpha, df=df)
    )
    required = clusters_required(design.margin, design.alpha)
    items = _items(design, variance, deff)
    clusters = max(required, math.ceil(items / design.items_per_cluster))
    per_item = design.samples * design.policies * design.arms
    needed = clusters * design.items_per_cluster * per_item
    return Sizes(
        design=design,
        deff=deff,
        error=error,
        power=chance,
        passes=chance if design.clusters >= required else 0.0,
        detects=_detects(design, deff),
        smallest_margin=float(
            kernels.smallest_margin(
                design.items, variance, deff=deff, drift=design.drift, alpha=design.alpha, power=design.power, df=df
            )
        ),
        detectable=float(kernels.minimal_detectable(error, df=df, alpha=design.alpha, power=design.power)),
        half_width=float(kernels.minimal_detectable(error, df=df, alpha=0.025, power=0.5)),
        required_clusters=required,
        blind_spot=blind_spot(design.clusters, design.alpha),
        needed_items=items,
        needed_clusters=clusters,
        answers=design.items * per_item,
        needed_answers=needed,
        seconds=None if design.rate is None else design.items * per_item / design.rate,
        needed_seconds=None if design.rate is None else needed / design.rate,
    )


def _variance(design: Design, drift: float) -> float:
    """Of an item's difference at a true ``drift``."""
    found = kernels.difference_variance(
        design.discordance, drift=drift, samples=design.samples, sampling_share=design.sampling_share
    )
    return float(found)


def _detects(design: Design, deff: float) -> float | None:
    """Power to find a drop of the margin, which takes as many items that differ."""
    if design.discordance < design.margin:
        return None
    variance = _variance(design, -design.margin)
    df = design.clusters - 1
    return float(kernels.detection_power(design.items, design.margin, variance, deff=deff, alpha=design.alpha, df=df))


def _items(design: Design, variance: float, deff: float) -> int:
    """Items at which the asked power is reached, with the t quantiles of the templates that they make."""
    df, items = math.inf, 0
    for _ in range(50):  # each round's t quantile moves the next size by less
        wanted = int(
            kernels.items_needed(
                design.margin, variance, deff=deff, drift=design.drift, alpha=design.alpha, power=design.power, df=df
            )
        )
        if wanted == items:
            break
        if wanted > _MOST:
            raise SpecError(
                f"more than {_MOST:.0e} items would be needed; assume a smaller drop or ask a larger margin"
            )
        items = wanted
        df = max(1, math.ceil(items / design.items_per_cluster) - 1)
    return items


def snippet(sizes: Sizes, suite: str) -> str:
    """The part of a spec that asks for the suggested size."""
    d = sizes.design
    return (
        "evaluate:\n"
        f"  suites: {{{suite}: {{items: {sizes.needed_clusters * d.items_per_cluster}}}}}"
        f"  # {sizes.needed_clusters} templates of {d.items_per_cluster}\n"
        f"  samples: {d.samples}\n"
        "gate:\n"
        f"  alpha: {d.alpha:g}\n"
        f"  margins: {{{suite}: {100 * d.margin:g}}}\n"
    )


_POSITIVE = {
    "clusters": 10**7,
    "items_per_cluster": 10**6,
    "samples": 10**4,
    "policies": 10**4,
    "arms": 10**3,
}
_SHARES = {"margin": "--margin", "discordance": "--discordance", "power": "--power"}


def _check(design: Design) -> None:
    """Raise SpecError with the option that is wrong."""
    for name, most in _POSITIVE.items():
        value, least = getattr(design, name), 2 if name == "clusters" else 1
        if not least <= value <= most:
            raise SpecError(f"--{name.replace('_', '-')} is {value}, wanted a whole number from {least} to {most}")
    for name, option in _SHARES.items():
        value, scale = getattr(design, name), 100 if name == "margin" else 1
        if not 0 < value < 1:
            raise SpecError(f"{option} is {scale * value:g}, wanted a number above 0 and below {scale}")
    margin_of(100 * design.margin, "--margin")
    if not 0 < design.alpha < 0.5:
        raise SpecError(f"--alpha is {design.alpha:g}, wanted a number above 0 and below 0.5")
    for value, option in ((design.correlation, "--icc"), (design.sampling_share, "--sampling-share")):
        if not 0 <= value <= 1:
            raise SpecError(f"{option} is {value:g}, wanted a number from 0 to 1")
    if design.rate is not None and not 0 < design.rate < math.inf:
        raise SpecError(f"--rate is {design.rate:g}, wanted answers per second above 0")
    _check_drift(design)


def _check_drift(design: Design) -> None:
    if not design.drift > -design.margin:
        raise SpecError(
            f"--drift is {100 * design.drift:g} pp at a margin of {100 * design.margin:g} pp: no size passes a drop "
            "at or beyond the margin"
        )
    if not abs(design.drift) <= design.discordance:
        raise SpecError(
            f"--discordance is {design.discordance:g}, too small for a drift of {100 * design.drift:g} pp; the share "
            "of items that differ is at least the size of the drift"
        )
