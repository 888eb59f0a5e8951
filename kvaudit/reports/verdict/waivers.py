"""Waivers: a named person accepts cells that do not pass until a date, at most a year ahead; INVALID is never waived.

waivers:
- who: Ada Byron
  why: regression is known and fixed on the branch that ships
  expires: 2026-12-31
  status: [FAIL]
  cells: {suite: refusal, arm: naive, policy: none, context_tokens: 192, estimand: alike}

All given selectors must match; an omitted one matches everything, and at least one is needed. ``suite`` is a metric: a
suite's score, or one facet by its full name (refusal.unsafe), which a waiver of the suite does not cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.facets import FORMER_CONTRASTS, GATED
from kvaudit.core.files import YamlFile, check_keys, read_yaml
from kvaudit.core.policy_names import match_policies
from kvaudit.core.text import short_repr, short_text
from kvaudit.reports.verdict.comparison import Comparison

WAIVER_KEYS = ("who", "why", "expires", "status", "cells")
WAIVER_SELECTORS = ("suite", "arm", "policy", "context_tokens", "estimand")
WAIVABLE = ("FAIL", "NOT MEASURABLE", "INCONCLUSIVE")
LONGEST = timedelta(days=366)


@dataclass(frozen=True)
class Waiver:
    """A waiver: who accepts which cells that do not pass, why, and until which day (inclusive); None selects all."""

    who: str
    why: str
    expires: str  # ISO date
    status: tuple[str, ...]
    suite: str | None = None
    arm: str | None = None
    policy: str | None = None
    context_tokens: int | None = None
    estimand: str | None = None

    def covers(self, status: str, place: Mapping[str, Any]) -> bool:
        """Return whether a cell with this status, named by its selectors, is waived."""
        selectors = {name: getattr(self, name) for name in WAIVER_SELECTORS}
        return status in self.status and all(place[k] == v for k, v in selectors.items() if v is not None)


def read_waivers(path: Path) -> YamlFile:
    """Read a waiver file as a mapping; ``parse_waivers`` checks its content against a comparison."""
    return read_yaml(path, "waiver file")


def active_waivers(comparison: Comparison, file: YamlFile | None, today: date | None) -> tuple[Waiver, ...]:
    """Return the waivers that are valid ``today``, none without a file; raises SpecError like ``parse_waivers``."""
    return () if file is None else parse_waivers(file, comparison, today or date.today())


def parse_waivers(file: YamlFile, comparison: Comparison, today: date) -> tuple[Waiver, ...]:
    """Return the waivers of a file; raises SpecError for an expired one, and for names that the run does not have."""
    check_keys(file.table, ("format", "waivers"), file.name)
    if file.table.get("format", 1) != 1:
        raise SpecError(f"{file.name}: format is {short_repr(file.table['format'])}, wanted 1")
    rows = file.table.get("waivers")
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"{file.name}: waivers is {short_repr(rows)}, wanted a list of at least one waiver")
    return tuple(_waiver(row, f"{file.name}: waiver {i}", comparison, today) for i, row in enumerate(rows, 1))


def _waiver(row: Any, where: str, comparison: Comparison, today: date) -> Waiver:
    if not isinstance(row, Mapping):
        raise SpecError(f"{where} is {short_repr(row)}, wanted a mapping with {', '.join(WAIVER_KEYS)}")
    check_keys(row, WAIVER_KEYS, where)
    expires = _date(row.get("expires"), where)
    who, why = (_text(row.get(key), f"{where}: {key}") for key in ("who", "why"))
    if expires > today + LONGEST:
        raise SpecError(
            f"{where} by {short_text(who)} expires on {expires.isoformat()}, more than {LONGEST.days} days after today "
            f"({today.isoformat()}); waivers are signed for a year at most"
        )
    if expires < today:
        raise SpecError(
            f"{where} by {short_text(who)} expired on {expires.isoformat()} (today is {today.isoformat()}); "
            "remove it, or have it signed again"
        )
    return Waiver(
        who, why, expires.isoformat(), _statuses(row, where), **_selectors(row.get("cells"), where, comparison)
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SpecError(f"{name} is {short_repr(value)}, wanted text")
    return value.strip()


def _date(value: Any, where: str) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):  # datetime is a subclass of date
        return value
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise SpecError(f"{where}: expires is {short_repr(value)}, wanted a date such as 2026-12-31") from None


def _statuses(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = row.get("status")
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(name in WAIVABLE for name in names):
        raise SpecError(
            f"{where}: status is {short_repr(value)}, wanted some of {', '.join(WAIVABLE)}; INVALID is never waived"
        )
    return tuple(dict.fromkeys(names))


def _selectors(cells: Any, where: str, comparison: Comparison) -> dict[str, Any]:
    if not isinstance(cells, Mapping) or not cells:
        raise SpecError(f"{where}: cells is {short_repr(cells)}, wanted at least one of {', '.join(WAIVER_SELECTORS)}")
    check_keys(cells, WAIVER_SELECTORS, f"cells of {where}")
    names: dict[str, Sequence[Any]] = {
        "suite": (*comparison.suites, *comparison.facets),
        "arm": comparison.arms,
        "policy": comparison.policies,
        "context_tokens": comparison.contexts,
        "estimand": GATED,
    }
    selectors = dict(cells)
    if isinstance(selectors.get("policy"), str):  # may be a short name
        selectors["policy"] = match_policies([selectors["policy"]], comparison.policies)[0]
    if isinstance(selectors.get("estimand"), str):  # may be a former name
        selectors["estimand"] = FORMER_CONTRASTS.get(selectors["estimand"], selectors["estimand"])
    for name, value in selectors.items():
        if isinstance(value, bool) or value not in names[name]:  # True == 1 could be among the numbers
            raise UnknownName(f"{name} in {where}", short_text(value), map(short_text, names[name]))
    return selectors
