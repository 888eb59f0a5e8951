"""Python sources by their syntax tree: keyword arguments, dicts, assignments, imports and command lines in strings.

Nothing is imported and nothing is run. A name counts as its value where the file assigns it once, as a literal.
"""

from __future__ import annotations

import ast
import re
import warnings

from kvaudit.audit.scan.sheet import (
    DEEPEST_TREE,
    Default,
    Mapping,
    Setting,
    Sheet,
    Unknown,
    Unreadable,
    Value,
    read_value,
    spelt,
)
from kvaudit.audit.scan.shell import read_line, read_words
from kvaudit.audit.scan.shell_words import Word

_FOR_PEOPLE = {"help", "description", "epilog", "usage"}  # texts that mention flags and set none
_FLAG = re.compile(r"--?[A-Za-z]")
# take the words of a command one by one
_OF_WORDS = {"append", "insert", "create_subprocess_exec", "execl", "execlp", "execlpe", "spawnl", "spawnlp"}
_SETTING = {"setdefault", "putenv", "setenv"}  # a variable of the environment
_GGML = "GGML_TYPE_"  # constants that llama.cpp's bindings take for the type of a cache
_FAR = 500  # lines in which the next flag of a string is looked up
_TALKING = {"print", "log", "debug", "info", "warning", "warn", "error", "exception", "critical", "fail", "exit"}


def read_python(text: str, sheet: Sheet) -> None:
    """The settings of a source; raises Unreadable where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source, not about its settings
            tree = ast.parse(text)
        _Reader(text, tree, sheet).visit(tree)
    except SyntaxError as error:
        raise Unreadable(f"no Python: {error.msg}", error.lineno or 1) from None
    except ValueError as error:
        raise Unreadable(f"no Python: {error}") from None
    except (RecursionError, MemoryError):
        raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep") from None


class _Reader(ast.NodeVisitor):
    def __init__(self, text: str, tree: ast.Module, sheet: Sheet) -> None:
        self.rows = text.split("\n")
        self.sheet = sheet
        self.constants = _assigned_once(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported(f"{node.module or ''}.{alias.name}", alias.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name, group = _callee(node.func), self.sheet.group()
        self.sheet.add(Setting("call", (name,), True, node.lineno, group))
        self._declared_flag(name, node, group)
        self._set_variable(name, node, group)
        if name in _OF_WORDS:
            words = [Word(spelt(self._value(one)), one.lineno) for one in node.args]
            if any(_FLAG.match(word.text) and " " not in word.text for word in words):
                read_words(words, self.sheet)
                return
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._setting((name, keyword.arg), keyword.value, keyword.lineno, group)
            elif isinstance(keyword.value, ast.Dict):  # LLM(**{"kv_cache_dtype": "fp8"})
                self._mapping(keyword.value, (name,))
        self.visit(node.func)
        if name not in _TALKING and not name.endswith(("Error", "Exception", "Warning")):
            for argument in node.args:
                self.visit(argument)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._mapping(node, ())

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            value, group = self._value(node.value), self.sheet.group()
            path = _place(target)
            if path and not (path[0] == "self" and isinstance(value, Unknown)):  # a class passes on what it is given
                if path[0] == "environ":
                    self.sheet.add(Setting("env", path[-1:], value, target.lineno, group))
                else:
                    self.sheet.add(Setting("key", path, value, target.lineno, group))
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """A field of a class of settings: its default is what is used where nothing is said."""
        if node.value is None:
            return
        path = (node.target.id,) if isinstance(node.target, ast.Name) else _place(node.target)
        value = self._value(node.value)
        if path and not isinstance(value, Unknown):
            self.sheet.add(Setting("key", path, value, node.lineno, self.sheet.group()))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_List(self, node: ast.List) -> None:
        self._sequence(node, ())

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._sequence(node, ())

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._command(node.value, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._command(_joined(node), node)

    def _imported(self, name: str, line: int) -> None:
        self.sheet.add(Setting("import", tuple(name.split(".")), True, line, self.sheet.group()))

    def _declared_flag(self, name: str, node: ast.Call, group: int) -> None:
        """An argument parser's default is what a launch without the flag gets."""
        flag = node.args[0] if node.args else None
        if name == "add_argument" and isinstance(flag, ast.Constant) and isinstance(flag.value, str):
            for keyword in node.keywords:
                if keyword.arg == "default":
                    value = self._value(keyword.value)
                    self.sheet.add(Setting("flag", (flag.value,), value, keyword.lineno, group))

    def _set_variable(self, name: str, node: ast.Call, group: int) -> None:
        """``os.environ.setdefault("NAME", value)`` and its like, and ``setattr(settings, "name", value)``."""
        if name == "setattr" and len(node.args) == 3:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                path = (_callee(node.args[0]), attribute.value)
                self.sheet.add(Setting("key", path, self._value(node.args[2]), node.lineno, group))
        if name in _SETTING and len(node.args) == 2:
            variable = node.args[0]
            if isinstance(variable, ast.Constant) and isinstance(variable.value, str) and variable.value.isupper():
                value = self._value(node.args[1])
                self.sheet.add(Setting("env", (variable.value,), value, node.lineno, group))

    def _setting(self, path: tuple[str, ...], value: ast.expr, line: int, group: int) -> None:
        self.sheet.add(Setting("key", path, self._value(value), line, group))
        if isinstance(value, ast.Dict):
            self._mapping(value, path)
        elif isinstance(value, ast.List | ast.Tuple):
            self._sequence(value, path)
        elif path[-1] not in _FOR_PEOPLE:
            self.visit(value)

    def _mapping(self, node: ast.Dict, path: tuple[str, ...]) -> None:
        group = self.sheet.group()
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._setting((*path, key.value), value, key.lineno, group)
            elif isinstance(key, ast.Attribute):  # a constant of a library: hints.kv_cache_precision
                self._setting((*path, key.attr), value, key.lineno, group)
            else:
                self.visit(value)

    def _sequence(self, node: ast.List | ast.Tuple, path: tuple[str, ...]) -> None:
        """A list of words is a command line, as ``subprocess`` takes it; mappings in a list belong to its key."""
        words = [Word(spelt(self._value(item)), item.lineno) for item in node.elts]
        if any(_FLAG.match(word.text) and " " not in word.text for word in words):
            read_words(words, self.sheet)
            return
        for item in node.elts:
            if isinstance(item, ast.Dict):
                self._mapping(item, path)
            else:
                self.visit(item)

    def _command(self, text: str, node: ast.expr) -> None:
        """A command line in a string; each flag is looked up in the lines that the string covers."""
        if " " not in text and "=" not in text:
            return  # the name of a flag
        found = Sheet(groups=self.sheet.groups, unread=self.sheet.unread)
        read_line(text, node.lineno, found)
        self.sheet.groups = found.groups
        line = node.lineno
        for setting in found.settings:
            rows = range(line, min(line + _FAR, (node.end_lineno or line) + 1))
            line = next((row for row in rows if setting.key[-1] in self.rows[row - 1]), line)
            self.sheet.add(setting._replace(line=line))

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        return _literal(node)


