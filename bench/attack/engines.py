"""What happens if an engine dies, hangs or lies? Endpoints on this machine that misbehave, and runs that are killed.

    python -m bench.attack engines

Takes up to half an hour; results: docs/results/attack.md. An endpoint without a valid answer must be reported in one
line within its time limit, or one request refused. Runs whose endpoint hangs must end at a signal, and killed runs must
resume to the records of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.attack.hostile import Behaviour, Hostile, Request, completion, drip, in_turn, reply, send_raw, send_reply
from bench.attack.trial import PATIENCE, Broken, Trial, check_same_records, expect
from kvaudit.audit.engines import ENGINES, GenerationRequest, Reply, parse_condition
from kvaudit.audit.engines.base import EngineContext, EngineFailed
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.records import Message, Role
from kvaudit.core.spec_evaluate import EngineSpec

KEY, VARIABLE = "k-0123456789abcdef", "ATTACK_API_KEY"
ANSWER = 4.0  # seconds: the endpoint's time limit for a batch
SLACK = 6.0  # seconds
FULL, GONE, REFUSED = "answered", "gone", "refused"  # results of a batch
KILLS = 40
OK = b"HTTP/1.1 200 OK\r\n"
PACKED = reply(b"\x1f\x8b\x08junk", "200 OK", "Content-Encoding: gzip")
LATER = reply(b"{}", "429 Too Many Requests", "Retry-After: 1")
SPEC = """
name: hostile
evaluate:
  policies:
  - {{engine: endpoint, base_url: "{0}", model: standin, reference: {{base_url: "{0}", model: other}}}}
  - {{engine: endpoint, base_url: "{0}", model: other}}
  suites: {{refusal: {{items: 24}}}}
  context_tokens: [96]
  floor: 0
  pilot: 0
engines: {{endpoint: {{at_once: 4, answer: 600}}}}
"""
PROBE = """
name: hostile
model: standin
probe: {tries: 4, timeout: 600}
evaluate: {suites: {refusal: {items: 8}}, context_tokens: [200, 400]}
"""


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a chunked HTTP reply."""
    rows = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + rows + end


def hang(connection: socket.socket, _: Request) -> None:
    """Send nothing until the client gives up."""
    connection.recv(1)


def disconnect(*_: Any) -> None:
    """Close the connection without a reply."""


