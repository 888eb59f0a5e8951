"""What every serving engine is: a name, which of its settings compress, and a session that answers token ids.

A condition is an engine with settings, in the engine's own words: they are handed on as they are, and what it does not
know it refuses in its own words. Prompts are rendered by us and go in as token ids, so no engine's template has a say.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvaudit.audit.policies import POLICIES, Policy, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.core.conditions import ENGINE, condition_text, engine_in, settings_in
from kvaudit.core.errors import AuditError, SpecError, UnknownName
from kvaudit.core.files import LONGEST_VALUE
from kvaudit.core.named_text import split_named
from kvaudit.core.records import Message
from kvaudit.core.registry import Registry
from kvaudit.core.secrets import has_password, is_secret_name
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import is_text, shown

if TYPE_CHECKING:
    from torch import Tensor

    from kvaudit.audit.cache.engine_store import EngineStore
    from kvaudit.audit.sampling.model import LoadedModel

Settings = Mapping[str, str]  # name -> value, as text


class GenerationRequest(NamedTuple):
    """A prompt and how it is answered. ``top_p`` 1 keeps the whole distribution, ``temperature`` 0 is greedy.

    ``messages`` are the same conversation for an engine that takes no tokens.
    """

    ids: tuple[int, ...]
    most: int  # tokens of the answer
    stops: tuple[int, ...]  # tokens that end it, which stand in the reply
    temperature: float
    top_p: float
    seed: int
    messages: tuple[Message, ...] = ()


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a conversation's turn: an engine draws from one anew, and no two turns by the same numbers."""
    return derive_seed("turn", seed, turn) if turn else seed


@dataclass(frozen=True)
class Reply:
    """An answer. ``logprob`` is the sum of the engine's log-probs of its tokens in nats, None where it gives none.

    ``text`` is the answer of an engine that gives no tokens, which then are none; ``thought`` and ``said_in`` are those
    of a ``ChatCompletion``. ``refused`` is what a server said
    that would not answer this request, though it may others.
    """

    ids: tuple[int, ...]
    finish: str  # stop | length | error, where it was refused
    logprob: float | None = None
    text: str | None = None
    refused: str | None = None
    thought: str | None = None
    said_in: str = ""

    def __post_init__(self) -> None:
        assert self.finish in (("stop", "length") if self.refused is None else ("error",)), self
        assert self.logprob is None or math.isfinite(self.logprob), self


class EngineFailed(AuditError):
    """An engine answers no more: it died, hangs, or says nothing of use. What it said last is in the message."""


def require_replies(asked: Sequence[GenerationRequest], replies: Sequence[Reply], who: str) -> None:
    """Raise EngineFailed for what cannot be the replies to a batch: a plug-in's engine is held to it as ours are."""
    if len(replies) != len(asked):
        raise EngineFailed(f"engine {who} gave {len(replies)} replies to {len(asked)} requests")
    for one, reply in zip(asked, replies, strict=True):
        if len(reply.ids) > one.most:
            raise EngineFailed(f"engine {who} gave an answer of {len(reply.ids)} tokens where {one.most} were the most")
        if set(one.stops) & set(reply.ids[:-1]):
            raise EngineFailed(f"engine {who} went on behind a token that ends an answer")


class Session(ABC):
    """An engine at work under one condition. ``described``: what it says it is, and what it made of the settings."""

    described: Mapping[str, str]

    @abstractmethod
    def answer(self, asked: Sequence[GenerationRequest]) -> list[Reply]:
        """The reply to every request of a batch, all of them in flight; raises EngineFailed."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine and whatever it started; a second call does nothing."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class DrawnRollout(NamedTuple):
    """A rollout. ``logprobs`` are nats under the whole distribution at the temperature asked for (greedy: 1).

    ``written`` are keys and values [tokens, L, H * D] float32 of all tokens but the last, as the engine wrote them;
    None where nobody asked, or it hands them out to nobody.
    """

    ids: tuple[int, ...]
    finish: str  # stop | length
    logprobs: tuple[float, ...]
    written: tuple[Tensor, Tensor] | None


class Drawer(ABC):
    """An engine that draws rollouts. ``described``: what it says it is.

    ``exact``: whether it computes in float32, so that only rounding is between it and a learner that does.
    """

    described: Mapping[str, str]
    exact: bool

    @abstractmethod
    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Have the engine draw by these weights from here on; raises EngineFailed, or RunError if it holds others."""

    @abstractmethod
    def draw(self, asked: Sequence[GenerationRequest], *, keep: int) -> list[DrawnRollout]:
        """A rollout for each, the first ``keep`` with its keys and values (see ``EngineStore``); raises as ``push``."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine; a second call does nothing."""


