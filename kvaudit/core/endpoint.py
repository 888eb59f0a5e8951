"""A server from outside, most often an OpenAI-compatible one (``chat/completions``), and every way of not answering.

The key stands in an environment variable and goes into one header, never into a file, a message or another host; where
an endpoint says it back, it is struck out. What an endpoint says is hostile: it may be late, endless or no JSON. One
that asks for time gets it. One of this machine is asked directly, whatever proxies the environment names.
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
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cached_property
from http.client import HTTPException
from typing import IO, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvaudit.core.completions import ChatCompletion, NoCompletion, ServerError, parse_completion, parse_error
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.records import Message, message_rows
from kvaudit.core.text import safe_variable_name
from kvaudit.core.text import clip, guide_path, inline, one_line
from kvaudit.core.network import map_in_order

T = TypeVar("T")
_ADDRESS = re.compile(r"(?i)https?:/|localhost[:/]|\d{1,3}(\.\d{1,3}){3}[:/]")  # one slash: a path has lost the other
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w{0,99}")
_PROBED = 2  # requests sent before all others
_GRACE = 0.5  # seconds in which a reply that is late says so itself
_LONGEST_REPLY = 1 << 20  # bytes
_LONGEST_WAIT = 120.0  # seconds that an endpoint may ask for
_HOPELESS = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405)  # of every question, not of this one
_TRIED_AGAIN = (408, 409, 425, 429)  # and whatever a server says of itself, from 500 on
_SERVER = 500
_BUSY = (429, 502, 503, 504, *range(520, 530))  # of all that ask, who wait together
# names of errors that do not go away by waiting, in the statuses that say so else
_NAMED_STATUS = {
    "insufficient_quota": 402, "insufficient_credits": 402, "billing_hard_limit_reached": 402,
    "invalid_api_key": 401, "authentication_error": 401, "unauthorized": 401, "permission_denied": 403,
    "permission_error": 403, "model_not_found": 404, "invalid_request_error": 400, "invalid_request": 400,
    "badrequesterror": 400, "context_length_exceeded": 400,
}  # fmt: skip
_SECRET = (401, 403)  # whose words may hold a part of the key
_SHORTEST_KEY = 8  # characters that are struck out of what is said; a shorter one may be a word


class Scope(StrEnum):
    """What goes without an answer."""

    TRY = "try"  # another one may get it
    QUESTION = "question"  # this one now, whatever is tried
    ENDPOINT = "endpoint"  # all of them


class Unanswered(Exception):
    """A question without an answer. ``wait``: seconds that the endpoint asked for; ``is_busy``: by all who ask it."""

    def __init__(
        self, what: str, scope: Scope = Scope.TRY, wait: float | None = None, *, is_busy: bool = False
    ) -> None:
        super().__init__(inline(one_line(what)))
        self.scope, self.wait, self.is_busy = scope, wait, is_busy


class RefusedRequest(Unanswered):
    """One request that the endpoint will not answer, in its own words: too long, or filtered; others it may."""

    def __init__(self, what: str) -> None:
        super().__init__(what, Scope.QUESTION)


class HttpReply(NamedTuple):
    """What came back over the wire."""

    status: int
    body: bytes
    retry_after: str | None = None


# address, body, headers, seconds for a whole reply
Transport = Callable[[str, bytes, Mapping[str, str], float], HttpReply]


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. ``key`` names the environment variable with the key; empty where none is wanted.

    ``timeout`` is in seconds for a whole reply, ``tries`` of one question; ``per_minute`` tries, None for any number.
    """

    base_url: str
    key: str = ""
    timeout: float = 60.0
    tries: int = 4
    per_minute: float | None = None

    def check(self, who: str) -> None:
        """Raise SpecError, in the name of ``who``, for an address that is none or would carry a key into a file."""
        if not self.base_url.startswith(("http://", "https://")) or set("@?#") & set(self.base_url):
            raise SpecError(f"{who}: base_url wants http:// or https://, no password in it and no query")
        if self.key and not _VARIABLE_NAME.fullmatch(self.key):  # not shown: it may be the key itself
            raise SpecError(
                f"{who}: key wants the name of the environment variable that holds the key, such as API_KEY"
            )

    def client(self, who: str, transport: Transport | None = None) -> EndpointClient:
        """The client, with its key in hand; raises SpecError where the variable is not set."""
        if self.key and not os.environ.get(self.key):
            raise SpecError(f"{who}: the environment variable {safe_variable_name(self.key)} is not set")
        return EndpointClient(self, os.environ[self.key] if self.key else "", transport or over_http)


