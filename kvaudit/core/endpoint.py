"""A client with retries for OpenAI-compatible servers: ``chat/completions``, and GET or POST at other paths.

The key is read from an environment variable and sent in one header. It is never written to a file, printed, or sent to
another host, and it is removed from replies that repeat it. Replies are untrusted: they may be late, endless or no
JSON. Retry-After is respected. A server on this machine is called directly, without the environment's proxies.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cached_property
from http.client import HTTPException
from typing import IO, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvaudit.core.completions import ChatCompletion, NoCompletion, ServerError, parse_completion, parse_error
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.network import call_with_timeout, map_in_order
from kvaudit.core.records import Message, message_rows
from kvaudit.core.text import clip, guide_path, inline, one_line, safe_variable_name

T = TypeVar("T")
_ADDRESS = re.compile(r"(?i)https?:/|localhost[:/]|\d{1,3}(\.\d{1,3}){3}[:/]")  # one slash: a Path drops the second
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w{0,99}")
_PROBES = 2  # requests sent before all others
_GRACE = 0.5  # seconds after the timeout in which the thread of a late reply may raise its own error
_LONGEST_REPLY = 1 << 20  # bytes
_LONGEST_WAIT = 120.0  # seconds of Retry-After that are respected
_FATAL = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405)  # every further request would fail too
_RETRIED = (408, 409, 425, 429)  # and every status from _SERVER_ERRORS on
_SERVER_ERRORS = 500
_BUSY = (429, 502, 503, 504, *range(520, 530))  # all requests of a client wait, not only this one
# error names that imply a status, even if the reply has another one
_NAMED_STATUS = {
    "insufficient_quota": 402, "insufficient_credits": 402, "billing_hard_limit_reached": 402,
    "invalid_api_key": 401, "authentication_error": 401, "unauthorized": 401, "permission_denied": 403,
    "permission_error": 403, "model_not_found": 404, "invalid_request_error": 400, "invalid_request": 400,
    "badrequesterror": 400, "context_length_exceeded": 400,
}  # fmt: skip
_SECRET = (401, 403)  # the server's message may hold a part of the key
_SHORTEST_KEY = 8  # characters of a key that is removed from replies; a shorter one could be a word


class Scope(StrEnum):
    """How much a failure affects: this try alone, every try of the same request, or every request to the endpoint."""

    TRY = "try"  # this try; another may succeed
    QUESTION = "question"  # this request, with any number of tries
    ENDPOINT = "endpoint"  # every request


class Unanswered(Exception):
    """The error that a request got no usable reply.

    ``scope`` says whether another try or other requests may succeed. ``wait`` is the number of seconds that the server
    asks to wait before the next try, or None. If ``is_busy``, all other requests must wait too.
    """

    def __init__(
        self, message: str, scope: Scope = Scope.TRY, wait: float | None = None, *, is_busy: bool = False
    ) -> None:
        super().__init__(inline(one_line(message)))
        self.scope, self.wait, self.is_busy = scope, wait, is_busy


class RefusedRequest(Unanswered):
    """The error that the server rejects one request, for example because it is too long; others may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Scope.QUESTION)


class HttpReply(NamedTuple):
    """An HTTP reply of a server: its status, body, and header Retry-After, None if it has none."""

    status: int
    body: bytes
    retry_after: str | None = None


# address, body, headers, seconds for a whole reply
Transport = Callable[[str, bytes, Mapping[str, str], float], HttpReply]


@dataclass(frozen=True)
class Endpoint:
    """The address of a server and how to call it. ``key`` names the environment variable of the key, "" for none.

    ``timeout`` is the longest time for a whole reply, in seconds. ``tries`` is the largest number of tries for one
    request. ``per_minute`` is the largest number of tries per minute, over all requests; None means no limit.
    """

    base_url: str
    key: str = ""
    timeout: float = 60.0
    tries: int = 4
    per_minute: float | None = None

    def check(self, who: str) -> None:
        """Raise SpecError if the address, or the name of the key's variable, is invalid; its text begins with ``who``.

        An address is invalid if it does not begin with http:// or https://, or holds a password or a query.
        """
        if not self.base_url.startswith(("http://", "https://")) or set("@?#") & set(self.base_url):
            raise SpecError(f"{who}: base_url wants http:// or https://, no password in it and no query")
        if self.key and not _VARIABLE_NAME.fullmatch(self.key):  # not shown: it may be the key itself
            raise SpecError(
                f"{who}: key wants the name of the environment variable that holds the key, such as API_KEY"
            )

    def cause(self, why: Unanswered, model: str) -> str:
        """Return the text of the failure ``why``, followed by the names of the model and of the key's variable."""
        return f"{why}; model {model}, {f'key from {self.key}' if self.key else 'no key'}"

    def client(self, who: str, transport: Transport | None = None) -> EndpointClient:
        """Return a client that sends the key; raise SpecError if the key's environment variable is not set.

        ``who`` begins the text of the error. ``transport`` sends the requests, by default over HTTP.
        """
        if self.key and not os.environ.get(self.key):
            raise SpecError(f"{who}: the environment variable {safe_variable_name(self.key)} is not set")
        return EndpointClient(self, os.environ[self.key] if self.key else "", transport or over_http)