class EngineContext(NamedTuple):
    """What a session is started for: the checkpoint, how the engine is run, and where its own words are kept."""

    model: LoadedModel
    part: EngineSpec
    log: Path
    threads: int


class Engine:
    """A serving engine. Plug-ins subclass it with a ``name`` that no policy has.

    ``install`` is the one line that brings it. ``compresses``: the settings that compress the KV cache, each with the
    values by which it does not (none: every value does). ``uncompressed`` names a reference. ``always`` is what a
    condition has unless it says otherwise, so that what the engine would choose by the machine is named.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # one line: what it is, what its KV settings are called
    install: ClassVar[str] = ""
    compresses: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    uncompressed: ClassVar[Settings] = {}
    always: ClassVar[Settings] = {}
    keeps: ClassVar[str] = ""  # the setting that says how many entries stay, of an engine that can evict
    undrawn: ClassVar[str] = ""  # why training draws no rollouts from it, where there is more to say

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """The settings with what the engine would otherwise choose by itself; raises SpecError for what cannot be."""
        return {**cls.always, **settings}

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """The uncompressed settings that ``settings`` are compared with: the same in all that does not compress."""
        plain = {name: value for name, value in settings.items() if name not in cls.compresses}
        return {**plain, **cls.uncompressed}

    @classmethod
    def reference_with(cls, settings: Settings, named: Settings) -> Settings:
        """The reference of ``settings`` in which ``named`` ones are as they were named."""
        return {**cls.reference(settings), **named}

    @classmethod
    def compressing(cls, settings: Settings) -> list[str]:
        """The settings that compress something."""
        return [name for name, plain in cls.compresses.items() if name in settings and settings[name] not in plain]

    @classmethod
    def kv(cls, text: str) -> Settings:
        """The settings that ``kvaudit check --kv TEXT`` stands for; raises SpecError for what stands for none."""
        raise SpecError(
            f"engine {cls.name} has no short way to say --kv {text[:80]!r}; give --set NAME=VALUE ({cls.says})"
        )

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:
        """Raise SpecError for settings that cannot be, and, with the line that installs it, where it is not there."""
        raise NotImplementedError

    @classmethod
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        """Start the engine on a checkpoint; raises EngineFailed, or SpecError for what it cannot serve."""
        raise NotImplementedError

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:  # noqa: ARG003
        """Raise SpecError for settings under which training can draw no rollouts."""
        # the one here only raises: an engine that draws has its own
        own = Engine.drawer.__func__  # type: ignore[attr-defined]
        drawing = (name for name, one in ENGINES.all().items() if one.drawer.__func__ is not own)  # type: ignore[attr-defined]
        why = f" ({cls.undrawn})" if cls.undrawn else ""
        raise SpecError(f"engine {cls.name} draws no rollouts for training{why}; known: {', '.join(drawing)}")

    @classmethod
    def drawer(cls, settings: Settings, work: EngineContext) -> Drawer:
        """Start the engine to draw rollouts by weights that change; raises as ``start``."""
        raise NotImplementedError

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:  # noqa: ARG003
        """How keys and values are stored under the settings, None where that is not known."""
        return None


ENGINES: Registry[Engine] = Registry("engine", "kvaudit.audit.engines", Engine)


@dataclass(frozen=True)
class Condition:
    """An engine with its settings, the one spelling of which is ``canonical``."""

    engine: str
    settings: tuple[tuple[str, str], ...]

    @cached_property
    def canonical(self) -> str:
        """The text that parses back to an equal condition."""
        return condition_text(self.engine, dict(self.settings))

    @cached_property
    def hash(self) -> str:
        """First 12 hex digits of the sha256 of the canonical text."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:12]

    @property
    def compressing(self) -> list[str]:
        """The settings by which it compresses something."""
        return ENGINES.get(self.engine).compressing(dict(self.settings))

    @property
    def reference(self) -> Condition:
        """The uncompressed condition of the same engine."""
        return _of(self.engine, ENGINES.get(self.engine).reference(dict(self.settings)))

    def reference_with(self, named: Any) -> Condition:
        """The reference with other values of some settings, as a mapping; or any other of the same engine, as text."""
        said = f"reference of engine {self.engine} is {shown(named)}"
        if not isinstance(named, Mapping | str):
            raise SpecError(f"{said}, wanted settings or the text of an engine")
        engine = engine_in(named) if isinstance(named, str) else str(named.get(ENGINE, self.engine))
        if engine != self.engine:
            raise SpecError(
                f"{said}: beside another engine nobody could tell what the setting does; name settings of {self.engine}"
            )
        if isinstance(named, str):
            return parse_condition(named)
        words = _words(engine, {name: value for name, value in named.items() if name != ENGINE})
        return _of(self.engine, ENGINES.get(self.engine).reference_with(dict(self.settings), words))