def _assigned_once(tree: ast.Module) -> dict[str, Value]:
    found: dict[str, list[Value]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(Unknown(node.id))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            found.setdefault(node.targets[0].id, []).append(_literal(node.value))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.setdefault(node.target.id, []).append(_literal(node.value))
    # an assignment is met twice: as itself, and as the name it stores
    return {
        name: next((value for value in values if value != Unknown(name)), None)
        for name, values in found.items()
        if len(values) == 2
    }


def _literal(node: ast.expr) -> Value:
    if isinstance(node, ast.Constant):
        value = node.value
        return read_value(value) if isinstance(value, str) else value if isinstance(value, bool | int | float) else None
    if isinstance(node, ast.Dict):
        return Mapping()
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return tuple(_literal(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int | float) else Unknown("an expression")
    if isinstance(node, ast.Attribute | ast.Name) and (constant := _constant(node)):
        return constant
    if isinstance(node, ast.Call) and _callee(node.func)[:1].isupper():
        return Mapping()  # a class of configurations, whose own arguments are settings
    return _variable_or_else(node) or Unknown("an expression")


def _constant(node: ast.Attribute | ast.Name) -> str:
    """The value that a constant of a library is named after, as in torch.float8_e4m3fn; empty for any other name."""
    name = _callee(node)
    if name.startswith(_GGML):
        return name.removeprefix(_GGML)
    owner = _callee(node.value) if isinstance(node, ast.Attribute) else ""
    return name.lower() if owner == "torch" or owner[:1].isupper() else ""


def _variable_or_else(node: ast.expr) -> Default | None:
    """What ``os.environ.get("NAME", "fp8")`` and ``os.getenv`` give where the variable is not set."""
    if not isinstance(node, ast.Call):
        return None
    of_environment = isinstance(node.func, ast.Attribute) and _callee(node.func.value) == "environ"
    if not (_callee(node.func) == "getenv" or (of_environment and _callee(node.func) == "get")):
        return None
    if len(node.args) != 2 or not isinstance(node.args[1], ast.Constant) or not isinstance(node.args[1].value, str):
        return None
    return Default(node.args[1].value, ast.unparse(node))


def _callee(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _place(target: ast.expr) -> tuple[str, ...]:
    """What an assignment to an attribute or to an item sets: whose, and its name."""
    if isinstance(target, ast.Attribute):
        return (_callee(target.value), target.attr)
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return (_callee(target.value), str(target.slice.value))
    return ()


def _joined(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "${...}" for part in node.values)
