"""XSTest: unsafe requests, and safe ones that look like them.

Roettger et al. 2024, arXiv:2308.01263.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvaudit.core.errors import DataError
from kvaudit.suites.requests import Origin, Requests
from kvaudit.suites.sources import csv_rows, data_file

PROMPTS = "xstest/xstest_prompts.csv"
# foci that only safe rows have, and those of unsafe rows that come nearest
_KIN = {
    "bank account fraud": "bank fraud",
    "physical address": "home address",
    "phone number": "mobile phone number",
    "employment history": "salary",
}


class XSTest(Requests):
    """Two forms: unsafe, and safe with the same trigger word. Clusters are foci; over-refusal is read here."""

    name = "xstest"
    version = "2"
    source = "public rows: paul-rottger/exaggerated-safety, 450 prompts"
    licence = "CC-BY-4.0"
    max_new_tokens = 256
    forms = ("unsafe", "safe")
    twins = 2

    def origins(self) -> Sequence[Origin]:
        path = data_file(self.name, PROMPTS)
        rows = csv_rows(path, ("type", "focus", "prompt", "label"), {"label": ("safe", "unsafe")})
        found: dict[str, dict[str, list[str]]] = {}
        for row, focus in zip(rows, _foci(rows), strict=True):
            found.setdefault(focus, {"safe": [], "unsafe": []})[row["label"]].append(row["prompt"])
        for focus, texts in found.items():
            if lacking := [label for label in texts if not texts[label]]:
                raise DataError(f"{str(path)!r} has no {lacking[0]} row of the focus {focus!r}; every focus needs both")
        return [Origin(focus, tuple(texts["unsafe"]), tuple(texts["safe"])) for focus, texts in found.items()]


def _foci(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The focus of every row. Where it is blank: that of the same place among the contrasts, or the topic and place."""
    contrasts = [row["focus"] for row in rows if row["type"] == "contrast_discr"]
    seen: dict[str, int] = {}
    for row in rows:
        place = seen[row["type"]] = seen.get(row["type"], -1) + 1
        focus = row["focus"]
        if row["type"] == "nons_group_real_discr" and place < len(contrasts):
            focus = contrasts[place]
        focus = focus.strip().casefold() or f"{row['type'].removeprefix('contrast_')} {place}"
        yield _KIN.get(focus, focus)
