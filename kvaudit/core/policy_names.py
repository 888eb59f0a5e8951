"""The texts of policies of kvaudit's cache and of engines' settings: how to match short ones and make display names.

    snapkv:budget=96                                                a policy of our cache
    snapkv:budget=96+kivi:bits=4                                    a composition: it also quantises the kept entries
    snapkv:budget=96@3|none                                         a mixture: one policy per request, here 3 to 1
    openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u4     an engine with its own settings: a condition

A spec may write a policy as a mapping (name, compose, mixture with weights, engine). The reference, with which a policy
is compared, is ``none``. A condition is compared with an uncompressed condition of the same engine; the argument
``references`` of functions here, and ``evaluate.references`` of a spec, map each condition to that reference.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import gcd
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from kvaudit.core.plugins import split_named
from kvaudit.core.text import clip, inline, short_repr

DENSE_POLICY = "none"  # keeps every entry; the reference of every drift
ENGINE = "engine"  # the key of an engine's name in a mapping
_MAX_DEPTH = 3  # a mixture of compositions of policies
_MAX_FOLDER_NAME, _HASH_DIGITS = 48, 6  # letters of a folder's name, and those of a hash in it
_MAX_WEIGHT_DIGITS = 12  # int() of a hostile file's digits must stay cheap
_MAX_VALUE, _MAX_CONDITION_NAME = 60, 56  # letters of a setting's value in a condition's name, and of the name
_MIN_CONSTANT = 3  # an all-capitals value longer than this needs no setting name
_UNQUOTED = "/:#~"  # not quoted in values, besides letters, digits, '_', '.' and '-'; the rest could be syntax
_Policy = tuple[str, dict[str, str]]  # name, fields


def policy_text(value: Any, depth: int = 0) -> str:
    """Return the text of a policy that is given as text or as a mapping; ``depth`` counts the mappings around it.

    Any other value gives its repr, which names no policy, so that a later check refuses it.
    """
    if not isinstance(value, Mapping) or depth >= _MAX_DEPTH:
        return value if isinstance(value, str) else short_repr(value)
    for key, separator in (("compose", "+"), ("mixture", "|")):
        if isinstance(value.get(key), list):
            weights = value.get("weights") if key == "mixture" else None
            entries = [policy_text(entry, depth + 1) for entry in value[key]]
            if isinstance(weights, list):
                pairs = zip_longest(entries, weights, fillvalue="")
                entries = [f"{entry}@{short_repr(weight)}" for entry, weight in pairs]
            return separator.join(entries)
    name_key = "engine" if "engine" in value else "name"
    fields = ",".join(f"{key}={_field_text(field)}" for key, field in value.items() if key != name_key)
    return f"{value.get(name_key)}:{fields}" if fields else str(value.get(name_key))


def _field_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    values = value if isinstance(value, list) else [value]
    return "/".join(entry if isinstance(entry, str) else short_repr(entry) for entry in values)


def match_policies(texts: Iterable[str], canonical: Sequence[str]) -> list[str]:
    """Return for each text the canonical policy that it means, or the text itself if none matches.

    Users write ``snapkv:budget=48``, while records hold every field. A policy matches a text if it has the same names,
    and equal values in all fields that both mention. If several match, the one that is equal to the text wins, then the
    one with the most equal fields, then the first. A policy that an earlier text has got is only taken if no other one
    matches.
    """
    matches: list[str] = []
    for text in texts:
        similar = [policy for policy in canonical if policy == text or _agrees(text, policy)]
        similar.sort(key=lambda policy: (policy != text, -_equal_field_count(text, policy)))
        unused = [policy for policy in similar if policy not in matches]  # two texts mean two policies if there are two
        matches.append((unused or similar or [text])[0])
    return matches


def short_names(policies: Sequence[str]) -> dict[str, str]:
    """Return {policy: display name}, such as ``snapkv 48``; names that would be equal get the fields that differ."""
    labels = {policy: _label(policy) for policy in policies}
    fields = {policy: _fields_by_place(policy) for policy in policies}
    names = {}
    for policy in policies:
        twins = [twin for twin in policies if labels[twin] == labels[policy]]
        differing = [key for key in fields[policy] if len({fields[twin].get(key) for twin in twins}) > 1]
        names[policy] = " ".join([labels[policy], *(f"{key[-1]}={fields[policy][key]}" for key in differing)])
    return names


def folder_names(policies: Sequence[str]) -> dict[str, str]:
    """Return {policy: a unique name for a folder}, such as ``snapkv-48``."""
    plain = {policy: name.replace("|", "or").replace("@", "x") for policy, name in short_names(policies).items()}
    names = {policy: re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for policy, name in plain.items()}
    counts = Counter(names.values())
    for policy, name in names.items():
        if counts[name] > 1 or len(name) > _MAX_FOLDER_NAME:
            digest = hashlib.sha256(policy.encode()).hexdigest()[:_HASH_DIGITS]
            names[policy] = f"{name[: _MAX_FOLDER_NAME - _HASH_DIGITS - 1]}-{digest}"
    return names


def _mixture(policy: str) -> list[tuple[str, int]]:
    """Return (policy, weight) for each policy of a mixture, weights in lowest terms; a single policy has weight 1."""
    entries = []
    for entry in policy.split("|"):
        text, _, digits = entry.rpartition("@")
        is_weight = digits.strip().isascii() and digits.strip().isdigit() and len(digits) < _MAX_WEIGHT_DIGITS
        is_weighted = text and is_weight and int(digits) > 0
        entries.append((text, int(digits)) if is_weighted else (entry, 1))
    divisor = gcd(*(weight for _, weight in entries))
    return [(text, weight // divisor) for text, weight in entries]


def _name_and_fields(text: str) -> _Policy:
    name, fields = split_named(text)
    return name, {field.name: field.value or "" for field in fields}


class _Form(NamedTuple):
    """The parts of a policy: the names and weights that make up its structure, and the fields of each single policy."""

    names: tuple[tuple[int, tuple[str, ...]], ...]  # of each alternative: its weight and the names composed
    fields: tuple[dict[str, str], ...]


@lru_cache(maxsize=4096)
def _form(policy: str) -> _Form:
    mixture = _mixture(policy)
    # the order of a composition does not matter
    compositions = [sorted(map(_name_and_fields, text.split("+")), key=lambda pair: pair[0]) for text, _ in mixture]
    names = [tuple(name for name, _ in composition) for composition in compositions]
    weights = [weight for _, weight in mixture]
    fields = tuple(fields for composition in compositions for _, fields in composition)
    return _Form(tuple(zip(weights, names, strict=True)), fields)


def _agrees(text: str, canonical: str) -> bool:
    short, full = _form(text), _form(canonical)
    return short.names == full.names and all(
        full_fields.get(key, value) == value
        for short_fields, full_fields in zip(short.fields, full.fields, strict=True)
        for key, value in short_fields.items()
    )


def _equal_field_count(text: str, canonical: str) -> int:
    """Return the number of fields that have equal values in two policies of the same structure."""
    pairs = zip(_form(text).fields, _form(canonical).fields, strict=True)
    return sum(len(short.items() & full.items()) for short, full in pairs)


def _label(policy: str) -> str:
    labels = []
    for text, weight in _mixture(policy):
        label = " + ".join(_simple_label(*_name_and_fields(entry)) for entry in text.split("+"))
        labels.append(label if weight == 1 else f"{label} @{weight}")
    return " | ".join(labels)


def _simple_label(name: str, fields: Mapping[str, str]) -> str:
    if "budget" in fields:
        return f"{name} {fields['budget']}"
    return f"{name} {fields['bits']} bit" if "bits" in fields else name


def _fields_by_place(policy: str) -> dict[tuple[int, int, str], str]:
    """Return every value of a policy, keyed by (place in the mixture, place in the composition, field)."""
    texts = ((i, j, text) for i, (draw, _) in enumerate(_mixture(policy)) for j, text in enumerate(draw.split("+")))
    return {(i, j, key): value for i, j, text in texts for key, value in _name_and_fields(text)[1].items()}


# --- conditions of engines -------------------------------------------------------------------------------------------


def condition_text(engine: str, settings: Mapping[str, str]) -> str:
    """Return the canonical text of an engine with its settings (a condition): "openvino:KV_CACHE_PRECISION=u4"."""
    fields = ",".join(f"{name}={quote(settings[name], safe=_UNQUOTED)}" for name in sorted(settings))
    return f"{engine}:{fields}" if fields else engine


def engine_name(text: str) -> str:
    """Return the name before the settings in the text of a condition or policy."""
    return text.partition(":")[0]


def engine_settings(text: str) -> dict[str, str]:
    """Return the settings in the text of a condition (an engine with its settings).

    "openvino:KV_CACHE_PRECISION=u4" gives {"KV_CACHE_PRECISION": "u4"}.
    """
    return {field.name: unquote(field.value or "") for field in split_named(text)[1]}


def reference_of(policy: str, references: Mapping[str, str]) -> str:
    """Return the uncompressed policy or engine setting with which ``policy`` is compared; itself if uncompressed."""
    if policy in references.values():
        return policy
    return references.get(policy, DENSE_POLICY)


def uncompressed_policies(references: Mapping[str, str]) -> frozenset[str]:
    """Return all uncompressed policies: ``none``, and the reference of each engine setting."""
    return frozenset({DENSE_POLICY, *references.values()})


def compressed_policies(policies: Collection[str], references: Mapping[str, str]) -> tuple[str, ...]:
    """Return, in order, the policies and engine settings that compress: all but the references."""
    exact = uncompressed_policies(references)
    return tuple(policy for policy in policies if policy not in exact)


def condition_names(references: Mapping[str, str]) -> dict[str, str]:
    """Return {condition: short name}, such as ``openvino u4``, for every condition and every reference.

    A name consists of the engine and of those of its settings that differ from the reference, as NAME=VALUE. NAME loses
    the words that the names of all these settings share. It is left out if it is the only one, or if VALUE is a
    constant such as BY_TOKEN. Conditions whose names would be equal get the other settings in which they differ. A long
    name is cut if it stays unique.
    """
    conditions = list(dict.fromkeys([*references, *references.values()]))
    settings = {text: engine_settings(text) for text in conditions}
    names = {
        text: _condition_name(text, settings[text], _differing_settings(text, settings, references))
        for text in conditions
    }
    for name in list(names.values()):
        twins = [text for text in conditions if names[text] == name]
        if len(twins) > 1:
            keys = [key for key in settings[twins[0]] if len({settings[twin].get(key) for twin in twins}) > 1]
            names |= {
                twin: f"{name} {_settings_text({key: settings[twin].get(key, '-') for key in keys})}" for twin in twins
            }
    cut = {
        text: f"{name[:_MAX_CONDITION_NAME]}…" if len(name) > _MAX_CONDITION_NAME else name
        for text, name in names.items()
    }
    cut_names = list(cut.values())
    unique = {text: cut[text] if cut_names.count(cut[text]) == 1 else name for text, name in names.items()}
    # if two are still equal, every one keeps its whole text
    return unique if len(set(unique.values())) == len(unique) else dict(zip(unique, unique, strict=True))


def _differing_settings(
    text: str, settings: Mapping[str, Mapping[str, str]], references: Mapping[str, str]
) -> list[str]:
    """Return the names of the settings in which an engine's condition differs from its reference.

    ``text`` is the condition, and ``settings`` maps the text of every condition to its settings. If ``text`` is a
    reference, returns the settings in which it differs from any condition that is compared with it.
    """
    compared = [settings[references[text]]] if text in references else []
    compared += [settings[condition] for condition, reference in references.items() if reference == text]
    return [name for name, value in settings[text].items() if any(other.get(name) != value for other in compared)]


def _condition_name(text: str, settings: Mapping[str, str], differing: Collection[str]) -> str:
    if "base_url" in settings and differing:  # of a server the model's name says more than the address
        address = settings["base_url"].partition("://")[2] or settings["base_url"]
        return inline(f"{engine_name(text)} {clip(settings.get('model', '-'), _MAX_VALUE)} at {address}")
    differences = _settings_text({name: settings[name] for name in differing})
    return inline(f"{engine_name(text)} {differences or 'as it comes'}")


def _settings_text(settings: Mapping[str, str]) -> str:
    values = list(settings.values())
    named = [name for name, value in settings.items() if not _is_constant(value) or values.count(value) > 1]
    short = _without_shared_words(named)
    pairs = [(short.get(name, ""), clip(value, _MAX_VALUE)) for name, value in settings.items()]
    return inline(" ".join(f"{name}={value}" if name else value for name, value in pairs))


def _is_constant(value: str) -> bool:
    """Return whether a value is an engine's constant, such as BY_TOKEN, which needs no setting name."""
    return value.isupper() and value.replace("_", "").isalpha() and len(value) > _MIN_CONSTANT


def _without_shared_words(names: Collection[str]) -> dict[str, str]:
    """Return {name of a setting: the name without the words that all names share}.

    If a shortened name would be empty, or equal to another, all names stay whole.
    """
    words = {name: name.split("_") for name in names}
    shared = set.intersection(*map(set, words.values())) if words else set[str]()
    short = {name: "_".join(word for word in parts if word not in shared) for name, parts in words.items()}
    is_unique = len(names) == 1 or (all(short.values()) and len(set(short.values())) == len(names))
    return short if is_unique else dict(zip(names, names, strict=True))
