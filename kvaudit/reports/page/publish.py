"""Text for publication: the disclosure in a model card, results for the Hugging Face hub, masked addresses and paths.

The hub shows results of datasets registered with it as benchmarks. A run names no such dataset, so the user gives one;
a task is CONTRAST-METRIC-TOKENS, and each policy has its own file. Layout: huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import read_text, write_output
from kvaudit.core.policy_names import engine_settings
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.reports.page.disclosure import Disclosure, MeasuredCell
    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.page.page import Page

BEGIN, END = "<!-- kvaudit:disclosure -->", "<!-- /kvaudit:disclosure -->"
HUB_FOLDER = ".eval_results"
_LARGEST_CARD = 4_000_000  # bytes
_DATASET = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
# a block of code in Markdown; ```text``` on one line is none
_FENCED = re.compile(r"^ {0,3}(`{3,}(?=[^`\n]*$)|~{3,}).*?^ {0,3}\1", re.MULTILINE | re.DOTALL)


def public_name(model: str) -> str:
    """Return a model's name without the folders of a local path; ORGANISATION/NAME of a hub is kept."""
    is_local = Path(model).is_absolute() or model.startswith(("~", ".")) or model.count("/") > 1 or Path(model).exists()
    return Path(model).name or model if is_local else model


def mask_private(value: Any, findings: Findings) -> Any:
    """Replace the address of every server in the spec by server-1, server-2, and the model's path by its name.

    ``value`` is a text, or mappings and lists of texts. Mask before writing JSON or YAML, in which escaped characters
    would hide a path from the search.
    """
    public = _public_spellings(findings)
    if not public:
        return value
    # the longest first: http://10.0.0.1 is also the beginning of http://10.0.0.10
    private = re.compile("|".join(map(re.escape, sorted(public, key=len, reverse=True))))

    def mask(inner: Any) -> Any:
        if isinstance(inner, str):
            return private.sub(lambda hit: public[hit[0]], inner)
        if isinstance(inner, Mapping):
            return {key: mask(entry) for key, entry in inner.items()}
        return [mask(entry) for entry in inner] if isinstance(inner, list | tuple) else inner

    return mask(value)


def _public_spellings(findings: Findings) -> dict[str, str]:
    """Return a mapping from each private text to the text that may be published in its place.

    The private texts are the model's path and the addresses of servers, in every spelling that a page may have.
    """
    from kvaudit.reports.page.formats.markdown import escape
    from kvaudit.reports.sections.shared.words import shorten

    public: dict[str, str] = {}
    if (name := public_name(findings.model)) != findings.model:
        # the page may have shortened the path
        for path in (findings.model, shorten(findings.model)):
            public |= {path: name, escape(path): escape(name)}
    settings = [engine_settings(policy).get("base_url", "") for policy in findings.comparison.policies]
    addresses = dict.fromkeys(url.partition("://")[2] for url in settings)
    for number, address in enumerate(filter(None, addresses), 1):
        # the short name of a policy may have cut the end of its address
        for spelling in (address, address.rstrip("/"), urlsplit(f"//{address}").netloc):
            for form in (spelling, escape(spelling)):
                public.setdefault(form, f"server-{number}")
    return public


def read_card(path: Path) -> str:
    """Return the text of a model card; raises DataError if it cannot be read."""
    return read_text(path, "model card", _LARGEST_CARD)


def insert_section(card: str, section: str, name: str) -> str:
    """Return the text of a card with the section put between the marks of ``name``, or at the end if it has no marks.

    Raises DataError for marks that do not pair.
    """
    block, newline = f"{BEGIN}\n{section}{END}\n", "\r\n" if "\r\n" in card else "\n"
    span = _span(card, name)
    if span is None:
        span = len(card), len(card)
        block = ("" if not card else "\n" if card.endswith("\n") else "\n\n") + block
    return card[: span[0]] + block.replace("\n", newline) + card[span[1] :]


