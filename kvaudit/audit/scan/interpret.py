"""What the settings of one file say: which rules they meet, of which engine, for rollouts or for serving."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from kvaudit.audit.scan.files import Contents
from kvaudit.audit.scan.rules import ConfigurationRole, ScanRule, ScanRules, matching
from kvaudit.audit.scan.sheet import Mapping, Setting, Unknown, Value
from kvaudit.core.text import clip

State = Literal["open", "declared", "corrected", "lossless", "native"]


@dataclass(frozen=True)
class Finding:
    """A key that says something about the cache. ``engines``: more than one where the file leaves it open."""

    file: str
    line: int
    role: ConfigurationRole
    engines: tuple[str, ...]
    rule: ScanRule
    key: str
    value: str
    policy: str
    block: int
    state: State = "open"
    answer: str = ""  # what answers for it


class NotReadable(NamedTuple):
    """A file, or a value of it, that only running would tell."""

    file: str
    line: int
    reason: str


_ROLLOUT = {"rollout", "rollouts", "grpo", "ppo", "rlhf", "rl", "train", "training", "trainer", "actor", "sampler"}
_SERVING = {"serve", "serving", "server", "deploy", "deployment", "prod", "production", "endpoint", "inference", "chat"}
_LAUNCHES = ("vllm serve", "trtllm-serve", "launch_server", "api_server", "llama-server", "ollama serve")
_LONGEST = 200  # characters of a key or value in a report


class Interpreter:
    """Reads the settings of one file against the rules."""

    def __init__(self, name: str, contents: Contents, rules: ScanRules) -> None:
        self.name, self.contents, self.rules = name, contents, rules
        self.siblings: dict[int, dict[str, Value]] = {}
        for setting in contents.settings:
            self.siblings.setdefault(setting.group, {})[_last(setting)] = setting.value
        self.words: dict[str, bool] = {}  # which words stand in the file or in its name

    def findings(self) -> tuple[list[Finding], list[NotReadable]]:
        """What is found and what is not readable, in order of lines; a key that stands twice in a line counts once."""
        found: dict[tuple[Any, ...], Finding] = {}
        unread: dict[tuple[int, str], NotReadable] = {}
        met: set[str] = set()  # rules whose key stands in the file, whatever its value
        for setting in self.contents.settings:
            wanted = [rule for rule in matching(setting, self.rules) if self._stands(rule, setting)]
            met |= {rule.id for rule in wanted}
            engines = self._engines(wanted, setting)
            theirs = [rule for rule in wanted if rule.engine in engines]
            if theirs and _only_running_tells(setting, theirs[0]):
                value = setting.value.text if isinstance(setting.value, Unknown) else "another word"
                reason = f"{_spelt(setting)} has the value {value!r}, which only running would tell"
                unread[setting.line, theirs[0].id] = NotReadable(self.name, setting.line, clip(reason, _LONGEST))
            elif rule := next((rule for rule in theirs if rule.holds(setting.value)), None):
                finding = self._finding(setting, rule, engines)
                found.setdefault((_same(setting), rule.id, finding.value), finding)
        # what is on by default is not, where the file itself says on or off
        kept = [finding for finding in found.values() if finding.rule.overruled not in met]
        return sorted(kept, key=lambda finding: finding.line), sorted(unread.values())

    def _finding(self, setting: Setting, rule: ScanRule, engines: tuple[str, ...]) -> Finding:
        return Finding(
            file=self.name,
            line=setting.line,
            role=rule.role or self._role(setting),
            engines=engines,
            rule=rule,
            key=clip(_spelt(setting), _LONGEST),
            value=clip(_text_of(setting.value), _LONGEST),
            policy=rule.policy_of(setting.value, self.siblings[setting.group]),
            block=setting.block,
        )

    def _stands(self, rule: ScanRule, setting: Setting) -> bool:
        """Whether the file is of the kind that the rule is about, and no sibling switches the key off."""
        if rule.mentions and not self._names(rule.mentions):
            return False
        siblings = self.siblings[setting.group]
        return not any(siblings.get(name) in values for name, values in (rule.unless or {}).items() if name in siblings)

    def _engines(self, wanted: Sequence[ScanRule], setting: Setting) -> tuple[str, ...]:
        """The engine that a key belongs to: named in its command, else in the file; else all that have it."""
        candidates = tuple(dict.fromkeys(rule.engine for rule in wanted))
        if len(candidates) < 2:
            return candidates
        words = {engine: self.rules.engines[engine].words for engine in candidates}
        near = {name: max((len(w) for w in own if _has(w, setting.near)), default=0) for name, own in words.items()}
        if best := max(near.values()):  # `trl vllm-serve` names TRL, though it also says vllm
            return tuple(engine for engine, length in near.items() if length == best)
        return tuple(engine for engine in candidates if self._names(words[engine])) or candidates

    def _role(self, setting: Setting) -> ConfigurationRole:
        """As the path of the key says, the trainers that the file names, the command, or the path of the file."""
        path, trainers = _parts(".".join(setting.key[:-1])), [one for one in self.rules.engines.values() if one.trainer]
        if path & _ROLLOUT or any(self._names(trainer.words) for trainer in trainers):
            return "rollout"
        if path & _SERVING or _parts(setting.near) & _SERVING:
            return "serving"
        return self._role_by_name

    @cached_property
    def _role_by_name(self) -> ConfigurationRole:
        for part in reversed(self.name.lower().split("/")):  # the name of the file, then of the folders above it
            if _parts(part) & _ROLLOUT:
                return "rollout"
            if _parts(part) & _SERVING:
                return "serving"
        return "serving" if self._names(_LAUNCHES) else "unknown"

    def _names(self, words: Iterable[str]) -> bool:
        """Whether the file, or its name, has one of the words."""
        for word in words:
            if word not in self.words:
                self.words[word] = _has(word, self.contents.text) or _has(word, self.name.lower())
        return any(self.words[word] for word in words)


def _has(word: str, text: str) -> bool:
    """Whether a text has a word by itself: verl does not stand in overlap."""
    return word.lower() in text and _pattern(word.lower()).search(text) is not None


@cache
def _pattern(word: str) -> re.Pattern[str]:
    after = "(?![a-z0-9])" if word[-1].isalnum() else ""
    return re.compile(f"(?<![a-z0-9]){re.escape(word)}{after}")


def _parts(text: str) -> set[str]:
    parts = set(re.split(r"[^a-z0-9_]+", text.lower()))
    return parts | {piece for part in parts for piece in part.split("_")}


def _only_running_tells(setting: Setting, rule: ScanRule) -> bool:
    """Whether the value is not known, or stands apart from a flag that needs one."""
    if isinstance(setting.value, Unknown):
        return True
    return setting.kind == "flag" and setting.value is True and rule.named


def _same(setting: Setting) -> tuple[int, str]:
    """What tells two findings of one rule apart: a package is imported once, a key stands at the end of its paths."""
    if setting.kind == "import":
        return 0, ""
    return setting.line, "" if setting.kind == "call" else _last(setting)


def _last(setting: Setting) -> str:
    return setting.key[-1].lstrip("-").replace("-", "_")


def _spelt(setting: Setting) -> str:
    if setting.kind == "call":
        return f"{setting.key[-1]}(...)"
    name = ".".join(part for part in setting.key if part)
    return f"import {name}" if setting.kind == "import" else name


def _text_of(value: Value) -> str:
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, tuple):
        return ", ".join(_text_of(entry) if isinstance(entry, Mapping | tuple) else str(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
