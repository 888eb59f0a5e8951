"""Read the settings of shell scripts, Dockerfiles and files of arguments: flags, overrides, variables. Runs nothing.

A script is split into words, commands and here-documents, each with the number of its first line. A variable is
replaced by its value if the script assigns it once, as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvaudit.audit.scan.sheet import Setting, Sheet, Unknown, Unreadable, Value, placeholder_of, read_value

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f\v]+|\\\r?\n)
    |(?P<newline>\n)
    |(?P<single>'[^']*')
    |(?P<double>"(?:\\.|[^"\\])*")
    |(?P<escape>\\.)
    |(?P<expansion>\$\{[^{}]*\}|\$\([^()]*\)|`[^`]*`)
    |(?P<operator><<<|<<-?|[;&|()<>])
    |(?P<plain>[^\s\\'"`;&|()<>$]+|\$)""",
    re.VERBOSE | re.DOTALL,
)
_LONGEST_WORD = 20_000  # characters


class Word(NamedTuple):
    """A shell word without its quotes, with the number of the line where it begins."""

    text: str
    line: int


class ShellCommand(NamedTuple):
    """The words of a shell command; if ``array``, those of an array variable, which any command may use."""

    words: list[Word]
    array: bool = False


class HereDocument(NamedTuple):
    """The body of a here-document, often a configuration."""

    text: str
    line: int


def parts_of(text: str, line: int) -> Iterator[ShellCommand | HereDocument]:
    """Yield the commands, arrays and here-documents of a script in order; raises Unreadable at an unclosed quote.

    ``line`` is the number of the text's first line in its file.
    """
    return _Parser(text, line).parts()


