"""What a run that was judged again keeps of the judge before: where both agree, its verdict, and the new one's card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvaudit.core.errors import DataError
from kvaudit.core.provenance import JUDGED
from kvaudit.reports.stats.judges import Kappa, kappa

_DESIRED = ((1, 1), (1, 0), (0, 1), (0, 0))  # before, and now: what the four counts are of
_MOST = 10**9


@dataclass(frozen=True)
class SecondJudge:
    """Who judges now; ``verdict_before`` is that of the run as it was judged before. ``card`` has headings first."""

    name: str
    sha256: str
    before: tuple[str, ...]
    verdict_before: str
    agreement: dict[str, tuple[int, ...]]  # by suite: desired both times, before, now, never
    card: tuple[tuple[str, ...], ...]

    def agreed(self, suite: str) -> Kappa | None:
        """Agreement of both judges on what is desired, None without an answer."""
        counts = self.agreement[suite]
        if not sum(counts):
            return None
        labels = np.repeat(np.array(_DESIRED), counts, axis=0)
        return kappa(labels[:, 0], labels[:, 1])


def second_judge(provenance: Mapping[str, Any]) -> SecondJudge | None:
    """What a judged run says of its judges, None for any other; raises DataError where that is of another form."""
    told = provenance.get(JUDGED)
    judge = told.get("judge") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or judge is None:
        return None
    try:
        return SecondJudge(
            name=_text(judge["name"]),
            sha256=_text(judge["sha256"]),
            before=tuple(map(_text, told.get("judges_before", []))),
            verdict_before=_text(told.get("verdict_before", "")),
            agreement={_text(suite): _counts(four) for suite, four in told.get("agreement", {}).items()},
            card=tuple(tuple(map(_text, row)) for row in told.get("card", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"provenance.json: what {JUDGED} says of the judge cannot be read ({error}); judge the run again"
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text is wanted")
    return value


def _counts(four: Any) -> tuple[int, ...]:
    if len(four) != len(_DESIRED) or not all(type(n) is int and 0 <= n <= _MOST for n in four) or sum(four) > _MOST:
        raise ValueError("agreement wants four counts")
    return tuple(four)
