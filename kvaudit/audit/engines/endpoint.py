"""A server that runs already: ``base_url``, ``model`` and ``key``, the name of the environment variable with its key.

It is asked for chat completions, as text. What it makes of a conversation is held to our own rendering: by token ids
where it shows them (vLLM's and llama.cpp's servers do), by the number of tokens that it says it read otherwise. Nobody
knows what it does to its cache, so what it is compared with has to be named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import GenerationRequest, Engine, EngineFailed, Reply, Session, Settings, EngineContext
from kvaudit.audit.engines.http_server import ask_concurrently, first_difference
from kvaudit.core.endpoint import Endpoint, RefusedRequest, Scope, Unanswered, over_http
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.provenance import NOT_SHOWN
from kvaudit.core.records import Message, Role
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.sampling.chat import Chat
    from kvaudit.audit.sampling.chat_calls import Answer

_KNOWN = ("base_url", "model", "key")
_TRIES = 4  # of one request
_THERE = 10.0  # seconds in which it says anything at all
_KNOCK = 60.0  # seconds in which it shows how it renders
_REMEDY = {
    Scope.TRY: "go on when it answers",
    Scope.QUESTION: "see whether it serves the model that is given here, with the model's own chat template",
    Scope.ENDPOINT: "mend base_url, model or key",
}
_RECOUNTED, _RECOUNTED_LEAST = 0.2, 16  # share and number of tokens by which a text may come out longer than it was
_LARGEST_SEED = 2**31 - 1  # that every endpoint can read


class RunningEndpoint(Engine):
    """An OpenAI-compatible endpoint that somebody else started."""

    name = "endpoint"
    says = "a server that runs already: base_url, model, key (of an environment variable); name its reference"
    install = ""  # it runs already
    undrawn = "servers take new weights in no common way, so it would draw by those that it was started with"

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        for name in settings:
            if name not in _KNOWN:
                raise UnknownName("setting of engine endpoint", name, _KNOWN)
        for name in ("base_url", "model"):
            if name not in settings:
                raise SpecError(f"engine endpoint lacks {name}: {{engine: endpoint, base_url: http://..., model: ...}}")
        _endpoint(settings, 1.0).check("engine endpoint")
        return settings

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """There is none but the one that is named."""
        raise SpecError(
            f"engine endpoint: what {settings['base_url']} serves {settings['model']} with is not known here; name "
            "what it is compared with, reference: {base_url: http://..., model: ...}"
        )

    @classmethod
    def reference_with(cls, settings: Settings, named: Settings) -> Settings:  # noqa: ARG003
        """The named one as it is written: a key is for one server."""
        return named

    @classmethod
    def check(cls, settings: Settings, part: EngineSpec) -> None:
        """Raise SpecError where the key is not set, or where nobody answers: a model takes longer to load."""
        _endpoint(settings, part.answer).client("engine endpoint")
        url = f"{settings['base_url'].rstrip('/')}/models"
        try:
            with suppress(Unanswered):  # whatever it says, and at whatever length: it is there
                over_http(url, b"", {}, _THERE)
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise SpecError(
                f"engine endpoint: nobody answers at {settings['base_url']} ({inline(str(why))[:80]}); start the "
                "server, or mend base_url"
            ) from None

    @classmethod
    def start(cls, settings: Settings, work: EngineContext) -> Session:
        """See ``Engine.start``; raises SpecError for an endpoint that makes another prompt of a conversation."""
        return _EndpointSession(settings, work)


class _EndpointSession(Session):
    def __init__(self, settings: Settings, work: EngineContext) -> None:
        self._settings, self._part, self._chat = settings, work.part, work.model.chat
        self._client = _endpoint(settings, work.part.answer).client("engine endpoint")
        from kvaudit.audit.sampling.chat_calls import Readings

        held = self._held_to_ours()
        self._held, self._readings = bool(held), Readings()
        shown = held or "held to ours by the number of tokens that it says it read, where it says so"
        unseen = "weights" if held else "weights and chat template"
        self.described = {"prompts": shown, "model": self._first(), NOT_SHOWN: unseen}

    def answer(self, asked: Sequence[GenerationRequest]) -> list[Reply]:
        """Replies are texts, or what the server said instead of one."""
        until = time.monotonic() + self._part.answer
        first = {one.messages: n for n, one in reversed(list(enumerate(asked)))}
        # every prompt once before any is asked again: what is claimed of the first tells how to read the next claim
        order = sorted(range(len(asked)), key=lambda n: first[asked[n].messages] != n)
        parts = [order[: len(first)], order[len(first) :]]
        found = dict[int, Reply]()
        try:
            for part in filter(None, parts):
                replies = ask_concurrently(lambda n: self._reply(asked[n], until), part, self._part.at_once, until)
                found.update(zip(part, replies, strict=True))
        except Unanswered as why:
            raise self._failed(why) from None
        return [found[n] for n in range(len(asked))]

    def stop(self) -> None:
        """It is not ours to stop."""

    def _reply(self, asked: GenerationRequest, until: float) -> Reply:
        more: dict[str, Any] = {"temperature": asked.temperature, "seed": asked.seed % _LARGEST_SEED}
        more |= {"top_p": asked.top_p} if asked.top_p < 1 else {}
        try:
            found = self._answer(asked.messages, len(asked.ids), asked.most, more, until)
        except RefusedRequest as why:
            return Reply((), "error", refused=str(why))
        self._hold_model(found.model)
        return Reply((), found.finish, text=found.text, thought=found.thought, said_in=found.said_in)

    def _answer(
        self, messages: Sequence[Message], sent: int, most: int, more: Mapping[str, Any], until: float
    ) -> Answer:
        """Its answer of at most so many tokens to a conversation of ``sent`` ones.

        Raises Unanswered, also where a conversation that begins has another number of tokens there than here.
        """
        from kvaudit.audit.sampling.chat_calls import SentRequest, answer, wire

        rows = wire(messages, Role.USER)
        body = {"model": self._settings["model"], "messages": rows, "max_tokens": most, **more}
        said = self._client.ask(body | self._options, until)
        seen = self._held or self._readings.unread(rows) == 0
        if seen:
            self._readings.note(rows)
        found = answer(said, SentRequest(rows, sent, True, most), 0.0, self._readings)
        self._check_kept_to(most, found)
        # later ones hold answers as text, of which a template may make another number of tokens than ours
        begins = all(message.role in (Role.USER, Role.SYSTEM) for message in messages)
        read = found.prompt_tokens
        # of what it has read before a server may count only what was no longer in its cache
        if begins and read is not None and (read > sent or (read < sent and not seen)):
            raise Unanswered(
                f"another prompt than ours: it read {read} tokens, by the model's own template it is {sent}",
                Scope.QUESTION,
            )
        return found

    def _check_kept_to(self, most: int, found: Answer) -> None:
        """Raise Unanswered for an answer of more tokens than were asked for, where the server counts none itself."""
        if found.new_tokens is not None:
            return
        wrote = self._chat.count_tokens(found.text)
        # other tokens than it drew may spell the same text
        if wrote > most * (1 + _RECOUNTED) + _RECOUNTED_LEAST:
            what = f"it wrote {wrote} tokens where at most {most} were asked for"
            raise Unanswered(what, Scope.QUESTION)

    def _hold_model(self, named: str) -> None:
        """Raise Unanswered for an answer of another model than the first one: gateways fall back on others."""
        first = self.described["model"]
        if inline(named) != first:
            raise Unanswered(
                f"an answer of model {inline(named)!r}, its first answer was of model {first!r}; no answer of another "
                "model is kept: turn off whatever falls back on one",
                Scope.QUESTION,
            )

    @property
    def _options(self) -> dict[str, Any]:
        """Options of the chat template, in the way of servers that have one."""
        return {"chat_template_kwargs": self._chat.options} if self._chat.options else {}

    def _first(self) -> str:
        """The name that it gives itself in a first answer; raises EngineFailed where there is none."""
        messages = _conversations(self._chat)[0]
        sent, until = len(self._chat.prompt(messages).ids), time.monotonic() + self._part.start
        try:
            return inline(self._answer(messages, sent, 1, {"temperature": 0}, until).model)
        except Unanswered as why:
            raise self._failed(why) from None

    def _held_to_ours(self) -> str:
        """How its prompts were held to ours, empty where it shows none of them; raises SpecError where they differ."""
        for way, shown in (("llama.cpp", self._shown_by_llama), ("vLLM", self._shown_by_vllm)):
            for number, messages in enumerate(_conversations(self._chat)):
                theirs, ours = shown(messages), self._chat.prompt(messages).ids
                # it shows nothing of the kind: try the next way
                if not theirs and not number:
                    break
                if (place := first_difference(theirs, ours)) is not None:
                    raise SpecError(self._other_prompt(place, theirs, ours))
            else:
                return f"the token ids of ours, as its /tokenize in the way of {way} shows"
        return ""

    def _shown_by_vllm(self, messages: Sequence[Message]) -> Any:
        from kvaudit.audit.sampling.chat_calls import wire

        rows = wire(messages, Role.USER)
        body = {"model": self._settings["model"], "messages": rows, "add_generation_prompt": True}
        return self._shown("tokenize", body | self._options, "tokens")

    def _shown_by_llama(self, messages: Sequence[Message]) -> Any:
        from kvaudit.audit.sampling.chat_calls import wire

        text = self._shown("apply-template", {"messages": wire(messages, Role.USER)} | self._options, "prompt")
        return self._shown("tokenize", {"content": text, "add_special": True, "parse_special": True}, "tokens")

    def _shown(self, path: str, body: Mapping[str, Any], name: str) -> Any:
        """What it shows at its root; an empty list where it shows nothing of the kind."""
        root = self._settings["base_url"].rstrip("/").removesuffix("/v1")
        try:
            client = _endpoint({**self._settings, "base_url": root}, _KNOCK, tries=1).client("engine endpoint")
            return client.fetch(path, body, time.monotonic() + _KNOCK).get(name, [])
        except Unanswered:
            return []

    def _other_prompt(self, place: int, theirs: Any, ours: Sequence[int]) -> str:
        def piece(ids: Any) -> str:
            known = isinstance(ids, list | tuple) and place < len(ids) and type(ids[place]) is int
            return repr(inline(self._chat.tokenizer.decode([ids[place]]))[:40]) if known else "nothing"

        return (
            f"engine endpoint: {self._settings['base_url']} makes another prompt of a conversation than the model's "
            f"own template: token {place} is {piece(theirs)} there and {piece(ours)} here; serve it with that "
            "template, or give the model that it serves"
        )

    def _failed(self, why: Unanswered) -> EngineFailed:
        key = f"key from {self._settings['key']}" if "key" in self._settings else "no key"
        return EngineFailed(
            f"engine endpoint: {self._settings['base_url']} gave no answer that counts: {why} (model "
            f"{self._settings['model']}, {key}); {_REMEDY[why.scope]}"
        )


def _endpoint(settings: Settings, timeout: float, tries: int = _TRIES) -> Endpoint:
    return Endpoint(settings["base_url"], settings.get("key", ""), timeout, tries)


def _conversations(chat: Chat) -> list[tuple[Message, ...]]:
    """Conversations that templates treat apart: a question, one under a system prompt, one after an answer."""
    question, said = Message(Role.USER, "What is 2 + 2?"), Message(Role.ASSISTANT, "4.")
    system = [(Message(Role.SYSTEM, "Be brief."), question)] if chat.system_role == "native" else []
    return [(question,), *system, (question, said, Message(Role.USER, "And 3 + 3?"))]