class FirstModel:
    """The model that a server named in its first answer; a gateway may later answer with another model.

    Pass its ``name`` if it is known already. Safe to use from several threads.
    """

    def __init__(self, name: str = "") -> None:
        self._first = {"name": name} if name else {}

    @property
    def name(self) -> str:
        """The model; empty as long as no answer has named one."""
        return self._first.get("name", "")

    def fault(self, name: str) -> str:
        """Return why an answer by the model ``name`` cannot be used; "" if it is the first model's.

        If no model is known yet, ``name`` becomes the first model.
        """
        first = self._first.setdefault("name", name) if name else self.name
        if name == first:
            return ""
        return f"an answer of model {name!r}, the first was of model {first!r}: turn off the server's fallback"


class EndpointClient:
    """A client that sends requests to an endpoint; safe to use from several threads."""

    def __init__(self, endpoint: Endpoint, key: str, transport: Transport) -> None:
        self.endpoint, self._key, self._transport = endpoint, key, transport
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._lock, self._next_start, self._busy_until = threading.Lock(), 0.0, 0.0

    def ask(self, body: Mapping[str, Any], deadline: float = math.inf) -> ChatCompletion:
        """Return the completion of a request; raise Unanswered if no try succeeds before ``deadline``.

        The deadline is in seconds of ``time.monotonic``.
        """
        return self._with_retries("chat/completions", body, deadline, self._completion)

    def fetch(self, path: str, body: Mapping[str, Any] | None = None, deadline: float = math.inf) -> dict[str, Any]:
        """POST ``body`` to a path, or GET the path if it is None; return the reply's JSON object. Raises as ``ask``."""
        return self._with_retries(path, body, deadline, _json_object)

    def fetch_text(self, path: str, deadline: float = math.inf) -> str:
        """Send a GET to a path and return the reply as text. Raises Unanswered as ``ask`` does."""
        return self._with_retries(path, None, deadline, lambda raw: self._redact(raw.decode(errors="replace")))

    def _with_retries(
        self, path: str, body: Mapping[str, Any] | None, deadline: float, parse: Callable[[bytes], T]
    ) -> T:
        raw = b"" if body is None else json.dumps(body).encode()
        failure = Unanswered("it was not asked")
        for number in range(self.endpoint.tries):
            if number:
                # 1, 2, 4, ... seconds, or Retry-After if that is longer
                wait = max(2.0 ** (number - 1), failure.wait or 0.0)
                if failure.is_busy:
                    self._busy_until = max(self._busy_until, time.monotonic() + wait)
                time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
            if deadline <= time.monotonic():
                break
            if not number:
                self._wait_while_busy(deadline)
            try:
                return parse(self._reply(path, raw, deadline))
            except Unanswered as error:
                failure = error
                if error.scope is not Scope.TRY:
                    break
        raise failure

    def _reply(self, path: str, raw: bytes, deadline: float) -> bytes:
        """Send one request; return the body of a reply with status 200, and raise Unanswered for any other reply."""
        self._wait_for_rate()
        url = f"{self.endpoint.base_url.rstrip('/')}/{path}"
        try:
            seconds = min(self.endpoint.timeout, max(0.001, deadline - time.monotonic()))
            reply = self._transport(url, raw, self._headers, seconds)
        except (OSError, HTTPException) as error:  # no route, a broken connection, a timeout
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Unanswered(self._redact(message)) from None
        except ValueError:  # its message may hold the key
            raise Unanswered("address or key have a form that no header can carry", Scope.ENDPOINT) from None
        if reply.status != 200:
            wait = _retry_after(reply.retry_after)
            raise self._failure(reply.status, parse_error(reply.body), f"status {reply.status}", wait)
        return reply.body

    def _failure(self, status: int, error: ServerError | None, text: str, wait: float | None = None) -> Unanswered:
        """Return the exception for an error reply; its ``scope`` says whether another try or request may succeed.

        ``text`` is the beginning of the exception's message; ``wait``, the seconds that the server asks to wait.
        """
        named = {_NAMED_STATUS.get(code) for code in error.codes} if error else set[int | None]()
        message = error.message if error and status not in _SECRET else ""
        text = self._redact(text + (f": {message}" if message else ""))
        if {status, *named} & set(_FATAL):
            return Unanswered(text, Scope.ENDPOINT)
        if status in _RETRIED or status >= _SERVER_ERRORS:
            return Unanswered(text, Scope.TRY, wait, is_busy=status in _BUSY)
        return RefusedRequest(text)

    def _completion(self, raw: bytes) -> ChatCompletion:
        if error := parse_error(raw):
            code = f" ({error.codes[0]})" if error.codes else ""
            raise self._failure(_status_of(error), error, f"an error in a reply of status 200{code}")
        try:
            return parse_completion(raw, self._redact)
        except NoCompletion as why:
            raise Unanswered(str(why), Scope.TRY if why.is_retryable else Scope.QUESTION) from None

    def _redact(self, text: str) -> str:
        return text.replace(self._key, "[key]") if len(self._key) >= _SHORTEST_KEY else text

    def _wait_while_busy(self, deadline: float) -> None:
        """Sleep while the server is busy, but not beyond the deadline, so that retries come before new requests."""
        if (seconds := min(self._busy_until, deadline) - time.monotonic()) > 0:
            time.sleep(seconds)

    def _wait_for_rate(self) -> None:
        if self.endpoint.per_minute is None:
            return
        with self._lock:  # only to reserve a start; the wait is outside of it
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self.endpoint.per_minute
        time.sleep(start - now)


