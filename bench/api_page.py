"""Does docs/api.md match the docstrings of what ``import kvaudit`` offers? Write the page, or check it.

    python -m bench.api_page            # write docs/api.md
    python -m bench.api_page --check    # exit with 1 if the page is out of date

Takes 5 seconds; ``make check`` runs the second.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import kvaudit
import kvaudit.trl

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
WORK = ("check", "run", "load_run", "gate", "compare")
RESULTS = ("Run", "Comparison")
_WIDE = 100  # characters of a signature on one line
HEAD = """# From Python

Made from docstrings by `python -m bench.api_page`; their examples run as tests. `import kvaudit` loads nothing heavy,
and each name is loaded when it is first used. Wrong input raises `kvaudit.AuditError` with one line.
"""


def page() -> str:
    """Return the text of the page."""
    described = (*WORK, *RESULTS, "AuditError", "CompressedCache", "shadow")
    plugin_bases = [name for name in kvaudit.__all__ if name not in described]
    cache = kvaudit.CompressedCache
    cache_properties = [(name, value) for name, value in vars(cache).items() if isinstance(value, property)]
    sections = [
        HEAD,
        "## The work\n",
        *(entry(name) for name in WORK),
        "## What comes back\n",
        *(entry(name) + list_members(vars(getattr(kvaudit, name)).items()) for name in RESULTS),
        "## The cache alone\n",
        entry("CompressedCache.for_model") + list_members(cache_properties),
        entry("shadow"),
        f"## In a trainer of TRL\n\n{to_markdown(inspect.getdoc(kvaudit.trl) or '')}\n",
        "## Bases of plug-ins\n\nHow to write one: CONTRIBUTING.md of the sources.\n",
        "\n".join(f"* `kvaudit.{name}`: {first_line(getattr(kvaudit, name))}" for name in plugin_bases),
    ]
    return "\n".join(sections).rstrip("\n") + "\n"


def entry(name: str) -> str:
    """Return the section of one name: its signature and docstring."""
    value = attrgetter(name)(kvaudit)
    signature = re.sub(r"'([A-Za-z_.| \[\],]+)'", r"\1", str(inspect.signature(value)))
    signature = re.sub(r"kvaudit\.(?:\w+\.)+", "", signature)
    if len(signature) > _WIDE:
        inside, _, after = signature[1:].rpartition(")")
        parameters = re.split(r", (?=\*|\w+:)", inside)  # types contain commas too
        signature = "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")" + after
    return f"### `{name}`\n\n```python\nkvaudit.{name}{signature}\n```\n\n{to_markdown(inspect.getdoc(value) or '')}\n"


def list_members(members: Iterable[tuple[str, object]]) -> str:
    """Return one line for each documented public member."""
    public = [(key, value) for key, value in members if not key.startswith("_") and is_documented(value)]
    lines = [f"* `.{key}{'()' if inspect.isfunction(value) else ''}`: {first_line(value)}" for key, value in public]
    return "\n" + "\n".join(lines) + "\n"


def is_documented(value: object) -> bool:
    """Return whether a class member is a method or property with a docstring."""
    return bool(inspect.isfunction(value) or hasattr(value, "fget") or hasattr(value, "func")) and bool(value.__doc__)


def first_line(value: object) -> str:
    """Return the first sentence of a docstring as Markdown."""
    return to_markdown_code((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def to_markdown_code(text: str) -> str:
    """Return text whose code is marked by one backtick, as in Markdown, instead of two."""
    return text.replace("``", "`")


def to_markdown(doc: str) -> str:
    """Return a docstring as Markdown, with its examples as code blocks."""
    blocks = []
    for block in doc.split("\n\n"):
        if block.startswith(">>>"):
            lines = [re.sub(r"  # doctest: .*$", "", line) for line in block.splitlines()]
            blocks.append("```python\n" + "\n".join(lines) + "\n```")
        elif block.startswith("    "):
            blocks.append("```python\n" + inspect.cleandoc(block) + "\n```")
        else:
            blocks.append(to_markdown_code(block))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit("docs/api.md does not match the docstrings; rewrite it with: python -m bench.api_page")
