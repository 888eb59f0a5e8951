"""A server on this machine that answers like an endpoint until it misbehaves. Used by sections of ``bench.attack``."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

Body = dict[str, Any]


class Request(NamedTuple):
    """A request: its path, its raw head, and its body."""

    path: str
    head: str
    body: Body


Behaviour = Callable[[socket.socket, Request], None]  # sends anything, then returns


class Hostile:
    """The server, as a context manager: correct for ``calm`` requests, then it behaves as ``behaviour`` says."""

    def __init__(self, behaviour: Behaviour, calm: int = 1) -> None:
        self.requests = list[Request]()
        self._behaviour, self._calm, self._answered, self._lock = behaviour, calm, 0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections = list[socket.socket]()
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Hostile:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            request = _read(connection)
            self.requests.append(request)
            if not request.path.endswith("/chat/completions"):
                send_reply(connection, b"{}", "404 Not Found")
                return
            with self._lock:
                self._answered += 1
                number = self._answered
            if number <= self._calm:
                send_reply(connection, completion())
            else:
                self._behaviour(connection, request)


def _read(connection: socket.socket) -> Request:
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += connection.recv(1 << 16) or _client_left()
    head, _, body = raw.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    length = next((int(row.partition(":")[2]) for row in text.splitlines() if row.lower().startswith("content-le")), 0)
    while len(body) < length:
        body += connection.recv(1 << 16) or _client_left()
    return Request(text.split(" ", 2)[1], text, json.loads(body) if body else {})


def _client_left() -> bytes:
    raise OSError("the client has left")


def completion(text: Any = "four", finish: Any = "stop", **changes: Any) -> bytes:
    """Return a chat completion with some keys changed; a key whose value is ``...`` is left out."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion", "model": "standin", "choices": [choice], **changes}
    return json.dumps({key: value for key, value in body.items() if value is not ...}).encode()


def send_reply(connection: socket.socket, body: bytes, status: str = "200 OK", *headers: str) -> None:
    """Send a whole reply."""
    rows = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    connection.sendall("\r\n".join([*rows, "", ""]).encode("latin-1") + body)


def reply(body: bytes, status: str = "200 OK", *headers: str) -> Behaviour:
    """Return the behaviour of sending a whole reply."""
    return lambda connection, _: send_reply(connection, body, status, *headers)


def send_raw(raw: bytes) -> Behaviour:
    """Return the behaviour of sending bytes as they are, and closing."""
    return lambda connection, _: connection.sendall(raw)


def drip(head: bytes, part: bytes, pause: float, times: int = 10_000) -> Behaviour:
    """Return the behaviour of sending ``head``, then ``part`` again and again."""

    def behave(connection: socket.socket, _: Request) -> None:
        connection.sendall(head)
        for _number in range(times):
            connection.sendall(part)
            time.sleep(pause)

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Return the behaviour of using one behaviour after the other, from request to request, cyclically."""
    lock, count = threading.Lock(), [0]

    def behave(connection: socket.socket, request: Request) -> None:
        with lock:
            number, count[0] = count[0], count[0] + 1
        behaviours[number % len(behaviours)](connection, request)

    return behave
