"""Keys and passwords: how they are told, and how they are kept out of what is said and written."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?i)\b(https?:/{1,2}|\w+://)[^\s'\"]*@")  # up to the last @: a password may hold / and @
_QUERY = re.compile(r"(?i)\b(https?:/{1,2}[^\s?'\"]*)\?[^\s#'\"]*")
_NAMED_SO = re.compile(r"(?i)(^|[_.-])(api|access|secret|private|admin)[_.-]?key$|(^|[_.-])(secret|password|passwd)$")
_TOKEN = re.compile(r"[A-Z0-9_]*TOKEN|(?i:(hf|hub|auth|access|api|bearer|admin)[_.-]?token)")
_SAYS_WHAT_IT_IS = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH")
HIDDEN = "[not shown]"


def without_passwords(text: str) -> str:
    """The text with the user, password and query of every address in it left out."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _USERINFO.sub(rf"\1{HIDDEN}@", text))


def has_password(text: str) -> bool:
    """Whether an address in the text has a user or a password."""
    return _USERINFO.search(text) is not None


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: HF_TOKEN, api_key; not max_tokens, nor the path of a keyfile."""
    return _NAMED_SO.search(name) is not None or _TOKEN.fullmatch(name) is not None


def variable_shown(name: str) -> str:
    """The name of an environment variable for an error, not shown where it may be the key itself."""
    is_name = _SAYS_WHAT_IT_IS.fullmatch(name) and any(word in name for word in _WORDS)
    return name if is_name else f"that `key` names ({HIDDEN}: it may be the key itself; wanted a name such as API_KEY)"
