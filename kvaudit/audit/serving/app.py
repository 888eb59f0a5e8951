"""The HTTP side: routes, keys, errors and one log line per request, without anything that a request held."""

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

from kvaudit.audit.serving.engine import PendingAnswers, QueueFull, SamplingEngine
from kvaudit.audit.serving.wire import ChatRequest, Choice, ReplyBodies, error_body, read_request
from kvaudit.core.errors import AuditError, RunError

LARGEST_BODY = 16 << 20  # bytes
_LOOK = 0.5  # seconds between two looks whether a client is still there
Log = Callable[[str], None]


def application(engine: SamplingEngine, *, key: str | None = None, log: Log = lambda _: None) -> Starlette:
    """The server as an ASGI application. With a ``key`` every request must bring it as its bearer token."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield  # as long as it serves
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
    """The routes, each of which answers in JSON, errors included."""

    def __init__(self, engine: SamplingEngine, key: str | None, log: Log) -> None:
        self._engine, self._key, self._log = engine, key, log

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "kvaudit"} for name in self._engine.names]
        return JSONResponse({"object": "list", "data": rows})

    async def complete(self, request: Request) -> Response:
        """Answer a chat, whole or as a stream of server-sent events."""
        started = time.perf_counter()
        if refused := self._refused(request):
            return refused
        try:
            asked = read_request(await _body(request))
            streams = asked.stream
            answer = await (self._streamed(asked, started) if streams else self._whole(request, asked, started))
        except _ClientGone:
            return self._failed(499, "the client has gone", started)
        except _TooLarge as error:
            return self._failed(413, str(error), started)
        except QueueFull as error:
            return self._failed(429, str(error), started, {"Retry-After": "5"})
        except RunError as error:
            return self._failed(500, str(error), started)
        except AuditError as error:
            return self._failed(400, str(error), started)
        except Exception as error:  # what a template or a tokenizer makes of strangers' text must be an answer too
            return self._failed(500, f"the request could not be read: {type(error).__name__}", started)
        return answer

    async def no_route(self, _: Request, error: Exception) -> Response:
        """A path or a method that is not served, in JSON as every answer."""
        assert isinstance(error, HTTPException)
        message = f"{http.HTTPStatus(error.status_code).phrase}; served are /v1/models and POST /v1/chat/completions"
        return self._failed(error.status_code, message, time.perf_counter(), dict(error.headers or {}))

    async def _whole(self, request: Request, asked: ChatRequest, started: float) -> Response:
        # rendering a chat template waits for another process
        prompt_tokens, done = await asyncio.to_thread(self._engine.submit, asked)
        try:
            choices = await _answered(request, done)
        finally:
            done.abandon()
        self._note(200, asked, choices, prompt_tokens, started)
        return JSONResponse(ReplyBodies(asked).whole(choices, prompt_tokens))

    async def _streamed(self, asked: ChatRequest, started: float) -> Response:
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str]]()

        def listener(number: int, text: str) -> None:  # from the sampling thread
            loop.call_soon_threadsafe(heard.put_nowait, (number, text))

        prompt_tokens, done = await asyncio.to_thread(self._engine.submit, asked, listener)
        finished = asyncio.wrap_future(done)

        async def noted() -> AsyncIterator[str]:
            try:
                async for event in _events(asked, heard, finished, prompt_tokens):
                    yield event
            finally:
                is_gone = not done.done()
                done.abandon()
                if is_gone:  # the client went
                    self._log(f"499 {_took(started)}")
                elif done.exception() is not None:
                    self._log(f"500 {_took(started)}")
                else:
                    self._note(200, asked, done.result(), prompt_tokens, started)

        return StreamingResponse(noted(), media_type="text/event-stream")

    def _refused(self, request: Request) -> Response | None:
        """A 401 for a request without the key; compared in constant time."""
        if self._key is None:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._key.encode()):
            return None
        return self._failed(401, "no valid key; send it as a bearer token", time.perf_counter())

    def _failed(self, status: int, message: str, started: float, headers: dict[str, str] | None = None) -> Response:
        self._log(f"{status} {_took(started)}")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return JSONResponse(error_body(message, kind), status_code=status, headers=headers)

    def _note(self, status: int, asked: ChatRequest, choices: list[Choice], prompt_tokens: int, started: float) -> None:
        drawn = sum(len(choice.logprobs) for choice in choices)
        self._log(f"{status} {_took(started)}, {prompt_tokens} prompt + {drawn} new tokens, {asked.model[:120]!r}")


def _took(started: float) -> str:
    return f"{1000 * (time.perf_counter() - started):.0f} ms"


class _ClientGone(Exception):
    """Nobody waits for an answer any more."""


async def _answered(request: Request, done: PendingAnswers) -> list[Choice]:
    """The answers to a request; raises _ClientGone once its client has gone."""
    finished = asyncio.wrap_future(done)
    while not finished.done():
        await asyncio.wait([finished], timeout=_LOOK)
        if not finished.done() and await request.is_disconnected():
            raise _ClientGone
    return finished.result()


class _TooLarge(AuditError):
    """A body beyond the limit."""


async def _body(request: Request) -> Any:
    """The JSON of a request; raises what becomes a 413 or a 400."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > LARGEST_BODY:
            raise _TooLarge(f"the request is larger than {LARGEST_BODY} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AuditError(f"the request is not JSON ({str(error)[:120]})") from None


async def _events(
    asked: ChatRequest,
    heard: asyncio.Queue[tuple[int, str]],
    finished: asyncio.Future[list[Choice]],
    prompt_tokens: int,
) -> AsyncIterator[str]:
    """The events of a stream: text as it is heard, then how each choice ended."""
    answer, said = ReplyBodies(asked), dict.fromkeys(range(asked.choices), "")
    for number in said:
        yield _event(answer.chunk(number, {"role": "assistant", "content": ""}))
    async for number, text in _until(finished, heard):
        yield _event(answer.chunk(number, {"content": text[len(said[number]) :]}))  # what is new of it
        said[number] = text
    if finished.exception() is not None:
        yield _event(error_body(str(finished.exception()), "server_error"))
        return
    for number, choice in enumerate(finished.result()):
        yield _event(answer.chunk(number, {}, choice))
    if asked.usage_in_stream:
        yield _event(answer.closing(finished.result(), prompt_tokens))
    yield "data: [DONE]\n\n"


async def _until(
    finished: asyncio.Future[list[Choice]], heard: asyncio.Queue[tuple[int, str]]
) -> AsyncIterator[tuple[int, str]]:
    """What is heard until the answer is finished."""
    while not (finished.done() and heard.empty()):
        waiting = asyncio.ensure_future(heard.get())
        try:
            await asyncio.wait([waiting, finished], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        finally:
            come = waiting.done()
            waiting.cancel()
        if come:
            yield waiting.result()
        else:
            await asyncio.sleep(0)  # what was told from the thread before it finished is on its way


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
