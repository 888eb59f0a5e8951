"""A running OpenAI-compatible server as an engine, with the settings ``base_url``, ``model`` and ``key``.

``key`` names the environment variable with its API key. The server takes chat completions as text. kvaudit checks that
it renders conversations as the model's own template does. It compares token ids if the server shows them (vLLM and
llama.cpp do), else the number of prompt tokens that the server reports. Its cache settings are unknown, so a spec must
also name a server to compare it with (the reference).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import Engine, EngineContext, EngineFailed, GenerationRequest, Reply, Session, Settings
from kvaudit.audit.engines.http_server import ask_concurrently, first_difference
from kvaudit.core.endpoint import Endpoint, FirstModel, RefusedRequest, Scope, Unanswered, over_http
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.provenance import NOT_SHOWN
from kvaudit.core.records import Message, Role
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.sampling.chat import Chat
    from kvaudit.audit.sampling.chat_calls import Answer

_SETTINGS = ("base_url", "model", "key")
_TRIES = 4  # of one request
_CHECK_SECONDS, _RENDER_SECONDS = 10.0, 60.0  # for any answer at all; for showing how it renders a conversation
_REMEDY = {
    Scope.TRY: "resume the run when it answers",
    Scope.QUESTION: "check that it serves the model named here with the model's own chat template",
    Scope.ENDPOINT: "correct base_url, model or key",
}
_RECOUNT_SHARE, _RECOUNT_TOKENS = 0.2, 16  # tokenizing a text again may give so many more tokens than were sampled


class RunningEndpoint(Engine):
    """An OpenAI-compatible endpoint that the user started."""

    name = "endpoint"
    says = "a server that runs already: base_url, model, key (of an environment variable); name its reference"
    install = ""  # it runs already
    undrawn = "servers have no common way to load new weights, so it would draw with its first ones"

    @classmethod
    def filled(cls, settings: Settings) -> Settings:
        for name in settings:
            if name not in _SETTINGS:
                raise UnknownName("setting of engine endpoint", name, _SETTINGS)
        for name in ("base_url", "model"):
            if name not in settings:
                raise SpecError(f"engine endpoint lacks {name}: {{engine: endpoint, base_url: http://..., model: ...}}")
        _endpoint(settings, 1.0).check("engine endpoint")
        return settings

    @classmethod
    def reference(cls, settings: Settings) -> Settings:
        """Raise SpecError: the cache settings of this server are unknown, so the spec must name one to compare with."""
        raise SpecError(
            f"engine endpoint: the cache settings of {settings['model']} at {settings['base_url']} are unknown; name "
            "the server to compare it with, reference: {base_url: http://..., model: ...}"
        )

    @classmethod
    def reference_with(cls, settings: Settings, named: Settings) -> Settings:  # noqa: ARG003
        """Return ``named``, the settings of the reference server, unchanged.

        No setting of this server is added, because its key must not be sent to the reference server.
        """
        return named

    @classmethod
    def check(cls, settings: Settings, spec: EngineSpec) -> None:
        """Raise SpecError if the API key's variable is not set or the server does not answer; loads no model."""
        _endpoint(settings, spec.answer).client("engine endpoint")
        url = f"{settings['base_url'].rstrip('/')}/models"
        try:
            with suppress(Unanswered):  # any reply shows that it runs
                over_http(url, b"", {}, _CHECK_SECONDS)
        except (OSError, HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None) or error
            raise SpecError(
                f"engine endpoint: no server answers at {settings['base_url']} ({inline(str(cause))[:80]}); start the "
                "server, or correct base_url"
            ) from None

    @classmethod
    def start(cls, settings: Settings, context: EngineContext) -> Session:
        """Connect to the server and return the session.

        Raises SpecError if the server renders a conversation into other tokens than the model's own chat template
        does, and EngineFailed if the server gives no answer.
        """
        return _EndpointSession(settings, context)


