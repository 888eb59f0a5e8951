"""Ways of serving by their text: a cache policy of ours, or a serving engine with settings in the engine's own words.

    snapkv:budget=96,window=8                                       a policy of our cache
    openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION=u4     an engine: its name, its settings by name

Both are spelled alike, so whatever reads the text of a policy reads that of an engine's condition. What a policy of
ours is compared with is served under ``none``; an engine's condition has an uncompressed reference in the same engine,
which the spec names (``evaluate.references``: condition -> reference).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import quote, unquote

from kvaudit.core.plugins import split_named
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import clip, inline

ENGINE = "engine"  # the key that names one in a mapping
_LONGEST_VALUE = 60  # letters of a setting in a short name
_LONGEST_NAME = 56
_SHORTEST_CONSTANT = 3  # letters, above which a value in capitals tells what it is of
_UNQUOTED = (
    "/:#~"  # besides letters, digits, '_', '.' and '-'; the rest would be read as a part of the text's own syntax
)


def condition_text(engine: str, settings: Mapping[str, str]) -> str:
    """The one spelling of an engine with its settings."""
    fields = ",".join(f"{name}={quote(settings[name], safe=_UNQUOTED)}" for name in sorted(settings))
    return f"{engine}:{fields}" if fields else engine


def engine_in(text: str) -> str:
    """The name before the settings: an engine, or a policy of ours."""
    return text.partition(":")[0]


def settings_in(text: str) -> dict[str, str]:
    """The settings of a condition."""
    return {field.name: unquote(field.value or "") for field in split_named(text)[1]}


def uncompressed_of(policy: str, references: Mapping[str, str]) -> str:
    """What a way of serving is compared with: itself, where it is a reference."""
    if policy in references.values():
        return policy
    return references.get(policy, DENSE_POLICY)


def uncompressed(references: Mapping[str, str]) -> frozenset[str]:
    """Every way of serving that compresses nothing."""
    return frozenset({DENSE_POLICY, *references.values()})


def compressed(policies: Collection[str], references: Mapping[str, str]) -> tuple[str, ...]:
    """The policies that compress something, in order."""
    exact = uncompressed(references)
    return tuple(policy for policy in policies if policy not in exact)


def condition_names(references: Mapping[str, str]) -> dict[str, str]:
    """``openvino u4`` for every condition and reference: the engine, with the settings in which it and its other side
    differ.

    Of these settings' names the words that all have in common are left out, and of a single one its name; constants of
    an engine (BY_TOKEN) stand without theirs. Two that would be called alike are told apart by whatever else differs;
    a long name is cut where that leaves it one.
    """
    conditions = list(dict.fromkeys([*references, *references.values()]))
    own = {text: settings_in(text) for text in conditions}
    names = {text: _named(text, own, _differing(text, own, references)) for text in conditions}
    for name in list(names.values()):
        twins = [text for text in conditions if names[text] == name]
        if len(twins) > 1:
            telling = [key for key in own[twins[0]] if len({own[twin].get(key) for twin in twins}) > 1]
            names |= {
                twin: f"{name} {_settings_text({key: own[twin].get(key, '-') for key in telling})}" for twin in twins
            }
    clipped = {text: f"{name[:_LONGEST_NAME]}…" if len(name) > _LONGEST_NAME else name for text, name in names.items()}
    short = list(clipped.values())
    found = {text: clipped[text] if short.count(clipped[text]) == 1 else name for text, name in names.items()}
    # where two are called alike after all, every one keeps its whole text
    return found if len(set(found.values())) == len(found) else dict(zip(found, found, strict=True))


def _differing(text: str, own: Mapping[str, Mapping[str, str]], references: Mapping[str, str]) -> list[str]:
    """The settings of a condition that are not as its reference has them; of a reference, as its conditions have."""
    others = [own[references[text]]] if text in references else []
    others += [own[condition] for condition, reference in references.items() if reference == text]
    return [name for name, value in own[text].items() if any(other.get(name) != value for other in others)]


def _named(text: str, own: Mapping[str, Mapping[str, str]], telling: Collection[str]) -> str:
    settings = own[text]
    if "base_url" in settings and telling:  # servers: what they call the model tells more than where they listen
        where = settings["base_url"].partition("://")[2] or settings["base_url"]
        return inline(f"{engine_in(text)} {clip(settings.get('model', '-'), _LONGEST_VALUE)} at {where}")
    shown = _settings_text({name: settings[name] for name in telling})
    return inline(f"{engine_in(text)} {shown or 'as it comes'}")


def _settings_text(settings: Mapping[str, str]) -> str:
    values = list(settings.values())
    short = _shortened([name for name, value in settings.items() if not _is_constant(value) or values.count(value) > 1])
    pairs = [(short.get(name, ""), clip(value, _LONGEST_VALUE)) for name, value in settings.items()]
    return inline(" ".join(f"{name}={value}" if name else value for name, value in pairs))


def _is_constant(value: str) -> bool:
    """One of an engine's own constants, such as BY_TOKEN, which needs no name beside it."""
    return value.isupper() and value.replace("_", "").isalpha() and len(value) > _SHORTEST_CONSTANT


def _shortened(names: Collection[str]) -> dict[str, str]:
    """Names without the words that all of them hold; the whole names where one would be nothing but such words."""
    parts = {name: name.split("_") for name in names}
    shared = set.intersection(*map(set, parts.values())) if parts else set[str]()
    short = {name: "_".join(word for word in own if word not in shared) for name, own in parts.items()}
    is_telling = len(names) == 1 or (all(short.values()) and len(set(short.values())) == len(names))
    return short if is_telling else dict(zip(names, names, strict=True))
