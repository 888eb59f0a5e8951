"""Match the settings of a file against the rules; find the engine and the role (rollout or serving) of each match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from kvaudit.audit.scan.files import Contents
from kvaudit.audit.scan.rules import ConfigurationRole, ScanRule, ScanRules, matching_rules, rules_for_variable
from kvaudit.audit.scan.sheet import Default, Mapping, Setting, Unknown, Value, comparable
from kvaudit.core.text import clip

State = Literal["open", "declared", "corrected", "lossless", "native"]


@dataclass(frozen=True)
class Finding:
    """A setting in a file that matches a rule, so that it switches a compression mechanism on.

    It has several ``engines`` if the file does not tell which of them it configures.
    """

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
    answer: str = ""  # the declaration or correction that accounts for it
    by_default: bool = False  # the value is a default, used unless the launch sets another


class NotReadable(NamedTuple):
    """A place that the scan could not read: a file or a part of it, or a value that is known only at run time."""

    file: str
    line: int
    reason: str


_ROLLOUT = {"rollout", "rollouts", "grpo", "ppo", "rlhf", "rl", "train", "training", "trainer", "actor", "sampler"}
_SERVING = {"serve", "serving", "server", "deploy", "deployment", "prod", "production", "endpoint", "inference", "chat"}
_LAUNCHES = ("vllm serve", "trtllm-serve", "launch_server", "api_server", "llama-server", "ollama serve")
_LONGEST = 200  # characters of a key or value in a report


class Interpreter:
    """The matcher of one file's settings against the rules, which say what settings switch on compression.

    ``name`` is the file's name for display.
    """

    def __init__(self, name: str, contents: Contents, rules: ScanRules) -> None:
        self.name, self.contents, self.rules = name, contents, rules
        self.siblings: dict[int, dict[str, Value]] = {}
        for setting in contents.settings:
            self.siblings.setdefault(setting.group, {})[_last_part(setting)] = setting.value
        self.words: dict[str, bool] = {}  # whether a word is in the file or its name

    def findings(self) -> tuple[list[Finding], list[NotReadable]]:
        """Return the findings and the unreadable values, each in order of lines.

        A key that is found twice in one line counts once.
        """
        findings: dict[tuple[Any, ...], Finding] = {}
        unread: dict[tuple[int, str], NotReadable] = {}
        matched: set[str] = set()  # rules whose key is in the file, with any value
        for setting in self.contents.settings:
            if self._is_local_variable(setting):
                continue  # its value is read where the script uses it
            candidates = [rule for rule in matching_rules(setting, self.rules) if self._applies(rule, setting)]
            matched |= {rule.id for rule in candidates}
            engines = self._engines(candidates, setting)
            rules = [rule for rule in candidates if rule.engine in engines]
            if rules and _is_run_time_value(setting, rules):
                reason = f"{_key_text(setting)} has the value {_open_value(setting.value)!r}, known only at run time"
                unread[setting.line, rules[0].id] = NotReadable(self.name, setting.line, clip(reason, _LONGEST))
            elif matches := [rule for rule in rules if rule.holds(setting.value)]:
                finding = self._finding(setting, matches[0], tuple(dict.fromkeys(rule.engine for rule in matches)))
                findings.setdefault((_identity(setting), matches[0].id, finding.value), finding)
        # a default does not count if the file itself switches the mechanism on or off
        remaining = [finding for finding in findings.values() if finding.rule.overruled not in matched]
        return sorted(remaining, key=lambda finding: finding.line), sorted(unread.values())

    def _finding(self, setting: Setting, rule: ScanRule, engines: tuple[str, ...]) -> Finding:
        return Finding(
            file=self.name,
            line=setting.line,
            role=rule.role or self._role(setting),
            engines=engines,
            rule=rule,
            key=clip(_key_text(setting), _LONGEST),
            value=clip(_value_text(setting.value), _LONGEST),
            policy=rule.policy_of(setting.value, self.siblings[setting.group]),
            block=setting.block,
            by_default=isinstance(setting.value, Default),
        )

    def _is_local_variable(self, setting: Setting) -> bool:
        """Return whether a setting is only a variable of a script.

        Such a variable has the name of an engine's setting, but only the script itself reads it.
        """
        if setting.kind != "env" or not rules_for_variable(setting.key[0], self.rules):
            return False
        return re.search(rf"\$\{{?{re.escape(setting.key[0].lower())}\b(?!:?[-=])", self.contents.text) is not None

    def _applies(self, rule: ScanRule, setting: Setting) -> bool:
        """Return whether a rule holds for a setting of this file.

        If the rule has ``mentions``, the file must contain one of these words. No other key in the setting's group may
        have a value that leaves the setting without effect; the rule's ``unless`` lists such values.
        """
        if rule.mentions and not self._mentions(rule.mentions):
            return False
        siblings = self.siblings[setting.group]
        return not any(siblings.get(name) in values for name, values in (rule.unless or {}).items() if name in siblings)

    def _engines(self, rules: Sequence[ScanRule], setting: Setting) -> tuple[str, ...]:
        """Return the engines to which a setting belongs, of those whose ``rules`` match its key.

        These are the engines named in its command, else those named in the file, else all of them.
        """
        candidates = tuple(dict.fromkeys(rule.engine for rule in rules))
        if len(candidates) < 2:
            return candidates
        words = {engine: self.rules.engines[engine].words for engine in candidates}
        lengths = {
            engine: max((len(word) for word in engine_words if _has_word(word, setting.command)), default=0)
            for engine, engine_words in words.items()
        }
        if longest := max(lengths.values()):  # the longest word wins: `trl vllm-serve` is TRL, not vllm
            return tuple(engine for engine, length in lengths.items() if length == longest)
        return tuple(engine for engine in candidates if self._mentions(words[engine])) or candidates

    def _role(self, setting: Setting) -> ConfigurationRole:
        """Return whether the setting configures rollouts or serving.

        This follows from the key's path, the trainers named in the file, the command, or else the file's path.
        """
        path = _words_of(".".join(setting.key[:-1]))
        trainers = [engine for engine in self.rules.engines.values() if engine.trainer]
        if path & _ROLLOUT or any(self._mentions(trainer.words) for trainer in trainers):
            return "rollout"
        if path & _SERVING or _words_of(setting.command) & _SERVING:
            return "serving"
        return self._role_by_name

    @cached_property
    def _role_by_name(self) -> ConfigurationRole:
        for part in reversed(self.name.lower().split("/")):  # the file's name first, then the folders above it
            if _words_of(part) & _ROLLOUT:
                return "rollout"
            if _words_of(part) & _SERVING:
                return "serving"
        return "serving" if self._mentions(_LAUNCHES) else "unknown"

    def _mentions(self, words: Iterable[str]) -> bool:
        """Return whether the file's text or name has one of the words."""
        for word in words:
            if word not in self.words:
                self.words[word] = _has_word(word, self.contents.text) or _has_word(word, self.name.lower())
        return any(self.words[word] for word in words)


