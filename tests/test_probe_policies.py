"""What a probe finds of our own server: a policy that ruins and one that does not, both hidden, and none at all.

The figures of docs/results/probe.md: pytest -m slow tests/test_probe_policies.py -s
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from endpoint_world import through
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.serving.app import application
from kvaudit.audit.serving.engine import SamplingEngine
from kvaudit.core import endpoint
from kvaudit.core.endpoint import HttpReply, Transport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Run = Callable[[str, Path], str]
PLAN = """
name: quarter
model: {model}
evaluate:
  suites: {{refusal: {{items: {items}}}}}
  context_tokens: [160, 384]
  samples: {samples}
  temperature: {temperature}
probe: {{tokenizer: embedded, tool_role: tool, at_once: 64, timeout: 3600, seeded: {seeded}}}
"""
HIDDEN = {"none": "none", "harsh": "streaming:budget=192,sink=4", "mild": "int8"}
DRAWS, AT_ONCE = 20, 14  # three requests give all 40 answers to a question


class Pool:
    """A wire that draws several answers to a question in one request and hands them out one by one."""

    def __init__(self, send: Transport) -> None:
        self._send, self._door = send, threading.Lock()
        self._drawn: dict[bytes, list[HttpReply]] = {}

    def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpReply:
        with self._door:
            left = self._drawn.setdefault(body, [])
        if not left:
            whole = self._send(url, json.dumps({**json.loads(body), "n": AT_ONCE}).encode(), headers, timeout)
            left += [_alone(json.loads(whole.body), choice) for choice in json.loads(whole.body)["choices"]]
        return left.pop()


def _alone(whole: dict[str, Any], choice: dict[str, Any]) -> HttpReply:
    return HttpReply(200, json.dumps({**whole, "choices": [choice], "usage": None}).encode())


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Probes an endpoint whose policy its name does not tell, and returns what is printed."""
    engine = SamplingEngine({"embedded": load_model()}, {name: f"embedded@{policy}" for name, policy in HIDDEN.items()})
    monkeypatch.setattr("kvaudit.core.endpoint.over_http", through(application(engine)))
    monkeypatch.setattr("os.fsync", lambda _: None)

    def run(text: str, out: Path) -> str:
        plan = tmp_path / "plan.yaml"
        plan.write_text(text)
        done = CliRunner().invoke(app, ["probe", str(plan), "--base-url", "http://endpoint/v1", "--out", str(out)])
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def compared(before: Path, now: Path) -> tuple[int, str]:
    """Exit code and verdict of two probes."""
    done = CliRunner().invoke(app, ["compare", str(before), str(now)])
    return done.exit_code, next(line for line in done.stdout.splitlines() if line.startswith("verdict:"))


def test_a_hidden_policy_that_ruins_fails_and_int8_does_not(probe: Run, tmp_path: Path) -> None:
    for name in HIDDEN:
        probe(PLAN.format(model=name, items=216, samples=1, temperature=0, seeded="true"), tmp_path / name)
    found = {name: compared(tmp_path / "none", tmp_path / name) for name in ("harsh", "mild")}
    shown = CliRunner().invoke(app, ["probe", str(tmp_path / "harsh"), "--baseline", str(tmp_path / "none")]).stdout
    print(found, shown)
    assert found["harsh"][0] == 3
    assert found["mild"][0] != 3
    assert "refusal at 384 loses with it more than at the baseline" in shown


def test_an_endpoint_against_itself_fails_no_oftener_than_its_level(
    probe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvaudit.core.endpoint.over_http", Pool(endpoint.over_http))
    monkeypatch.setattr("kvaudit.audit.commands.probe._show", lambda *_: None)
    plan = PLAN.format(model="none", items=72, samples=1, temperature=1.0, seeded="false")
    found = []
    for draw in range(DRAWS):
        pair = [tmp_path / f"{draw}-{side}" for side in ("before", "now")]
        for out in pair:
            probe(plan, out)
        found.append(compared(*pair))
        print(draw, *found[-1], flush=True)
    # of 20 draws at 5 % one fails; more than three come up once in 60
    assert sum(code == 3 for code, _ in found) <= 3