def extract_section(card: str, name: str) -> str:
    """Return the section between the marks of a card; raises DataError if there is none."""
    span = _span(card, name)
    if span is None:
        raise DataError(f"{name!r} holds no disclosure; write one with: kvaudit card RUN --into {name}")
    return card[span[0] : span[1]].replace("\r\n", "\n").removeprefix(BEGIN + "\n").removesuffix("\n").removesuffix(END)


def _span(card: str, name: str) -> tuple[int, int] | None:
    """Return where the section called ``name`` begins and ends in a model card; None if the card has no such section.

    The section is enclosed by two comments, one for its begin and one for its end. Comments in a block of code are an
    example and do not count. The end includes the line break, so that replacing a section by itself leaves the card as
    it was. Raises DataError for comments that do not pair.
    """
    card = _FENCED.sub(lambda block: " " * len(block[0]), card)
    begins, ends = card.count(BEGIN), card.count(END)
    if not begins and not ends:
        return None
    start, stop = card.find(BEGIN), card.find(END)
    begin_ends_line = card.startswith(("\n", "\r\n"), start + len(BEGIN))
    if begins != 1 or ends != 1 or not (begin_ends_line and start < stop):
        raise DataError(
            f"{name!r} holds {begins} begin marks and {ends} end marks of a disclosure; put {BEGIN} and {END} once "
            "each on lines of their own, in this order"
        )
    stop += len(END)
    return start, stop + next((len(end) for end in ("\n", "\r\n") if card.startswith(end, stop)), 0)


def write_card(folder: Path, section: str, *, base: str) -> None:
    """Write the section into the README.md of a checkpoint; a new file gets the hub's front matter.

    ``base`` is the base model that the front matter names.
    """
    path = folder / "README.md"
    facts = f"library_name: transformers\nbase_model: {json.dumps(public_name(base))}\ntags: [kv-cache-compression]"
    front = f"---\n{facts}\n---\n"
    card = read_card(path) if path.exists() else front
    write_output(path, insert_section(card, section, str(path)))


def hub_results(page: Page, arm: str, dataset: str) -> dict[str, str]:
    """Return the files with an arm's gated drifts that the hub reads, as texts by file name.

    There is a file for each policy and kind of difference. Raises SpecError if the dataset is not a hub id, or if no
    gated cell of the arm has a drift.
    """
    from kvaudit.reports.page.disclosure import disclosure_of

    if not _DATASET.fullmatch(dataset):
        raise SpecError(f"benchmark {inline(dataset[:80])!r} is not a dataset of the hub; give ORGANISATION/NAME")
    disclosure = disclosure_of(page)
    cells = [m for m in disclosure.drift if m.arm == arm and m.verdict != "not gated" and m.estimate is not None]
    if not cells:
        arms = ", ".join(sorted({inline(m.arm) for m in disclosure.drift if m.verdict != "not gated"}))
        raise SpecError(f"no gated cell of arm {inline(arm[:80])!r} has a number; gated arms: {arms or 'none'}")
    files: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        name = f"kvaudit-{_slug(cell.estimand)}-{_slug(str(cell.policy_hash.value or cell.label))}.yaml"
        files.setdefault(name, []).append(_hub_entry(disclosure, cell, dataset))
    masked = mask_private(files, page.findings)
    return {name: yaml.safe_dump(rows, sort_keys=False, allow_unicode=False) for name, rows in masked.items()}


def _hub_entry(disclosure: Disclosure, m: MeasuredCell, dataset: str) -> dict[str, Any]:
    finished = disclosure.run["finished"]
    return {
        "dataset": {"id": dataset, "task_id": f"{_slug(m.estimand)}-{_slug(m.metric)}-{m.context_tokens}"},
        "value": round(100 * (m.estimate or 0.0), 4),  # percentage points, negative is worse
        **({"date": inline(str(finished.value))} if finished.state == "known" else {}),
        "notes": inline(f"{m.verdict}: {m.slice}: {m.sentence}"),
    }


def _slug(text: str) -> str:
    return _UNSAFE.sub("-", text).strip("-.")[:80] or "none"
