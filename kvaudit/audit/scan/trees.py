"""YAML and JSON, and the trees that TOML is read into, too: keys with their paths, values and lines.

No tag builds anything. JSON is read as the YAML it is, which knows lines. Anchors are followed, up to what one file may
hold. Templates of other tools are blanked first: what they would write is not known, the rest of the file is.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from kvaudit.audit.scan.sheet import (
    DEEPEST_TREE,
    MOST_SETTINGS,
    Default,
    Mapping,
    Setting,
    Sheet,
    Unknown,
    Unreadable,
    Value,
    blank_of,
    read_value,
    spelt,
)
from kvaudit.audit.scan.shell import read_line, read_shell, read_words
from kvaudit.audit.scan.shell_words import Word

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # the same grammar, ten times as fast
TEMPLATE = re.compile(r"\$?\{\{(?:(?!\{\{).)*?\}\}", re.DOTALL)
_COMMENT = re.compile(r"\{#(?:(?!\{#).)*?#\}", re.DOTALL)
_STATEMENT = re.compile(r"\{%(?:(?!\{%).)*?%\}", re.DOTALL)  # writes nothing by itself
_TEMPLATE_LINE = re.compile(r"(?m)^[ \t]*\{\{-?[^{}\n]*\}\}[ \t]*$")
_OTHER_BREAKS = dict.fromkeys(map(ord, "\x85\u2028\u2029"), " ")
_YAML_TAG = "tag:yaml.org,2002:"
_COMMENT_LINE = re.compile(r"(?m)^[ \t]*//.*$")
_ASSIGNED = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_SEVERAL_WORDS = re.compile(r"\s|=")  # a command, or pairs of names and values
_FLAG = re.compile(r"-[A-Za-z-]")
_SCRIPTS = (".sh", ".bash", ".env", ".conf", ".service")
_EMBEDDED = (".yaml", ".yml", ".json", *_SCRIPTS)  # names of files inside a file


class Leaf(NamedTuple):
    """A value; ``source`` is how it is written where it may hold a command over several lines."""

    value: Value
    line: int
    source: str = ""
    first: int = 0  # the line on which ``source`` begins


class Branch(NamedTuple):
    """A mapping: key, line, value."""

    items: list[tuple[str, int, Any]]


class Series(NamedTuple):
    """A sequence."""

    items: list[Any]
    line: int


Tree = Leaf | Branch | Series


def read_yaml_text(text: str, sheet: Sheet, line: int = 1) -> None:
    """The settings of YAML; raises Unreadable where it is broken, or stands for more than a file may hold."""
    blanked = without_templates(text)
    try:
        _refuse_deep(blanked)
        for document in yaml.compose_all(blanked, Loader=_LOADER):
            if document is not None:
                walk(_Composed(blanked, line - 1).tree(document, 0), (), sheet)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark.line if error.problem_mark else 0
        raise Unreadable(f"no YAML: {error.problem}", at + line) from None
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"no YAML: {error}", line) from None
    except RecursionError:
        raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep", line) from None


def read_json_text(text: str, sheet: Sheet, line: int = 1) -> None:
    """The settings of JSON, comments on lines of their own allowed."""
    try:
        read_yaml_text(_COMMENT_LINE.sub("", text).replace("\t", " "), sheet, line)
    except Unreadable as error:
        raise Unreadable(error.reason.replace("YAML", "JSON"), error.line) from None


def walk(tree: Tree, path: tuple[str, ...], sheet: Sheet) -> None:
    """Write every key of a tree into the sheet, and the commands, arguments and variables that its texts hold."""
    if isinstance(tree, Branch):
        _walk_mapping(tree, path, sheet)
    elif isinstance(tree, Series):
        _read_arguments(tree, sheet)
        for item in tree.items:
            walk(item, path, sheet)
    elif tree.source:
        read_line(tree.source, tree.first, sheet)


def _walk_mapping(tree: Branch, path: tuple[str, ...], sheet: Sheet) -> None:
    group = sheet.group()
    _read_named_variable(tree, group, sheet)
    for key, line, child in tree.items:
        inner = path if key == "<<" else (*path, key)  # merged keys stand where they are merged into
        if key != "<<":
            sheet.add(Setting("key", inner, _summary(child), line, group))
        if isinstance(child, Leaf) and child.source and key.endswith(_EMBEDDED):
            _read_embedded(key, child, sheet)
        else:
            walk(child, inner, sheet)


def _read_embedded(name: str, leaf: Leaf, sheet: Sheet) -> None:
    """A file inside a file, as a container's manifest holds it."""
    read = read_shell if name.endswith(_SCRIPTS) else read_yaml_text
    try:
        read(dedent(leaf.source), sheet, leaf.first)
    except Unreadable as error:
        sheet.unread.append((error.line, error.reason))