class _Parser:
    """The parser that splits a script into words, and words into commands, in one pass."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.line = text, line
        self.open: list[ShellCommand] = [ShellCommand([])]  # the current command, and an open array on top of it
        self.word: Word | None = None
        self.ends: list[str] = []  # end words of here-documents that begin after this line
        self.awaits_end = False  # whether the next word is an end word
        self.done: list[ShellCommand | HereDocument] = []

    def parts(self) -> Iterator[ShellCommand | HereDocument]:
        at = 0
        while at < len(self.text):
            if self.text[at] == "#" and self.word is None:
                at = _end_of_line(self.text, at)
                continue
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise Unreadable("a quote is never closed", self.line)
            at = self._take(str(match.lastgroup), match[0], match.end())
            yield from self.done
            self.done.clear()
        self._end_word()
        yield from reversed(self.open)

    def _take(self, kind: str, piece: str, at: int) -> int:
        """Take one token of the script: it extends or ends a word or command. Return the offset of the next token.

        ``kind`` is the name of its group in ``_TOKEN``, ``piece`` its text and ``at`` the offset after it.
        """
        if kind == "operator":
            self._operator(piece)
        elif kind in ("blank", "newline"):
            self._end_word()
            if kind == "newline" and len(self.open) == 1:
                self._end_command()
        else:
            word = self.word or Word("", self.line)
            if len(word.text) < _LONGEST_WORD:  # longer words are data
                self.word = Word(word.text + _unquote(kind, piece), word.line)
        self.line += piece.count("\n")
        while kind == "newline" and self.ends:
            body, at = _here_document(self.text, at, self.ends.pop(0))
            self.done.append(HereDocument(body, self.line))
            self.line += body.count("\n") + 1
        return at

    def _operator(self, piece: str) -> None:
        opens_array = piece == "(" and self.word is not None and self.word.text[-1:] == "="
        self._end_word()
        self.awaits_end = piece in ("<<", "<<-")
        if opens_array:
            self.open.append(ShellCommand([], array=True))
        elif piece == ")" and len(self.open) > 1:
            self.done.append(self.open.pop())
        elif piece in ";&|()" and len(self.open) == 1:
            self._end_command()

    def _end_word(self) -> None:
        if self.word is not None:
            self.open[-1].words.append(self.word)
            if self.awaits_end:
                self.ends.append(self.word.text)
            self.awaits_end = False
        self.word = None

    def _end_command(self) -> None:
        self.done.append(self.open.pop())
        self.open.append(ShellCommand([]))


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _here_document(text: str, at: int, end: str) -> tuple[str, int]:
    """Return the body of the here-document that begins at offset ``at``, and the offset after its end word ``end``."""
    start = at
    while at < len(text):
        stop = _end_of_line(text, at)
        if text[at:stop].strip() == end:
            return text[start:at], stop + 1
        at = stop + 1
    return text[start:], len(text)


def _unquote(kind: str, piece: str) -> str:
    if kind == "single":
        return piece[1:-1]
    if kind == "double":
        return re.sub(r'\\(["\\$`])', r"\1", piece[1:-1])  # continuations stay, so that line numbers stay right
    return piece[1:] if kind == "escape" else piece


_ASSIGNMENT = re.compile(r"(?s)\+{0,2}([A-Za-z_][\w.\-/@]*)\+?=(.*)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_FLAGS_INSIDE = re.compile(r"(?:\A|\s)--?[A-Za-z]")
# an environment variable set before a command, or by a line of a systemd unit
_VARIABLE_SET = re.compile(
    r"""(?:\A|[\n;&|(]|\b(?:export|env|setenv)\s)[ \t]*(?:Environment=["']?)?[A-Z][A-Z0-9_]*=[^\s=]"""
)
_PAIR_COMMA = re.compile(r",(?=[A-Za-z_][\w.\-]*=)")  # between the pairs of `a=1,b=2`
_PAIRS = re.compile(r"[A-Za-z_][\w.\-/]*=[^\s,]*(?:,[A-Za-z_][\w.\-/]*=[^\s,]*)+")
_SHELL_COMMAND = {"-c", "-lc", "-ic", "-ec"}  # a command follows as one word
_OPENING = {"{", "then", "do", "else", "!"}  # words before a command
_SETTING = re.compile(r"(?m)^(?:export[ \t]+)?([A-Za-z][\w.\-]*)[ \t]*[:?+]?=[ \t]*")
_PRINTING = {"echo", "printf", "log", "die", "warn", ":"}  # commands whose words are texts
_HERE = re.compile(r"<<-?[\"']?([A-Za-z_]\w*)")
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_TEMPLATE = re.compile(r"\$?\{\{[^{}\n]*\}\}")  # of a justfile, or of a tool that writes the script
_DEEPEST = 3  # commands nested in strings of commands


def read_shell(text: str, sheet: Sheet, line: int = 1) -> list[HereDocument]:
    """Add the settings of a script to ``sheet`` and return its here-documents.

    ``line`` is the number of the text's first line in its file. Raises Unreadable at an unclosed quote.
    """
    commands: list[ShellCommand] = []
    documents: list[HereDocument] = []
    try:
        for part in parts_of(_TEMPLATE.sub(lambda match: placeholder_of(match[0]), text), line):
            if isinstance(part, HereDocument):
                documents.append(part)
            else:
                commands.append(part)
    finally:  # also the commands before an unclosed quote
        variables = _constant_variables(commands)
        for command in commands:
            _read_command(command, variables, sheet, 0)
    return documents


def read_settings(text: str, sheet: Sheet) -> list[HereDocument]:
    """Read the ``name = value`` lines of a makefile or INI file as shell assignments; return the here-documents."""
    return read_shell(_SETTING.sub(r"\1=", text), sheet)


def read_dockerfile(text: str, sheet: Sheet) -> list[HereDocument]:
    """Read the settings of a Dockerfile, its instructions rewritten as shell commands; return its here-documents."""
    lines, is_continued, is_list = [], False, False
    ends: list[str] = []  # of open here-documents, whose lines stay unchanged
    for row in text.split("\n"):
        if ends:
            ends = ends[1:] if row.strip() == ends[0] else ends
            lines.append(row)
            continue
        if row.lstrip().startswith("#"):
            lines.append("\\" if is_continued else "")
            continue
        shell = row if is_continued else _as_shell(row)
        is_list = is_list if is_continued else shell.lstrip().startswith("[")
        words = re.sub(r'(?<!\\)"\s*[,\]]', '" ', re.sub(r"\A\s*\[", "", shell))  # the words of a list
        lines.append(words if is_list else shell)
        is_continued = row.rstrip().endswith("\\")
        ends = [] if is_list or is_continued else _HERE.findall(row)
    return read_shell("\n".join(lines), sheet)


def read_words(words: Sequence[Word], sheet: Sheet) -> None:
    """Add to ``sheet`` the engine settings in a list of arguments, as in container files and ``subprocess`` calls."""
    _read_command(ShellCommand(list(words)), {}, sheet, 0)


def read_line(text: str, line: int, sheet: Sheet) -> None:
    """Add to ``sheet`` the settings in a string with a command line or pairs ``a=1,b=2``; ignore other strings."""
    if holds_commands(text) or _PAIRS.fullmatch(text):
        _read_nested(text, line, {}, sheet, 0)


def holds_commands(text: str) -> bool:
    """Return whether a text has flags, or sets environment variables as a command line does."""
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


def _constant_variables(commands: list[ShellCommand]) -> dict[str, str]:
    """Return {variable: value} for variables to which the whole script gives one plain value."""
    values: dict[str, set[str]] = {}
    for command in commands:
        for word in command.words:
            if (match := _ASSIGNMENT.fullmatch(word.text)) and not word.text.startswith("-"):
                values.setdefault(match[1], set()).add(match[2])
    looped = {words[1].text for words, _ in commands if len(words) > 1 and words[0].text in ("for", "read", "select")}
    constants = {name: next(iter(texts)) for name, texts in values.items() if len(texts) == 1 and name not in looped}
    # a default counts as a plain value
    return {name: value for name, value in constants.items() if not isinstance(read_value(value), Unknown)}


def _read_command(command: ShellCommand, variables: dict[str, str], sheet: Sheet, depth: int) -> None:
    words = command.words
    first = next((word.text.lstrip("@") for word in words if word.text not in _OPENING), "")
    if not words or first in _PRINTING:
        return
    group = sheet.group()
    text = "" if command.array else " ".join(word.text for word in words[:50]).lower()[:2_000]
    block = 0 if command.array else group
    for index, word in enumerate(words):
        if _is_flag(word.text):
            name, value = _flag(words, index, variables)
            sheet.add(Setting("flag", (name,), value, word.line, group, block, text))
            if "." in name:
                path = tuple(name.lstrip("-").split("."))
                sheet.add(Setting("key", path, value, word.line, group, block, text))
            argument = word.text.partition("=")[2]  # --env=NAME=value, --model_args=a=1,b=2
            _read_pairs(argument, word.line, variables, sheet, (group, block, text), depth)
        elif " " in word.text and index and words[index - 1].text in _SHELL_COMMAND:
            _read_nested(word.text, word.line, variables, sheet, depth)
        elif _ASSIGNMENT.fullmatch(word.text):
            _read_pairs(word.text, word.line, variables, sheet, (group, block, text), depth)
        elif word.text == "setenv" and len(words) > index + 2:
            value = _value(words[index + 2].text, variables)
            sheet.add(Setting("env", (words[index + 1].text,), value, word.line, group, block, text))
        elif " " in word.text and holds_commands(word.text):
            _read_nested(word.text, word.line, variables, sheet, depth)


def _is_flag(text: str) -> bool:
    return text[:2] == "--" or (text[:1] == "-" and text[1:2].isalpha())


def _flag(words: list[Word], index: int, variables: dict[str, str]) -> tuple[str, Value]:
    """Return name and value of the flag at ``index``; a flag without a value is true.

    ``variables`` are the script's constants, {name: value}.
    """
    name, equals, value = words[index].text.partition("=")
    if equals:
        return name, _value(value, variables)
    following = words[index + 1].text if index + 1 < len(words) else "--"
    return name, True if _is_flag(following) else _value(following, variables)


def _value(text: str, variables: dict[str, str]) -> Value:
    return read_value(_VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text))


def _read_pairs(
    text: str, line: int, variables: dict[str, str], sheet: Sheet, place: tuple[int, int, str], depth: int
) -> None:
    """Add the settings in ``a=1`` or ``a=1,b=2``; a value may contain further pairs (``Environment="NAME=x"``).

    ``variables`` are the script's constants, and ``place`` is the settings' (group, block, command), see ``Setting``.
    ``depth`` counts the strings around the text; too deep ones are not read.
    """
    for pair in [text] if _FLAGS_INSIDE.search(text) else _PAIR_COMMA.split(text):
        if match := _ASSIGNMENT.fullmatch(pair):
            _read_assignment(match[1], match[2], line, variables, sheet, place, depth)
            if depth < _DEEPEST and not _FLAGS_INSIDE.search(match[2]):
                _read_pairs(match[2], line, variables, sheet, place, depth + 1)


def _read_assignment(
    name: str, value: str, line: int, variables: dict[str, str], sheet: Sheet, place: tuple[int, int, str], depth: int
) -> None:
    """Add ``NAME=value`` as an environment variable and ``a.b=value`` as a key.

    If the value contains flags, those are read as arguments instead. ``variables`` are the script's constants, and
    ``place`` is the setting's (group, block, command), see ``Setting``. ``depth`` counts the strings around the text.
    """
    if _FLAGS_INSIDE.search(value):
        _read_nested(value, line, variables, sheet, depth, shared=True)
        return
    path = (name,) if name.isupper() else tuple(name.split("."))
    sheet.add(Setting("env" if name.isupper() else "key", path, _value(value, variables), line, *place))


def _read_nested(
    text: str, line: int, variables: dict[str, str], sheet: Sheet, depth: int, *, shared: bool = False
) -> None:
    """Read a command line that is quoted inside an argument, such as ``bash -c "vllm serve x --kv-cache-dtype fp8"``.

    ``variables`` are the script's constants, and ``depth`` counts the strings around the text. ``shared`` says that the
    text is the value of a variable, so that any command of the script may use the flags in it.
    """
    if depth >= _DEEPEST:
        sheet.unread.append((line, f"commands nested in strings more than {_DEEPEST} levels deep"))
        return
    try:
        parts = list(parts_of(text.replace("$(", "(").replace("`", ";"), line))
    except Unreadable:
        return  # an apostrophe: a text for people that mentions a flag
    commands = [part for part in parts if isinstance(part, ShellCommand) and part.words]
    if [word.text for command in commands for word in command.words] == [text] and not _is_flag(text):
        return  # an expansion, which would be read again without end
    for command in commands:
        _read_command(command._replace(array=command.array or shared), variables, sheet, depth + 1)