class EndpointClient:
    """Asks an endpoint, one question after the other or from several threads."""

    def __init__(self, endpoint: Endpoint, key: str, transport: Transport) -> None:
        self._endpoint, self._key, self._transport = endpoint, key, transport
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._lock, self._free_at, self._busy_until = threading.Lock(), 0.0, 0.0

    def ask(self, body: Mapping[str, Any], until: float = math.inf) -> ChatCompletion:
        """The completion of a request; raises Unanswered once no further try would help, or at the time ``until``."""
        return self._tried("chat/completions", body, until, self._completion)

    def fetch(self, path: str, body: Mapping[str, Any] | None = None, until: float = math.inf) -> dict[str, Any]:
        """The object that a path answers; without a body it is fetched. Raises as ``ask`` does."""
        return self._tried(path, body, until, _object)

    def fetch_text(self, path: str, until: float = math.inf) -> str:
        """What a path answers, as text. Raises as ``ask`` does."""
        return self._tried(path, None, until, lambda raw: self._struck(raw.decode(errors="replace")))

    def _tried(self, path: str, body: Mapping[str, Any] | None, until: float, read: Callable[[bytes], T]) -> T:
        raw = b"" if body is None else json.dumps(body).encode()
        why = Unanswered("it was not asked")
        for number in range(self._endpoint.tries):
            if number:
                # seconds: 1, 2, 4 and so on, or what the endpoint asked for where that is longer
                wait = max(2.0 ** (number - 1), why.wait or 0.0)
                if why.is_busy:
                    self._busy_until = max(self._busy_until, time.monotonic() + wait)
                time.sleep(max(0.0, min(wait, until - time.monotonic())))
            if until <= time.monotonic():
                break
            if not number:
                self._wait_for_others(until)
            try:
                return read(self._reply(path, raw, until))
            except Unanswered as error:
                why = error
                if error.scope is not Scope.TRY:
                    break
        raise why

    def _reply(self, path: str, raw: bytes, until: float) -> bytes:
        """The body of one reply of status 200."""
        self._take_turn()
        url = f"{self._endpoint.base_url.rstrip('/')}/{path}"
        try:
            left = min(self._endpoint.timeout, max(0.001, until - time.monotonic()))
            replied = self._transport(url, raw, self._headers, left)
        except (OSError, HTTPException) as error:  # no route, a broken line, a timeout
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Unanswered(self._struck(what)) from None
        except ValueError:  # whose words may hold the key
            raise Unanswered("address or key have a form that no header can carry", Scope.ENDPOINT) from None
        if replied.status != 200:
            raise self._refused(replied)
        return replied.body

    def _refused(self, replied: HttpReply) -> Unanswered:
        """What a status means: for all questions, for this one (too long, or filtered), or for this try."""
        error = parse_error(replied.body)
        return self._failed(replied.status, error, f"status {replied.status}", _retry_after(replied.retry_after))

    def _failed(self, status: int, error: ServerError | None, what: str, wait: float | None = None) -> Unanswered:
        """An error by its status, and in the server's own words; the one rule of what is tried again."""
        named = {_NAMED_STATUS.get(code) for code in error.codes} if error else set[int | None]()
        message = error.message if error and status not in _SECRET else ""
        what = self._struck(what + (f": {message}" if message else ""))
        if {status, *named} & set(_HOPELESS):
            return Unanswered(what, Scope.ENDPOINT)
        if status in _TRIED_AGAIN or status >= _SERVER:
            return Unanswered(what, Scope.TRY, wait, is_busy=status in _BUSY)
        return RefusedRequest(what)

    def _completion(self, raw: bytes) -> ChatCompletion:
        if error := parse_error(raw):
            kind = f" ({error.codes[0]})" if error.codes else ""
            raise self._failed(_status_of(error), error, f"an error in a reply of status 200{kind}")
        try:
            return parse_completion(raw, self._struck)
        except NoCompletion as why:
            raise Unanswered(str(why), Scope.TRY if why.again else Scope.QUESTION) from None

    def _struck(self, text: str) -> str:
        return text.replace(self._key, "[key]") if len(self._key) >= _SHORTEST_KEY else text

    def _wait_for_others(self, until: float) -> None:
        """Begin no question while another one waits for an endpoint that is busy: its next try comes first."""
        if (left := min(self._busy_until, until) - time.monotonic()) > 0:
            time.sleep(left)

    def _take_turn(self) -> None:
        """Wait until another try keeps to the rate."""
        if self._endpoint.per_minute is None:
            return
        # the turn is taken under the lock, and waited for outside of it
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + 60 / self._endpoint.per_minute
        time.sleep(start - now)


def ask_all(
    client: EndpointClient, bodies: Sequence[Mapping[str, Any]], parallel: int
) -> list[ChatCompletion | Unanswered]:
    """The completion of every request, or why there is none, ``parallel`` of them at a time.

    Raises Unanswered where asking on is of no use: two of the first, or one for all, got nothing.
    """

    def ask(body: Mapping[str, Any]) -> ChatCompletion | Unanswered:
        try:
            return client.ask(body)
        except Unanswered as why:
            return why

    replies = [ask(body) for body in bodies[:_PROBED]]
    # one request may be more than a server can bear; several, or a refusal, stand for the rest
    silent = [why for why in replies if isinstance(why, Unanswered) and why.scope is not Scope.QUESTION]
    if len(silent) == _PROBED or any(why.scope is Scope.ENDPOINT for why in silent):
        raise silent[-1]
    return [*replies, *map_in_order(ask, bodies[_PROBED:], parallel)]


