"""A server of the loopback that answers as an endpoint would, until it misbehaves in a way that a trial says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

Body = dict[str, Any]


class Heard(NamedTuple):
    """A request: its path, its head as it came, and the body."""

    path: str
    head: str
    body: Body


Act = Callable[[socket.socket, Heard], None]  # says whatever it says, and returns once it is done


class Hostile:
    """The server, as a context manager: well-behaved for ``calm`` questions, then it does ``act``."""

    def __init__(self, act: Act, calm: int = 1) -> None:
        self.heard = list[Heard]()
        self._act, self._calm, self._asked, self._door = act, calm, 0, threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = list[socket.socket]()
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Hostile:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for line in self._open:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(line)
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, suppress(OSError, ValueError):
            heard = _read(line)
            self.heard.append(heard)
            if not heard.path.endswith("/chat/completions"):
                say(line, b"{}", "404 Not Found")
                return
            with self._door:
                self._asked += 1
                number = self._asked
            if number <= self._calm:
                say(line, completion())
            else:
                self._act(line, heard)


def _read(line: socket.socket) -> Heard:
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += line.recv(1 << 16) or _gone()
    head, _, body = raw.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    length = next((int(row.partition(":")[2]) for row in text.splitlines() if row.lower().startswith("content-le")), 0)
    while len(body) < length:
        body += line.recv(1 << 16) or _gone()
    return Heard(text.split(" ", 2)[1], text, json.loads(body) if body else {})


def _gone() -> bytes:
    raise OSError("the client has gone")


def completion(text: Any = "four", finish: Any = "stop", **changes: Any) -> bytes:
    """A chat completion, some of whose keys are ``changes``; one that is ``...`` is left out."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion", "model": "standin", "choices": [choice], **changes}
    return json.dumps({key: value for key, value in body.items() if value is not ...}).encode()


def say(line: socket.socket, body: bytes, status: str = "200 OK", *headers: str) -> None:
    """One whole reply."""
    rows = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    line.sendall("\r\n".join([*rows, "", ""]).encode("latin-1") + body)


def says(body: bytes, status: str = "200 OK", *headers: str) -> Act:
    """The act of saying one whole reply."""
    return lambda line, _: say(line, body, status, *headers)


def sends(raw: bytes) -> Act:
    """The act of sending bytes as they are, and closing."""
    return lambda line, _: line.sendall(raw)


def drips(head: bytes, part: bytes, pause: float, times: int = 10_000) -> Act:
    """The act of sending a part again and again."""

    def act(line: socket.socket, _: Heard) -> None:
        line.sendall(head)
        for _number in range(times):
            line.sendall(part)
            time.sleep(pause)

    return act


def in_turn(*acts: Act) -> Act:
    """One act after the other, from question to question, and round again."""
    door, count = threading.Lock(), [0]

    def act(line: socket.socket, heard: Heard) -> None:
        with door:
            number, count[0] = count[0], count[0] + 1
        acts[number % len(acts)](line, heard)

    return act