def _summary(tree: Tree) -> Value:
    if isinstance(tree, Leaf):
        return tree.value
    if isinstance(tree, Series):
        return tuple(item.value for item in tree.items if isinstance(item, Leaf))
    return Mapping() if tree.items else None


def _read_named_variable(tree: Branch, group: int, sheet: Sheet) -> None:
    """``{name: X, value: Y}`` is how containers are given a variable of the environment."""
    found = {key: (line, child.value) for key, line, child in tree.items if isinstance(child, Leaf)}
    if "name" in found and "value" in found and isinstance(found["name"][1], str):
        line, name = found["name"]
        sheet.add(Setting("env", (str(name),), found["value"][1], line, group))


def _read_arguments(row: Series, sheet: Sheet) -> None:
    """A sequence of words is a command line; one of ``NAME=value`` sets variables."""
    leaves = [item for item in row.items if isinstance(item, Leaf)]
    words = [Word(spelt(leaf.value), leaf.line) for leaf in leaves]
    if any(_FLAG.match(word.text) and " " not in word.text for word in words):
        read_words(words, sheet)
        return
    for word in words:
        if match := _ASSIGNED.fullmatch(word.text):
            sheet.add(Setting("env", (match[1],), read_value(match[2]), word.line, sheet.group()))


class _Composed:
    """Turns composed nodes, which know their lines, into a tree."""

    def __init__(self, text: str, offset: int) -> None:
        self.rows = text.split("\n")
        self.offset = offset  # lines above the text
        self.left = MOST_SETTINGS  # aliases count every time they are followed

    def tree(self, node: Any, depth: int) -> Tree:
        """The tree of a node; raises Unreadable when there is too much of it."""
        line = node.start_mark.line + 1 + self.offset
        self.left -= 1
        if self.left < 0:
            raise Unreadable(f"its aliases stand for more than {MOST_SETTINGS} values", line)
        if depth > DEEPEST_TREE:
            raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep", line)
        if isinstance(node, yaml.MappingNode):
            above, pairs = 1 + self.offset, node.value
            return Branch([(str(k.value), k.start_mark.line + above, self.tree(v, depth + 1)) for k, v in pairs])
        if isinstance(node, yaml.SequenceNode):
            return Series([self.tree(item, depth + 1) for item in node.value], line)
        value = _scalar(node.tag, node.value)
        if not isinstance(value, str | Unknown | Default) or not _SEVERAL_WORDS.search(node.value):
            return Leaf(value, line)
        source, first = self._source(node)
        return Leaf(value, line, source, first + self.offset)

    def _source(self, node: Any) -> tuple[str, int]:
        """The text of a scalar with the line breaks of the file, so that words in it keep their lines."""
        start, end = node.start_mark, node.end_mark
        if start.line == end.line or node.style in ("'", '"'):
            return node.value, start.line + 1
        rows = self.rows[start.line : end.line + 1]
        rows[-1] = rows[-1][: end.column]
        if node.style in ("|", ">"):
            joint = "\n" if node.style == "|" else "\\\n"
            return joint.join(rows[1:]), start.line + 2
        return "\\\n".join([rows[0][start.column :], *rows[1:]]), start.line + 1


def without_templates(text: str) -> str:
    """The text with templates blanked, line for line: a line that is one goes, a value that is one has no value.

    Breaks that only YAML takes for the end of a line go, too.
    """
    text = text.translate(_OTHER_BREAKS)
    if not any(mark in text for mark in ("{{", "{%", "{#")):
        return text
    for nothing in (_COMMENT, _STATEMENT):
        text = nothing.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = _TEMPLATE_LINE.sub("", text)
    return TEMPLATE.sub(blanked_template, text)


def blanked_template(match: re.Match[str]) -> str:
    """A word in place of a template, with as many lines."""
    return blank_of(match[0]) + "\n" * match[0].count("\n")


def _scalar(tag: str, text: str) -> Value:
    """A YAML scalar as its value; a tag of its own stands for what only its tool knows."""
    if not tag.startswith(_YAML_TAG):
        words = _FLAG.match(text) or _ASSIGNED.match(text)  # !Sub "--kv-cache-dtype=${KvType}"
        return read_value(text) if words else Unknown(f"{tag} {text}".strip())
    kind = tag.removeprefix(_YAML_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind in ("int", "float"):
        return _number(text)
    return read_value(text) if kind == "str" else Unknown(tag)


def _number(text: str) -> Value:
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return text  # 0x10, 1:30
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _refuse_deep(text: str) -> None:
    """Raise Unreadable for nesting that would end the reader, while the text is still a stream."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_TREE:
            raise Unreadable(
                f"nested more than {DEEPEST_TREE} levels deep", event.start_mark.line + 1 if event.start_mark else 1
            )