def _has_word(word: str, text: str) -> bool:
    """Return whether a text has a word as a whole word (overlap does not contain verl)."""
    return word.lower() in text and _pattern(word.lower()).search(text) is not None


@cache
def _pattern(word: str) -> re.Pattern[str]:
    after = "(?![a-z0-9])" if word[-1].isalnum() else ""
    return re.compile(f"(?<![a-z0-9]){re.escape(word)}{after}")


def _words_of(text: str) -> set[str]:
    parts = set(re.split(r"[^a-z0-9_]+", text.lower()))
    return parts | {piece for part in parts for piece in part.split("_")}


def _is_run_time_value(setting: Setting, rules: Sequence[ScanRule]) -> bool:
    """Return whether a setting's value is known only at run time, or missing after a flag that needs one.

    A value with a default counts as known if a rule holds for the default.
    """
    value = setting.value
    if isinstance(value, Unknown):
        return True
    if isinstance(value, Default) or (isinstance(value, tuple) and any(isinstance(entry, Unknown) for entry in value)):
        return not any(rule.holds(value) for rule in rules)
    return setting.kind == "flag" and value is True and rules[0].needs_value


def _open_value(value: Value) -> str:
    """Return how the file writes a value that is known only at run time, such as "${X}"."""
    if isinstance(value, tuple):
        return next(entry.text for entry in value if isinstance(entry, Unknown))
    return value.text if isinstance(value, Unknown | Default) else "another word"


def _identity(setting: Setting) -> tuple[int, str]:
    """Return what repeated findings of a rule have in common: the setting's line and the last part of its key.

    All calls in a line have the same identity, and so have all imports in a file.
    """
    if setting.kind == "import":
        return 0, ""  # importing a package several times counts once
    return setting.line, "" if setting.kind == "call" else _last_part(setting)


def _last_part(setting: Setting) -> str:
    return comparable(setting.key[-1].lstrip("-"))


def _key_text(setting: Setting) -> str:
    if setting.kind == "call":
        return f"{setting.key[-1]}(...)"
    name = ".".join(part for part in setting.key if part)
    return f"import {name}" if setting.kind == "import" else name


def _value_text(value: Value) -> str:
    if isinstance(value, Default):
        return value.value
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, tuple):
        return ", ".join(_value_text(entry) if isinstance(entry, Mapping | tuple) else str(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
