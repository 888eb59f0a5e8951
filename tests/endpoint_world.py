"""Endpoints without a socket: our own server as a function, and endpoints whose answers a test defines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvaudit.audit.runs.endpoint_probe import Plan
from kvaudit.audit.sampling.chat_calls import wire
from kvaudit.core.endpoint import HttpReply, Transport
from kvaudit.core.tool_forms.text import as_text

Answers = Callable[[dict[str, Any]], HttpReply]


def through(app: Any) -> Transport:
    """Return a transport to an ASGI application in this process."""

    def send(url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpReply:
        return asyncio.run(asyncio.wait_for(_exchange(app, urlsplit(url).path, body, headers), timeout))

    return send


async def _exchange(app: Any, path: str, body: bytes, headers: Mapping[str, str]) -> HttpReply:
    raw_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw_headers, "query_string": b""}
    status, raw, reply_headers = 0, bytearray(), dict[bytes, bytes]()

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            reply_headers.update(message["headers"])
        raw.extend(message.get("body", b""))

    await app({**scope, "asgi": {"spec_version": "2.3"}}, receive, send)
    retry_after = reply_headers.get(b"retry-after")
    return HttpReply(status, bytes(raw), retry_after.decode() if retry_after else None)


def completion(text: str, finish: str = "stop", **more: Any) -> HttpReply:
    """Return a chat completion of one text; ``more`` are further keys of its body."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return HttpReply(200, json.dumps({"model": "made-up", "choices": [choice], **more}).encode())


def gold(plan: Plan) -> Answers:
    """Return a function that gives the right answer to every call of a plan."""
    assert plan.spec.probe is not None
    role = plan.spec.probe.tool_role
    gold_answers = {
        json.dumps(wire(as_text(i.messages, i.tools), role)): unit.suite.gold(i)
        for unit in plan.units
        for i in unit.items
    }

    def answers(body: dict[str, Any]) -> HttpReply:
        rows = body["messages"]
        opening = next(n for n in range(1, len(rows) + 1) if json.dumps(rows[:n]) in gold_answers)
        turn = sum(row["role"] == "assistant" for row in rows[opening:])
        return completion(gold_answers[json.dumps(rows[:opening])][turn])

    return answers


class Wire:
    """A transport that answers by a function of the request's body and records all requests."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._lock = answers, threading.Lock()
        self.asked, self.headers = list[dict[str, Any]](), list[Mapping[str, str]]()

    def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpReply:
        request = json.loads(body)
        with self._lock:
            self.asked.append(request)
            self.headers.append(headers)
        return self._answers(request)
