"""The contract of serving engines such as vLLM: requests, replies, sessions, and the plug-in class ``Engine``.

An engine with settings is called a condition. Settings use the engine's own names and are passed on unchanged; the
engine itself rejects those it does not know. kvaudit renders prompts and sends token ids, so the engine's own chat
template has no effect.
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
from kvaudit.core.errors import AuditError, SpecError, UnknownName
from kvaudit.core.files import MAX_VALUE_LENGTH
from kvaudit.core.plugins import Registry, split_named
from kvaudit.core.policy_names import ENGINE, condition_text, engine_name, engine_settings
from kvaudit.core.records import Message
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import has_password, is_key_like, is_secret_name, is_text, short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from kvaudit.audit.cache.engine_store import EngineStore
    from kvaudit.audit.sampling.model import LoadedModel

OWN_ENGINE = "kvaudit"  # our own compressing cache, configured by a policy
Settings = Mapping[str, str]  # name -> value, as text
_LONGEST_SETTING = 500  # characters of a value
_SETTING_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class GenerationRequest(NamedTuple):
    """A prompt with its sampling options: ``temperature`` 0 is greedy, ``top_p`` 1 keeps the whole distribution.

    ``messages`` are the prompt's conversation, for engines that take text instead of token ids. ``tools`` are the
    schemas of its tools; they are empty if the messages contain the tools as text.
    """

    ids: tuple[int, ...]
    max_tokens: int  # of the answer
    stops: tuple[int, ...]  # token ids that end the answer; the reply includes them
    temperature: float
    top_p: float
    seed: int
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of turn number ``turn`` of a conversation, so that every turn has other random numbers."""
    return derive_seed("turn", seed, turn) if turn else seed


@dataclass(frozen=True)
class Reply:
    """An engine's reply to one request; ``logprob`` is the sum of its tokens' log-probs in nats, None if unknown.

    If the engine returns no token ids, ``ids`` is empty and ``text`` is the answer. ``refused`` is the server's
    message if it rejected the request. ``thought`` is the text of the model's reasoning before the answer, and
    ``said_in`` names the fields of the server's message that held the answer.
    """

    ids: tuple[int, ...]
    finish: str  # stop | length | error (rejected)
    logprob: float | None = None
    text: str | None = None
    refused: str | None = None
    thought: str | None = None
    said_in: str = ""

    def __post_init__(self) -> None:
        assert self.finish in (("stop", "length") if self.refused is None else ("error",)), self
        assert self.logprob is None or math.isfinite(self.logprob), self


class EngineFailed(AuditError):
    """The error of an engine that dies, hangs or sends unusable replies; its message quotes the last log lines."""


def require_replies(requests: Sequence[GenerationRequest], replies: Sequence[Reply], engine: str) -> None:
    """Raise EngineFailed unless each request has one reply that keeps to its token limit and its stop tokens."""
    if len(replies) != len(requests):
        raise EngineFailed(f"engine {engine} gave {len(replies)} replies to {len(requests)} requests")
    for request, reply in zip(requests, replies, strict=True):
        if len(reply.ids) > request.max_tokens:
            raise EngineFailed(
                f"engine {engine} gave an answer of {len(reply.ids)} tokens; the limit was {request.max_tokens}"
            )
        if set(request.stops) & set(reply.ids[:-1]):
            raise EngineFailed(f"engine {engine} continued an answer after a stop token")


class Session(ABC):
    """An engine that is running with certain settings and answers requests.

    ``described`` holds the engine's version, its resolved settings and similar facts; it goes into provenance.json.
    ``window`` is the number of tokens that a prompt and its answer may have together, if the engine reports it.
    """

    described: Mapping[str, str]
    window: int | None = None

    @abstractmethod
    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        """Return the reply to each request of a batch; raise EngineFailed if the engine does not give all of them."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine and every process it started; a second call does nothing."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class DrawnRollout(NamedTuple):
    """A rollout sampled by an engine.

    ``logprobs`` are nats under the full distribution at the requested temperature (at 1 for greedy sampling).
    ``written`` holds the keys and values [tokens, L, H * D] float32 of all tokens but the last, as the engine wrote
    them to its cache; it is None if they were not requested or the engine does not return them.
    """

    ids: tuple[int, ...]
    finish: str  # stop | length
    logprobs: tuple[float, ...]
    written: tuple[Tensor, Tensor] | None


class Drawer(ABC):
    """A running engine that samples rollouts for training.

    ``described`` holds the engine's version and settings, as in ``Session``. ``exact`` is True if the engine computes
    in float32, so that its log-probs differ from those of a float32 learner by rounding only.
    """

    described: Mapping[str, str]
    exact: bool

    @abstractmethod
    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Load new weights, keyed by their names in the checkpoint.

        Raises EngineFailed, or RunError if the engine holds other weights afterwards.
        """

    @abstractmethod
    def draw(self, requests: Sequence[GenerationRequest], *, keep: int) -> list[DrawnRollout]:
        """Sample and return one rollout per request; the first ``keep`` of them come with their keys and values.

        Raises EngineFailed, or RunError if the engine sampled with other weights than those pushed last.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the engine; a second call does nothing."""


