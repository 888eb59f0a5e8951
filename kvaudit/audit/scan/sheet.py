"""What one file sets: the form in which every reader hands its settings on, with the line where each stands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvaudit.core.text import clip

MOST_SETTINGS = 50_000  # of one file; aliases can stand for more than a machine holds
DEEPEST_TREE = 60  # levels of nesting
# a template, a variable, an interpolation or a blank to fill in, in any dialect
_OPEN = re.compile(
    r"\{\{|\{%|<%|#\{|\$\{|\$\(|\$\w|`|%\(\w+\)|\A<[^<>]+>\Z|\A\{\w*\}\Z|\A@@?\w+@@?\Z|\A%\w+%\Z"
    r"|\A\[\[.*\]\]\Z|\A\(\(.*\)\)\Z"
)
# ${NAME:-fp8}, ${NAME-fp8}, ${NAME:=fp8}, ${oc.env:NAME,fp8}
_DEFAULT = re.compile(r"\$\{(?:\w+:?[-=]|oc\.env:\w+,)\s*(['\"]?)([^${}`'\"\s]+)\1\}")
# {{ x | default "fp8" }}, {{ x | default('fp8') }}, ${{ inputs.x || 'fp8' }}
_OR_ELSE = re.compile(r"(?:\bdefault\b\s*\(?|\|\|)\s*(?:\"([\w.]+)\"|'([\w.]+)'|(\d+))")
_BLANK = re.compile(r"__a_template(?:_or_(?P<default>[\w.]+?))?_of_another_tool__")
_BLANK_OF_DEFAULT = "__a_template_or_{}_of_another_tool__"
_SHOWN = "{{...}}"  # what is shown in place of a template

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


@dataclass(frozen=True)
class Default:
    """A value that stands where nothing else is set; ``text`` is how it is written."""

    value: str
    text: str


Value = str | int | float | bool | None | tuple[object, ...] | Unknown | Default | Mapping


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


def blank_of(template: str) -> str:
    """One word in place of a template of another tool, which ``read_value`` knows again, with its default if any."""
    found = _OR_ELSE.search(template)
    default = next(filter(None, found.groups()), "") if found else ""
    return _BLANK_OF_DEFAULT.format(default) if default else "__a_template_of_another_tool__"


def read_value(text: str) -> Value:
    """A text as its value, its default, or Unknown where only running would tell it: the one reader of templates."""
    blank = _BLANK.fullmatch(text)
    shown = _BLANK.sub(_SHOWN, text)
    if blank and blank["default"]:
        return Default(blank["default"], shown)
    if found := _DEFAULT.fullmatch(text):
        return Default(found[2], text)
    return Unknown(clip(shown, 80)) if _OPEN.search(shown) else text


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z](?:[a-z]|\b|_))")


def comparable(word: str) -> str:
    """A name in the form in which names are compared: kv-cache-dtype, kv_cache_dtype and kvCacheDtype are one."""
    return split_camel(word).replace("-", "_").lower()


def split_camel(text: str) -> str:
    """A text whose names in camelCase are written with underscores."""
    return _CAMEL.sub("_", text)


def spelt(value: Value) -> str:
    """A value as a word of a command, which ``read_value`` reads as the same value again."""
    if isinstance(value, Default):
        return _BLANK_OF_DEFAULT.format(value.value) if value.text == _SHOWN else value.text
    if isinstance(value, Unknown):
        return value.text if isinstance(read_value(value.text), Unknown) else f"${{{value.text}}}"
    return str(value)
