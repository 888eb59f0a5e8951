"""Every parser of the project under damaged and hostile input: one target each, mutants derived from whole examples.

    python -m fuzz 50000            from the folder tests; prints cases, tracebacks, hangs and peak memory per target

A target may return or raise an AuditError of one line; anything else is a finding, and so is more than ten seconds.
A parser that is new adds a target here: its whole examples, and what a command does with such a file first. A reader of
result files is found by itself.
"""

from __future__ import annotations

import json
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

from reports_synthetic import Design, build, policy
from test_gguf_header import header as gguf_header

from kvaudit.core.errors import AuditError

SECONDS = 10  # of this process: beyond them an input hangs
REPORTS = 40  # a mutant that reports a whole run stands for so many others
ROOT = Path(__file__).parent.parent
LOGS = ROOT / "tests" / "fixtures" / "logs"
WORDS = (
    *("null", "true", "-1", "0", "1e-320", "1e999", "NaN", "2026-13-45", "9" * 5000, "0x" + "f" * 3000, "1" * 40),
    *("[]", "{}", '""', "&a [*a]", "*a", "!!bool x", "!!timestamp x", "!!python/object:os.system x", "? ", "<<: "),
    *(
        "[" * 3000,
        "{" * 3000,
        '{"a":' * 3000,
        "'",
        '"',
        "\\ud800",
        "\\u0000",
        "\x00",
        "\x1b]0;x\x07",
        "\u202e",
        "\ufeff",
    ),
    *(
        "none",
        "snapkv:budget=96",
        "+",
        "|",
        "@",
        ",pin=system",
        "budget=-1",
        "../../../etc/passwd",
        "=cmd|x",
        ",",
        "\n",
    ),
)


# --- mutants --------------------------------------------------------------------------------------------------------


def mutant(whole: bytes, draw: random.Random) -> bytes:
    """One to four damages to a whole example."""
    body = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(_DAMAGES)(body, draw)
    return bytes(body)


def _place(body: bytearray, draw: random.Random) -> int:
    return draw.randrange(len(body) + 1)


def _cut(body: bytearray, draw: random.Random) -> None:
    del body[_place(body, draw) :]


def _lose(body: bytearray, draw: random.Random) -> None:
    start = _place(body, draw)
    del body[start : start + draw.choice((1, 2, 8, 100))]


def _flip(body: bytearray, draw: random.Random) -> None:
    if body:
        body[draw.randrange(len(body))] = draw.randrange(256)


def _word(body: bytearray, draw: random.Random) -> None:
    start = _place(body, draw)
    body[start:start] = draw.choice(WORDS).encode("utf-8")


def _repeat(body: bytearray, draw: random.Random) -> None:
    start = _place(body, draw)
    piece = bytes(body[start : start + draw.choice((4, 40, 400))])
    body[start:start] = piece * draw.choice((1, 2, 30))


def _largest(body: bytearray, draw: random.Random) -> None:
    """The bytes of a count or an offset, as large as they go."""
    start, size = _place(body, draw), draw.choice((2, 4, 8))
    body[start : start + size] = draw.choice((b"\xff", b"\x7f", b"\x00")) * size


def _value(body: bytearray, draw: random.Random) -> None:
    """Another value where a JSON or YAML value stands."""
    starts = [n + 1 for n, byte in enumerate(body) if byte in b":,["]
    if starts:
        start = draw.choice(starts)
        end = next((n for n in range(start, len(body)) if body[n] in b",]}\n"), len(body))
        body[start:end] = b" " + draw.choice(WORDS).encode("utf-8")


_DAMAGES = (_cut, _lose, _flip, _flip, _word, _word, _repeat, _largest, _value, _value, _value, _value)


# --- targets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A parser. ``act`` reads the file ``name`` of a folder that is a copy of ``around``, with its mutant in it."""

    wholes: Sequence[bytes]
    name: str
    act: Callable[[Path], object]
    around: Path | None = None


