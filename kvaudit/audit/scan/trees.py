"""Read the settings of YAML, JSON and TOML: keys with their paths, values and lines.

YAML tags build no objects, and aliases are followed up to ``MOST_SETTINGS`` values. JSON is read as YAML, whose parser
reports lines. Template expressions of other tools, such as ``{{ x }}``, are replaced by placeholders first.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
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
    as_word,
    placeholder_of,
    read_value,
)
from kvaudit.audit.scan.shell import Word, read_line, read_shell, read_words

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # the same grammar, ten times as fast
_TEMPLATE = re.compile(r"\$?\{\{(?:(?!\{\{).)*?\}\}", re.DOTALL)
_COMMENT = re.compile(r"\{#(?:(?!\{#).)*?#\}", re.DOTALL)
_STATEMENT = re.compile(r"\{%(?:(?!\{%).)*?%\}", re.DOTALL)  # writes no text
_TEMPLATE_LINE = re.compile(r"(?m)^[ \t]*\{\{-?[^{}\n]*\}\}[ \t]*$")
_OTHER_BREAKS = dict.fromkeys(map(ord, "\x85\u2028\u2029"), " ")
_YAML_TAG = "tag:yaml.org,2002:"
_COMMENT_LINE = re.compile(r"(?m)^[ \t]*//.*$")
_ASSIGNED = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_SEVERAL_WORDS = re.compile(r"\s|=")  # a command, or pairs of names and values
_FLAG = re.compile(r"-[A-Za-z-]")
_MOST_LINES = 500  # searched for an entry of a TOML list or inline table
_TOML_NAME = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_TOML_TABLE = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_DEEP_TOML_KEY = re.compile(rf"[\s\[]*+(?:{_TOML_NAME}\s*+\.\s*+){{{DEEPEST_TREE}}}")
_TOML_KEY = re.compile(rf"\s*({_TOML_NAME}(?:\s*\.\s*{_TOML_NAME})*)\s*=")
_SCRIPTS = (".sh", ".bash", ".env", ".conf", ".service")
_EMBEDDED = (".yaml", ".yml", ".json", *_SCRIPTS)  # endings of files inside a file


class Leaf(NamedTuple):
    """A scalar in a tree of YAML, JSON or TOML.

    ``source`` is its text in the file, with line breaks, if that may contain a command; else empty.
    """

    value: Value
    line: int
    source: str = ""
    source_line: int = 0  # the first line of ``source``


class Branch(NamedTuple):
    """A mapping in a tree of YAML, JSON or TOML, as (key, line, tree of the value) entries."""

    items: list[tuple[str, int, Any]]


class Series(NamedTuple):
    """A sequence in a tree of YAML, JSON or TOML; its ``items`` are trees."""

    items: list[Any]
    line: int


Tree = Leaf | Branch | Series


def read_yaml_text(text: str, sheet: Sheet, line: int = 1) -> None:
    """Add the settings in a YAML text to ``sheet``, the settings of its file.

    ``line`` is the number of the text's first line in its file. Raises Unreadable if the text is broken or too large.
    """
    plain = without_templates(text)
    try:
        _check_depth(plain)
        for document in yaml.compose_all(plain, Loader=_LOADER):
            if document is not None:
                _walk(_YamlTree(plain, line - 1).tree(document, 0), (), sheet)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark.line if error.problem_mark else 0
        raise Unreadable(f"no YAML: {error.problem}", at + line) from None
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"no YAML: {error}", line) from None
    except RecursionError:
        raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep", line) from None


def read_json_text(text: str, sheet: Sheet, line: int = 1) -> None:
    """Add the settings in a JSON text to ``sheet``, the settings of its file; comments on separate lines are allowed.

    ``line`` is the number of the text's first line in its file.
    """
    try:
        read_yaml_text(_COMMENT_LINE.sub("", text).replace("\t", " "), sheet, line)
    except Unreadable as error:
        raise Unreadable(error.reason.replace("YAML", "JSON"), error.line) from None


def _walk(tree: Tree, path: tuple[str, ...], sheet: Sheet) -> None:
    """Add the settings in a tree to ``sheet``, which collects the settings of a file.

    These are all keys of the tree (parsed YAML, JSON or TOML), and the commands, arguments and variables in its texts.
    ``path`` are the keys that lead to the tree.
    """
    if isinstance(tree, Branch):
        _walk_mapping(tree, path, sheet)
    elif isinstance(tree, Series):
        _read_arguments(tree, sheet)
        for item in tree.items:
            _walk(item, path, sheet)
    elif tree.source:
        read_line(tree.source, tree.source_line, sheet)


def _walk_mapping(tree: Branch, path: tuple[str, ...], sheet: Sheet) -> None:
    group = sheet.group()
    _read_named_variable(tree, group, sheet)
    for key, line, child in tree.items:
        inner = path if key == "<<" else (*path, key)  # merged keys belong to the mapping itself
        if key != "<<":
            sheet.add(Setting("key", inner, _summary(child), line, group))
        if isinstance(child, Leaf) and child.source and key.endswith(_EMBEDDED):
            _read_embedded(key, child, sheet)
        else:
            _walk(child, inner, sheet)


def _read_embedded(name: str, leaf: Leaf, sheet: Sheet) -> None:
    """Add the settings of a text value that is itself a file's content, as in a manifest of containers.

    ``name`` is the file's name. If it is that of a script, the text is read as shell, else as YAML.
    """
    read_text = read_shell if name.endswith(_SCRIPTS) else read_yaml_text
    try:
        read_text(dedent(leaf.source), sheet, leaf.source_line)
    except Unreadable as error:
        sheet.unread.append((error.line, error.reason))


def _summary(tree: Tree) -> Value:
    if isinstance(tree, Leaf):
        return tree.value
    if isinstance(tree, Series):
        return tuple(item.value for item in tree.items if isinstance(item, Leaf))
    return Mapping() if tree.items else None


def _read_named_variable(tree: Branch, group: int, sheet: Sheet) -> None:
    """Add ``{name: X, value: Y}`` as an environment variable of a container."""
    leaves = {key: (line, child.value) for key, line, child in tree.items if isinstance(child, Leaf)}
    if "name" in leaves and "value" in leaves and isinstance(leaves["name"][1], str):
        line, name = leaves["name"]
        sheet.add(Setting("env", (str(name),), leaves["value"][1], line, group))


def _read_arguments(row: Series, sheet: Sheet) -> None:
    """Read the settings of a sequence: as a command line if it contains flags, else as variables ``NAME=value``."""
    leaves = [item for item in row.items if isinstance(item, Leaf)]
    words = [Word(as_word(leaf.value), leaf.line) for leaf in leaves]
    if any(_FLAG.match(word.text) and " " not in word.text for word in words):
        read_words(words, sheet)
        return
    for word in words:
        if match := _ASSIGNED.fullmatch(word.text):
            sheet.add(Setting("env", (match[1],), read_value(match[2]), word.line, sheet.group()))


class _YamlTree:
    """The converter of parsed YAML nodes to a tree with line numbers."""

    def __init__(self, text: str, offset: int) -> None:
        self.rows = text.split("\n")
        self.offset = offset  # lines above the text
        self.remaining = MOST_SETTINGS  # values; an alias counts each time it is followed

    def tree(self, node: Any, depth: int) -> Tree:
        """Return the tree of a node that is ``depth`` levels deep; raises Unreadable if it is too deep or too large."""
        line = node.start_mark.line + 1 + self.offset
        self.remaining -= 1
        if self.remaining < 0:
            raise Unreadable(f"its aliases expand to more than {MOST_SETTINGS} values", line)
        if depth > DEEPEST_TREE:
            raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep", line)
        if isinstance(node, yaml.MappingNode):
            first = 1 + self.offset
            return Branch([(str(k.value), k.start_mark.line + first, self.tree(v, depth + 1)) for k, v in node.value])
        if isinstance(node, yaml.SequenceNode):
            return Series([self.tree(item, depth + 1) for item in node.value], line)
        value = _scalar(node.tag, node.value)
        if not isinstance(value, str | Unknown | Default) or not _SEVERAL_WORDS.search(node.value):
            return Leaf(value, line)
        source, first = self._source(node)
        return Leaf(value, line, source, first + self.offset)

    def _source(self, node: Any) -> tuple[str, int]:
        """Return a scalar's text with the line breaks that it has in the file, and the number of its first line."""
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
    """Replace template expressions, such as ``{{ x }}``, by placeholders; line numbers stay the same.

    A line that is only an expression becomes empty, and line breaks that only YAML recognises become spaces.
    """
    text = text.translate(_OTHER_BREAKS)
    if not any(mark in text for mark in ("{{", "{%", "{#")):
        return text
    for pattern in (_COMMENT, _STATEMENT):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = _TEMPLATE_LINE.sub("", text)
    return _TEMPLATE.sub(lambda match: placeholder_of(match[0]) + "\n" * match[0].count("\n"), text)


