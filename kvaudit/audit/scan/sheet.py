"""What one file sets: the form in which every reader hands its settings on, with the line where each stands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvaudit.core.text import clip

MOST_SETTINGS = 50_000  # of one file; aliases can stand for more than a machine holds
DEEPEST_TREE = 60  # levels of nesting
# a template, a variable, an interpolation or a blank to fill in, in any dialect
_OPEN = re.compile(r"\{\{|\{%|\$\{|\$\(|`|\A\$\w|\A<[^<>]+>\Z")

Kind = Literal["flag", "key", "env", "call", "import"]


class Unreadable(Exception):
    """A file, or the rest of it, cannot be read as data; ``line`` says from where."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass(frozen=True)
class Unknown:
    """A value that only running would tell: a template, a variable, an expression."""

    text: str


@dataclass(frozen=True)
class Mapping:
    """A value that is a mapping; what it holds are settings of their own."""


Value = str | int | float | bool | None | tuple[object, ...] | Unknown | Mapping


class Setting(NamedTuple):
    """One key and its value.

    ``key`` leads to it from outside in, a call's name first; ``group`` numbers the mapping, call or command it shares
    with its siblings, ``block`` the command it belongs to (0: no command, or words that any command may take).
    ``near`` is the text it is launched with.
    """

    kind: Kind
    key: tuple[str, ...]
    value: Value
    line: int
    group: int
    block: int = 0
    near: str = ""


@dataclass
class Sheet:
    """Collects the settings of one file."""

    settings: list[Setting] = field(default_factory=list)
    groups: int = 0
    unread: list[tuple[int, str]] = field(default_factory=list)  # line and reason of what was passed over

    def group(self) -> int:
        """A new number for what belongs together."""
        self.groups += 1
        return self.groups

    def add(self, setting: Setting) -> None:
        """Take a setting; raises Unreadable beyond what one file may hold."""
        if len(self.settings) >= MOST_SETTINGS:
            raise Unreadable(f"holds more than {MOST_SETTINGS} settings, aliases counted", setting.line)
        self.settings.append(setting)


def read_value(text: str) -> Value:
    """A text as its value, or Unknown where only running would tell it."""
    return Unknown(clip(text, 80)) if _OPEN.search(text) else text


def comparable(word: str) -> str:
    """A name in the form in which names are compared: engines take both hyphens and underscores."""
    return word.replace("-", "_").lower()


def spelt(value: Value) -> str:
    """A value as it is written."""
    return value.text if isinstance(value, Unknown) else str(value)