ServingMode = Policy | Condition  # what a unit is served under


def parse_condition(source: str | Mapping[str, Any]) -> Condition:
    """The condition that text or a mapping describes; raises UnknownName for an engine and SpecError for a value."""
    if isinstance(source, str):
        engine, given = engine_in(source), dict[str, Any](settings_in(source))
        # names are keys of a mapping, so that one given twice is missing from the count
        if len(given) != len(split_named(source)[1]):
            raise SpecError(f"engine {shown(engine)} has a setting twice: {shown(source)}")
    else:
        given = dict(source)
        engine = str(given.pop(ENGINE))
    return _of(engine, _words(engine, given))


def parse_serving_mode(source: Any) -> ServingMode:
    """A policy of ours or an engine's condition; ``{engine: kvaudit, policy: ...}`` is the former."""
    if isinstance(source, Mapping) and ENGINE in source:
        if source[ENGINE] != OWN_ENGINE:
            return parse_condition(source)
        if set(source) != {ENGINE, "policy"}:
            raise SpecError(
                f"engine {OWN_ENGINE} is our own cache: write {{engine: {OWN_ENGINE}, policy: snapkv:budget=96}}"
            )
        return parse_policy(source["policy"])
    if isinstance(source, str) and is_engine(engine_in(source)):
        return parse_condition(source)
    # compositions and mixtures name what they do not know themselves
    if isinstance(source, str) and engine_in(source) not in POLICIES.all() and not set("+|@") & set(source):
        raise UnknownName("policy or engine", engine_in(source), (*POLICIES.all(), *ENGINES.all()))
    return parse_policy(source)


OWN_ENGINE = "kvaudit"


def is_engine(name: str) -> bool:
    """Whether an engine goes by this name; a policy that does goes first."""
    return name not in POLICIES.all() and name in ENGINES.all()


def _of(engine: str, settings: Settings) -> Condition:
    filled = ENGINES.get(engine).filled(settings)
    _check_no_secret(engine, filled)
    found = Condition(engine, tuple(sorted(filled.items())))
    if (length := len(found.canonical)) > LONGEST_VALUE:
        raise SpecError(
            f"engine {engine} has settings of {length} characters once they are spelled out, a spec can hold "
            f"{LONGEST_VALUE}; give shorter ones"
        )
    return found


def _check_no_secret(engine: str, settings: Settings) -> None:
    """Raise SpecError for a setting that nobody would want in a spec, a record or a report."""
    for name, value in settings.items():
        if is_secret_name(name) or has_password(value):
            raise SpecError(
                f"engine {engine}: setting {name} holds a secret, which specs, records and reports would show; set it "
                "in the environment that kvaudit is started in, which engines see"
            )


def _words(engine: str, given: Mapping[Any, Any]) -> Settings:
    return {str(name): _word(engine, str(name), value) for name, value in given.items()}


def _word(engine: str, name: str, value: Any) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"engine {shown(engine)} can have no setting {shown(name)}: a name is of letters, digits, '_', '-' and '.'"
        )
    if isinstance(value, bool):
        return str(value).lower()
    word = str(value) if isinstance(value, str | int | float) else ""
    if not word or len(word) > _LONGEST or not is_text(word):
        raise SpecError(f"setting {name} is {shown(value)}, wanted a word or a number of the engine's own")
    return word


_LONGEST = 500  # characters of a value
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