def _scalar(tag: str, text: str) -> Value:
    """Return the value of a YAML scalar; an ``Unknown`` if its tag belongs to another tool (``!Sub``)."""
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


def _check_depth(text: str) -> None:
    """Raise Unreadable for nesting that would overflow the parser's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_TREE:
            raise Unreadable(
                f"nested more than {DEEPEST_TREE} levels deep", event.start_mark.line + 1 if event.start_mark else 1
            )


def read_toml_text(text: str, sheet: Sheet) -> None:
    """Add the settings in a TOML text to ``sheet``, the settings of its file; raises Unreadable for invalid TOML."""
    plain = _TEMPLATE.sub(_toml_placeholder, text)
    for number, row in enumerate(plain.split("\n"), 1):
        if _DEEP_TOML_KEY.match(row):  # of which the parser would take quadratic time
            raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep", number)
    try:
        table = tomllib.loads(plain)
        _walk(_TomlTree(plain).tree(table, ()), (), sheet)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        raise Unreadable(f"no TOML: {error}", int(at[1]) if at else 1) from None
    except RecursionError:
        raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep") from None


class _TomlTree:
    """The converter of a parsed TOML table to a tree with line numbers, which the TOML parser does not report."""

    def __init__(self, text: str) -> None:
        self.rows = text.split("\n")
        self.tables, self.keys = _toml_lines(self.rows)

    def tree(self, value: Any, path: tuple[str, ...], line: int = 1) -> Tree:
        """Return a parsed value as a tree with line numbers; the value is on ``line`` or below."""
        if isinstance(value, dict):
            return Branch([self._item(name, child, (*path, name), line) for name, child in value.items()])
        if isinstance(value, list):
            return Series(self._items(value, path, line), line)
        text = value if isinstance(value, str) else ""
        leaf_value = value if isinstance(value, bool | int | float) else read_value(str(value))
        return Leaf(leaf_value, line, text if " " in text else "", line)

    def _item(self, name: str, child: Any, path: tuple[str, ...], line: int) -> tuple[str, int, Tree]:
        rows = self.keys.get(path) or self.tables.get(path) or []
        index = bisect_left(rows, line)  # of several tables with one name, the next one
        line = rows[min(index, len(rows) - 1)] if rows else self._find_line(name, line)
        return name, line, self.tree(child, path, line)

    def _items(self, values: list[Any], path: tuple[str, ...], line: int) -> list[Tree]:
        headers = self.tables.get(path, [])
        trees: list[Tree] = []
        for index, value in enumerate(values):
            if isinstance(value, dict):
                line = headers[index] if index < len(headers) else line
            elif isinstance(value, str):
                line = self._find_line(value.split("\n")[0], line)
            trees.append(self.tree(value, path, line))
        return trees

    def _find_line(self, text: str, line: int) -> int:
        """Return the number of the first line that contains ``text``, at ``line`` or below it.

        If an escape sequence hides the text there, return ``line``.
        """
        rows = range(line, min(line + _MOST_LINES, len(self.rows) + 1))
        return next((row for row in rows if text in self.rows[row - 1]), line)


def _toml_lines(rows: list[str]) -> tuple[dict[tuple[str, ...], list[int]], dict[tuple[str, ...], list[int]]]:
    """Return two dicts {path: line numbers}, of tables and of keys, ignoring text inside multi-line strings."""
    tables: dict[tuple[str, ...], list[int]] = {}
    keys: dict[tuple[str, ...], list[int]] = {}
    table: tuple[str, ...] = ()
    quote = ""
    for number, row in enumerate(rows, 1):
        if quote:
            quote = "" if quote in row else quote
            continue
        if match := _TOML_TABLE.match(row):
            table = _split_dotted(match[1])
            tables.setdefault(table, []).append(number)
        elif match := _TOML_KEY.match(row):
            path = _split_dotted(match[1])
            for end in range(1, len(path) + 1):
                keys.setdefault((*table, *path[:end]), []).append(number)
        quote = next((mark for mark in ('"""', "'''") if row.count(mark) % 2), "")
    return tables, keys


def _split_dotted(text: str) -> tuple[str, ...]:
    parts = re.findall(r'"([^"]*)"|\'([^\']*)\'|([\w-]+)', text)
    return tuple(next(filter(None, groups), "") for groups in parts)


def _toml_placeholder(match: re.Match[str]) -> str:
    """Return a placeholder for a template expression, in quotes unless the expression is inside quotes."""
    quoted = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()].count('"') % 2
    blank = placeholder_of(match[0])
    return (blank if quoted else f'"{blank}"') + "\n" * match[0].count("\n")
