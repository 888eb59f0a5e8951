"""What keys mean: the rules of ``rules.yaml``, and which of them a setting meets."""

from __future__ import annotations

import hashlib
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
_OFF = {"", "none", "null", "false", "off", "no"}


@dataclass(frozen=True)
class Mechanism:
    """What happens to the cache, or to the text before it. ``corrected``: an importance ratio answers for it."""

    says: str
    lossy: bool
    corrected: bool


@dataclass(frozen=True)
class EngineWords:
    """Words by which a command or a file is known; what a ``trainer`` launches are rollouts."""

    words: Sequence[str]
    trainer: bool = False


@dataclass(frozen=True)
class ScanRule:
    """One key of one engine; the fields are those that ``rules.yaml`` explains."""

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
    def named(self) -> bool:
        """Whether the value is a name, which a flag by itself does not say."""
        return not isinstance(self.when, str) and bool({"in", "not"} & set(self.when))

    def holds(self, value: Value) -> bool:
        """Whether the mechanism is on with this value; the value is known."""
        value = value.value if isinstance(value, Default) else value
        if isinstance(value, str) and value.startswith("--"):
            return False  # a table of which key is which flag
        if self.when == "set" or isinstance(value, Mapping):
            return _is_set(value)
        (test, wanted), *_ = dict(self.when).items()  # type: ignore[arg-type]  # a mapping, as it is not "set"
        if test == "above":
            number = _number(value)
            return number is not None and number > wanted
        if test == "has":
            return isinstance(value, tuple) and any(str(entry).lower() in _lower(wanted) for entry in value)
        if isinstance(value, tuple):  # what there is to choose from
            return any(self.holds(entry) for entry in value if not isinstance(entry, Unknown))  # type: ignore[arg-type]
        named = {str(value).lower(), str(value).lower().partition(",")[0]}  # q8_0,4: of four layers
        return _is_set(value) and bool(named & _lower(wanted)) == (test == "in")

    def policy_of(self, value: Value, siblings: Table[str, Value]) -> str:
        """Our policy that comes nearest, from the value and what stands beside it, or ``no equivalent``."""
        value = value.value if isinstance(value, Default) else value
        if not isinstance(self.policy, str):
            return self.policy.get(str(value).lower(), NO_EQUIVALENT)
        if "{" not in self.policy:
            return self.policy
        known = {**(self.fields or {}), **{name: _one(entry) for name, entry in siblings.items()}}
        names = [part.partition("}")[0] for part in self.policy.split("{")[1:]]
        if any(_number(known.get(name)) is None for name in names):
            return NO_EQUIVALENT  # differs by layer, or is not known
        return self.policy.format(**{name: int(_number(known[name]) or 0) for name in names})


class ScanRules(NamedTuple):
    """All rules, by what they match first; ``sha256`` names this state of them."""

    rules: Sequence[ScanRule]
    engines: Table[str, EngineWords]
    mechanisms: Table[str, Mechanism]
    sha256: str
    patterns: Table[tuple[str, str], Sequence[tuple[tuple[str, ...], ScanRule]]]


@cache
def load_rules() -> ScanRules:
    """The rules that come with this version."""
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


def matching(setting: Setting, rules: ScanRules) -> list[ScanRule]:
    """The rules whose key this is, those of the longest pattern; their conditions are not asked yet."""
    found = list(_matching(setting, rules))
    longest = max((length for length, _ in found), default=0)
    return [rule for length, rule in found if length == longest]


def _matching(setting: Setting, rules: ScanRules) -> Iterator[tuple[int, ScanRule]]:
    of_package = setting.kind == "import"
    end = _compared(setting.kind, setting.key[:1] if of_package else setting.key[-1:])
    if patterns := rules.patterns.get((setting.kind, end[0])):
        key = _compared(setting.kind, setting.key)
        for pattern, rule in patterns:
            if of_package or key[-len(pattern) :] == pattern:
                yield len(pattern), rule
    if setting.kind == "key" and setting.key[-1].isupper():  # `environment: {NAME: value}`
        yield from _matching(setting._replace(kind="env", key=setting.key[-1:]), rules)
    if setting.kind == "env":
        yield from ((1, rule) for rule in named_like_a_key(setting.key[0], rules))


def named_like_a_key(variable: str, rules: ScanRules) -> list[ScanRule]:
    """The rules for whose key, or for whose engine's key, a variable is named: KV_CACHE_DTYPE, VLLM_KV_CACHE_DTYPE."""
    name = comparable(variable)
    owner = next((engine for engine in rules.engines if name.startswith(f"{comparable(engine)}_")), "")
    key = name.removeprefix(f"{comparable(owner)}_") if owner else name
    alone = [rule for pattern, rule in rules.patterns.get(("key", key), ()) if pattern == (key,)]
    return [rule for rule in alone if rule.engine == owner or not owner]


def _patterns(rule: ScanRule) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from (("flag", _compared("flag", (flag,))) for flag in rule.flags)
    yield from (("key", _compared("key", tuple(key.split(".")))) for key in rule.keys)
    yield from (("env", (name,)) for name in rule.env)
    yield from (("call", (name,)) for name in rule.calls)
    yield from (("import", (name,)) for name in rule.imports)


def _compared(kind: str, key: tuple[str, ...]) -> tuple[str, ...]:
    """A key as it is compared: hyphens and cases alike, but short flags, variables and names of code as they are."""
    if kind in ("env", "call", "import") or (kind == "flag" and not key[0].startswith("--")):
        return key
    return tuple(comparable(part.lstrip("-")) for part in key)


def _is_set(value: Value) -> bool:
    return value is not None and value is not False and value != () and str(value).lower() not in _OFF


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _one(value: Value) -> Value:
    """What all entries of a list are, if they are the same."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        return value[0]  # type: ignore[return-value]  # entries of a list are values
    return value


def _lower(values: Sequence[Any]) -> set[str]:
    return {str(value).lower() for value in values}