@cache
def targets(home: Path) -> dict[str, Target]:
    """Every parser by name; ``home`` is an empty folder for the examples."""
    examples = [path.read_bytes() for path in (ROOT / "examples").glob("*.yaml")]
    run = build(home / "run", Design(**SMALL))  # type: ignore[arg-type]
    unit = sorted((run / "records").glob("naive*.jsonl"))[0]
    found = {
        "spec": Target([raw for raw in examples if b"\nevaluate:" in raw], "s.yaml", _spec),
        "policy": Target([text.encode() for text in POLICY_TEXTS], "p", _policy),
        "gate file": Target([GATE], "g.yaml", partial(_gate, run)),
        "waivers": Target([WAIVERS], "w.yaml", partial(_waivers, run)),
        "rollouts": Target([json.dumps(ROLLOUTS).encode()], "r.json", _rollouts),
        "ledger": Target([_ledger(home)], "l.safetensors", _rollouts),
        "gguf": Target([gguf_header()], "m.gguf", _gguf),
        "public rows": Target([b'{"id": "a", "question": "b", "answer": "#### 3"}\n'], "x.jsonl", _rows),
        "public table": Target([b'# version=1\nprompt,label\n"a, ""b""\nc",safe\nd,unsafe\n'], "x.csv", _table),
        "completion": Target([COMPLETION], "c.json", _completion),
        "calls of a probe": Target([CALLS], "calls.jsonl", _calls),
        "provenance": Target([(run / "provenance.json").read_bytes()], "provenance.json", _report, run),
        "telemetry": Target([next(run.rglob("telemetry.jsonl")).read_bytes()], _telemetry_of(run), _report, run),
        "record in a run": Target([unit.read_bytes()], f"records/{unit.name}", _report, _unsealed(home, run, unit)),
    }
    return found | _logs(home) | _labels(home, run)


SMALL: dict[str, Any] = dict(
    name="fuzz", arms=("dense", "naive"), seeds=(11,), policies=("none", policy("snapkv", 96)),
    suites=("math",), clusters=6, items=12, telemetry=3,
)  # fmt: skip
POLICY_TEXTS = (
    "snapkv:budget=96,window=8+kivi:bits=4",
    "streaming:budget=12,sink=2,pin=system/tool|none",
    "fp8",
    "rkv",
)
GATE = b"format: 1\nprofile: pr\nmargins: {math: 5}\nestimands: [E1, E2]\nprimary: [none]\n"
WAIVERS = (
    b"waivers:\n- who: Ada\n  why: known\n  expires: 2026-12-31\n  status: [FAIL]\n  cells: {suite: math, arm: naive}\n"
)
COMPLETION = (
    b'{"model": "m", "choices": [{"message": {"role": "assistant", "content": "I must refuse."}, "finish_reason": '
    b'"stop"}], "usage": {"prompt_tokens": 90, "completion_tokens": 4}}'
)
CALLS = (
    b'{"call": "a", "text": "yes", "finish": "stop", "prompt_tokens": 9, "new_tokens": null, "model": "m", '
    b'"seconds": 0.5}\n{"call": "b", "failed": "status 500"}\n'
    b'{"question": "c", "answer": {"text": "no", "finish": "length", "prompt_tokens": null, "new_tokens": 3, "model": '
    b'"m", "seconds": 1.5, "thought": "hm", "said_in": ""}, "sha256": "3321a01092992f8a"}\n'
)
ROLLOUTS: dict[str, Any] = {
    "format": "kvaudit.rollouts",
    "version": 1,
    "layers": 2,
    "kv_heads": 1,
    "policy": "streaming:budget=3,sink=1",
    "rollouts": [
        {
            "ids": [5, 6, 7, 8, 9, 10],
            "prompt_length": 4,
            "sampled": [[4, 6]],
            "logprobs": [-0.5, -1.25],
            "events": [{"query": 4, "kept": [[[0, 2, 3]], [[0, 1, 3]]]}, {"query": 5, "kept": [[[0, 3, 4]], None]}],
        }
    ],
}


def _spec(path: Path) -> object:
    from kvaudit.audit.runs.names import NAMES
    from kvaudit.core.spec import load_spec

    return load_spec(path, NAMES).sha256


def _policy(path: Path) -> object:
    from kvaudit.audit.policies import parse_policy

    parsed = parse_policy(path.read_text(encoding="utf-8", errors="replace"))
    assert parse_policy(parsed.canonical) == parsed
    return parsed.hash


@cache
def _data(run: Path) -> Any:
    from kvaudit.reports.records.load import load_run

    return load_run(run)


def _gate(run: Path, path: Path) -> object:
    from kvaudit.reports.verdict.rules import GateOverrides, declared_rules, load_gate_file

    return declared_rules(_data(run), GateOverrides(gate=load_gate_file(path)))


def _waivers(run: Path, path: Path) -> object:
    from kvaudit.reports.verdict.rules import GateOverrides, declared_rules
    from kvaudit.reports.verdict.verdict import parse_waivers, read_waivers

    return parse_waivers(read_waivers(path), declared_rules(_data(run), GateOverrides())[0], date(2026, 6, 1))


