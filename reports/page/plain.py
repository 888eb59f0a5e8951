"""Numbers as plain characters: the words every format shares."""

from __future__ import annotations

from reports.stats.effect import Effect


def points(value: float) -> str:
    """Score units as signed percentage points: +1.8."""
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def drift(effect: Effect) -> str:
    """-1.8 pp [-4.6, +0.9]."""
    return _drift_of(effect.estimate, effect.low, effect.high)


def _drift_of(estimate: float | None, low: float | None, high: float | None) -> str:
    """The same from three numbers, "no number" without them."""
    if estimate is None or low is None or high is None:
        return "no number"
    return f"{points(estimate)} pp [{points(low)}, {points(high)}]"


def percent(value: float | None) -> str:
    """A share as 12.3 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def pvalue(value: float | None) -> str:
    """A p-value with two digits; the least that 9,999 draws can give is printed as a bound."""
    if value is None:
        return "-"
    return "< 0.0001" if value <= 1e-4 * (1 + 1e-9) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def size(count: float) -> str:
    """Bytes as KB, MB or GB (powers of 1000)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def scientific(value: float | None) -> str:
    """1.2e-07 for small and large numbers, plain otherwise."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"
