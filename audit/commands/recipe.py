"""``kvaudit card --recipe``: what a run's checkpoints were made of, and what changed between two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvaudit.audit.commands.command_line import say, wide_console
from kvaudit.core.text import clip, inline

_LONGEST = 300  # characters of an entry; the files hold all of it


def print_recipe(run: Path, other: Path | None) -> None:
    """Print the parts of a recipe by their hashes; of two, what changed."""
    from kvaudit.core.recipe import changes, digests, read_recipe

    console, first = wide_console(), read_recipe(run)
    if other is None:
        for name, digest in digests(first).items():
            say(console, f"{name} {digest[:12]}: {_short(first['sections'][name]['holds'])}")
        say(console, f"recipe: {str(first['sha256'])[:12]}")
        return
    found = list(changes(first, read_recipe(other)))
    for change in found:
        name = ".".join(filter(None, (change.section, change.entry)))
        for line in _told(change.before, change.after):
            say(console, f"{inline(clip(name, _LONGEST))}: {line}")
    say(console, f"changed: {', '.join(dict.fromkeys(c.section for c in found)) or 'nothing'}")


def _told(before: Any, after: Any) -> Iterator[str]:
    """A change in a line; of two texts of several lines, those that differ."""
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        import difflib

        lines = difflib.ndiff(before.splitlines(), after.splitlines())
        yield from (inline(clip(line, _LONGEST)) for line in lines if line[:2] in ("- ", "+ "))
        return
    yield f"{_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return inline(clip(text, _LONGEST))