def ask_all(
    client: EndpointClient, bodies: Sequence[Mapping[str, Any]], threads: int
) -> list[ChatCompletion | Unanswered]:
    """Return, for every request in order, its completion or the error that says why it has none.

    Raises Unanswered after the first two requests if others are useless to send: if both of them failed (a rejected
    request does not count as failed), or if one failed for a reason that affects all requests.
    """

    def ask(body: Mapping[str, Any]) -> ChatCompletion | Unanswered:
        try:
            return client.ask(body)
        except Unanswered as why:
            return why

    replies = [ask(body) for body in bodies[:_PROBES]]
    # a rejected request says nothing about the others
    failures = [why for why in replies if isinstance(why, Unanswered) and why.scope is not Scope.QUESTION]
    if len(failures) == _PROBES or any(why.scope is Scope.ENDPOINT for why in failures):
        raise failures[-1]
    return [*replies, *map_in_order(ask, bodies[_PROBES:], threads)]


@dataclass(frozen=True, kw_only=True)
class EndpointModel:
    """The base of plug-ins that ask a model on a server, such as a judge; the fields are options of the plug-in.

    ``who`` names the plug-in in errors. ``key`` names the environment variable of the key, "" for none. ``timeout`` is
    the longest time for a whole reply, in seconds. ``tries`` is the largest number of tries for one request, and
    ``parallel`` the number of requests at a time.
    """

    who: ClassVar[str] = ""

    base_url: str
    model: str
    key: str = ""
    timeout: float = 60.0
    tries: int = 4
    parallel: int = 4

    def __post_init__(self) -> None:
        self._endpoint.check(self.who)
        for name, most in (("timeout", 3600), ("tries", 20), ("parallel", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(f"{self.who}: {name} is {getattr(self, name):g}, wanted from 1 to {most}")

    def check(self) -> None:
        """Raise SpecError if the key is not set."""
        self._endpoint.client(self.who)

    def completions(self, conversations: Iterable[Sequence[Message]], most_tokens: int) -> list[str | None]:
        """Return the reply to each conversation at temperature 0, None where the request failed.

        A request also counts as failed if the server or its model refused, or if the reply comes from another model
        than the first reply did: a gateway may fall back on another model. ``most_tokens`` limits each reply. Raises
        RunError if all requests would fail.
        """
        client = self._endpoint.client(self.who)  # before a thread starts, so that a missing key raises here
        options = {"model": self.model, "temperature": 0, "max_tokens": most_tokens}
        bodies = [{**options, "messages": message_rows(messages)} for messages in conversations]
        try:
            replies = ask_all(client, bodies, self.parallel)
        except Unanswered as why:
            raise RunError(
                f"{self.who}: {self.base_url} does not answer ({self._endpoint.cause(why, self.model)}); earlier "
                "answers are kept: rerun when it answers, or give another base_url, model or key"
            ) from None
        faults = [self._fault(reply) for reply in replies]
        self.unread.extend(filter(None, faults))
        return [
            reply.answer if isinstance(reply, ChatCompletion) and not fault else None
            for reply, fault in zip(replies, faults, strict=True)
        ]

    def _fault(self, reply: ChatCompletion | Unanswered) -> str:
        """Return why a reply cannot be used; empty if it can."""
        if isinstance(reply, Unanswered):
            return str(reply)
        if fault := self._first_model.fault(reply.model):
            return fault
        return f"a reply that was withheld ({reply.finish_reason})" if reply.is_withheld else ""

    @property
    def replying_model(self) -> str:
        """The model named in the first reply; replies of other models are refused. Empty before the first reply."""
        return self._first_model.name

    def expect_model(self, name: str) -> None:
        """Accept replies of the model ``name`` only; no effect if a reply or an earlier call has fixed the model."""
        self._first_model.fault(name)

    @cached_property
    def _first_model(self) -> FirstModel:
        return FirstModel()

    @cached_property
    def unread(self) -> list[str]:
        """The reasons why replies could not be used, one for each failed request so far."""
        return []

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self.base_url, self.key, self.timeout, self.tries)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The handler that follows no redirect, because a redirect would send the key to another host."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:  # noqa: ARG002
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
_THIS_MACHINE = re.compile(r"127(\.\d+){3}|localhost|::1")


def over_http(
    url: str, body: bytes, headers: Mapping[str, str], timeout: float, longest: int = _LONGEST_REPLY
) -> HttpReply:
    """Send an HTTP request, a GET if the body is empty; return the reply.

    Raises OSError (TimeoutError for a reply after ``timeout`` seconds), HTTPException, ValueError, or Unanswered for a
    reply that does not end or has more than ``longest`` bytes.
    """
    return call_with_timeout(lambda: _exchange(url, body, headers, timeout, longest), timeout + _GRACE)


def _exchange(url: str, body: bytes, headers: Mapping[str, str], timeout: float, longest: int) -> HttpReply:
    deadline = time.monotonic() + timeout
    opener = _DIRECT if _THIS_MACHINE.fullmatch(urlsplit(url).hostname or "") else _OPENER
    try:
        request = urllib.request.Request(url, body or None, dict(headers))  # noqa: S310 - the scheme was checked
        with opener.open(request, timeout=timeout) as response:
            return HttpReply(response.status, _read(response, deadline, longest))
    except urllib.error.HTTPError as error:
        with error:
            return HttpReply(error.code, _read(error, deadline, longest), error.headers.get("Retry-After"))


def _read(response: Any, deadline: float, longest: int) -> bytes:
    body = bytearray()
    while chunk := response.read1(1 << 16):
        body += chunk
        if time.monotonic() > deadline:
            raise Unanswered("a reply that does not end")
        if len(body) > longest:
            raise Unanswered(f"a reply of more than {longest} bytes")
    if missing := getattr(response, "length", None):  # of the stated length; read1 does not check it
        raise Unanswered(f"a reply that ends {missing} bytes early")
    return bytes(body)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Unanswered("a reply that is no JSON", Scope.QUESTION) from None
    if not isinstance(body, dict):
        raise Unanswered("a reply that is no object of JSON", Scope.QUESTION)
    return body


def _status_of(error: ServerError) -> int:
    """Return the HTTP status that the codes of an error (in a reply of status 200) name; else 500, which is retried."""
    numbers = [int(code) for code in error.codes if code.isascii() and code.isdigit() and len(code) == 3]
    named = [_NAMED_STATUS[code] for code in error.codes if code in _NAMED_STATUS]
    return next(iter((*numbers, *named)), _SERVER_ERRORS)


def _retry_after(header: str | None) -> float | None:
    """Return a Retry-After header, a number or a date, in seconds from now; None for anything else."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            seconds = math.nan
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_WAIT)


def check_no_address(key: str, text: str, expected: str) -> None:
    """Raise SpecError if ``text``, the value of the option ``key``, is a server's address.

    The message says what was ``expected``, and shows the address without its password and query.
    """
    if not _ADDRESS.match(text.strip()):
        return
    address = re.sub(r"(?i)^(https?:)/+([^/@]*@)?", r"\1//", text.strip().partition("?")[0])
    raise SpecError(
        f"{key} is {clip(inline(address), 80)!r}, a server's address, wanted {expected}; to compare two servers: "
        "kvaudit check MODEL --reference URL#NAME --candidate URL#NAME, where MODEL is the folder of what they serve; "
        f"for one server: engine: endpoint in evaluate.policies of a spec ({guide_path('audit-an-engine.md')})"
    )
