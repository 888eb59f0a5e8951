"""Endpoints without a socket: our own server as a function, and made-up ones that answer what a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvaudit.audit.runs.probe.plan import Plan
from kvaudit.audit.sampling.chat_calls import wire
from kvaudit.core.endpoint import HttpReply, Transport

Answers = Callable[[dict[str, Any]], HttpReply]


def through(app: Any) -> Transport:
    """The wire to an ASGI application in this process."""

    def send(url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpReply:
        return asyncio.run(asyncio.wait_for(_exchange(app, urlsplit(url).path, body, headers), timeout))

    return send


async def _exchange(app: Any, path: str, body: bytes, headers: Mapping[str, str]) -> HttpReply:
    named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": named, "query_string": b""}
    status, raw, answered = 0, bytearray(), dict[bytes, bytes]()

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def sent(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answered.update(message["headers"])
        raw.extend(message.get("body", b""))

    await app({**scope, "asgi": {"spec_version": "2.3"}}, receive, sent)
    again = answered.get(b"retry-after")
    return HttpReply(status, bytes(raw), again.decode() if again else None)


def completion(text: str, finish: str = "stop", **more: Any) -> HttpReply:
    """A chat completion of one text; ``more`` stands beside it in the body."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return HttpReply(200, json.dumps({"model": "made-up", "choices": [choice], **more}).encode())


def gold(plan: Plan) -> Answers:
    """The right answer to every call of a plan."""
    assert plan.spec.probe is not None
    role = plan.spec.probe.tool_role
    known = {json.dumps(wire(i.messages, role)): unit.suite.gold(i) for unit in plan.units for i in unit.items}

    def answers(body: dict[str, Any]) -> HttpReply:
        rows = body["messages"]
        found = next(known[key] for n in range(1, len(rows) + 1) if (key := json.dumps(rows[:n])) in known)
        opening = next(n for n in range(1, len(rows) + 1) if json.dumps(rows[:n]) in known)
        return completion(found[sum(row["role"] == "assistant" for row in rows[opening:])])

    return answers


class Wire:
    """A wire whose other end answers by a function of the request's body; remembers what it was asked."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._door = answers, threading.Lock()
        self.asked, self.headers = list[dict[str, Any]](), list[Mapping[str, str]]()

    def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpReply:
        asked = json.loads(body)
        with self._door:
            self.asked.append(asked)
            self.headers.append(headers)
        return self._answers(asked)
