"""Keys and passwords: in the environment, in addresses, in the wrong place, and said back by the server.

None of them stands in an answer, a message, a record, a log, a page or what is published; neither do the address of a
server nor a path of this machine in what is meant to be published.
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

from bench.attack.engines import KEY, VARIABLE, WHOLE, _came_of
from bench.attack.hostile import Act, Heard, Hostile, completion, in_turn, say, says
from bench.attack.trial import PATIENCE, Trial, expect

PASSWORD = "PASSW0RD-of-the-attack"
HERE = "http://127.0.0.1:9/v1"
WITH = f"http://me:{PASSWORD}@127.0.0.1:9/v1"
QUERY = f"http://127.0.0.1:9/v1?key={PASSWORD}"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in KEY)
ERROR = json.dumps({"error": {"message": f"invalid key {KEY}"}}).encode()


# how a server says the key back
ECHOES: dict[str, Act] = {
    "in its answer": says(completion(f"your key is {KEY}")),
    "in its answer, escaped": says(completion("@").replace(b"@", ESCAPED.encode())),
    "as a bearer in its answer": says(completion(f"Authorization: Bearer {KEY}")),
    "a hundred times": says(completion(f"{KEY} " * 3)),
    "as the model": says(completion(model=KEY)),
    "in the model": says(completion(model=f"standin-{KEY}")),
    "as the end": says(completion(finish=KEY)),
    "as the id": says(completion(id=KEY)),
    "in its usage": says(completion(usage={KEY: KEY})),
    "as its usage": says(completion(usage=KEY)),
    "as a key of its reply": says(completion(**{KEY: 1})),
    "as the role": says(completion(choices=[{"message": {"role": KEY, "content": "4"}, "finish_reason": "stop"}])),
    "in an error of status 400": says(ERROR, "400 Bad"),
    "in an error of status 401": says(ERROR, "401 Unauthorized"),
    "in an error of status 403": says(ERROR, "403 Forbidden"),
    "half of it in an error of status 401": says(ERROR.replace(KEY.encode(), KEY[:9].encode()), "401 Unauthorized"),
    "in an error of status 429": says(ERROR, "429 Later"),
    "in an error of status 500": says(ERROR, "500 Oops"),
    "in an error of no form": says(KEY.encode(), "500 Oops"),
    "in its reason": says(WHOLE, f"500 {KEY}"),
    "in its headers": says(WHOLE, "200 OK", f"X-Key: {KEY}"),
    "in what to wait for": says(b"{}", "429 Later", f"Retry-After: {KEY}"),
    "where it redirects to": says(b"", "302 Found", f"Location: http://127.0.0.1:9/{KEY}"),
    "in no JSON": says(f"<p>{KEY}</p>".encode()),
    "in its status line": lambda line, _: line.sendall(f"HTTP/1.1 {KEY}\r\n\r\n".encode()),
}
VLLM = ("check", "embedded", "--engine", "vllm", "--kv", "fp8", "--set")
SERVERS = ("--candidate", f"{HERE}#m")
GRID = "evaluate: {{policies: [none, {0}], suites: {{refusal: {{items: 4}}}}, context_tokens: [96]}}"
ENDPOINT = "{{engine: endpoint, base_url: '{0}', model: m, reference: {{base_url: '{0}', model: r}}, {1}}}"
# commands that are given a password, and specs that hold one
COMMANDS: dict[str, tuple[str, ...]] = {
    "a reference with a password": ("check", "embedded", "--reference", f"{WITH}#m", *SERVERS),
    "a reference with a query": ("check", "embedded", "--reference", f"{QUERY}#m", *SERVERS),
    "a candidate with a password": ("check", "embedded", "--reference", f"{HERE}#m", "--candidate", f"{WITH}#m"),
    "a password as a key": ("check", "embedded", "--reference", f"{HERE}#m", *SERVERS, "--set", f"key={PASSWORD}"),
    "a password as a setting": (*VLLM, f"HF_TOKEN={PASSWORD}"),
    "an api_key": (*VLLM, f"api_key={PASSWORD}"),
    "a proxy": (*VLLM, f"HTTP_PROXY={WITH}"),
    "a token of openvino": ("check", "embedded", "--engine", "openvino", "--kv", "u4", "--set", f"HF_TOKEN={PASSWORD}"),
    "a model with a password": ("check", WITH, "--engine", "openvino", "--kv", "u4"),
    "a mirror with a password": ("data", "fetch", "strongreject", "--from", WITH),
    "a mirror with a query": ("data", "fetch", "strongreject", "--from", QUERY),
    "a mirror of another scheme": ("data", "fetch", "strongreject", "--from", f"ftp://me:{PASSWORD}@127.0.0.1/"),
    "a spec that is an address": ("run", WITH),
    "a probe of an address": ("probe", "probe.yaml", "--base-url", WITH),
    "a probe of a query": ("probe", "probe.yaml", "--base-url", QUERY),
    "a plan that is an address": ("probe", WITH, "--base-url", HERE),
    "two addresses to compare": ("compare", WITH, WITH),
    "an address as a run": ("report", WITH),
    "a gate of an address": ("gate", WITH),
    "a card of an address": ("card", WITH),
    "the key of a server": ("serve", "embedded", "--key-env", PASSWORD),
    "a model to serve": ("serve", WITH),
    "a spec with a password": ("run", "password.yaml"),
    "a spec with a query": ("run", "query.yaml"),
    "a spec with a key": ("run", "key.yaml"),
    "a spec with a token": ("run", "token.yaml"),
    "a probe with a key": ("probe", "probe-key.yaml", "--base-url", HERE),
    "a judge with a password": ("run", "judge.yaml"),
}  # fmt: skip
SPECS = {
    "password": GRID.format(ENDPOINT.format(WITH, "")),
    "query": GRID.format(ENDPOINT.format(QUERY, "")),
    "key": GRID.format(ENDPOINT.format(HERE, f"key: {PASSWORD}")),
    "token": GRID.format(f"{{engine: vllm, kv_cache_dtype: fp8, HF_TOKEN: {PASSWORD}}}"),
    "judge": f"judge: ['rubric-endpoint:base_url={WITH},model=m']\n" + GRID.format("int8"),
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
    """Echoes, passwords on the command line and in specs, and every file of a run whose server echoes."""
    os.environ[VARIABLE] = KEY
    for name, act in ECHOES.items():
        yield Trial(f"the key is said back {name}", partial(_echoed, act))
    for name, text in SPECS.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}\n", encoding="utf-8")
    for name, words in COMMANDS.items():
        yield Trial(name, partial(_hidden, folder, words))
    yield Trial("a run whose server says the key back", partial(_run, folder))
    for path in sorted(path for path in (folder / "run").rglob("*") if path.is_file()):
        yield Trial(f"no key in {path.relative_to(folder)}", partial(_holds_no_key, path))
    yield Trial("a card names no server and no path", partial(_published, folder))


def _echoed(act: Act) -> None:
    for calm in (0, 1):
        with Hostile(act, calm) as server:
            _, replies, words = _came_of(server.url)
        said = words + "".join(f"{reply.text} {reply.refused} {reply.finish}" for reply in replies)
        expect(KEY not in said and KEY[:9] not in said, f"the key is shown: {said!r}")


def _kvaudit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvaudit", *words]
    cache = {"KVAUDIT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "KVAUDIT_DATA"} | cache
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110 * PATIENCE, check=False, cwd=folder, env=environment
    )


def _hidden(folder: Path, words: tuple[str, ...]) -> None:
    done = _kvaudit(folder, *words)
    expect(PASSWORD not in done.stderr + done.stdout, f"it is shown: {(done.stderr + done.stdout)[-300:]!r}")
    expect("Traceback" not in done.stderr, f"a traceback: {done.stderr[-200:]!r}")
    expect(done.returncode == 2, f"exit code {done.returncode}: {done.stderr[-200:]!r}")
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".yaml"]
    for path in written:
        expect(PASSWORD.encode() not in path.read_bytes(), f"it stands in {path}")


def _echo(line: Any, heard: Heard) -> None:
    own = heard.head.partition("Authorization: ")[2].partition("\r\n")[0]
    said = own if heard.body["model"] == "one" else f"No: {own}"
    say(line, completion(said, model=f"standin of {own}"))


def _run(folder: Path) -> None:
    refuses = says(ERROR, "400 Bad")
    with Hostile(in_turn(_echo, _echo, _echo, refuses), calm=0) as server:
        (folder / "echo.yaml").write_text(RUN.format(server.url, VARIABLE), encoding="utf-8")
        run = str(folder / "run")
        done = _kvaudit(folder, "run", "echo.yaml", "--out", run, "--workers", "1", "--anyway")
    expect(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-300:]}")
    card = folder / "run" / "README.md"
    card.write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    (folder / "run" / "said.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    for words in (("card", run, "--into", str(card)), ("view", run), ("report", run)):
        again = _kvaudit(folder, *words)
        expect(
            again.returncode in (0, 2 * (words[0] == "view")),
            f"{words[0]}: exit code {again.returncode}: {again.stderr[-300:]}",
        )


def _holds_no_key(path: Path) -> None:
    raw = path.read_bytes()
    for spelled in (KEY, quote(KEY), base64.b64encode(KEY.encode()).decode(), ESCAPED):
        expect(spelled.encode() not in raw, f"the key stands there as {spelled[:6]}...")


def _published(folder: Path) -> None:
    published = [path for path in (folder / "run").rglob("*") if path.name in ("README.md", "bom.json", "card.md")]
    expect(published, "nothing was published")
    for path in published:
        text = path.read_text(encoding="utf-8")
        for word in ("127.0.0.1", str(folder)):
            expect(word not in text, f"{word} stands in {path.relative_to(folder)}")