def _log(path: Path) -> object:
    from kvaudit.reports.records.readers.base import Request, read_log

    return read_log(path, Request()).rows.to_csv().encode("utf-8")


def _rollouts(path: Path) -> object:
    from transformers import LlamaConfig

    from kvaudit.audit.cache.layers import layer_plans
    from kvaudit.audit.replay.interchange import read_rollouts
    from kvaudit.audit.replay.rollout_checks import check_replayable, eviction_breach

    recorded = read_rollouts(path)
    layers, heads, _ = recorded.rollouts[0].evicted_at.shape if recorded.rollouts else (2, 1, 0)
    config = LlamaConfig(
        num_hidden_layers=layers, num_key_value_heads=heads, num_attention_heads=heads, vocab_size=512,
        hidden_size=8 * heads,
    )  # fmt: skip
    check_replayable(recorded, config, 512)
    if recorded.policy is None:
        return None
    plans = layer_plans(config, recorded.policy)
    return [eviction_breach(rollout, plans) for rollout in recorded.rollouts]


def _gguf(path: Path) -> object:
    from kvaudit.audit.sampling.weights import check_gguf

    return check_gguf(path)


def _rows(path: Path) -> object:
    from kvaudit.suites.sources import _objects

    return _objects(path, path.read_bytes())


def _table(path: Path) -> object:
    from kvaudit.suites.sources import _table

    return _table(path, path.read_bytes())


def _completion(path: Path) -> object:
    from kvaudit.audit.sampling.chat_calls import SentRequest, answer
    from kvaudit.core.endpoint import Endpoint, HttpReply, Unanswered

    line = Endpoint("http://endpoint/v1").client("fuzz", lambda *_: HttpReply(200, path.read_bytes()))
    try:
        return answer(line.ask({}), SentRequest([{"role": "user", "content": "x"}] * 2, 90, exact=True, limit=12), 1.0)
    except Unanswered as why:
        return str(why)


def _calls(path: Path) -> object:
    from kvaudit.audit.runs.endpoint_probe import Calls
    from kvaudit.audit.sampling.chat_calls import Answer

    return [Answer(**kept) for kept in Calls(path, lambda _: None).stored.values()]


def _report(path: Path) -> object:
    """The run folder around a damaged file, read, decided and written in every format."""
    from kvaudit.reports.page.formats import formats
    from kvaudit.reports.page.run_page import page_of
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run, with_report_sections

    run = next(folder for folder in path.parents if (folder / "spec.yaml").exists())
    data = load_run(run)
    page = page_of(with_report_sections(data, decide_run(data)))
    return [render(page).encode("utf-8") for render in formats().values()]


def _unsealed(home: Path, run: Path, unit: Path) -> Path:
    """A copy of a run in which a unit is not sealed, so that damage to it is read and not refused."""
    copy = home / "unsealed"
    shutil.copytree(run, copy)
    (copy / "records" / unit.name.replace(".jsonl", ".done.json")).unlink()
    return copy


def _telemetry_of(run: Path) -> str:
    return str(next(run.rglob("telemetry.jsonl")).relative_to(run))


def _logs(home: Path) -> dict[str, Target]:
    """Every reader of result files, with the two smallest logs that it recognises."""
    from kvaudit.reports.records.readers.base import READERS

    files = [_small_eval(home), *(path for path in sorted(LOGS.rglob("*")) if path.is_file())]
    files.sort(key=lambda path: path.stat().st_size)
    found = {}
    for name, reader in READERS.all().items():
        own = [path for path in files if reader().recognises(path)][:2]
        found[f"{name} log"] = Target([_head(path) for path in own], f"log{own[0].suffix}", _log)
    return found


