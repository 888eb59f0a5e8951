"""The contract of a command: a file with its function and options, and a ``COMMAND`` that says where it is listed.

The first line of the function's docstring is its summary, the rest is read by ``--help`` of the command alone. A
command without a function holds others: those whose ``group`` is its name.

    def scan(paths: Paths) -> None:
        \"\"\"Find KV compression in configurations.\"\"\"

    COMMAND = Command("scan", group="Disclose", order=2, call=scan)
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import typer

# those whose default nobody is shown: there is none, or their help says it
option, argument = partial(typer.Option, show_default=False), partial(typer.Argument, show_default=False)
HELP_HEADINGS = ("Audit", "Look", "Disclose", "Serve and ask", "Go again", "Extend")  # as the help shows them
LONGEST_SUMMARY = 60  # characters, so that the help of 80 columns cuts none


@dataclass(frozen=True)
class Command:
    """A command as it is listed. ``old`` names still work for a release; what followed them follows the new words."""

    name: str
    _: KW_ONLY
    group: str  # a heading, or the command that holds it
    order: int  # in its group
    call: Callable[..., None] | typer.Typer | None = None
    help: str = ""  # of a command without a function of its own, which has no docstring
    old: Mapping[str, str] = field(default_factory=dict)  # a former name -> what is typed now
    settings: Mapping[str, Any] = field(default_factory=dict)  # of typer's context

    @property
    def text(self) -> str:
        """What ``--help`` of the command says."""
        return self.help or inspect.getdoc(self.call) or ""

    @property
    def summary(self) -> str:
        """The line that the list of commands shows."""
        return self.text.partition("\n")[0].rstrip(".")

    @property
    def place(self) -> tuple[int, int]:
        """By which it is sorted; a command that another holds goes last, and by its own order."""
        return HELP_HEADINGS.index(self.group) if self.group in HELP_HEADINGS else len(HELP_HEADINGS), self.order


def load_commands(package: str = "kvaudit.audit.commands") -> list[Command]:
    """The command of every file of a package that has one, in the order of the help."""
    root = importlib.import_module(package)
    modules = (importlib.import_module(entry.name) for entry in pkgutil.iter_modules(root.__path__, f"{package}."))
    found = [command for module in modules if isinstance(command := vars(module).get("COMMAND"), Command)]
    return sorted(found, key=lambda command: (*command.place, command.name))
