"""Untrusted text made safe to print (visible characters, short lines, no passwords), and paths of kvaudit's guides."""

from __future__ import annotations

import hashlib
import re
import reprlib
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HIDDEN = "[not shown]"  # stands for a secret
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
# each takes a whole address at once, so that a text of many beginnings has one reading
_ADDRESS = re.compile(r"(?i)\b(https?:/{1,2}|\w+://)([^\s'\"]*+)")
_QUERY = re.compile(r"(?i)\b(https?:/{1,2}[^\s?'\"]*+)(\?[^\s#'\"]*)?")
_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(api|access|secret|private|admin|signing|encryption)[_.-]?key$"
    r"|(^|[_.-])(secret|password|passwd|pwd|passphrase|authorization|bearer|cookie|credentials?)$"
)
_TOKEN_NAME = re.compile(r"[A-Z0-9_]*TOKEN|(?i:(hf|hub|auth|access|api|bearer|admin)[_.-]?token)")
_KEY_TEXT = re.compile(r"(?i:bearer|basic)\s+\S{8}|\b(?:sk-|hf_|gh[ps]_|gsk_|xai-)[A-Za-z0-9_-]{16}")
_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH")


# --- characters and length -------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Replace every control, bidirectional, invisible or invalid character by a visible one.

    C0 and DEL become control pictures (ESC as ␛); other control, format, private, surrogate and separator characters
    become ⟨U+202E⟩. Newline and tab stay.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():  # nearly every text, and fast to test
        return text
    return "".join(char if char in "\n\t" or char.isprintable() else _picture(ord(char)) for char in text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def inline(text: str) -> str:
    """Return the text on one line: newlines as ⏎, tabs as spaces, other special characters as ``visible`` does."""
    return visible(text).replace("\n", "⏎").replace("\t", " ")


_printed_notes = set[str]()


def note_once(line: str) -> None:
    """Print a note on standard error, each text once per process."""
    if line not in _printed_notes:
        _printed_notes.add(line)
        print(f"note: {line}", file=sys.stderr)


def clip(text: str, length: int) -> str:
    """Shorten a text to ``length`` characters of its start and end, with a note between them on what is left out."""
    if len(text) <= length:
        return text
    head = (length * 2) // 3
    return f"{text[:head]} […{len(text) - length} characters left out…] {text[len(text) - (length - head) :]}"


def clip_distinct(text: str, length: int) -> str:
    """Shorten a text of more than ``length`` characters to its start and the sha256 of the whole.

    Thanks to the hash, the results for different texts differ.
    """
    if len(text) <= length:
        return text
    return f"{text[:length]}… (sha256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"


def join_names(names: Iterable[str], limit: int = 3, *, between: str = ", ", last: str = " and ") -> str:
    """Join the first ``limit`` names and, if there are more, say how many: "a, b, c and 2 more".

    ``between`` separates the names, and ``last`` comes before the number.
    """
    entries = list(names)
    return between.join(entries[:limit]) + (f"{last}{len(entries) - limit} more" if len(entries) > limit else "")


def normalise(text: str) -> str:
    """Return a text in lower case, with single blanks and without invisible characters; near copies become equal."""
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKC", text) if unicodedata.category(char) != "Cf")
    return " ".join(text.split()).casefold()


def length_of(tokens: int) -> str:
    """Return a context length as text: "512 tokens", or "as published" for 0."""
    return f"{tokens} tokens" if tokens else "as published"


def length_label(tokens: int) -> str:
    """Return a context length for a table cell: "512" or "published"."""
    return str(tokens) if tokens else "published"


def at_length(tokens: int) -> str:
    """Return a context length for a sentence: "at 512 tokens" or "as published"."""
    return f"at {tokens} tokens" if tokens else "as published"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode the text; it cannot encode unpaired surrogates, which JSON allows."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def short_repr(value: Any) -> str:
    """Return the repr of any value, shortened to one line."""
    return one_line(_repr.repr(value))


def short_text(value: Any) -> str:
    """Shorten a name from a file to 80 characters without line breaks."""
    return one_line(value if isinstance(value, str) else short_repr(value))[:80]


def one_line(value: object) -> str:
    """Shorten the text of an error to one line of at most 200 characters."""
    return " ".join(str(value).split())[:200]


def reason(error: BaseException) -> str:
    """Return class and message of an exception of third-party code, whose ``__str__`` may itself raise."""
    try:
        message = inline(one_line(error))
    except (Exception, SystemExit):
        message = "its message cannot be shown"
    return f"{type(error).__name__}: {message}"


# --- secrets ---------------------------------------------------------------------------------------------------------


def hide_passwords(text: str) -> str:
    """Return the text without the user, password and query of every address in it."""
    text = _ADDRESS.sub(_without_user, text)
    return _QUERY.sub(lambda match: f"{match[1]}?{HIDDEN}" if match[2] else match[1], text)


def _without_user(match: re.Match[str]) -> str:
    _, at, host = match[2].rpartition("@")  # the last @: a password may hold / and @
    return f"{match[1]}{HIDDEN}@{host}" if at else match[0]


def has_password(text: str) -> bool:
    """Return whether an address in the text has a user or a password."""
    return any("@" in match[2] for match in _ADDRESS.finditer(text))


def is_secret_name(name: str) -> bool:
    """Return whether a setting's name says that it is a secret: HF_TOKEN or api_key, but not max_tokens or keyfile."""
    return _SECRET_NAME.search(name) is not None or _TOKEN_NAME.fullmatch(name) is not None


def is_key_like(text: str) -> bool:
    """Return whether a text looks like an API key: it begins like an authorization header, or has a vendor's form."""
    return _KEY_TEXT.search(text) is not None


def safe_variable_name(name: str) -> str:
    """Return an environment variable's name for an error message, or a phrase if the name may be a key itself."""
    is_name = _VARIABLE_NAME.fullmatch(name) and any(word in name for word in _SECRET_WORDS)
    return name if is_name else f"that `key` names ({HIDDEN}: it may be the key itself; wanted a name such as API_KEY)"


# --- where things are installed --------------------------------------------------------------------------------------


def shipped_folder(name: str) -> Path:
    """Return the folder ``docs`` or ``examples``: inside the installed package, or next to it in a clone."""
    package = Path(__file__).parent.parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def install_command(extras: str) -> str:
    """Return the command that installs optional packages of kvaudit, from this clone or from an index."""
    clone = Path(__file__).parent.parent.parent
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'kvaudit[{extras}]'"
    return f"pip install '{'.' if Path.cwd() == clone else clone}[{extras}]'"


def guide_path(page: str) -> str:
    """Return the path of a page of kvaudit's guides (``docs``) in this installation."""
    return str(shipped_folder("docs") / page)
