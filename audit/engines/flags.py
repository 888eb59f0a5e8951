"""Settings of an engine as flags of its own command line: handed on, and refused only where they are ours to say."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvaudit.audit.engines.base import Settings
from kvaudit.core.errors import SpecError
from kvaudit.core.text import clipped

_FLAG = re.compile(r"[a-z][a-z0-9_.]*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def one_spelling(settings: Settings) -> Settings:
    """The same settings with flags in one spelling: ``--kv-cache-dtype``, ``kv-cache-dtype`` and ``kv_cache_dtype``."""
    return {
        name if _VARIABLE.fullmatch(name) else name.removeprefix("--").replace("-", "_"): value
        for name, value in settings.items()
    }


def check_flags(engine: str, settings: Settings, ours: Collection[str]) -> None:
    """Raise SpecError for what is neither a flag nor a variable, and for what we say ourselves, shortened or not."""
    for name in settings:
        if any(own.startswith(name) for own in ours):  # parsers take the beginning of a flag for the whole
            raise SpecError(f"engine {engine}: {name} is not yours to set: {', '.join(sorted(ours))} are kvaudit's own")
        if not _FLAG.fullmatch(name) and not _VARIABLE.fullmatch(name):
            raise SpecError(
                f"engine {engine}: setting {clipped(name)!r} is no flag of a command line (kv_cache_dtype) and no "
                "variable of an environment (VLLM_CPU_KVCACHE_SPACE)"
            )


def flags(settings: Settings, *, negated: bool = True) -> list[str]:
    """The words of a command line; ``true`` is the bare flag, several words are a list.

    ``false`` is its ``--no-`` form, or, where the parser has none (not ``negated``), the flag left out.
    """
    named = {name: value for name, value in settings.items() if _FLAG.fullmatch(name)}
    return [word for name, value in named.items() if negated or value != "false" for word in _flag(name, value)]


def _flag(name: str, value: str) -> list[str]:
    flag = name.replace("_", "-")
    if value in ("true", "false"):
        return [f"--{flag}" if value == "true" else f"--no-{flag}"]
    several = value.split()
    if len(several) > 1 and value[0] not in "{[" and not any(word.startswith("-") for word in several):
        return [f"--{flag}", *several]
    return [f"--{flag}={value}"]


def variables(settings: Settings) -> dict[str, str]:
    """Those that go into the environment."""
    return {name: value for name, value in settings.items() if _VARIABLE.fullmatch(name)}
