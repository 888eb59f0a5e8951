"""The HTTP side of the server: routes, keys, errors, and one log line per request without its contents."""

from __future__ import annotations

import asyncio
import hmac
import http
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvaudit.audit.serving.answers import AnswerReader
from kvaudit.audit.serving.engine import PendingAnswers, QueueFull, SamplingEngine
from kvaudit.audit.serving.wire import ChatRequest, Choice, ReplyBodies, error_body, read_request
from kvaudit.core.errors import AuditError, RunError

_LARGEST_BODY = 16 << 20  # bytes
_POLL = 0.5  # seconds between two checks whether a client is still connected
Log = Callable[[str], None]


def application(engine: SamplingEngine, *, key: str | None = None, log: Log = lambda _: None) -> Starlette:
    """Return the server as an ASGI application; with a ``key``, every request needs it as its bearer token."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    service = _Service(engine, key, log)
    return Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/chat/completions", service.complete, methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: service.no_route},
    )


class _Service:
    """The handlers of the server's routes; all responses are JSON, errors included, except streams of answers."""

    def __init__(self, engine: SamplingEngine, key: str | None, log: Log) -> None:
        self._engine, self._key, self._log = engine, key, log

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        if unauthorized := self._unauthorized(request):
            return unauthorized
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "kvaudit"} for name in self._engine.names]
        return JSONResponse({"object": "list", "data": rows})

    async def complete(self, http_request: Request) -> Response:
        """Answer a chat, whole or as a stream of server-sent events."""
        started = time.perf_counter()
        if unauthorized := self._unauthorized(http_request):
            return unauthorized
        try:
            request = read_request(await _body(http_request))
            if request.stream:
                response = await self._stream(request, started)
            else:
                response = await self._complete(http_request, request, started)
        except _ClientGone:
            return self._error_response(499, "the client has disconnected", started)
        except _TooLarge as error:
            return self._error_response(413, str(error), started)
        except QueueFull as error:
            return self._error_response(429, str(error), started, {"Retry-After": "5"})
        except RunError as error:
            return self._error_response(500, str(error), started)
        except AuditError as error:
            return self._error_response(400, str(error), started)
        except Exception as error:  # templates and tokenizers may raise anything for an unusual request
            return self._error_response(500, f"the request could not be read: {type(error).__name__}", started)
        return response

    async def no_route(self, _: Request, error: Exception) -> Response:
        """Respond to a request for an unknown path or method with an error."""
        assert isinstance(error, HTTPException)
        message = f"{http.HTTPStatus(error.status_code).phrase}; served are /v1/models and POST /v1/chat/completions"
        return self._error_response(error.status_code, message, time.perf_counter(), dict(error.headers or {}))

    async def _complete(self, http_request: Request, request: ChatRequest, started: float) -> Response:
        # in a thread, because rendering a chat template waits for another process
        prompt_tokens, answers = await asyncio.to_thread(self._engine.submit, request)
        try:
            choices = await _read(await _wait_for(answers, http_request), answers.reader)
        finally:
            answers.abandon()
        self._log_success(request, choices, prompt_tokens, started)
        return JSONResponse(ReplyBodies(request).completion(choices, prompt_tokens))

    async def _stream(self, request: ChatRequest, started: float) -> Response:
        loop, texts = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str]]()

        def listener(number: int, text: str) -> None:  # called by the sampling thread
            loop.call_soon_threadsafe(texts.put_nowait, (number, text))

        prompt_tokens, answers = await asyncio.to_thread(self._engine.submit, request, listener)
        finished = asyncio.wrap_future(answers)

        def end() -> None:
            is_disconnected = not answers.done()
            answers.abandon()
            if is_disconnected:
                self._log(f"499 {_elapsed(started)}")
            elif answers.exception() is not None:
                self._log(f"500 {_elapsed(started)}")
            else:
                self._log_success(request, answers.result(), prompt_tokens, started)

        return _EventStream(_events(request, texts, finished, prompt_tokens, answers.reader), end)

    def _unauthorized(self, request: Request) -> Response | None:
        """Return a 401 response if a request lacks the key, else None; keys are compared in constant time."""
        if self._key is None:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._key.encode()):
            return None
        return self._error_response(401, "no valid key; send it as a bearer token", time.perf_counter())

    def _error_response(
        self, status: int, message: str, started: float, headers: dict[str, str] | None = None
    ) -> Response:
        self._log(f"{status} {_elapsed(started)}")
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        return JSONResponse(error_body(message, error_type), status_code=status, headers=headers)

    def _log_success(self, request: ChatRequest, choices: list[Choice], prompt_tokens: int, started: float) -> None:
        new = sum(len(choice.logprobs) for choice in choices)
        self._log(f"200 {_elapsed(started)}, {prompt_tokens} prompt + {new} new tokens, {request.model[:120]!r}")


