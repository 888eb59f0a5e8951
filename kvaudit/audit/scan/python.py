"""Read Python sources by their syntax tree: keyword arguments, dicts, assignments, imports, command lines in strings.

Nothing is imported or run. A name is replaced by its value if the file assigns it once, as a literal.
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
    as_word,
    read_value,
)
from kvaudit.audit.scan.shell import Word, read_line, read_words

_FOR_PEOPLE = {"help", "description", "epilog", "usage"}  # keys of texts that mention flags without setting them
_FLAG = re.compile(r"--?[A-Za-z]")
# functions that take the words of a command one by one
_TAKE_WORDS = {"append", "insert", "create_subprocess_exec", "execl", "execlp", "execlpe", "spawnl", "spawnlp"}
_SET_VARIABLE = {"setdefault", "putenv", "setenv"}  # functions that set an environment variable
_GGML = "GGML_TYPE_"  # cache types in llama.cpp's bindings
_MOST_LINES = 500  # of a string, searched for the line of the next flag
_PRINTING = {"print", "log", "debug", "info", "warning", "warn", "error", "exception", "critical", "fail", "exit"}


def read_python(text: str, sheet: Sheet) -> None:
    """Add the settings in the text of a Python file to ``sheet``; raises Unreadable if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the scanned source
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
        self.constants = _find_constants(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add_import(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._add_import(f"{node.module or ''}.{alias.name}", alias.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name, group = _callee(node.func), self.sheet.group()
        self.sheet.add(Setting("call", (name,), True, node.lineno, group))
        self._read_flag_default(name, node, group)
        self._read_assigning_call(name, node, group)
        if name in _TAKE_WORDS:
            words = [Word(as_word(self._value(argument)), argument.lineno) for argument in node.args]
            if any(_FLAG.match(word.text) and " " not in word.text for word in words):
                read_words(words, self.sheet)
                return
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._add_setting((name, keyword.arg), keyword.value, keyword.lineno, group)
            elif isinstance(keyword.value, ast.Dict):  # LLM(**{"kv_cache_dtype": "fp8"})
                self._read_mapping(keyword.value, (name,))
        self.visit(node.func)
        if name not in _PRINTING and not name.endswith(("Error", "Exception", "Warning")):
            for argument in node.args:
                self.visit(argument)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._read_mapping(node, ())

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            value, group = self._value(node.value), self.sheet.group()
            path = _target_path(target)
            if path and not (path[0] == "self" and isinstance(value, Unknown)):  # a class storing its argument
                if path[0] == "environ":
                    self.sheet.add(Setting("env", path[-1:], value, target.lineno, group))
                else:
                    self.sheet.add(Setting("key", path, value, target.lineno, group))
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Add the value of an annotated assignment as a setting: in a settings class, it is the field's default."""
        if node.value is None:
            return
        path = (node.target.id,) if isinstance(node.target, ast.Name) else _target_path(node.target)
        value = self._value(node.value)
        if path and not isinstance(value, Unknown):
            self.sheet.add(Setting("key", path, value, node.lineno, self.sheet.group()))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_List(self, node: ast.List) -> None:
        self._read_sequence(node, ())

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._read_sequence(node, ())

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._read_command(node.value, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._read_command(_joined_text(node), node)

    def _add_import(self, name: str, line: int) -> None:
        self.sheet.add(Setting("import", tuple(name.split(".")), True, line, self.sheet.group()))

    def _read_flag_default(self, name: str, node: ast.Call, group: int) -> None:
        """Add an argparse flag's default to the file's settings, since it holds if the flag is not given."""
        flag = node.args[0] if node.args else None
        if name == "add_argument" and isinstance(flag, ast.Constant) and isinstance(flag.value, str):
            for keyword in node.keywords:
                if keyword.arg == "default":
                    value = self._value(keyword.value)
                    self.sheet.add(Setting("flag", (flag.value,), value, keyword.lineno, group))

    def _read_assigning_call(self, name: str, node: ast.Call, group: int) -> None:
        """Add the setting that a call assigns, as in ``os.environ.setdefault("NAME", value)`` or ``setattr``."""
        if name == "setattr" and len(node.args) == 3:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                path = (_callee(node.args[0]), attribute.value)
                self.sheet.add(Setting("key", path, self._value(node.args[2]), node.lineno, group))
        if name in _SET_VARIABLE and len(node.args) == 2:
            variable = node.args[0]
            if isinstance(variable, ast.Constant) and isinstance(variable.value, str) and variable.value.isupper():
                value = self._value(node.args[1])
                self.sheet.add(Setting("env", (variable.value,), value, node.lineno, group))

    def _add_setting(self, path: tuple[str, ...], value: ast.expr, line: int, group: int) -> None:
        self.sheet.add(Setting("key", path, self._value(value), line, group))
        if isinstance(value, ast.Dict):
            self._read_mapping(value, path)
        elif isinstance(value, ast.List | ast.Tuple):
            self._read_sequence(value, path)
        elif path[-1] not in _FOR_PEOPLE:
            self.visit(value)

    def _read_mapping(self, node: ast.Dict, path: tuple[str, ...]) -> None:
        group = self.sheet.group()
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._add_setting((*path, key.value), value, key.lineno, group)
            elif isinstance(key, ast.Attribute):  # a constant of a library: hints.kv_cache_precision
                self._add_setting((*path, key.attr), value, key.lineno, group)
            else:
                self.visit(value)

    def _read_sequence(self, node: ast.List | ast.Tuple, path: tuple[str, ...]) -> None:
        """Read a list with flags as a command line, as for ``subprocess``; of any other list, read the entries."""
        words = [Word(as_word(self._value(item)), item.lineno) for item in node.elts]
        if any(_FLAG.match(word.text) and " " not in word.text for word in words):
            read_words(words, self.sheet)
            return
        for item in node.elts:
            if isinstance(item, ast.Dict):
                self._read_mapping(item, path)
            else:
                self.visit(item)

    def _read_command(self, text: str, node: ast.expr) -> None:
        """Read a command line in a string; each flag gets its own line number."""
        if " " not in text and "=" not in text:
            return  # the name of a flag
        command = Sheet(groups=self.sheet.groups, unread=self.sheet.unread)
        read_line(text, node.lineno, command)
        self.sheet.groups = command.groups
        line = node.lineno
        for setting in command.settings:
            rows = range(line, min(line + _MOST_LINES, (node.end_lineno or line) + 1))
            line = next((row for row in rows if setting.key[-1] in self.rows[row - 1]), line)
            self.sheet.add(setting._replace(line=line))

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        return _literal(node)


def _find_constants(tree: ast.Module) -> dict[str, Value]:
    """Return {name: value} of the names that the file assigns once."""
    assigned: dict[str, list[Value]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, []).append(Unknown(node.id))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            assigned.setdefault(node.targets[0].id, []).append(_literal(node.value))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            assigned.setdefault(node.target.id, []).append(_literal(node.value))
    # two values are one assignment: the node itself, and the name it stores
    return {
        name: next((value for value in values if value != Unknown(name)), None)
        for name, values in assigned.items()
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
        return Mapping()  # a configuration class, whose arguments are settings
    return _variable_default(node) or Unknown("an expression")


def _constant(node: ast.Attribute | ast.Name) -> str:
    """Return the value that a library's constant stands for (torch.float8_e4m3fn: "float8_e4m3fn"); "" for others."""
    name = _callee(node)
    if name.startswith(_GGML):
        return name.removeprefix(_GGML)
    owner = _callee(node.value) if isinstance(node, ast.Attribute) else ""
    return name.lower() if owner == "torch" or owner[:1].isupper() else ""


def _variable_default(node: ast.expr) -> Default | None:
    """Return the default of ``os.environ.get("NAME", "fp8")`` or ``os.getenv``; None for other expressions."""
    if not isinstance(node, ast.Call):
        return None
    is_environment = isinstance(node.func, ast.Attribute) and _callee(node.func.value) == "environ"
    if not (_callee(node.func) == "getenv" or (is_environment and _callee(node.func) == "get")):
        return None
    if len(node.args) != 2 or not isinstance(node.args[1], ast.Constant) or not isinstance(node.args[1].value, str):
        return None
    return Default(node.args[1].value, ast.unparse(node))


def _callee(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _target_path(target: ast.expr) -> tuple[str, ...]:
    """Return the path of an assigned attribute or item, such as (owner, name); () for any other target."""
    if isinstance(target, ast.Attribute):
        return (_callee(target.value), target.attr)
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return (_callee(target.value), str(target.slice.value))
    return ()


def _joined_text(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "${...}" for part in node.values)
