"""The rules in ``rules.yaml``: which setting of which engine switches on which mechanism that compresses the cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Table
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvaudit.audit.scan.sheet import Default, Mapping, Setting, Unknown, Value, comparable
from kvaudit.core.files import parse_yaml

ConfigurationRole = Literal["rollout", "serving", "both", "unknown"]
NO_EQUIVALENT = "no equivalent"
CORRECTION, NATIVE = "correction", "native"
_PATH = Path(__file__).with_name("rules.yaml")
_OFF = {"", "none", "null", "false", "off", "no", "disabled"}


@dataclass(frozen=True)
class Mechanism:
    """A mechanism that compresses the cache or prompt.

    ``lossy``: it changes what the model sees; ``corrected``: an importance ratio in training can correct for that.
    """

    says: str
    lossy: bool
    corrected: bool


@dataclass(frozen=True)
class EngineWords:
    """The words that identify an engine in commands and files.

    ``trainer``: it trains models, so what it launches are training rollouts.
    """

    words: Sequence[str]
    trainer: bool = False


@dataclass(frozen=True)
class ScanRule:
    """A rule for one setting of an engine: its names, and the values that switch a compression mechanism on.

    The head of ``rules.yaml`` explains the fields.
    """

    id: str
    engine: str
    mechanism: str
    since: str
    source: str
    flags: Sequence[str] = ()
    keys: Sequence[str] = ()
    env: Sequence[str] = ()
    calls: Sequence[str] = ()
    imports: Sequence[str] = ()
    role: ConfigurationRole | None = None
    when: str | Table[str, Any] = "set"
    unless: Table[str, Sequence[Any]] | None = None
    mentions: Sequence[str] = ()
    policy: str | Table[str, str] = NO_EQUIVALENT
    fields: Table[str, Any] | None = None
    overruled: str | None = None
    note: str = ""

    @property
    def needs_value(self) -> bool:
        """Whether the rule lists values, so that a flag without a value cannot match it."""
        return not isinstance(self.when, str) and bool({"in", "not"} & set(self.when))

    def holds(self, value: Value) -> bool:
        """Return whether ``value`` switches the rule's mechanism on; call it only for a value that the file states."""
        value = value.value if isinstance(value, Default) else value
        if isinstance(value, str) and value.startswith("--"):
            return False  # the entry of a table that maps keys to flags
        if self.when == "set" or isinstance(value, Mapping):
            return _is_set(value)
        (test, wanted), *_ = dict(self.when).items()  # type: ignore[arg-type]  # a mapping, as it is not "set"
        if test == "above":
            number = _number(value)
            return number is not None and number > wanted
        if test == "has":
            return isinstance(value, tuple) and any(str(entry).lower() in _lower(wanted) for entry in value)
        if isinstance(value, tuple):  # a list of choices
            return any(self.holds(entry) for entry in value if not isinstance(entry, Unknown))  # type: ignore[arg-type]
        names = {str(value).lower(), str(value).lower().partition(",")[0]}  # q8_0,4: q8_0 in four layers
        return _is_set(value) and bool(names & _lower(wanted)) == (test == "in")

    def policy_of(self, value: Value, siblings: Table[str, Value]) -> str:
        """Return the policy of kvaudit that comes closest to a setting, or ``no equivalent``.

        The policy follows from the setting's value and the values of its ``siblings``, the other keys of
        its mapping or command.
        """
        value = value.value if isinstance(value, Default) else value
        if not isinstance(self.policy, str):
            return self.policy.get(str(value).lower(), NO_EQUIVALENT)
        if "{" not in self.policy:
            return self.policy
        fields = {**(self.fields or {}), **{name: _common_entry(entry) for name, entry in siblings.items()}}
        names = [part.partition("}")[0] for part in self.policy.split("{")[1:]]
        if any(_number(fields.get(name)) is None for name in names):
            return NO_EQUIVALENT  # differs by layer, or unknown
        return self.policy.format(**{name: int(_number(fields[name]) or 0) for name in names})


