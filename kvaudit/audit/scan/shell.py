"""Shell scripts, Dockerfiles and files of arguments: flags, overrides, variables. Nothing is run.

A variable counts as its value where the script assigns it once, as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvaudit.audit.scan.sheet import Setting, Sheet, Unknown, Unreadable, Value, blank_of, read_value
from kvaudit.audit.scan.shell_words import HereDocument, ShellCommand, Word, parts_of

_ASSIGNMENT = re.compile(r"(?s)\+{0,2}([A-Za-z_][\w.\-/@]*)\+?=(.*)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_FLAGS_INSIDE = re.compile(r"(?:\A|\s)--?[A-Za-z]")
# a command that is given a variable of the environment, or a unit's line that does so
_VARIABLE_SET = re.compile(
    r"""(?:\A|[\n;&|(]|\b(?:export|env|setenv)\s)[ \t]*(?:Environment=["']?)?[A-Z][A-Z0-9_]*=[^\s=]"""
)
_SEVERAL = re.compile(r",(?=[A-Za-z_][\w.\-]*=)")  # of `a=1,b=2`, as options hold arguments
_PAIRS = re.compile(r"[A-Za-z_][\w.\-/]*=[^\s,]*(?:,[A-Za-z_][\w.\-/]*=[^\s,]*)+")
_COMMAND_FOLLOWS = {"-c", "-lc", "-ic", "-ec"}  # of a shell
_OPENING = {"{", "then", "do", "else", "!"}  # stand before a command
_SETTING = re.compile(r"(?m)^(?:export[ \t]+)?([A-Za-z][\w.\-]*)[ \t]*[:?+]?=[ \t]*")
_TALKING = {"echo", "printf", "log", "die", "warn", ":"}  # their words are for people
_HERE = re.compile(r"<<-?[\"']?([A-Za-z_]\w*)")
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_TEMPLATE = re.compile(r"\$?\{\{[^{}\n]*\}\}")  # of a justfile, or of what writes the script
_DEEPEST = 3  # a command in a string of a command


def read_shell(text: str, sheet: Sheet, line: int = 1) -> list[HereDocument]:
    """The settings of a script; returns its here-documents. Raises Unreadable at a quote that is never closed."""
    commands: list[ShellCommand] = []
    texts: list[HereDocument] = []
    try:
        for part in parts_of(_TEMPLATE.sub(lambda match: blank_of(match[0]), text), line):
            if isinstance(part, HereDocument):
                texts.append(part)
            else:
                commands.append(part)
    finally:  # what stands above a quote that is never closed
        known = _assigned_once(commands)
        for command in commands:
            _read_command(command, known, sheet, 0)
    return texts


def read_settings(text: str, sheet: Sheet) -> list[HereDocument]:
    """The settings of a makefile or of sections with ``name = value``, which shells know without the blanks."""
    return read_shell(_SETTING.sub(r"\1=", text), sheet)


def read_dockerfile(text: str, sheet: Sheet) -> list[HereDocument]:
    """The settings of a Dockerfile: its instructions are rewritten as shell, line by line."""
    lines, continued, listed = [], False, False
    ends: list[str] = []  # of here-documents, whose lines stand as they are
    for row in text.split("\n"):
        if ends:
            ends = ends[1:] if row.strip() == ends[0] else ends
            lines.append(row)
            continue
        if row.lstrip().startswith("#"):
            lines.append("\\" if continued else "")
            continue
        shell = row if continued else _as_shell(row)
        listed = listed if continued else shell.lstrip().startswith("[")
        words = re.sub(r'(?<!\\)"\s*[,\]]', '" ', re.sub(r"\A\s*\[", "", shell))  # of a list of words
        lines.append(words if listed else shell)
        continued = row.rstrip().endswith("\\")
        ends = [] if listed or continued else _HERE.findall(row)
    return read_shell("\n".join(lines), sheet)


def read_words(words: Sequence[Word], sheet: Sheet) -> None:
    """The settings of a list of arguments, as container files and ``subprocess`` take them."""
    _read_command(ShellCommand(list(words)), {}, sheet, 0)


def read_line(text: str, line: int, sheet: Sheet) -> None:
    """The settings of a command line, or of pairs ``a=1,b=2``, that stands in a string; another string sets nothing."""
    if holds_commands(text) or _PAIRS.fullmatch(text):
        _read_nested(text, line, {}, sheet, 0)


def holds_commands(text: str) -> bool:
    """Whether a text has flags, or sets variables as a command line does."""
    return _FLAGS_INSIDE.search(text) is not None or _VARIABLE_SET.search(text) is not None


def _as_shell(row: str) -> str:
    match = _INSTRUCTION.match(row)
    if match is None:
        return row
    word, rest = match[1].upper(), row[match.end() :]
    if word == "ONBUILD":
        return _as_shell(rest)
    if word == "ENV":
        name, _, value = rest.partition(" ")
        return rest if "=" in name else f"{name}={value}"
    return rest if word in ("RUN", "CMD", "ENTRYPOINT", "ARG") else f": {rest}"


def _assigned_once(commands: list[ShellCommand]) -> dict[str, str]:
    """The variables that hold one plain text wherever the script uses them."""
    values: dict[str, set[str]] = {}
    for command in commands:
        for word in command.words:
            if (match := _ASSIGNMENT.fullmatch(word.text)) and not word.text.startswith("-"):
                values.setdefault(match[1], set()).add(match[2])
    looped = {words[1].text for words, _ in commands if len(words) > 1 and words[0].text in ("for", "read", "select")}
    once = {name: next(iter(found)) for name, found in values.items() if len(found) == 1 and name not in looped}
    # a default is as good as a text: it stands where the script is given nothing else
    return {name: value for name, value in once.items() if not isinstance(read_value(value), Unknown)}


def _read_command(command: ShellCommand, known: dict[str, str], sheet: Sheet, depth: int) -> None:
    words = command.words
    first = next((word.text.lstrip("@") for word in words if word.text not in _OPENING), "")
    if not words or first in _TALKING:
        return
    group = sheet.group()
    near = "" if command.array else " ".join(word.text for word in words[:50]).lower()[:2_000]
    block = 0 if command.array else group
    for index, word in enumerate(words):
        if _is_flag(word.text):
            name, value = _flag(words, index, known)
            sheet.add(Setting("flag", (name,), value, word.line, group, block, near))
            if "." in name:
                path = tuple(name.lstrip("-").split("."))
                sheet.add(Setting("key", path, value, word.line, group, block, near))
            held = word.text.partition("=")[2]  # --env=NAME=value, --model_args=a=1,b=2
            _read_pairs(held, word.line, known, sheet, (group, block, near), depth)
        elif " " in word.text and index and words[index - 1].text in _COMMAND_FOLLOWS:
            _read_nested(word.text, word.line, known, sheet, depth)
        elif _ASSIGNMENT.fullmatch(word.text):
            _read_pairs(word.text, word.line, known, sheet, (group, block, near), depth)
        elif word.text == "setenv" and len(words) > index + 2:
            value = _value(words[index + 2].text, known)
            sheet.add(Setting("env", (words[index + 1].text,), value, word.line, group, block, near))
        elif " " in word.text and holds_commands(word.text):
            _read_nested(word.text, word.line, known, sheet, depth)


def _is_flag(text: str) -> bool:
    return text[:2] == "--" or (text[:1] == "-" and text[1:2].isalpha())


def _flag(words: list[Word], index: int, known: dict[str, str]) -> tuple[str, Value]:
    """The name and value of the flag at ``index``; a flag without value is true."""
    name, equals, value = words[index].text.partition("=")
    if equals:
        return name, _value(value, known)
    after = words[index + 1].text if index + 1 < len(words) else "--"
    if _is_flag(after):
        return name, True
    return name, _value(after, known)


def _value(text: str, known: dict[str, str]) -> Value:
    return read_value(_VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), text))