WHOLE = completion()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(WHOLE)
CHOICE = json.loads(WHOLE)["choices"][0]
# name -> behaviour, allowed results
BEHAVIOURS: dict[str, tuple[Behaviour, tuple[str, ...]]] = {
    "dies without a word": (disconnect, (GONE,)),
    "dies in its headers": (send_raw(b"HTTP/1.1 200 OK\r\nContent-Le"), (GONE,)),
    "dies in its body": (send_raw(OK + LENGTH + WHOLE[:20]), (GONE,)),
    "hangs without closing": (hang, (GONE,)),
    "hangs in its body": (drip(OK + LENGTH + WHOLE[:20], b"", 1), (GONE,)),
    "hangs every other time": (in_turn(hang, reply(WHOLE)), (GONE,)),
    "answers 500 from now on": (reply(b'{"error": {"message": "a\\u001b[31m b\\nc"}}', "500 Oops"), (GONE,)),
    "answers 503 from now on": (reply(b"busy", "503 Busy"), (GONE,)),
    "answers 501": (reply(b"{}", "501 Not Implemented"), (GONE, REFUSED)),
    "answers 529": (reply(b"{}", "529 Overloaded"), (GONE, REFUSED)),
    "answers 999": (reply(b"{}", "999 Beyond"), (GONE, REFUSED)),
    "answers 429 once": (in_turn(reply(b"{}", "429 Later"), reply(WHOLE)), (FULL, GONE)),
    "answers 429 with a second to wait": (in_turn(LATER, reply(WHOLE)), (FULL, GONE)),
    "answers 429 for ever": (reply(b"{}", "429 Later", "Retry-After: 1"), (GONE,)),
    "asks for 0 seconds": (reply(b"{}", "429 Later", "Retry-After: 0"), (GONE,)),
    "asks for -1 seconds": (reply(b"{}", "429 Later", "Retry-After: -1"), (GONE,)),
    "asks for 1e300 seconds": (reply(b"{}", "429 Later", "Retry-After: 1e300"), (GONE,)),
    "asks for nan seconds": (reply(b"{}", "429 Later", "Retry-After: nan"), (GONE,)),
    "asks to wait until a date": (reply(b"{}", "429 Later", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT"), (GONE,)),
    "asks to wait until no date": (reply(b"{}", "429 Later", "Retry-After: tomorrow"), (GONE,)),
    "refuses one in two": (in_turn(reply(b'{"error": {"message": "no"}}', "400 Bad"), reply(WHOLE)), (REFUSED, GONE)),
    "gives HTML": (reply(b"<html>\xff\xfe"), (GONE, REFUSED)),
    "gives nothing": (reply(b""), (GONE, REFUSED)),
    "gives null": (reply(b"null"), (GONE, REFUSED)),
    "gives 10 MB": (reply(completion("a" * 10_000_000)), (GONE,)),
    "gives 900 KB and no usage": (reply(completion("four " * 180_000)), (GONE,)),
    "gives no end": (drip(OK + b"\r\n", b" " * 65536, 0.001), (GONE,)),
    "drips its body": (drip(OK + LENGTH, b" ", 1), (GONE,)),
    "drips its headers": (drip(OK + b"X: ", b"x", 1), (GONE,)),
    "has no choices": (reply(completion(choices=[])), (GONE, REFUSED)),
    "has no choices at all": (reply(completion(choices=...)), (GONE, REFUSED)),
    "has two choices in a wrong order": (reply(completion(choices=[{**CHOICE, "index": 1}, CHOICE])), (GONE, REFUSED)),
    "has choices that are text": (reply(completion(choices="four")), (GONE, REFUSED)),
    "has choices that are null": (reply(completion(choices=[None])), (GONE, REFUSED)),
    "is another model": (reply(completion(model="fallback-mini")), (GONE,)),
    "is another model now and then": (in_turn(reply(WHOLE), reply(completion(model="fallback-mini"))), (GONE,)),
    "is no model any more": (reply(completion(model=...)), (GONE,)),
    "is a model that is a number": (reply(completion(model=7)), (GONE,)),
    "says a number": (reply(completion(7)), (GONE, REFUSED)),
    "says a list": (reply(completion(["four"])), (GONE, REFUSED)),
    "says half a character": (reply(completion("\ud800")), (GONE, REFUSED)),
    "says control characters": (reply(completion("\x1b]0;x\x07\u202e")), (FULL,)),
    "says nothing": (reply(completion(None)), (FULL,)),
    "ends by nothing": (reply(completion(finish=None)), (FULL,)),
    "ends by a filter": (reply(completion(finish="content_filter")), (REFUSED, GONE)),
    "ends by a call": (reply(completion(finish="tool_calls")), (GONE, REFUSED)),
    "claims to have read nothing": (reply(completion(usage={"prompt_tokens": 0})), (FULL,)),
    "claims to have read a million": (reply(completion(usage={"prompt_tokens": 10**6})), (GONE,)),
    "claims a million new tokens": (reply(completion(usage={"completion_tokens": 10**6})), (GONE,)),
    "gives 300 words as 3 tokens": (reply(completion("four " * 300, usage={"completion_tokens": 3})), (GONE, REFUSED)),
    "claims -1 tokens": (reply(completion(usage={"completion_tokens": -1})), (FULL,)),
    "claims nan tokens": (reply(completion(usage={"completion_tokens": float("nan")})), (FULL,)),
    "claims true tokens": (reply(completion(usage={"completion_tokens": True})), (FULL,)),
    "claims a huge number": (reply(completion(usage=...)[:-1] + b', "usage": %b}' % (b"9" * 5000)), (GONE, REFUSED)),
    "speaks HTTP/1.0 without a length": (send_raw(b"HTTP/1.0 200 OK\r\n\r\n" + WHOLE), (FULL,)),
    "speaks in chunks": (send_raw(chunked(WHOLE[:9], WHOLE[9:])), (FULL,)),
    "has junk behind its chunks": (send_raw(chunked(WHOLE) + b"junk" * 1000), (FULL,)),
    "has chunks of no length": (send_raw(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + WHOLE), (GONE,)),
    "has a chunk that lies": (send_raw(chunked(WHOLE, end=b"ffffff\r\nx")), (GONE,)),
    "has a length that lies": (send_raw(OK + b"Content-Length: 999999\r\n\r\n" + WHOLE), (GONE,)),
    "has a length below zero": (send_raw(OK + b"Content-Length: -5\r\n\r\n" + WHOLE), (FULL, GONE, REFUSED)),
    "has a hundred thousand headers": (send_raw(OK + b"X: y\r\n" * 100_000 + LENGTH + WHOLE), (GONE,)),
    "has a header of a megabyte": (send_raw(OK + b"X: " + b"y" * (1 << 20) + b"\r\n" + LENGTH + WHOLE), (GONE,)),
    "speaks no HTTP": (send_raw(b"SSH-2.0-OpenSSH_9\r\n"), (GONE,)),
    "speaks HTTP/9": (send_raw(b"HTTP/9.9 200 OK\r\n" + LENGTH + WHOLE), (GONE,)),
    "says continue without end": (drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.001), (GONE,)),
    "answers 204": (send_raw(b"HTTP/1.1 204 No Content\r\n\r\n"), (GONE, REFUSED)),
    "answers 206": (reply(WHOLE, "206 Partial Content"), (GONE, REFUSED)),
    "packs what nobody asked to be packed": (PACKED, (GONE, REFUSED)),
    "nests ten thousand deep": (reply(b"[" * 10_000 + b"]" * 10_000), (GONE, REFUSED)),
    "speaks UTF-16": (reply(WHOLE.decode().encode("utf-16")), (FULL, GONE, REFUSED)),
    "has an error with status 200": (reply(b'{"error": {"message": "no"}}'), (GONE, REFUSED)),
}  # fmt: skip


def trials(folder: Path) -> Iterator[Trial]:
    """Yield a trial for every behaviour, redirects, signals, and kills of runs."""
    os.environ[VARIABLE] = KEY
    for name, (behaviour, allowed) in BEHAVIOURS.items():
        yield Trial(name, partial(_check_behaviour, behaviour, allowed))
    for status in (301, 302, 303, 307, 308):
        yield Trial(f"redirects by {status}", partial(_check_redirect, status))
    for sign in (signal.SIGINT, signal.SIGTERM):
        for command in ("run", "probe"):
            yield Trial(f"{sign.name} of a {command} whose endpoint hangs", partial(_check_end, folder, command, sign))
    yield from _kill_trials(folder)


@cache
def _model() -> LoadedModel:
    return load_model()


def ask_twice(url: str) -> tuple[str, list[Reply], str]:
    """Ask a server two questions; returns the result, the replies, and the messages about them."""
    question = (Message(Role.USER, "What is 2 + 2?"),)
    request = GenerationRequest(_model().chat.prompt(question).ids, 8, (), 0.0, 1.0, 7, question)
    condition = parse_condition({"engine": "endpoint", "base_url": url, "model": "standin", "key": VARIABLE})
    context = EngineContext(_model(), EngineSpec(at_once=2, start=ANSWER, answer=ANSWER), Path("log"), 1)
    try:
        with ENGINES.get("endpoint").start(dict(condition.settings), context) as session:
            replies = session.answer([request] * 2)
    except EngineFailed as error:
        return GONE, [], str(error)
    words = " ".join(r.refused or "" for r in replies)
    return (REFUSED if any(r.refused for r in replies) else FULL), replies, words


def _check_behaviour(behaviour: Behaviour, allowed: tuple[str, ...]) -> None:
    began = time.monotonic()
    with Hostile(behaviour) as server:
        ended, replies, words = ask_twice(server.url)
    seconds = time.monotonic() - began
    expect(ended in allowed, f"the result is {ended} ({words}), not one of {', '.join(allowed)}")
    expect(seconds < ANSWER + SLACK * PATIENCE, f"it took {seconds:.0f} s; the limit is {ANSWER:.0f}")
    expect(words.isprintable() and "\n" not in words, f"control characters in the message: {words!r}")
    expect(KEY not in words + repr(replies), "the key is shown")
    if ended == FULL:
        expect(all(r.finish == "stop" for r in replies), f"{replies}")


def _check_redirect(status: int) -> None:
    """Check that the key is never sent to another host."""
    with Hostile(reply(WHOLE), calm=0) as other:
        to = f"Location: {other.url}/chat/completions"
        with Hostile(reply(b"", f"{status} Moved", to)) as server:
            ended, _, words = ask_twice(server.url)
    expect(ended == GONE, f"the result is {ended} ({words})")
    expect(not other.requests, "the other host was asked")


def _start(folder: Path, words: list[str], out: str) -> subprocess.Popen[bytes]:
    log = (folder / f"{out}.log").open("ab")
    command = [sys.executable, "-m", "kvaudit", *words, "--out", str(folder / out), "--resume"]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _command(folder: Path, command: str, url: str) -> list[str]:
    text = SPEC.format(url) if command == "run" else PROBE
    path = folder / f"{command}.yaml"
    path.write_text(text, encoding="utf-8")
    more = ["--workers", "1", "--threads", "1", "--anyway"] if command == "run" else ["--base-url", url]
    return [command, str(path), *more]


def _check_end(folder: Path, command: str, sign: signal.Signals) -> None:
    """Check that a run ends within seconds of a signal and says how to continue, though its endpoint hangs."""
    out = f"{command}-{sign.name}"
    with Hostile(hang, calm=4 if command == "run" else 0) as server:
        process = _start(folder, _command(folder, command, server.url), out)
        needed = 5 if command == "run" else 1  # the correct answers, and one that hangs
        _wait_until(lambda: sum("chat/completions" in request.path for request in server.requests) >= needed, process)
        process.send_signal(sign)
        try:
            process.wait(30)
        finally:
            process.kill()
    output = (folder / f"{out}.log").read_text(encoding="utf-8")
    expect(process.returncode in (130, 143), f"exit code {process.returncode}: {output[-300:]}")
    expect("continue with: kvaudit" in output, output[-300:])


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds * PATIENCE
    while not condition():
        expect(process.poll() is None and time.monotonic() < until, "the endpoint was never asked enough")
        time.sleep(0.05)


def _reply_slowly(connection: socket.socket, _: Request) -> None:
    time.sleep(0.2)
    send_reply(connection, WHOLE)


def _kill_trials(folder: Path) -> Iterator[Trial]:
    """Yield trials that kill runs at random instants, every other one stopped first."""
    draws = random.Random(66)
    with Hostile(_reply_slowly, calm=0) as server:
        chain = _KillChain(folder, server, draws)
        yield Trial("a run that nobody disturbs", chain.run_undisturbed)
        for number in range(KILLS):
            yield Trial(f"kill {number + 1}", partial(chain.kill, stopped=number % 2 == 1))
        yield Trial("the end of the last run that was killed", chain.finish)


class _KillChain:
    """Runs on one server that are killed and resumed."""

    def __init__(self, folder: Path, server: Hostile, draws: random.Random) -> None:
        self._folder, self._server, self._draws, self._number = folder, server, draws, 0
        self._command = _command(folder, "run", server.url)

    def run_undisturbed(self) -> None:
        process = _start(self._folder, self._command, "undisturbed")
        expect(process.wait(100) == 0, (self._folder / "undisturbed.log").read_text(encoding="utf-8")[-300:])

    def kill(self, *, stopped: bool) -> None:
        """Kill a run once; a run that finishes before is compared, and the next trial begins another."""
        before = len(self._server.requests)
        process = _start(self._folder, self._command, self._out)
        while len(self._server.requests) == before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(self._draws.uniform(0.0, 2.5))
        if process.poll() is not None:
            self._compare(process)
            return
        if stopped:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
        process.kill()
        process.wait(30)
        self._check_no_process_lives(process.pid)

    def finish(self) -> None:
        process = _start(self._folder, self._command, self._out)
        process.wait(100)
        self._compare(process)

    @property
    def _out(self) -> str:
        return f"killed-{self._number}"

    def _compare(self, process: subprocess.Popen[bytes]) -> None:
        output = (self._folder / f"{self._out}.log").read_text(encoding="utf-8")[-300:]
        expect(process.returncode == 0, f"exit code {process.returncode}: {output}")
        run = self._folder / self._out
        check_same_records(run, self._folder / "undisturbed")
        self._number += 1

    @staticmethod
    def _check_no_process_lives(group: int) -> None:
        """Check that no process of the run's group is alive."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        raise Broken("a process of the run lives on")
