"""Requests that must be refused, from AdvBench, HarmBench, StrongREJECT and XSTest, which has safe ones too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvaudit.core.errors import DataError
from kvaudit.suites.requests import SEPARATOR, Origin, Requests, group_by_origin
from kvaudit.suites.sources import csv_rows, data_file

PROMPTS = "xstest/xstest_prompts.csv"
# foci that only safe rows have, and those of unsafe rows that come nearest
_KIN = {
    "bank account fraud": "bank fraud",
    "physical address": "home address",
    "phone number": "mobile phone number",
    "employment history": "salary",
}


class AdvBench(Requests):
    """Twins: a goal that must be refused, and a plain request of ours. 520 goals are 307 with near copies as one.

    Zou et al. 2023, arXiv:2307.15043.
    """

    name = "advbench"
    version = "4"  # help behind a disapproval is help, and a "no" that answers is no refusal
    source = "public rows: llm-attacks/llm-attacks, 520 goals"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, "advbench/advbench.csv"), ("goal",))
        return group_by_origin(tuple(row["goal"] for row in rows))


class HarmBench(Requests):
    """Twins: a behaviour that must be refused, below the text it is about, if any, and a plain request of ours.

    Standard and contextual behaviours (Mazeika et al. 2024, arXiv:2402.04249). Copyright is left out, since whether a
    song is quoted takes the song to tell.
    """

    name = "harmbench"
    version = "4"  # help behind a disapproval is help, and a "no" that answers is no refusal
    source = "public rows: centerforaisafety/HarmBench, standard and contextual"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        path = data_file(self.name, "harmbench/harmbench_behaviors_text_all.csv")
        kinds = {"FunctionalCategory": ("standard", "contextual", "copyright")}
        rows = csv_rows(path, ("Behavior", "FunctionalCategory", "ContextString"), kinds)
        asked = [row for row in rows if row["FunctionalCategory"] != "copyright"]
        return group_by_origin(tuple(SEPARATOR.join(filter(None, (row["ContextString"], row["Behavior"]))) for row in asked))


class StrongReject(Requests):
    """Twins: a prompt that must be refused, and a plain request of ours (Souly et al. 2024, arXiv:2402.10260)."""

    name = "strongreject"
    version = "4"  # help behind a disapproval is help, and a "no" that answers is no refusal
    source = "public rows: StrongREJECT, 313 prompts"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, "strongreject/strongreject_dataset.csv"), ("forbidden_prompt",))
        return group_by_origin(tuple(row["forbidden_prompt"] for row in rows))


class XSTest(Requests):
    """Two forms: unsafe, and safe with the same trigger word. Clusters are foci; over-refusal is read here.

    Roettger et al. 2024, arXiv:2308.01263.
    """

    name = "xstest"
    version = "4"  # help behind a disapproval is help, and a "no" that answers is no refusal
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
        place = seen[row["type"]] = seen.get(row["type"], -1) + 1  # the row's place among those of its type
        focus = row["focus"]
        if row["type"] == "nons_group_real_discr" and place < len(contrasts):
            focus = contrasts[place]
        focus = focus.strip().casefold() or f"{row['type'].removeprefix('contrast_')} {place}"
        yield _KIN.get(focus, focus)
