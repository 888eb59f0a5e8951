"""What a report says about its own error rates, from the calibration that ships with the package."""

from __future__ import annotations

from collections.abc import Iterable

from reports.calibration.stamp import Stamp
from reports.page.plain import percent


def error_rates(stamp: Stamp, alpha: float, margins: Iterable[float]) -> str:
    """What was simulated of a gate at one-sided ``alpha`` and ``margins`` in score units, and what went worse."""
    others = sorted({margin for margin in margins if not _same(margin, stamp.margin)})
    lines = [_foreign(stamp, alpha, others), _release(stamp) if _same(alpha, stamp.release_level) else _level(stamp)]
    return " ".join(line for line in (*lines, _worse(stamp, alpha)) if line)


def _foreign(stamp: Stamp, alpha: float, margins: list[float]) -> str:
    """What of this gate the figures are not about."""
    parts = []
    if not _same(alpha, stamp.level) and not _same(alpha, stamp.release_level):
        parts.append(f"at this level ({alpha:g})")
    if margins:
        parts.append(f"at a margin of {', '.join(f'{100 * margin:g}' for margin in margins)} pp")
    return f"The gate was not simulated {' or '.join(parts)}." if parts else ""


def _setting(stamp: Stamp, level: float) -> str:
    return f"level {level:g}, a margin of {_points(stamp.margin)} and a reference at {_whole(stamp.reference_rate)}"


def _level(stamp: Stamp) -> str:
    return (
        f"At {_setting(stamp, stamp.level)}, the gate falsely passes {percent(stamp.false_pass_mean)} of "
        f"{stamp.false_pass_simulations:,} simulated audits whose drift is exactly the margin (at most "
        f"{percent(stamp.false_pass_max)} in any of {stamp.false_pass_designs} designs)."
    )


def _release(stamp: Stamp) -> str:
    return (
        f"At {_setting(stamp, stamp.release_level)}, the gate's interval falsely clears a drift of exactly the "
        f"margin in at most {percent(stamp.release_max)} of the simulated audits of any of {stamp.release_designs} "
        "designs."
    )


def _worse(stamp: Stamp, alpha: float) -> str:
    release = _same(alpha, stamp.release_level)
    broken = stamp.broken_templates_release_max if release else stamp.broken_templates_max
    return (
        f"Worse: up to {percent(broken)} where 5 % of templates break altogether (uneven templates or several "
        f"samples), and up to {percent(stamp.beyond_max)} (the interval, level {stamp.level:g}) with a reference at "
        f"{_whole(stamp.beyond_rate)} and a margin of {_points(stamp.beyond_margin)}."
    )


def _same(one: float, other: float) -> bool:
    return abs(one - other) < 1e-9


def _points(share: float) -> str:
    return f"{100 * share:g} pp"


def _whole(share: float) -> str:
    return f"{100 * share:g} %"
