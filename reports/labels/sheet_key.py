"""The key of a labelling sheet: whose answers its rows hold, and which records they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.core.yaml_file import one_line

KEY_FORMAT = 1


@dataclass(frozen=True)
class KeyPair:
    """One pair that was put on the sheet, and the rows that hold its answers."""

    item: str
    sample: int
    candidate_seed: int
    reference_seed: int
    candidate_row: str
    reference_row: str


@dataclass(frozen=True)
class KeyCell:
    """The pairs of one gated cell that were put on the sheet."""

    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    pairs: tuple[KeyPair, ...]


@dataclass(frozen=True)
class Key:
    """What the sheet hides. ``rows`` maps a row to the sha256 of what it shows, ``records`` is the run's digest."""

    run: str
    records: str
    seed: int
    concordant: int
    rows: Mapping[str, str]
    cells: tuple[KeyCell, ...]
    format: int = KEY_FORMAT


def key_path(sheet: Path) -> Path:
    """Where the key of a sheet lies."""
    return sheet.with_suffix(".key.json")


def render_key(key: Key) -> str:
    """The key as JSON."""
    return json.dumps(asdict(key), ensure_ascii=True, indent=1) + "\n"


def read_key(sheet: Path) -> Key:
    """The key of a sheet; raises DataError for one that is missing or not a key."""
    path = key_path(sheet)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return _key(value)
    except FileNotFoundError:
        raise DataError(f"{str(path)!r} is missing; keep the key beside the sheet, or write another sheet") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is not the key of a sheet ({one_line(error)})") from None


def _key(value: Any) -> Key:
    if value["format"] != KEY_FORMAT:
        raise ValueError(f"format {value['format']!r}, wanted {KEY_FORMAT}")
    cells = []
    for cell in value["cells"]:
        pairs = tuple(KeyPair(**_typed(pair, KeyPair)) for pair in cell["pairs"])
        cells.append(KeyCell(**{**_typed({**cell, "pairs": ()}, KeyCell), "pairs": pairs}))
    names = [(c.estimand, c.arm, c.policy, c.suite, c.context_tokens) for c in cells]
    if not cells or len(set(names)) < len(names):
        raise ValueError("it names no cell, or one twice")
    for name, least in (("seed", 0), ("concordant", 1)):
        if value[name] < least:
            raise ValueError(f"{name} is {value[name]}, wanted {least} or more")
    rows = {str(name): str(text) for name, text in value["rows"].items()}
    unknown = {row for cell in cells for p in cell.pairs for row in (p.candidate_row, p.reference_row)} - set(rows)
    if unknown:
        raise ValueError(f"a pair names row {sorted(unknown)[0]!r}, which is not in the key")
    return Key(**{**_typed({**value, "cells": (), "rows": {}}, Key), "cells": tuple(cells), "rows": rows})


def _typed(value: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of a dataclass with the types it wants."""
    kinds = {"str": str, "int": int}
    for name, wanted in kind.__annotations__.items():
        if wanted in kinds and (not isinstance(value[name], kinds[wanted]) or isinstance(value[name], bool)):
            raise TypeError(f"{name} is {str(value[name])[:40]!r}")
    return dict(value)
