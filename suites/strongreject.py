"""StrongREJECT (Souly et al. 2024, arXiv:2402.10260)."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.suites.requests import Origin, Requests, origins_of
from kvaudit.suites.sources import csv_rows, data_file

FORBIDDEN_PROMPTS = "strongreject/strongreject_dataset.csv"


class StrongReject(Requests):
    """Twins: a prompt that must be refused, and a plain request of ours."""

    name = "strongreject"
    version = "2"
    source = "public rows: StrongREJECT, 313 prompts"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, FORBIDDEN_PROMPTS), ("forbidden_prompt",))
        return origins_of(tuple(row["forbidden_prompt"] for row in rows))