class EngineContext(NamedTuple):
    """The inputs for starting an engine: the checkpoint, the engine's entry in the spec, log file, CPU threads."""

    model: LoadedModel
    spec: EngineSpec
    log: Path
    threads: int


class Engine:
    """A serving engine; a plug-in subclasses it with a ``name`` that no policy has.

    ``install`` is the command that installs it. ``compresses`` lists the settings that can compress the KV cache, each
    with those of its values that do not compress (empty: every value compresses). The uncompressed reference gets the
    settings ``uncompressed`` instead of these. ``always`` are defaults that kvaudit sets, since the engine's own
    defaults may depend on the machine.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # one line: the engine and the names of its KV settings
    install: ClassVar[str] = ""
    compresses: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    uncompressed: ClassVar[Settings] = {}
    always: ClassVar[Settings] = {}
    keeps: ClassVar[str] = ""  # the setting for the number of cache entries kept, if the engine can evict
    undrawn: ClassVar[str] = ""  # why training cannot draw rollouts from it

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        """Return the settings with defaults filled in; raise SpecError for impossible settings."""
        return {**cls.always, **settings}

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """Return the settings of the uncompressed reference: those that can compress are replaced, all others kept."""
        shared = {name: value for name, value in settings.items() if name not in cls.compresses}
        return {**shared, **cls.uncompressed}

    @classmethod
    def reference_with(cls, settings: Settings, named: Settings) -> Settings:
        """Return the settings of the uncompressed reference (see ``reference``), overridden by ``named``.

        ``named`` are settings that the spec gives for the reference.
        """
        return {**cls.reference(settings), **named}

    @classmethod
    def compressing(cls, settings: Settings) -> list[str]:
        """Return the names of the given settings whose values compress the KV cache."""
        return [name for name, values in cls.compresses.items() if name in settings and settings[name] not in values]

    @classmethod
    def kv(cls, text: str) -> Settings:
        """Return the settings that TEXT in ``kvaudit check --kv TEXT`` stands for, such as "fp8_e5m2".

        Raises SpecError for a text that the engine does not know.
        """
        raise SpecError(f"engine {cls.name} does not support --kv {text[:80]!r}; give --set NAME=VALUE ({cls.says})")

    @classmethod
    def gpus(cls, settings: Settings) -> int:  # noqa: ARG003
        """Return the number of GPUs that the engine uses with these settings."""
        return 1

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:
        """Raise SpecError for impossible settings, and if the engine is not installed.

        The message about a missing engine quotes ``install``, the command that installs it.
        """
        raise NotImplementedError

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        """Start the engine on a checkpoint; raise EngineFailed, or SpecError if it cannot serve the checkpoint."""
        raise NotImplementedError

    @classmethod
    def check_drawing(cls, settings: Settings) -> None:  # noqa: ARG003
        """Raise SpecError for settings under which training cannot sample rollouts."""
        base = Engine.drawer.__func__  # type: ignore[attr-defined]
        names = (name for name, engine in ENGINES.all().items() if engine.drawer.__func__ is not base)  # type: ignore[attr-defined]
        reason = f" ({cls.undrawn})" if cls.undrawn else ""
        raise SpecError(f"engine {cls.name} cannot draw rollouts for training{reason}; use one of: {', '.join(names)}")

    @classmethod
    def drawer(cls, settings: Settings, context: EngineContext) -> Drawer:
        """Start the engine for sampling training rollouts; its weights are replaced in every step.

        Raises the errors of ``start``.
        """
        raise NotImplementedError

    @classmethod
    def store(cls, settings: Settings) -> EngineStore | None:  # noqa: ARG003
        """Return how the engine, under the settings, rounds the keys and values in its cache; None if unknown.

        If it is known, training can replay rollouts: recompute their log-probs from equally rounded keys and values.
        """
        return None


ENGINES: Registry[Engine] = Registry("engine", "kvaudit.audit.engines", Engine)


@dataclass(frozen=True)
class Condition:
    """A serving engine with its settings, as one way to serve a checkpoint."""

    engine: str
    settings: tuple[tuple[str, str], ...]

    @cached_property
    def canonical(self) -> str:
        """The canonical text of the engine with its settings, which parses back to an equal condition."""
        return condition_text(self.engine, dict(self.settings))

    @cached_property
    def hash(self) -> str:
        """The first 12 hex digits of the sha256 of the canonical text."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:12]

    @property
    def compressing(self) -> list[str]:
        """The names of the settings whose value compresses the KV cache."""
        return ENGINES.get(self.engine).compressing(dict(self.settings))

    @property
    def reference(self) -> Condition:
        """The same engine with settings that do not compress the KV cache, to compare with."""
        return _condition(self.engine, ENGINES.get(self.engine).reference(dict(self.settings)))

    def reference_with(self, named: Any) -> Condition:
        """Return the uncompressed engine settings to compare with, as the spec gives them in ``named``.

        ``named`` is a mapping of settings that override those of ``reference``, or the text of a whole condition
        (engine and settings). Raises SpecError for anything else, and for another engine.
        """
        if not isinstance(named, Mapping | str):
            raise SpecError(
                f"reference of engine {self.engine} is {short_repr(named)}, expected settings or the text "
                "of a condition"
            )
        engine = engine_name(named) if isinstance(named, str) else str(named.get(ENGINE, self.engine))
        if engine != self.engine:
            raise SpecError(
                f"reference of engine {self.engine} is {short_repr(named)}: the reference must use the same engine; "
                f"give settings of {self.engine}"
            )
        if isinstance(named, str):
            return parse_condition(named)
        texts = _setting_texts(engine, {name: value for name, value in named.items() if name != ENGINE})
        return _condition(self.engine, ENGINES.get(self.engine).reference_with(dict(self.settings), texts))


