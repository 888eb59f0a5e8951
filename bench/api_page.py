"""docs/api.md, made from the docstrings of what ``import kvaudit`` gives.

python -m bench.api_page            # writes it
python -m bench.api_page --check    # fails where the page is another
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
    """The whole page."""
    told = (*WORK, *RESULTS, "AuditError", "CompressedCache", "shadow")
    rest = [name for name in kvaudit.__all__ if name not in told]
    cache = kvaudit.CompressedCache
    of_the_cache = [(name, value) for name, value in vars(cache).items() if isinstance(value, property)]
    parts = [
        HEAD,
        "## The work\n",
        *(entry(name) for name in WORK),
        "## What comes back\n",
        *(entry(name) + listed(vars(getattr(kvaudit, name)).items()) for name in RESULTS),
        "## The cache alone\n",
        entry("CompressedCache.for_model") + listed(of_the_cache),
        entry("shadow"),
        f"## In a trainer of TRL\n\n{shown(inspect.getdoc(kvaudit.trl) or '')}\n",
        "## Bases of plug-ins\n\nHow to write one: CONTRIBUTING.md of the sources.\n",
        "\n".join(f"* `kvaudit.{name}`: {first_line(getattr(kvaudit, name))}" for name in rest),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def entry(name: str) -> str:
    """A name with its signature and docstring."""
    found = attrgetter(name)(kvaudit)
    signature = re.sub(r"'([A-Za-z_.| \[\],]+)'", r"\1", str(inspect.signature(found)))
    signature = re.sub(r"kvaudit\.(?:\w+\.)+", "", signature)
    if len(signature) > _WIDE:
        inside, _, after = signature[1:].rpartition(")")
        parameters = re.split(r", (?=\*|\w+:)", inside)  # a type may hold commas of its own
        signature = "(\n" + "".join(f"    {one},\n" for one in parameters) + ")" + after
    return f"### `{name}`\n\n```python\nkvaudit.{name}{signature}\n```\n\n{shown(inspect.getdoc(found) or '')}\n"


def listed(members: Iterable[tuple[str, object]]) -> str:
    """What an object has, in a line each."""
    public = [(key, value) for key, value in members if not key.startswith("_") and documented(value)]
    lines = [f"* `.{key}{'()' if inspect.isfunction(value) else ''}`: {first_line(value)}" for key, value in public]
    return "\n" + "\n".join(lines) + "\n"


def documented(value: object) -> bool:
    """Whether a member of a class is a method or property that says what it is."""
    return bool(inspect.isfunction(value) or hasattr(value, "fget") or hasattr(value, "func")) and bool(value.__doc__)


def first_line(value: object) -> str:
    """The sentence that a docstring opens with."""
    return code((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def code(text: str) -> str:
    """Docstrings mark code by two backticks, Markdown by one."""
    return text.replace("``", "`")


def shown(doc: str) -> str:
    """A docstring as Markdown, its examples in a block."""
    blocks = []
    for block in doc.split("\n\n"):
        if block.startswith(">>>"):
            lines = [re.sub(r"  # doctest: .*$", "", line) for line in block.splitlines()]
            blocks.append("```python\n" + "\n".join(lines) + "\n```")
        elif block.startswith("    "):
            blocks.append("```python\n" + inspect.cleandoc(block) + "\n```")
        else:
            blocks.append(code(block))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit("docs/api.md is not what the docstrings say; write it with: python -m bench.api_page")
