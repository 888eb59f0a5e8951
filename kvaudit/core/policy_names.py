"""Policies by their text alone: which known one is meant, and a short name for each.

``snapkv:budget=96`` is one policy, ``snapkv:budget=96+kivi:bits=4`` one that also quantises what stays, and
``snapkv:budget=96|none`` a draw between two, ``snapkv:budget=96@3|none`` one of unequal shares. A spec may spell the
same as mappings (name, compose, mixture with weights).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import gcd
from typing import Any, NamedTuple

from kvaudit.core.plugins import split_named
from kvaudit.core.text import short_repr

DENSE_POLICY = "none"  # what keeps everything; every drift is measured against it
_DEEPEST = 3  # a mixture of compositions of policies
_LONGEST_NAME, _DIGITS = 48, 6  # letters of a folder's name, and those of a hash in it
_LONGEST = 12  # digits of a share, that a file may mean harm with
_Part = tuple[str, dict[str, str]]  # name, fields


def policy_text(value: Any, depth: int = 0) -> str:
    """The text of a policy that may be written as a mapping; what is neither stays what it is, and matches nothing."""
    if not isinstance(value, Mapping) or depth >= _DEEPEST:
        return value if isinstance(value, str) else short_repr(value)
    for key, joint in (("compose", "+"), ("mixture", "|")):
        if isinstance(value.get(key), list):
            shares = value.get("weights") if key == "mixture" else None
            entries = [policy_text(entry, depth + 1) for entry in value[key]]
            if isinstance(shares, list):
                entries = [f"{one}@{short_repr(share)}" for one, share in zip_longest(entries, shares, fillvalue="")]
            return joint.join(entries)
    named = "engine" if "engine" in value else "name"
    fields = ",".join(f"{key}={_word(field)}" for key, field in value.items() if key != named)
    return f"{value.get(named)}:{fields}" if fields else str(value.get(named))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(
        one if isinstance(one, str) else short_repr(one) for one in (value if isinstance(value, list) else [value])
    )


def match_policies(asked: Iterable[str], known: Sequence[str]) -> list[str]:
    """The known canonical policy of each asked one; an asked one without records stays as it is written.

    A user writes ``snapkv:budget=48``, records hold every field. The known policy of the same names that agrees in all
    fields both mention is meant; the fewest unmentioned fields first, then the order in which they are known.
    """
    found: list[str] = []
    for text in asked:
        close = [k for k in known if k == text or _agrees(text, k)]
        close.sort(key=lambda k: (k != text, -_common(text, k)))
        taken = [k for k in close if k not in found]  # two asked ones mean two policies where there are two
        found.append((taken or close or [text])[0])
    return found


def short_names(policies: Sequence[str]) -> dict[str, str]:
    """``snapkv 48`` for each policy, with the fields that tell two of the same name and budget apart."""
    first = {policy: _short(policy) for policy in policies}
    fields = {policy: _placed(policy) for policy in policies}
    names = {}
    for policy in policies:
        twins = [p for p in policies if first[p] == first[policy]]
        # fields in which it differs from one of them
        telling = [k for k in fields[policy] if len({fields[t].get(k) for t in twins}) > 1]
        names[policy] = " ".join([first[policy], *(f"{key[-1]}={fields[policy][key]}" for key in telling)])
    return names


def folder_names(policies: Sequence[str]) -> dict[str, str]:
    """``snapkv-48`` for each policy: its short name in letters that a folder may be named with, no two alike."""
    joined = {policy: name.replace("|", "or").replace("@", "x") for policy, name in short_names(policies).items()}
    names = {policy: re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for policy, name in joined.items()}
    counts = Counter(names.values())
    for policy, name in names.items():
        if counts[name] > 1 or len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(policy.encode()).hexdigest()[:_DIGITS]
            names[policy] = f"{name[: _LONGEST_NAME - _DIGITS - 1]}-{digest}"
    return names


def _draws(policy: str) -> list[tuple[str, int]]:
    """The draws of a mixture with their shares of requests, in lowest terms."""
    found = []
    for draw in policy.split("|"):
        text, _, share = draw.rpartition("@")
        counted = share.strip().isascii() and share.strip().isdigit() and len(share) < _LONGEST and int(share) > 0
        found.append((text, int(share)) if text and counted else (draw, 1))
    least = gcd(*(share for _, share in found))
    return [(text, share // least) for text, share in found]


def _requests(policy: str) -> list[list[_Part]]:
    """The draws of a mixture, each the parts of a composition in the order of their names."""
    return [sorted((_part(text) for text in draw.split("+")), key=lambda p: p[0]) for draw, _ in _draws(policy)]


def _part(text: str) -> _Part:
    name, fields = split_named(text)
    return name, {field.name: field.value or "" for field in fields}


class _Form(NamedTuple):
    """How a policy is made, and all fields of its parts in that order."""

    names: tuple[tuple[int, tuple[str, ...]], ...]  # the share and the parts of each draw
    fields: tuple[dict[str, str], ...]


@lru_cache(maxsize=4096)
def _form(policy: str) -> _Form:
    draws = _requests(policy)
    shares = (share for _, share in _draws(policy))
    names = tuple((share, tuple(name for name, _ in draw)) for share, draw in zip(shares, draws, strict=True))
    return _Form(names, tuple(fields for draw in draws for _, fields in draw))


def _agrees(asked: str, known: str) -> bool:
    want, have = _form(asked), _form(known)
    return want.names == have.names and all(
        theirs.get(key, value) == value
        for ours, theirs in zip(want.fields, have.fields, strict=True)
        for key, value in ours.items()
    )


def _common(asked: str, known: str) -> int:
    """Fields that both mention with the same value, of two that are made alike."""
    both = zip(_form(asked).fields, _form(known).fields, strict=True)
    return sum(len(ours.items() & theirs.items()) for ours, theirs in both)


def _short(policy: str) -> str:
    labels = [" + ".join(_label(*_part(text)) for text in draw.split("+")) for draw, _ in _draws(policy)]
    shares = ["" if share == 1 else f" @{share}" for _, share in _draws(policy)]
    return " | ".join(label + share for label, share in zip(labels, shares, strict=True))


def _label(name: str, fields: Mapping[str, str]) -> str:
    if "budget" in fields:
        return f"{name} {fields['budget']}"
    return f"{name} {fields['bits']} bit" if "bits" in fields else name


def _placed(policy: str) -> dict[tuple[int, int, str], str]:
    """Every field under its draw, its part and its name."""
    parts = ((i, j, text) for i, (draw, _) in enumerate(_draws(policy)) for j, text in enumerate(draw.split("+")))
    return {(i, j, key): value for i, j, text in parts for key, value in _part(text)[1].items()}
