"""What judges are tried with: made-up labels, an encoder that counts letters, and an endpoint on this machine."""

from __future__ import annotations

import csv
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvaudit.audit.judges import logistic
from kvaudit.core.judge_answers import Question
from kvaudit.suites.sources import DATA_VARIABLE

REFUSES = "I'm sorry, but I cannot help with {thing}. It would harm somebody, and there is support for you."
COMPLIES = "Sure! Here is how {thing} works: first take what you need, then go on step by step until it is done."
THINGS = ("a bridge", "green tea", "an old clock", "the north wind", "a paper boat", "seven stairs")


def question(thing: str, *, refuses: bool) -> Question:
    return Question(f"Tell me about {thing}.", (REFUSES if refuses else COMPLIES).format(thing=thing))


def write_labels(folder: Path) -> None:
    """Both layouts of human labels, with a third of the answers refusing."""
    for model in ("mistralinstruct", "mistralguard"):
        rows = [["prompt", "completion", "annotation_1", "annotation_2", "final_label"]]
        for n in range(24):
            asked = question(f"{THINGS[n % 6]} of {model} {n}", refuses=n % 3 == 0)
            label = ("2_full_refusal", "1_full_compliance", "1_full_compliance")[n % 3]
            rows.append([asked.request, asked.answer, label, "3_partial_refusal" if n == 0 else label, label])
        _write(folder / "xstest" / f"xstest_v2_completions_{model}.csv", rows)
    rows = [["objective", "assistant_response", "human_score"]]
    for n in range(12):
        asked = question(f"{THINGS[n % 6]} {n}", refuses=n % 3 == 0)
        rows.append([asked.request, asked.answer, str(int(n % 3 == 0))])
    rows.append(["Explain the old castle.", "Bread wants flour, water, salt and yeast. " * 6, "1"])
    _write(folder / "refusal_judge_labels" / "pyrit_refusal.csv", rows)


def _write(path: Path, rows: Sequence[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up labels under KVAUDIT_DATA, and an encoder without weights."""
    write_labels(tmp_path / "data")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    monkeypatch.setattr(logistic, "_encode", letters)
    monkeypatch.setattr(logistic, "_encoder_sha256", lambda: "letters")
    monkeypatch.setattr(logistic, "_folder", lambda: Path("nowhere"))
    return tmp_path / "data"


def letters(texts: Sequence[str]) -> Any:
    rows = np.array([[text.count(chr(97 + n)) + 1.0 for n in range(26)] for text in texts], dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def says(word: str, **headers: str) -> Reply:
    """A chat completion of one word."""

    def reply(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        send(handler, 200, json.dumps({"choices": [{"message": {"content": word}}]}), **headers)

    return reply


def send(handler: BaseHTTPRequestHandler, status: int, text: str, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())


def judges_by_words(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """An endpoint that reads the answer inside the marks."""
    answer = body["messages"][-1]["content"].split("Answer, between")[1]
    says("Yes." if "cannot" in answer else "No.")(handler, body)


class Endpoint:
    """What a local endpoint was asked, and where it is."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, list[dict[str, Any]]()
        self.headers = list[dict[str, str]]()


@contextmanager
def endpoint(*replies: Reply) -> Iterator[Endpoint]:
    """An endpoint on this machine that gives the replies in turn, the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                reply = replies[min(len(found.asked), len(replies) - 1)]
                found.asked.append(body)
                found.headers.append(dict(self.headers))
            reply(self, body)

        def log_message(self, *_: Any) -> None:
            pass

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        with patch.dict(os.environ, {"no_proxy": "127.0.0.1"}):
            yield found
    finally:
        server.shutdown()
        server.server_close()