class ScanRules(NamedTuple):
    """All rules by which a scan finds settings of the cache in files, with the words for engines and mechanisms.

    ``patterns`` finds rules by two things: the kind of a setting's name (flag, key, env, call, import), and the last
    part of this name. ``sha256`` is the hash of ``rules.yaml``.
    """

    rules: Sequence[ScanRule]
    engines: Table[str, EngineWords]
    mechanisms: Table[str, Mechanism]
    sha256: str
    patterns: Table[tuple[str, str], Sequence[tuple[tuple[str, ...], ScanRule]]]


@cache
def load_rules() -> ScanRules:
    """Return the rules of ``rules.yaml``, which ships with this version of kvaudit."""
    text = _PATH.read_text(encoding="utf-8")
    table = parse_yaml(text, _PATH.name, "rule file").table
    rules = [ScanRule(**row) for row in table["rules"]]
    engines = {name: EngineWords(**row) for name, row in table["engines"].items()}
    mechanisms = {name: Mechanism(**row) for name, row in table["mechanisms"].items()}
    index: dict[tuple[str, str], list[tuple[tuple[str, ...], ScanRule]]] = {}
    for rule in rules:
        for kind, pattern in _patterns(rule):
            index.setdefault((kind, pattern[-1]), []).append((pattern, rule))
    return ScanRules(rules, engines, mechanisms, hashlib.sha256(text.encode()).hexdigest(), index)


def matching_rules(setting: Setting, rules: ScanRules) -> list[ScanRule]:
    """Return the rules with the longest pattern that matches a setting's key; its value is not looked at here."""
    matches = list(_matches(setting, rules))
    longest = max((length for length, _ in matches), default=0)
    return [rule for length, rule in matches if length == longest]


def _matches(setting: Setting, rules: ScanRules) -> Iterator[tuple[int, ScanRule]]:
    """Yield (length, rule) for each rule whose key pattern matches; the length is the pattern's number of key parts."""
    is_import = setting.kind == "import"
    end = _normalise(setting.kind, setting.key[:1] if is_import else setting.key[-1:])
    if patterns := rules.patterns.get((setting.kind, end[0])):
        key = _normalise(setting.kind, setting.key)
        for pattern, rule in patterns:
            if is_import or key[-len(pattern) :] == pattern:
                yield len(pattern), rule
    if setting.kind == "key" and setting.key[-1].isupper():  # `environment: {NAME: value}`
        yield from _matches(setting._replace(kind="env", key=setting.key[-1:]), rules)
    if setting.kind == "env":
        yield from ((1, rule) for rule in rules_for_variable(setting.key[0], rules))


def rules_for_variable(variable: str, rules: ScanRules) -> list[ScanRule]:
    """Return the rules for an environment variable that is named after a rule's key.

    The variable is the key in capitals, with or without the engine's name: KV_CACHE_DTYPE or VLLM_KV_CACHE_DTYPE.
    """
    name = comparable(variable)
    engine = next((engine for engine in rules.engines if name.startswith(f"{comparable(engine)}_")), "")
    key = name.removeprefix(f"{comparable(engine)}_") if engine else name
    matches = [rule for pattern, rule in rules.patterns.get(("key", key), ()) if pattern == (key,)]
    return [rule for rule in matches if rule.engine == engine or not engine]


def _patterns(rule: ScanRule) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from (("flag", _normalise("flag", (flag,))) for flag in rule.flags)
    yield from (("key", _normalise("key", tuple(key.split(".")))) for key in rule.keys)
    yield from (("env", (name,)) for name in rule.env)
    yield from (("call", (name,)) for name in rule.calls)
    yield from (("import", (name,)) for name in rule.imports)


def _normalise(kind: str, key: tuple[str, ...]) -> tuple[str, ...]:
    """Return a key with its hyphens and case made uniform; short flags, variables and names in code stay unchanged."""
    if kind in ("env", "call", "import") or (kind == "flag" and not key[0].startswith("--")):
        return key
    return tuple(comparable(part.lstrip("-")) for part in key)


def _is_set(value: Value) -> bool:
    is_off = value is None or value is False or value == () or str(value).lower() in _OFF
    return not is_off and _number(value) != 0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _common_entry(value: Value) -> Value:
    """Return the entry of a list whose entries are all equal; return any other value unchanged."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        return value[0]  # type: ignore[return-value]  # entries of a list are values
    return value


def _lower(values: Sequence[Any]) -> set[str]:
    return {str(value).lower() for value in values}
