"""``.eval_results/*.yaml`` of a model repository, as the Hugging Face hub reads it: an entry for every gated drift.

The hub shows results of datasets that are registered with it as benchmarks, whose ``eval.yaml`` names the tasks. A run
knows of no such dataset, so whoever publishes names it; a task is CONTRAST-METRIC-TOKENS. Results of one task under
several policies stand in several files, as the hub wants it.
Layout: huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from kvaudit.core.errors import SpecError
from kvaudit.core.text import inline
from kvaudit.reports.page.disclosure import Disclosure, MeasuredCell, disclosure_of
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.publish import mask_servers

HUB_FOLDER = ".eval_results"
_DATASET = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def hub_results(page: Page, arm: str, dataset: str) -> dict[str, str]:
    """File name -> text of the gated drifts of one arm, a file for every policy and contrast.

    Raises SpecError for a dataset that is no hub id, and for an arm of which nothing is gated with a number.
    """
    if not _DATASET.fullmatch(dataset):
        raise SpecError(f"benchmark {inline(dataset[:80])!r} is no dataset of the hub, wanted ORGANISATION/NAME")
    told = disclosure_of(page)
    cells = [m for m in told.drift if m.arm == arm and m.verdict != "not gated" and m.estimate is not None]
    if not cells:
        arms = ", ".join(sorted({inline(m.arm) for m in told.drift if m.verdict != "not gated"}))
        raise SpecError(f"nothing of arm {inline(arm[:80])!r} is gated and has a number; gated are {arms or 'none'}")
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        found.setdefault(_file(cell), []).append(_entry(told, cell, dataset))
    texts = {name: yaml.safe_dump(rows, sort_keys=False, allow_unicode=False) for name, rows in found.items()}
    return {name: mask_servers(text, page.findings) for name, text in texts.items()}


def _file(m: MeasuredCell) -> str:
    return f"kvaudit-{_slug(m.estimand)}-{_slug(str(m.policy_hash.value or m.label))}.yaml"


def _entry(told: Disclosure, m: MeasuredCell, dataset: str) -> dict[str, Any]:
    finished = told.run["finished"]
    return {
        "dataset": {"id": dataset, "task_id": f"{_slug(m.estimand)}-{_slug(m.metric)}-{m.context_tokens}"},
        "value": round(100 * (m.estimate or 0.0), 4),  # percentage points, below 0 is worse
        **({"date": inline(str(finished.value))} if finished.state == "known" else {}),
        "notes": inline(f"{m.verdict}: {m.slice}: {m.sentence}"),
    }


def _slug(text: str) -> str:
    """Letters, digits, points, lines and nothing else."""
    return _UNSAFE.sub("-", text).strip("-.")[:80] or "none"
