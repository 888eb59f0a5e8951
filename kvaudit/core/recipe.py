"""recipe.json: all that a run's checkpoints were made of and are held to, in sections with a sha256 each.

    {"format": "kvaudit.recipe", "version": 1, "sha256": of all, "sections": {NAME: {"sha256": ..., "holds": ...}}}

    model          what training begins from
    reward         what pays, as the spec says it, its sha256 and who graded which suite
    constitution   the text that answers are held to, null without one
    data           the training questions: suites, their versions, lengths, seeds, and the items by sha256
    policy         the cache policy of every arm's rollouts
    refusal_set    the safety suites of the evaluation: versions, and the items by sha256
    training       loss, rates, sizes, and whatever else the train section says

A run writes it when its training begins. What changed between two runs is what differs between two of these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.files import read_text
from kvaudit.core.plugins import sha256_of

RECIPE, RECIPE_FORMAT, RECIPE_VERSION = "recipe.json", "kvaudit.recipe", 1
SECTIONS = ("model", "reward", "constitution", "data", "policy", "refusal_set", "training")
LARGEST_RECIPE = 1_000_000  # bytes


class RecipeChange(NamedTuple):
    """One entry that differs between two recipes; None where one has none."""

    section: str
    entry: str
    before: Any
    after: Any


def sealed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The file of some sections, with the sha256 of each and of all."""
    table = {name: {"sha256": sha256_of(sections[name]), "holds": sections[name]} for name in SECTIONS}
    return {"format": RECIPE_FORMAT, "version": RECIPE_VERSION, "sha256": _whole(table), "sections": table}


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe from a file, or from a run's folder; DataError for what is none, or no longer what its hashes say."""
    if path.is_dir() and not (path / RECIPE).is_file():
        raise DataError(f"{str(path)!r} holds no {RECIPE}; give the folder of a run that trained, or its file")
    path = path / RECIPE if path.is_dir() else path
    try:
        found = json.loads(read_text(path, "recipe", LARGEST_RECIPE))
        table = found["sections"]
        right = found["format"] == RECIPE_FORMAT and found["version"] == RECIPE_VERSION and set(table) == set(SECTIONS)
        same = right and all(row["sha256"] == sha256_of(row["holds"]) for row in table.values())
        whole = same and found["sha256"] == _whole(table)
    except (ValueError, KeyError, TypeError, RecursionError):
        right = whole = False
    if not right:
        raise DataError(
            f"{str(path)!r} is not of format {RECIPE_FORMAT} version {RECIPE_VERSION}; "
            "give a run that trained, or its file"
        )
    if not whole:
        raise DataError(f"{str(path)!r} holds other entries than its sha256 say; put it back as the run wrote it")
    recipe: dict[str, Any] = found
    return recipe


def digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of every section."""
    return {name: str(recipe["sections"][name]["sha256"]) for name in SECTIONS}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[RecipeChange]:
    """What differs between two recipes, section by section, entry by entry."""
    for section in SECTIONS:
        one, other = (dict(_flat("", recipe["sections"][section]["holds"])) for recipe in (before, after))
        for entry in dict.fromkeys([*one, *other]):
            if one.get(entry) != other.get(entry):
                yield RecipeChange(section, entry, one.get(entry), other.get(entry))


def _whole(table: Mapping[str, Any]) -> str:
    return sha256_of({name: table[name]["sha256"] for name in SECTIONS})


def _flat(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every entry of nested mappings, by the names that lead to it."""
    if not isinstance(value, Mapping):
        yield place, value
        return
    for name, inner in value.items():
        yield from _flat(f"{place}.{name}" if place else str(name), inner)
