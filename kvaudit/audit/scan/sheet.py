"""The settings of a file with their line numbers: the common output of all readers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvaudit.core.text import clip

MOST_SETTINGS = 50_000  # per file; YAML aliases can expand to more than fits in memory
DEEPEST_TREE = 60  # levels of nesting
# a template, variable, interpolation or placeholder, in any dialect
_OPEN = re.compile(
    r"\{\{|\{%|<%|#\{|\$\{|\$\(|\$\w|`|%\(\w+\)|\A<[^<>]+>\Z|\A\{\w*\}\Z|\A@@?\w+@@?\Z|\A%\w+%\Z"
    r"|\A\[\[.*\]\]\Z|\A\(\(.*\)\)\Z"
)
# ${NAME:-fp8}, ${NAME-fp8}, ${NAME:=fp8}, ${oc.env:NAME,fp8}
_DEFAULT = re.compile(r"\$\{(?:\w+:?[-=]|oc\.env:\w+,)\s*(['\"]?)([^${}`'\"\s]+)\1\}")
# {{ x | default "fp8" }}, {{ x | default('fp8') }}, ${{ inputs.x || 'fp8' }}
_OR_ELSE = re.compile(r"(?:\bdefault\b\s*+\(?+|\|\|)\s*+(?:\"([\w.]+)\"|'([\w.]+)'|(\d+))")
_BLANK = re.compile(r"__a_template(?:_or_(?P<default>[\w.]+?))?_of_another_tool__")
_BLANK_OF_DEFAULT = "__a_template_or_{}_of_another_tool__"
_SHOWN = "{{...}}"  # displayed instead of a template

Kind = Literal["flag", "key", "env", "call", "import"]


class Unreadable(Exception):
    """The error that a file cannot be read as data from ``line`` on."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass(frozen=True)
class Unknown:
    """A value that is known only at run time: a template expression, a variable, or an expression in code."""

    text: str


@dataclass(frozen=True)
class Mapping:
    """The value of a key that has a mapping below it, whose entries are separate settings."""


@dataclass(frozen=True)
class Default:
    """A value that applies if nothing else is set; ``text`` is the expression in the file that states it."""

    value: str
    text: str


Value = str | int | float | bool | None | tuple[object, ...] | Unknown | Default | Mapping


class Setting(NamedTuple):
    """A key with its value, as found in a file.

    ``key`` is the path from the outermost key or call. ``group`` is the number of the mapping, call or command that the
    setting shares with its siblings. ``block`` is the number of the setting's command; it is 0 if the setting is in no
    command, or if any command may use it. ``command`` is the command's text.
    """

    kind: Kind
    key: tuple[str, ...]
    value: Value
    line: int
    group: int
    block: int = 0
    command: str = ""


@dataclass
class Sheet:
    """The settings that are collected from one file, and the parts of the file that could not be read."""

    settings: list[Setting] = field(default_factory=list)
    groups: int = 0
    unread: list[tuple[int, str]] = field(default_factory=list)  # line and reason of skipped parts

    def group(self) -> int:
        """Return a new number for a group: the settings of one mapping, call or command."""
        self.groups += 1
        return self.groups

    def add(self, setting: Setting) -> None:
        """Add a setting; raises Unreadable beyond ``MOST_SETTINGS``."""
        if len(self.settings) >= MOST_SETTINGS:
            raise Unreadable(f"holds more than {MOST_SETTINGS} settings, aliases counted", setting.line)
        self.settings.append(setting)


def placeholder_of(template: str) -> str:
    """Return a word that replaces a template expression of a file, such as ``{{ x }}``, so that the file can be read.

    The word contains the expression's default, if it has one; ``read_value`` recognises the word.
    """
    match = _OR_ELSE.search(template)
    default = next(filter(None, match.groups()), "") if match else ""
    return _BLANK_OF_DEFAULT.format(default) if default else "__a_template_of_another_tool__"


def read_value(text: str) -> Value:
    """Return the value that a text stands for: a ``Default``, an ``Unknown``, or the text itself.

    A variable or a template expression, such as ``${X}``, gives a ``Default`` if it states one, else an ``Unknown``.
    """
    blank = _BLANK.fullmatch(text)
    shown = _BLANK.sub(_SHOWN, text)
    if blank and blank["default"]:
        return Default(blank["default"], shown)
    if match := _DEFAULT.fullmatch(text):
        return Default(match[2], text)
    return Unknown(clip(shown, 80)) if _OPEN.search(shown) else text


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z](?:[a-z]|\b|_))")


def comparable(word: str) -> str:
    """Normalise a name for comparison: kv-cache-dtype, kv_cache_dtype and kvCacheDtype become equal."""
    return split_camel(word).replace("-", "_").lower()


def split_camel(text: str) -> str:
    """Rewrite camelCase names in a text with underscores."""
    return _CAMEL.sub("_", text)


def as_word(value: Value) -> str:
    """Write a value as one word of a command line, from which ``read_value`` returns the same value."""
    if isinstance(value, Default):
        return _BLANK_OF_DEFAULT.format(value.value) if value.text == _SHOWN else value.text
    if isinstance(value, Unknown):
        return value.text if isinstance(read_value(value.text), Unknown) else f"${{{value.text}}}"
    return str(value)
