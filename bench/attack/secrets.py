"""Does a key or password ever appear in an answer, a message, a record, a log or a published page?

    python -m bench.attack secrets

Takes some minutes; results: docs/results/attack.md. Secrets are in the environment, in addresses and where they do not
belong, and a server returns them. A published card must not name a server or a local path either.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.attack.engines import KEY, VARIABLE, WHOLE, ask_twice
from bench.attack.hostile import Behaviour, Hostile, Request, completion, in_turn, reply, send_reply
from bench.attack.trial import PATIENCE, Trial, expect

PASSWORD = "PASSW0RD-of-the-attack"
URL = "http://127.0.0.1:9/v1"
SECRET_URL = f"http://me:{PASSWORD}@127.0.0.1:9/v1"
QUERY_URL = f"http://127.0.0.1:9/v1?key={PASSWORD}"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in KEY)
ERROR = json.dumps({"error": {"message": f"invalid key {KEY}"}}).encode()


# ways in which a server returns the key
ECHOES: dict[str, Behaviour] = {
    "in its answer": reply(completion(f"your key is {KEY}")),
    "in its answer, escaped": reply(completion("@").replace(b"@", ESCAPED.encode())),
    "as a bearer in its answer": reply(completion(f"Authorization: Bearer {KEY}")),
    "a hundred times": reply(completion(f"{KEY} " * 3)),
    "as the model": reply(completion(model=KEY)),
    "in the model": reply(completion(model=f"standin-{KEY}")),
    "as the end": reply(completion(finish=KEY)),
    "as the id": reply(completion(id=KEY)),
    "in its usage": reply(completion(usage={KEY: KEY})),
    "as its usage": reply(completion(usage=KEY)),
    "as a key of its reply": reply(completion(**{KEY: 1})),
    "as the role": reply(completion(choices=[{"message": {"role": KEY, "content": "4"}, "finish_reason": "stop"}])),
    "in an error of status 400": reply(ERROR, "400 Bad"),
    "in an error of status 401": reply(ERROR, "401 Unauthorized"),
    "in an error of status 403": reply(ERROR, "403 Forbidden"),
    "half of it in an error of status 401": reply(ERROR.replace(KEY.encode(), KEY[:9].encode()), "401 Unauthorized"),
    "in an error of status 429": reply(ERROR, "429 Later"),
    "in an error of status 500": reply(ERROR, "500 Oops"),
    "in an error of no form": reply(KEY.encode(), "500 Oops"),
    "in its reason": reply(WHOLE, f"500 {KEY}"),
    "in its headers": reply(WHOLE, "200 OK", f"X-Key: {KEY}"),
    "in what to wait for": reply(b"{}", "429 Later", f"Retry-After: {KEY}"),
    "where it redirects to": reply(b"", "302 Found", f"Location: http://127.0.0.1:9/{KEY}"),
    "in no JSON": reply(f"<p>{KEY}</p>".encode()),
    "in its status line": lambda connection, _: connection.sendall(f"HTTP/1.1 {KEY}\r\n\r\n".encode()),
}
VLLM = ("check", "embedded", "--engine", "vllm", "--kv", "fp8", "--set")
SERVERS = ("--candidate", f"{URL}#m")
GRID = "evaluate: {{policies: [none, {0}], suites: {{refusal: {{items: 4}}}}, context_tokens: [96]}}"
ENDPOINT = "{{engine: endpoint, base_url: '{0}', model: m, reference: {{base_url: '{0}', model: r}}, {1}}}"
# commands that are given a password, and specs that hold one
COMMANDS: dict[str, tuple[str, ...]] = {
    "a reference with a password": ("check", "embedded", "--reference", f"{SECRET_URL}#m", *SERVERS),
    "a reference with a query": ("check", "embedded", "--reference", f"{QUERY_URL}#m", *SERVERS),
    "a candidate with a password": ("check", "embedded", "--reference", f"{URL}#m", "--candidate", f"{SECRET_URL}#m"),
    "a password as a key": ("check", "embedded", "--reference", f"{URL}#m", *SERVERS, "--set", f"key={PASSWORD}"),
    "a password as a setting": (*VLLM, f"HF_TOKEN={PASSWORD}"),
    "an api_key": (*VLLM, f"api_key={PASSWORD}"),
    "a proxy": (*VLLM, f"HTTP_PROXY={SECRET_URL}"),
    "a token of openvino": ("check", "embedded", "--engine", "openvino", "--kv", "u4", "--set", f"HF_TOKEN={PASSWORD}"),
    "a model with a password": ("check", SECRET_URL, "--engine", "openvino", "--kv", "u4"),
    "a mirror with a password": ("data", "fetch", "strongreject", "--from", SECRET_URL),
    "a mirror with a query": ("data", "fetch", "strongreject", "--from", QUERY_URL),
    "a mirror of another scheme": ("data", "fetch", "strongreject", "--from", f"ftp://me:{PASSWORD}@127.0.0.1/"),
    "a spec that is an address": ("run", SECRET_URL),
    "a probe of an address": ("probe", "probe.yaml", "--base-url", SECRET_URL),
    "a probe of a query": ("probe", "probe.yaml", "--base-url", QUERY_URL),
    "a plan that is an address": ("probe", SECRET_URL, "--base-url", URL),
    "two addresses to compare": ("compare", SECRET_URL, SECRET_URL),
    "an address as a run": ("report", SECRET_URL),
    "a gate of an address": ("gate", SECRET_URL),
    "a card of an address": ("card", SECRET_URL),
    "the key of a server": ("serve", "embedded", "--key-env", PASSWORD),
    "a model to serve": ("serve", SECRET_URL),
    "a spec with a password": ("run", "password.yaml"),
    "a spec with a query": ("run", "query.yaml"),
    "a spec with a key": ("run", "key.yaml"),
    "a spec with a token": ("run", "token.yaml"),
    "a probe with a key": ("probe", "probe-key.yaml", "--base-url", URL),
    "a judge with a password": ("run", "judge.yaml"),
}  # fmt: skip
SPECS = {
    "password": GRID.format(ENDPOINT.format(SECRET_URL, "")),
    "query": GRID.format(ENDPOINT.format(QUERY_URL, "")),
    "key": GRID.format(ENDPOINT.format(URL, f"key: {PASSWORD}")),
    "token": GRID.format(f"{{engine: vllm, kv_cache_dtype: fp8, HF_TOKEN: {PASSWORD}}}"),
    "judge": f"judge: ['rubric-endpoint:base_url={SECRET_URL},model=m']\n" + GRID.format("int8"),
    "probe": "model: m\nprobe: {}\nevaluate: {suites: {refusal: {items: 4}}, context_tokens: [200, 400]}",
    "probe-key": f"model: m\nprobe: {{key: {PASSWORD}}}\nevaluate: {{suites: [refusal], context_tokens: [200, 400]}}",
}
RUN = """
name: echoes
evaluate:
  policies:
  - {{engine: endpoint, base_url: "{0}", model: one, key: {1}, reference: {{base_url: "{0}", model: other, key: {1}}}}}
  - {{engine: endpoint, base_url: "{0}", model: other, key: {1}}}
  suites: {{refusal: {{items: 12}}}}
  context_tokens: [96]
  floor: 0
  pilot: 0
