"""What the settings of one file say: which rules they meet, of which engine, for rollouts or for serving."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from kvaudit.audit.scan.files import Contents
from kvaudit.audit.scan.rules import ConfigurationRole, ScanRule, ScanRules, matching, named_like_a_key
from kvaudit.audit.scan.sheet import Default, Mapping, Setting, Unknown, Value, comparable
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
    by_default: bool = False  # the value stands where the launch sets no other


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
            if self._is_own_variable(setting):
                continue  # its value is read where the script uses it
            wanted = [rule for rule in matching(setting, self.rules) if self._stands(rule, setting)]
            met |= {rule.id for rule in wanted}
            engines = self._engines(wanted, setting)
            theirs = [rule for rule in wanted if rule.engine in engines]
            if theirs and _only_running_tells(setting, theirs):
                reason = (
                    f"{_spelt(setting)} has the value {_open_value(setting.value)!r}, which only running would tell"
                )
                unread[setting.line, theirs[0].id] = NotReadable(self.name, setting.line, clip(reason, _LONGEST))
            elif rule := next((rule for rule in theirs if rule.holds(setting.value)), None):
                holding = tuple(one.engine for one in theirs if one.holds(setting.value))
                finding = self._finding(setting, rule, tuple(dict.fromkeys(holding)))
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
            by_default=isinstance(setting.value, Default),
        )

    def _is_own_variable(self, setting: Setting) -> bool:
        """Whether a variable that is named like a key, and belongs to no engine, is only used by the file itself."""
        if setting.kind != "env" or not named_like_a_key(setting.key[0], self.rules):
            return False
        return re.search(rf"\$\{{?{re.escape(setting.key[0].lower())}\b(?!:?[-=])", self.contents.text) is not None

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


def _only_running_tells(setting: Setting, rules: Sequence[ScanRule]) -> bool:
    """Whether the value is not known, or stands apart from a flag that needs one; a default counts where it matters."""
    value = setting.value
    if isinstance(value, Unknown):
        return True
    if isinstance(value, Default) or (isinstance(value, tuple) and any(isinstance(one, Unknown) for one in value)):
        return not any(rule.holds(value) for rule in rules)
    return setting.kind == "flag" and value is True and rules[0].named


def _open_value(value: Value) -> str:
    """How a value that is not known is written."""
    if isinstance(value, tuple):
        return next(one.text for one in value if isinstance(one, Unknown))
    return value.text if isinstance(value, Unknown | Default) else "another word"


def _same(setting: Setting) -> tuple[int, str]:
    """What tells two findings of one rule apart: a package is imported once, a key stands at the end of its paths."""
    if setting.kind == "import":
        return 0, ""
    return setting.line, "" if setting.kind == "call" else _last(setting)


def _last(setting: Setting) -> str:
    return comparable(setting.key[-1].lstrip("-"))


def _spelt(setting: Setting) -> str:
    if setting.kind == "call":
        return f"{setting.key[-1]}(...)"
    name = ".".join(part for part in setting.key if part)
    return f"import {name}" if setting.kind == "import" else name


def _text_of(value: Value) -> str:
    if isinstance(value, Default):
        return value.value
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, tuple):
        return ", ".join(_text_of(entry) if isinstance(entry, Mapping | tuple) else str(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