ServingMode = Policy | Condition  # how a checkpoint is served: by our own cache under a policy, or by an engine


def parse_condition(source: str | Mapping[str, Any]) -> Condition:
    """Return the condition (engine with settings) in a text or a mapping.

    Raises UnknownName for an unknown engine and SpecError for an invalid setting.
    """
    if isinstance(source, str):
        engine, settings = engine_name(source), dict[str, Any](engine_settings(source))
        # a repeated name overwrites its key, so the counts differ
        if len(settings) != len(split_named(source)[1]):
            raise SpecError(f"engine {short_repr(engine)} has a setting twice: {short_repr(source)}")
    else:
        settings = dict(source)
        engine = str(settings.pop(ENGINE))
    return _condition(engine, _setting_texts(engine, settings))


def parse_serving_mode(source: Any) -> ServingMode:
    """Return how to serve a checkpoint: by an engine with settings, or under a policy by kvaudit's own cache.

    ``source`` is a text or a mapping; ``{engine: kvaudit, policy: ...}`` names kvaudit's cache.
    """
    if isinstance(source, Mapping) and ENGINE in source:
        if source[ENGINE] != OWN_ENGINE:
            return parse_condition(source)
        if set(source) != {ENGINE, "policy"}:
            raise SpecError(
                f"engine {OWN_ENGINE} is our own cache and takes only a policy: write {{engine: {OWN_ENGINE}, policy: "
                "snapkv:budget=96}"
            )
        return parse_policy(source["policy"])
    if isinstance(source, str) and is_engine(engine_name(source)):
        return parse_condition(source)
    # parse_policy names the unknown parts of compositions and mixtures
    if isinstance(source, str) and engine_name(source) not in POLICIES.all() and not set("+|@") & set(source):
        raise UnknownName("policy or engine", engine_name(source), (*POLICIES.all(), *ENGINES.all()))
    return parse_policy(source)


def is_engine(name: str) -> bool:
    """Return whether ``name`` is the name of an engine; a policy of the same name takes precedence."""
    return name not in POLICIES.all() and name in ENGINES.all()


def _condition(engine: str, settings: Settings) -> Condition:
    filled = ENGINES.get(engine).filled(settings)
    for name, value in filled.items():
        if is_secret_name(name) or has_password(value) or is_key_like(value):
            raise SpecError(
                f"engine {engine}: setting {name} holds a secret, which specs, records and reports would show; set it "
                "as an environment variable of kvaudit instead, which engines inherit"
            )
    condition = Condition(engine, tuple(sorted(filled.items())))
    if (length := len(condition.canonical)) > MAX_VALUE_LENGTH:
        raise SpecError(
            f"engine {engine} has settings of {length} characters with defaults filled in, the limit is "
            f"{MAX_VALUE_LENGTH}; shorten them"
        )
    return condition


def _setting_texts(engine: str, settings: Mapping[Any, Any]) -> Settings:
    """Return settings with every name and value as text.

    Raises SpecError for a malformed name, and for a value that is not a short text, a number or a boolean.
    """
    texts = dict[str, str]()
    for key, value in settings.items():
        name = str(key)
        if not _SETTING_NAME.fullmatch(name):
            raise SpecError(
                f"engine {short_repr(engine)}: {short_repr(name)} cannot be the name of a setting; use letters, "
                "digits, '_', '-' and '.'"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not isinstance(value, str | int | float) or not 0 < len(text) <= _LONGEST_SETTING or not is_text(text):
            raise SpecError(f"setting {name} is {short_repr(value)}, expected a word or a number that the engine knows")
        texts[name] = text
    return texts