class _EndpointSession(Session):
    def __init__(self, settings: Settings, context: EngineContext) -> None:
        from kvaudit.audit.sampling.chat_calls import Readings

        self._settings, self._spec, self._chat = settings, context.spec, context.model.chat
        self._client = _endpoint(settings, context.spec.answer).client("engine endpoint")
        comparison = self._compare_prompts()
        self._shows_prompts, self._readings, self._model = bool(comparison), Readings(), FirstModel()
        # resumed runs compare these texts with provenance.json, so they stay as they are
        prompts = comparison or "held to ours by the number of tokens that it says it read, where it says so"
        unknown = "weights" if comparison else "weights and chat template"
        self.described = {"prompts": prompts, "model": self._first_model(), NOT_SHOWN: unknown}
        self.window = self._shown_window()

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        """Return a reply to each request; its ``text`` is the answer.

        For a request that the server rejected, ``refused`` is the server's message instead.
        """
        until = time.monotonic() + self._spec.answer
        first_use = {request.messages: n for n, request in reversed(list(enumerate(requests)))}
        # each prompt once before repetitions, whose reported prompt tokens may leave out what the server has cached
        order = sorted(range(len(requests)), key=lambda n: first_use[requests[n].messages] != n)
        replies = dict[int, Reply]()
        try:
            for numbers in filter(None, (order[: len(first_use)], order[len(first_use) :])):
                answers = ask_concurrently(
                    lambda n: self._reply(requests[n], until), numbers, self._spec.at_once, until
                )
                replies.update(zip(numbers, answers, strict=True))
        except Unanswered as error:
            raise self._failure(error) from None
        return [replies[n] for n in range(len(requests))]

    def stop(self) -> None:
        """Do nothing, since the user started the server."""

    def _reply(self, request: GenerationRequest, until: float) -> Reply:
        try:
            answer = self._answer(request, until)
        except RefusedRequest as error:
            return Reply((), "error", refused=str(error))
        return Reply((), answer.finish, text=answer.text, thought=answer.thought, said_in=answer.said_in)

    def _answer(self, request: GenerationRequest, until: float) -> Answer:
        """Return the answer to a request, waiting for it at most until the time ``until`` of ``time.monotonic``.

        Raises Unanswered if no answer comes in time, if it is of another model than the first one, or if the endpoint
        reports another length of the prompt in the first turn than ``request.ids`` has.
        """
        from kvaudit.audit.sampling.chat_calls import LARGEST_SEED, SentRequest, ask, request_body, wire

        messages, prompt_tokens, max_tokens = request.messages, len(request.ids), request.max_tokens
        # a conversation whose prompt contains the tools as text has no structured calls
        has_tools = bool(request.tools) or any(message.tool_calls for message in messages)
        rows, seed = wire(messages, Role.TOOL if has_tools else Role.USER), request.seed % LARGEST_SEED
        body = request_body(self._settings["model"], rows, max_tokens, request.temperature, request.top_p, seed)
        tools = {"tools": list(request.tools)} if request.tools else {}
        was_read = self._shows_prompts or self._readings.unread(rows) == 0
        if was_read:
            self._readings.note(rows)
        sent = SentRequest(rows, prompt_tokens, True, max_tokens, has_tools)
        body |= tools | self._template_options
        reply = ask(self._client, body, sent, self._readings, self._model, until)
        self._check_length(max_tokens, reply)
        # later turns hold answers as text, which a template may tokenize differently than we do
        is_first_turn = all(message.role in (Role.USER, Role.SYSTEM) for message in messages)
        read = reply.prompt_tokens
        # for a prompt that it has read before, a server may report only the tokens missing from its cache
        if is_first_turn and read is not None and (read > prompt_tokens or (read < prompt_tokens and not was_read)):
            raise Unanswered(
                f"a different prompt than ours: it read {read} tokens, by the model's own template it is "
                f"{prompt_tokens}",
                Scope.QUESTION,
            )
        return reply

    def _check_length(self, max_tokens: int, reply: Answer) -> None:
        """Raise Unanswered if the answer has too many tokens by our own count, whatever number the server reports."""
        if reply.new_tokens is not None and "tool_calls" in reply.said_in:
            return  # the JSON of calls may be longer than what the model wrote
        count, most = self._chat.count_tokens(reply.text), max(max_tokens, reply.new_tokens or 0)
        # the drawn tokens may differ from the tokens of their text
        if count > most * (1 + _RECOUNT_SHARE) + _RECOUNT_TOKENS:
            raise Unanswered(f"it wrote {count} tokens where at most {most} were asked for", Scope.QUESTION)

    @property
    def _template_options(self) -> dict[str, Any]:
        """Return the options of the chat template in the format that servers accept."""
        return {"chat_template_kwargs": self._chat.options} if self._chat.options else {}

    def _first_model(self) -> str:
        """Send a first request; return the model's name in the answer, or raise EngineFailed if there is none."""
        messages = _conversations(self._chat)[0]
        ids, until = self._chat.prompt(messages).ids, time.monotonic() + self._spec.start
        try:
            self._answer(GenerationRequest(ids, 1, (), temperature=0, top_p=1, seed=0, messages=messages), until)
        except Unanswered as error:
            raise self._failure(error) from None
        return inline(self._model.name)

    def _shown_window(self) -> int | None:
        """Return the context window in tokens that the server's list of models states (vLLM, SGLang); else None."""
        try:
            client = _endpoint(self._settings, _RENDER_SECONDS, tries=1).client("engine endpoint")
            rows = client.fetch("models", None, time.monotonic() + _RENDER_SECONDS).get("data")
        except Unanswered:
            return None
        models = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
        windows = [row.get("max_model_len") for row in models if row.get("id") == self._settings["model"]]
        return next((window for window in windows if type(window) is int and window > 0), None)

    def _compare_prompts(self) -> str:
        """Check that the server renders conversations into the same token ids as the model's own template.

        Returns in words how the server showed its ids; "" if it does not show them. Raises SpecError if the ids differ.
        """
        for server, prompt_ids in (("llama.cpp", self._llama_cpp_ids), ("vLLM", self._vllm_ids)):
            for number, messages in enumerate(_conversations(self._chat)):
                theirs, ours = prompt_ids(messages), self._chat.prompt(messages).ids
                # this server's path does not exist: try the next server's
                if not theirs and not number:
                    break
                if (index := first_difference(theirs, ours)) is not None:
                    raise SpecError(self._different_prompt(index, theirs, ours))
            else:
                return f"the token ids of ours, as its /tokenize in the way of {server} shows"
        return ""

    def _vllm_ids(self, messages: Sequence[Message]) -> Any:
        from kvaudit.audit.sampling.chat_calls import wire

        rows = wire(messages, Role.USER)
        body = {"model": self._settings["model"], "messages": rows, "add_generation_prompt": True}
        return self._fetch("tokenize", body | self._template_options, "tokens")

    def _llama_cpp_ids(self, messages: Sequence[Message]) -> Any:
        from kvaudit.audit.sampling.chat_calls import wire

        text = self._fetch("apply-template", {"messages": wire(messages, Role.USER)} | self._template_options, "prompt")
        return self._fetch("tokenize", {"content": text, "add_special": True, "parse_special": True}, "tokens")

    def _fetch(self, path: str, body: Mapping[str, Any], key: str) -> Any:
        """Send ``body`` to a path below the server's root; return field ``key`` of the reply, [] if there is none."""
        root = self._settings["base_url"].rstrip("/").removesuffix("/v1")
        try:
            client = _endpoint({**self._settings, "base_url": root}, _RENDER_SECONDS, tries=1).client("engine endpoint")
            return client.fetch(path, body, time.monotonic() + _RENDER_SECONDS).get(key, [])
        except Unanswered:
            return []

    def _different_prompt(self, index: int, theirs: Any, ours: Sequence[int]) -> str:
        def token_text(ids: Any) -> str:
            is_token = isinstance(ids, list | tuple) and index < len(ids) and type(ids[index]) is int
            return repr(inline(self._chat.tokenizer.decode([ids[index]]))[:40]) if is_token else "nothing"

        return (
            f"engine endpoint: {self._settings['base_url']} renders a conversation into a different prompt than the "
            f"model's own template: token {index} is {token_text(theirs)} there and {token_text(ours)} here; serve it "
            "with that template, or give the model that it serves"
        )

    def _failure(self, error: Unanswered) -> EngineFailed:
        """Return the error to raise for a missing answer; it names the server, the reason and what to do."""
        cause = self._client.endpoint.cause(error, self._settings["model"])
        return EngineFailed(
            f"engine endpoint: {self._settings['base_url']} gave no valid answer ({cause}); {_REMEDY[error.scope]}"
        )


def _endpoint(settings: Settings, timeout: float, tries: int = _TRIES) -> Endpoint:
    return Endpoint(settings["base_url"], settings.get("key", ""), timeout, tries)


def _conversations(chat: Chat) -> list[tuple[Message, ...]]:
    """Return conversations for comparing templates: a question alone, after a system prompt, and in a second turn."""
    question, answer = Message(Role.USER, "What is 2 + 2?"), Message(Role.ASSISTANT, "4.")
    system = [(Message(Role.SYSTEM, "Be brief."), question)] if chat.system_role == "native" else []
    return [(question,), *system, (question, answer, Message(Role.USER, "And 3 + 3?"))]