@dataclass(frozen=True, kw_only=True)
class EndpointModel:
    """A model behind an endpoint, as the options of a plug-in that asks it; ``who`` is what its errors call it.

    ``key`` names the environment variable that holds the key; empty where the endpoint wants none. ``timeout`` is in
    seconds for a whole reply, ``tries`` of one question, ``parallel`` questions at a time.
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
        """Raise SpecError where the key is not set."""
        self._endpoint.client(self.who)

    def completions(self, conversations: Iterable[Sequence[Message]], most_tokens: int) -> list[str | None]:
        """The greedy reply to each conversation, None for one that failed.

        Raises RunError where asking on is of no use; what was answered before is kept by whoever remembers it.
        """
        client = self._endpoint.client(self.who)  # before a thread starts: a missing key is the user's to mend
        options = {"model": self.model, "temperature": 0, "max_tokens": most_tokens}
        bodies = [{**options, "messages": message_rows(part)} for part in conversations]
        try:
            replies = ask_all(client, bodies, self.parallel)
        except Unanswered as why:
            key = f"key from {self.key}" if self.key else "no key"
            raise RunError(
                f"{self.who}: {self.base_url} does not answer ({why}; model {self.model}, {key}); what was answered "
                "before is kept: go on when it answers, or give another base_url, model or key"
            ) from None
        self.unread.extend(str(reply) for reply in replies if isinstance(reply, Unanswered))
        return [reply.answer if isinstance(reply, ChatCompletion) else None for reply in replies]

    @cached_property
    def unread(self) -> list[str]:
        """Why questions went without an answer, so that it can be quoted."""
        return []

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self.base_url, self.key, self.timeout, self.tries)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a redirect would carry the key to another host."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:  # noqa: ARG002
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
_THIS_MACHINE = re.compile(r"127(\.\d+){3}|localhost|::1")


def over_http(
    url: str, body: bytes, headers: Mapping[str, str], timeout: float, longest: int = _LONGEST_REPLY
) -> HttpReply:
    """Send a request to an address of http:// or https://, a GET where the body is empty; at most ``longest`` bytes
    come back. Raises OSError, HTTPException or ValueError.

    A socket's own timeout begins anew with every byte, so an endpoint that drips its headers is left to a thread of its
    own, and given up here with a TimeoutError.
    """
    replied: Future[HttpReply] = Future()

    def exchange() -> None:
        try:
            replied.set_result(_exchanged(url, body, headers, timeout, longest))
        except BaseException as error:  # raised where it is waited for
            replied.set_exception(error)

    threading.Thread(target=exchange, daemon=True).start()  # one that is given up keeps no process alive
    return replied.result(timeout + _GRACE)


def _exchanged(url: str, body: bytes, headers: Mapping[str, str], timeout: float, longest: int) -> HttpReply:
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
    """A whole reply; one that drips or never ends is cut."""
    body = bytearray()
    while part := response.read1(1 << 16):
        body += part
        if time.monotonic() > deadline:
            raise Unanswered("a reply that does not end")
        if len(body) > longest:
            raise Unanswered(f"a reply of more than {longest} bytes")
    return bytes(body)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Unanswered("a reply that is no JSON", Scope.QUESTION) from None
    if not isinstance(body, dict):
        raise Unanswered("a reply that is no object of JSON", Scope.QUESTION)
    return body


def _status_of(error: ServerError) -> int:
    """The status that an error inside a reply would have had; one of no kind that is known may pass."""
    numbers = [int(code) for code in error.codes if code.isascii() and code.isdigit() and len(code) == 3]
    named = [_NAMED_STATUS[code] for code in error.codes if code in _NAMED_STATUS]
    return next(iter((*numbers, *named)), _SERVER)


def _retry_after(header: str | None) -> float | None:
    """Seconds to wait, written as a number or as a date; None where it is neither."""
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


def check_no_address(what: str, given: str, wanted: str) -> None:
    """Raise SpecError where ``what`` was given as the address of a server; its user, password and query are not shown.

    A server is audited too, but beside the folder of its model, whose chat template its prompts are held to.
    """
    if not _ADDRESS.match(given.strip()):
        return
    shown = re.sub(r"(?i)^(https?:)/+([^/@]*@)?", r"\1//", given.strip().partition("?")[0])
    raise SpecError(
        f"{what} is {clip(inline(shown), 80)!r}, a server's address, wanted {wanted}; of two servers: kvaudit check "
        "MODEL --reference URL#NAME --candidate URL#NAME, where MODEL is the folder of what they serve; one: name it "
        f"as engine: endpoint in evaluate.policies of a spec ({guide_path('audit-an-engine.md')})"
    )