class _EventStream(StreamingResponse):
    """A stream of server-sent events that calls ``end`` when it is over, even if the client left before it began."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _elapsed(started: float) -> str:
    return f"{1000 * (time.perf_counter() - started):.0f} ms"


class _ClientGone(Exception):
    """The error that the client disconnected before its answer was complete."""


class _TooLarge(AuditError):
    """The error of a request whose body is larger than the limit."""


async def _wait_for(answers: PendingAnswers, request: Request) -> list[Choice]:
    """Return the answers once they are complete; raise _ClientGone if the client disconnects first."""
    finished = asyncio.wrap_future(answers)
    while not finished.done():
        await asyncio.wait([finished], timeout=_POLL)
        if not finished.done() and await request.is_disconnected():
            raise _ClientGone
    return finished.result()


async def _body(request: Request) -> Any:
    """Return the JSON of a request; raise _TooLarge if it is too large, and AuditError if it is not valid JSON."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _LARGEST_BODY:
            raise _TooLarge(f"the request is larger than {_LARGEST_BODY} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AuditError(f"the request is not JSON ({str(error)[:120]})") from None


async def _read(choices: list[Choice], reader: AnswerReader | None) -> list[Choice]:
    """Return answers with the tool calls in them parsed by ``reader``; if it is None, they are unchanged."""
    if reader is None:
        return choices
    # in a thread, because some tokenizers read calls in another process
    return [await asyncio.to_thread(reader.read, choice) for choice in choices]


async def _events(
    request: ChatRequest,
    texts: asyncio.Queue[tuple[int, str]],
    finished: asyncio.Future[list[Choice]],
    prompt_tokens: int,
    reader: AnswerReader | None,
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response: text as it is sampled, then each answer's tool calls and its end."""
    bodies, sent = ReplyBodies(request), dict.fromkeys(range(request.choices), "")
    growing = {} if reader is None else {number: reader.start() for number in sent}
    for number in sent:
        yield _event(bodies.chunk(number, {"role": "assistant", "content": ""}))
    async for number, text in _queued_texts(texts, finished):
        sendable = growing[number].sendable(text) if growing else text
        if len(sendable) > len(sent[number]):
            yield _event(bodies.chunk(number, {"content": sendable[len(sent[number]) :]}))
            sent[number] = sendable
    try:
        choices = await _read(finished.result(), reader)
    except AuditError as error:
        yield _event(error_body(str(error), "server_error"))
        return
    for number, choice in enumerate(choices):
        if unsent := choice.text[len(sent[number]) :]:
            yield _event(bodies.chunk(number, {"content": unsent}))
        for chunk in bodies.call_chunks(number, choice):
            yield _event(chunk)
        yield _event(bodies.chunk(number, {}, choice))
    if request.usage_in_stream:
        yield _event(bodies.usage_chunk(choices, prompt_tokens))
    yield "data: [DONE]\n\n"


async def _queued_texts(
    texts: asyncio.Queue[tuple[int, str]], finished: asyncio.Future[list[Choice]]
) -> AsyncIterator[tuple[int, str]]:
    while not (finished.done() and texts.empty()):
        next_text = asyncio.ensure_future(texts.get())
        try:
            await asyncio.wait([next_text, finished], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        finally:
            has_text = next_text.done()
            next_text.cancel()
        if has_text:
            yield next_text.result()
        else:
            await asyncio.sleep(0)  # lets the loop queue texts that the thread sent before it finished


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