"""


def trials(folder: Path) -> Iterator[Trial]:
    """Yield trials: echoes, passwords on the command line and in specs, and every file of a run whose server echoes."""
    os.environ[VARIABLE] = KEY
    for name, behaviour in ECHOES.items():
        yield Trial(f"the key is returned {name}", partial(_check_echo, behaviour))
    for name, text in SPECS.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}\n", encoding="utf-8")
    for name, words in COMMANDS.items():
        yield Trial(name, partial(_check_password_hidden, folder, words))
    yield Trial("a run whose server returns the key", partial(_run, folder))
    for path in sorted(path for path in (folder / "run").rglob("*") if path.is_file()):
        yield Trial(f"no key in {path.relative_to(folder)}", partial(_check_no_key, path))
    yield Trial("a card names no server and no path", partial(_check_published, folder))


def _check_echo(behaviour: Behaviour) -> None:
    for calm in (0, 1):
        with Hostile(behaviour, calm) as server:
            _, replies, words = ask_twice(server.url)
        output = words + "".join(f"{r.text} {r.refused} {r.finish}" for r in replies)
        expect(KEY not in output and KEY[:9] not in output, f"the key is shown: {output!r}")


def _kvaudit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvaudit", *words]
    cache = {"KVAUDIT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "KVAUDIT_DATA"} | cache
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110 * PATIENCE, check=False, cwd=folder, env=environment
    )


def _check_password_hidden(folder: Path, words: tuple[str, ...]) -> None:
    result = _kvaudit(folder, *words)
    expect(
        PASSWORD not in result.stderr + result.stdout,
        f"the password is shown: {(result.stderr + result.stdout)[-300:]!r}",
    )
    expect("Traceback" not in result.stderr, f"a traceback: {result.stderr[-200:]!r}")
    expect(result.returncode == 2, f"exit code {result.returncode}: {result.stderr[-200:]!r}")
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".yaml"]
    for path in written:
        expect(PASSWORD.encode() not in path.read_bytes(), f"the password is in {path}")


def _echo(connection: Any, request: Request) -> None:
    key = request.head.partition("Authorization: ")[2].partition("\r\n")[0]
    text = key if request.body["model"] == "one" else f"No: {key}"
    send_reply(connection, completion(text, model=f"standin of {key}"))


def _run(folder: Path) -> None:
    refuses = reply(ERROR, "400 Bad")
    with Hostile(in_turn(_echo, _echo, _echo, refuses), calm=0) as server:
        (folder / "echo.yaml").write_text(RUN.format(server.url, VARIABLE), encoding="utf-8")
        run = str(folder / "run")
        result = _kvaudit(folder, "run", "echo.yaml", "--out", run, "--workers", "1", "--anyway")
    expect(result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-300:]}")
    card = folder / "run" / "README.md"
    card.write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    (folder / "run" / "output.txt").write_text(result.stdout + result.stderr, encoding="utf-8")
    for words in (("card", run, "--into", str(card)), ("view", run), ("report", run)):
        result = _kvaudit(folder, *words)
        allowed = (0, 2) if words[0] == "view" else (0,)
        expect(result.returncode in allowed, f"{words[0]}: exit code {result.returncode}: {result.stderr[-300:]}")


def _check_no_key(path: Path) -> None:
    raw = path.read_bytes()
    for spelling in (KEY, quote(KEY), base64.b64encode(KEY.encode()).decode(), ESCAPED):
        expect(spelling.encode() not in raw, f"the key is there as {spelling[:6]}...")


def _check_published(folder: Path) -> None:
    published = [path for path in (folder / "run").rglob("*") if path.name in ("README.md", "bom.json", "card.md")]
    expect(published, "there is no card")
    for path in published:
        text = path.read_text(encoding="utf-8")
        for word in ("127.0.0.1", str(folder)):
            expect(word not in text, f"{word} is in {path.relative_to(folder)}")