def _read_pairs(
    text: str, line: int, known: dict[str, str], sheet: Sheet, where: tuple[int, int, str], depth: int
) -> None:
    """``a=1``, or several with commas between; what a pair holds may be such pairs again (``Environment="NAME=x"``)."""
    pieces = [text] if _FLAGS_INSIDE.search(text) else _SEVERAL.split(text)
    for piece in pieces:
        if match := _ASSIGNMENT.fullmatch(piece):
            _read_assignment(match[1], match[2], line, known, sheet, where, depth)
            if depth < _DEEPEST and not _FLAGS_INSIDE.search(match[2]):
                _read_pairs(match[2], line, known, sheet, where, depth + 1)


def _read_assignment(
    name: str, value: str, line: int, known: dict[str, str], sheet: Sheet, where: tuple[int, int, str], depth: int
) -> None:
    """``NAME=value`` sets a variable of the environment, ``a.b=value`` a key; a value may hold arguments."""
    if _FLAGS_INSIDE.search(value):
        _read_nested(value, line, known, sheet, depth, shared=True)
        return
    path = (name,) if name.isupper() else tuple(name.split("."))
    sheet.add(Setting("env" if name.isupper() else "key", path, _value(value, known), line, *where))


def _read_nested(
    text: str, line: int, known: dict[str, str], sheet: Sheet, depth: int, *, shared: bool = False
) -> None:
    """A command line inside a word; ``shared``: arguments that any command may take."""
    if depth >= _DEEPEST:
        sheet.unread.append((line, f"commands in strings of commands, more than {_DEEPEST} deep"))
        return
    try:
        parts = list(parts_of(text.replace("$(", "(").replace("`", ";"), line))
    except Unreadable:
        return  # an apostrophe: a text that mentions a flag
    commands = [part for part in parts if isinstance(part, ShellCommand) and part.words]
    if [word.text for command in commands for word in command.words] == [text] and not _is_flag(text):
        return  # an expansion, which stays one word however often it is read
    for command in commands:
        _read_command(command._replace(array=command.array or shared), known, sheet, depth + 1)