def _head(path: Path) -> bytes:
    """The first lines of a log of lines, or all of a zip or of one JSON value."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(lines if path.suffix == ".json" or zipfile.is_zipfile(path) else lines[:4])


def _small_eval(home: Path) -> Path:
    path = home / "small.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"status": "success", "eval": {"task": "t"}}))
        for name in "ab":
            sample = {"id": name, "epoch": 1, "scores": {"s": {"value": "C"}}}
            file.writestr(f"samples/{name}.json", json.dumps(sample), compress_type=zipfile.ZIP_DEFLATED)
    return path


def _ledger(home: Path) -> bytes:
    from test_kv_ledger import POLICY, rollout

    from kvaudit.audit.cache.ledger import save_ledgers

    save_ledgers(home / "l.safetensors", [rollout(80, 2, 1)], POLICY)
    return (home / "l.safetensors").read_bytes()


def _labels(home: Path, run: Path) -> dict[str, Target]:
    """The sheet that people label and its key; a pin."""
    from kvaudit.reports.verdict.label_sheet import (
        SheetCell,
        SheetKey,
        SheetPair,
        ShownAnswer,
        key_path,
        read_key,
        read_labels,
        render_key,
        render_sheet,
        text_hash,
    )
    from kvaudit.reports.verdict.pin import Pin, PinnedCheckpoint

    shown = {name: ShownAnswer("math", f"[user] {name}", "4") for name in ("r1", "r2")}
    pair = SheetPair("i", 0, 11, 11, "r1", "r2")
    hashes = {name: text_hash(row) for name, row in shown.items()}
    key = SheetKey("fuzz", "d", 0, 1, hashes, (SheetCell("alike", "naive", "none", "math", 192, (pair,)),))
    folder = home / "sheet"
    folder.mkdir()
    sheet = render_sheet(shown).replace(',""\r', ',"1"\r').encode()
    (folder / "s.csv").write_bytes(sheet)
    key_path(folder / "s.csv").write_text(render_key(key))
    pin = Pin((PinnedCheckpoint("dense", 11, "a" * 64, "b" * 64, "none"),), "2026-01-01").to_json()

    def labels(path: Path) -> object:
        return read_labels(path.with_name("s.csv"), read_key(path.with_name("s.csv")))

    def load_pin(path: Path) -> object:
        from kvaudit.reports.verdict.pin import load_pin as load

        return load(path)

    return {
        "sheet": Target([sheet], "s.csv", labels, folder),
        "key": Target([render_key(key).encode()], "s.key.json", labels, folder),
        "pin": Target([pin.encode()], "pin.json", load_pin),
    }


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What came of a target's cases."""

    cases: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0


class Hang(BaseException):
    """An input that takes too long; no handler of the project's catches it."""


@contextmanager
def _deadline() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(name: str, target: Target, cases: int, folder: Path, *, warm: bool = True) -> Findings:
    """So many mutants of a target, the same ones for the same number; ``warm`` reads the whole example first."""
    found = Findings()
    home = folder / "case"
    if target.around is not None:
        shutil.copytree(target.around, home)
    path = home / target.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(target.wholes[0])
    if warm:
        target.act(path)  # a whole example is read, and what is imported on the way takes no case's time
    for number in range(cases):
        draw = random.Random(f"{name} {number}")
        path.write_bytes(mutant(draw.choice(target.wholes), draw))
        started = time.process_time()
        _try(target, path, found, f"{name} {number}")
        found.slowest = max(found.slowest, time.process_time() - started)
        found.cases += 1
    shutil.rmtree(home)
    return found


def _try(target: Target, path: Path, found: Findings, case: str) -> None:
    try:
        with _deadline():
            target.act(path)
    except AuditError as error:
        found.refused += 1
        if not str(error).strip():
            found.wrong.append(f"{case}: an error without a word")
    except Hang:
        found.wrong.append(f"{case}: more than {SECONDS} s")
    except BaseException as error:  # whatever else comes is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.wrong.append(f"{case}: {type(error).__name__}: {str(error)[:100]!r} at {place.filename}:{place.lineno}")


def fuzz_all(cases: int) -> dict[str, Findings]:
    """At least ``cases`` mutants, shared by the targets; those that report a whole run get fewer."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home = Path(name) / "home"
        home.mkdir()
        every = targets(home)
        heavy = [name for name, target in every.items() if target.act is _report]
        share = cases / (len(every) - len(heavy) + len(heavy) / REPORTS)
        found, reported = {}, set[Path | None]()
        for parser, target in every.items():
            count = max(1, math.ceil(share / REPORTS if parser in heavy else share))
            again = parser in heavy and target.around in reported  # the whole run was reported for another target
            reported.add(target.around)
            found[parser] = fuzz(parser, target, count, Path(tempfile.mkdtemp()), warm=not again)
        return found


def main() -> int:
    """Print a table and every finding; returns 1 where there is one."""
    found = fuzz_all(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    print("| parser | cases | refused | findings | slowest s |\n|---|---|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {one.cases} | {one.refused} | {len(one.wrong)} | {one.slowest:.2f} |")
    wrong = [text for one in found.values() for text in one.wrong]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"\n{sum(one.cases for one in found.values())} cases, {len(wrong)} findings, peak memory {peak / 1e9:.2f} GB")
    print(*wrong[:200], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
