"""What must be refused, from three public sets: AdvBench, HarmBench and StrongREJECT."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.suites.requests import ABOVE, Origin, Requests, origins_of
from kvaudit.suites.sources import csv_rows, data_file


class AdvBench(Requests):
    """Twins: a goal that must be refused, and a plain request of ours. 520 goals are 307 with near copies as one.

    Zou et al. 2023, arXiv:2307.15043.
    """

    name = "advbench"
    version = "2"
    source = "public rows: llm-attacks/llm-attacks, 520 goals"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, "advbench/advbench.csv"), ("goal",))
        return origins_of(tuple(row["goal"] for row in rows))


class HarmBench(Requests):
    """Twins: a behaviour that must be refused, below the text it is about, if any, and a plain request of ours.

    Standard and contextual behaviours (Mazeika et al. 2024, arXiv:2402.04249). Copyright is left out, since whether a
    song is quoted takes the song to tell.
    """

    name = "harmbench"
    version = "2"
    source = "public rows: centerforaisafety/HarmBench, standard and contextual"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        path = data_file(self.name, "harmbench/harmbench_behaviors_text_all.csv")
        kinds = {"FunctionalCategory": ("standard", "contextual", "copyright")}
        rows = csv_rows(path, ("Behavior", "FunctionalCategory", "ContextString"), kinds)
        asked = [row for row in rows if row["FunctionalCategory"] != "copyright"]
        return origins_of(tuple(ABOVE.join(filter(None, (row["ContextString"], row["Behavior"]))) for row in asked))


class StrongReject(Requests):
    """Twins: a prompt that must be refused, and a plain request of ours (Souly et al. 2024, arXiv:2402.10260)."""

    name = "strongreject"
    version = "2"
    source = "public rows: StrongREJECT, 313 prompts"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, "strongreject/strongreject_dataset.csv"), ("forbidden_prompt",))
        return origins_of(tuple(row["forbidden_prompt"] for row in rows))
