"""The command line end to end on a tiny random model, and every kind of bad input: one line, exit 2."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.commands.base import end_on_sigterm, user_errors
from kvaudit.audit.commands.run import RunOptions, plan_workers
from kvaudit.audit.policies import POLICIES
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.spec import load_spec

SPEC = """\
name: tiny
model: {model}
train:
  arms: [dense, smd]
  seeds: [1]
  policy: "streaming:budget=64,sink=4,window=8"
  suites: [math]
  context_tokens: 400
  steps: 2
  prompts_per_step: 1
  group: 2
  ledger_every: 1
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{math: {{items: 2, max_new_tokens: 8}}}}
  context_tokens: [400]
"""


@pytest.fixture
def spec(tmp_path: Path, tiny_folder: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(model=tiny_folder))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A whole run; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "spec.yaml").write_text(SPEC.format(model=tiny_folder))
    code, out, err = kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, out + err
    (folder / "out.txt").write_text(out)
    return folder


def kvaudit(*words: object) -> tuple[int, str, str]:
    """A command; what the runs of these tests ask is too little to decide anything, and their models can do nothing."""
    anyway = ["--anyway"] if words[0] == "run" and "--join" not in words else []
    typed = [*(str(word) for word in words), *anyway]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kvaudit", *typed])
        result = CliRunner().invoke(app, typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = [line for line in result.stderr.splitlines(keepends=True) if not line.startswith("cannot pass: ")]
    return result.exit_code, result.stdout, "".join(said)


def refused(*words: object) -> str:
    """The one line of an error that exits with 2."""
    code, out, err = kvaudit(*words)
    lines = err.strip().splitlines()
    assert (code, len(lines)) == (2, 1), (code, out, err)
    assert lines[0].startswith("error: ")
    return lines[0]


def refused_model(model: Path, policy: str = "none") -> str:
    """The one line by which a run of this model is refused."""
    suites = {"math": {"items": 2, "max_new_tokens": 8}}
    spec = {
        "name": "a",
        "model": str(model),
        "evaluate": {"policies": list(dict.fromkeys(("none", policy))), "suites": suites},
    }
    spec["evaluate"]["context_tokens"] = [400]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(json.dumps(spec))
        return refused("run", path, "--out", Path(folder) / "run", "--threads", 1)


def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "copy")
    return tmp_path / "copy"


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_leaves_checkpoints_records_provenance_and_a_report(finished: Path) -> None:
    run = finished / "run"
    out = (finished / "out.txt").read_text()
    assert [line.split(":")[0] for line in out.splitlines()[2:4]] == ["MARGINS not declared", "model"]
    assert "(exit " in out
    assert f"report: {run / 'report' / 'report.html'}, card: " in out
    assert (run / "report" / "report.html").stat().st_size > 1000
    provenance = json.loads((run / "provenance.json").read_text())
    assert set(provenance["checkpoints"]) == {"dense/1", "smd/1"}
    assert provenance["reference_sha256"] == {"1": provenance["checkpoints"]["dense/1"]}
    assert provenance["suite_kinds"] == {"math": "capability"}
    assert provenance["finished"] >= provenance["started"]
    assert len(list((run / "records").glob("*.jsonl"))) == len(list((run / "records").glob("*.done.json"))) == 4
    assert not list(run.rglob("*.lock")) or all(path.name.startswith(".") for path in run.rglob("*.lock"))


def test_a_finished_run_resumes_to_the_same_records(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    before = {path.name: path.read_bytes() for path in (run / "records").iterdir()}
    code, _, err = kvaudit("run", finished / "spec.yaml", "--out", run, "--resume", "--threads", 1)
    assert code == 0, err
    assert {path.name: path.read_bytes() for path in (run / "records").iterdir()} == before


def test_a_lost_unit_is_written_again_with_the_same_answers(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    unit = next((run / "records").glob("smd-*.jsonl"))
    before = [json.loads(line) | {"seconds": 0} for line in unit.read_text().splitlines()]
    unit.unlink()
    unit.with_name(unit.name.replace(".jsonl", ".done.json")).unlink()
    code, _, err = kvaudit("run", finished / "spec.yaml", "--out", run, "--resume", "--threads", 1)
    assert code == 0, err
    assert [json.loads(line) | {"seconds": 0} for line in unit.read_text().splitlines()] == before


def test_train_then_evaluate_then_report_is_a_run(spec: Path, tmp_path: Path, finished: Path) -> None:
    out = tmp_path / "parts"
    assert kvaudit("run", "--only", "train", spec, "--out", out, "--threads", 1)[0] == 0
    assert kvaudit("run", "--only", "evaluate", spec, "--out", out, "--threads", 1)[0] == 0
    assert kvaudit("report", out)[0] == 0
    one, other = (json.loads((run / "provenance.json").read_text())["checkpoints"] for run in (out, finished / "run"))
    assert one == other


def test_gate_exits_by_verdict(finished: Path) -> None:
    code, out, _ = kvaudit("gate", finished / "run")
    status = out.splitlines()[0].partition(" (exit ")[0]
    assert code == {"PASS": 0, "FAIL": 3, "INCONCLUSIVE": 4, "INVALID": 5}[status]
    assert code in (4, 5)  # two items decide nothing


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("policies: [none", "polices: [none", "unknown key 'polices' in evaluate. Did you mean 'policies'?"),
        ("arms: [dense, smd]", "arms: [dense, smt]", "unknown arm 'smt'. Did you mean 'smd'?"),
        ("{math:", "{meth:", "unknown suite 'meth'. Did you mean 'math'?"),
        ('"streaming:', '"streamin:', "unknown policy or engine 'streamin'. Did you mean 'streaming'?"),
        ("budget=64", "budget=8", "budget=8 is below sink + window"),
        ("context_tokens: 400", "context_tokens: 9000", "train.context_tokens 9000 and an answer of suite math"),
        ("name: tiny", "name: tiny\nmodel2: x", "unknown key 'model2'. Did you mean 'model'?"),
        ("model: /", "model: ${KVAUDIT_UNSET}/", "the environment variable KVAUDIT_UNSET is not set"),
    ],
)
def test_a_wrong_spec_is_refused(spec: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    text = spec.read_text()
    assert old in text
    spec.write_text(text.replace(old, new, 1))
    assert message in refused("run", spec, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context_tokens: [400]", "context_tokens: [9000]", "evaluate.context_tokens 9000 and an answer of suite math"),
        ("context_tokens: [400]", "context_tokens: [400, 20]", "evaluate.suites math: context_tokens 20 is too short"),
        ("context_tokens: 400", "context_tokens: 20", "train.suites math: context_tokens 20 is too short"),
        ("model: /", "model: /nowhere/", "is no folder, .gguf file or hub id"),
    ],
)
def test_a_mistake_found_late_leaves_the_folder_to_the_mended_spec(
    spec: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    spec.write_text(spec.read_text().replace(old, new, 1))
    for only in ([], ["--only", "train"], ["--only", "evaluate"]):
        assert message in refused("run", *only, spec, "--out", tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_missing_spec_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused("run", tmp_path / "none.yaml", "--out", tmp_path / "run")


def test_a_hub_model_without_a_network_is_refused(spec: Path, tmp_path: Path) -> None:
    spec.write_text(SPEC.format(model="someone/some-model"))
    assert "neither a local folder nor reachable on the hub" in refused("run", spec, "--out", tmp_path / "run")


def edited_config(folder: Path, tiny_folder: Path, **values: Any) -> Path:
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_a_model_without_full_attention_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    values = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    folder = edited_config(tmp_path / "sliding", tiny_folder, **values)
    assert "no full-attention layer to compress (its layers: sliding_attention)" in refused_model(folder)


def test_a_model_of_pickles_or_of_nothing_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = edited_config(tmp_path / "pickled", tiny_folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights are not loaded" in refused_model(folder)
    assert "holds no config.json" in refused_model(tmp_path)
    assert "does not exist" in refused_model(tmp_path / "x.gguf")


def test_cut_weights_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = edited_config(tmp_path / "cut", tiny_folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refused_model(folder)


def test_a_changed_checkpoint_is_refused(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    damaged(run / "checkpoints" / "smd" / "seed-1" / "model.safetensors")
    for words in commands(finished, run):
        message = refused(*words)
        assert "seed-1/model.safetensors' has sha256" in message
        assert "its checkpoint's provenance says" in message


@pytest.mark.parametrize("name", ["ledgers/step-1.safetensors", "model.safetensors", "telemetry.jsonl"])
def test_a_lost_file_of_a_finished_checkpoint_is_refused(finished: Path, tmp_path: Path, name: str) -> None:
    run = copied(finished, tmp_path)
    (run / "checkpoints" / "smd" / "seed-1" / name).unlink()
    for words in commands(finished, run):
        assert f"{name}' is missing" in refused(*words)


def test_a_changed_ledger_is_refused(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    damaged(run / "checkpoints" / "smd" / "seed-1" / "ledgers" / "step-1.safetensors")
    for words in commands(finished, run):
        assert "ledgers/step-1.safetensors' has sha256" in refused(*words)


def commands(finished: Path, run: Path) -> list[tuple[object, ...]]:
    """Every command that goes on with a run or reads it."""
    spec = finished / "spec.yaml"
    goes_on = [("run", spec, "--out", run, "--resume"), ("run", "--only", "train", spec, "--out", run, "--resume")]
    sheet = run.parent / "sheet.csv"
    reads = [("report", run), ("gate", run), ("compare", run, run)]
    reads += [("grade", "judge", run, "--out", run.parent / "again")]
    reads += [("grade", "adjudicate", run, "--out", sheet), ("grade", "adjudicate", run, "--read", sheet)]
    return [*goes_on, ("run", "--only", "evaluate", spec, "--out", run), ("run", "--join", run), *reads]


def test_a_missing_checkpoint_is_refused(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    shutil.rmtree(run / "checkpoints" / "smd")
    for seal in (run / "records").glob("smd-*.done.json"):
        seal.unlink()
    message = refused("run", "--only", "evaluate", finished / "spec.yaml", "--out", run)
    assert "is missing or unfinished; train it first" in message


def test_a_changed_record_is_refused(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    damaged(next((run / "records").glob("*.jsonl")))
    for command in ("report", "gate"):
        assert "its seal says" in refused(command, run)


def test_a_path_that_cannot_be_a_folder_is_refused(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be a folder" in refused("run", spec, "--out", tmp_path / "file" / "run")
    assert "cannot be a path (File name too long)" in refused("run", spec, "--out", tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("threads", "workers", "begun", "shared"),
    [
        (None, 3, None, (3, 1)),
        (None, 3, 1, (3, 1)),
        (None, 3, 2, (1, 2)),
        (None, None, 2, (1, 2)),
        (None, None, None, (1, None)),
        (4, 3, 2, (1, 4)),
        (1, None, 2, (1, 1)),
        (1, 2, 2, (2, 1)),
    ],
)
def test_a_run_keeps_the_threads_it_began_with(
    spec: Path, threads: int | None, workers: int | None, begun: int | None, shared: tuple[int, int | None]
) -> None:
    assert plan_workers(RunOptions(threads=threads, workers=workers), load_spec(spec, NAMES), begun) == shared


def test_a_run_remembers_what_it_began_with_when_it_goes_on_with_other_threads(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    words = ("run", finished / "spec.yaml", "--out", run, "--resume", "--threads", 2)
    assert kvaudit(*words)[0] == 0
    torch.set_num_threads(1)
    assert json.loads((run / "provenance.json").read_text())["threads"] == 1


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    assert "holds no run" in refused("run", "--join", tmp_path / "none")
    for words in (("grade", "judge", tmp_path / "none"), ("explain", tmp_path / "none", "item")):
        assert "spec.yaml' is missing; give the folder of a run" in refused(*words)
    assert "is missing" in refused("report", tmp_path / "none")
    assert "is missing" in refused("gate", tmp_path)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_line(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr("kvaudit.core.files.os.replace", refuse)
    message = refused("run", spec, "--out", tmp_path / "run")
    assert words in message
    assert f"kvaudit run {spec} --out {tmp_path / 'run'} --anyway --resume" in message


@pytest.mark.parametrize(
    ("stop", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm_say_how_to_go_on(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: signal.Signals, code: int, word: str
) -> None:
    def interrupt(*_: Any) -> None:
        signal.raise_signal(stop)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    end_on_sigterm()
    monkeypatch.setattr("kvaudit.audit.runs.stages.train.TrainStage.work", interrupt)
    try:
        got, _, err = kvaudit("run", spec, "--out", tmp_path / "my run", "--limit", 2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert got == code
    out = tmp_path / "my run"
    assert err == f"{word}; continue with: kvaudit run {spec} --out '{out}' --limit 2 --anyway --resume\n"


@pytest.mark.parametrize("name", ["gate", "report", "card"])
def test_a_stopped_report_is_continued_with_the_options_that_were_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [name, str(tmp_path / "a run"), "--gate", "strict.yaml", "--waivers", "waived.yaml"]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvaudit.audit.commands.report.GateOptions.read", interrupt)
    code, _, err = kvaudit(*words)
    assert (code, err) == (130, f"interrupted; continue with: {shlex.join(['kvaudit', *words])}\n")


def test_a_crash_is_not_dressed_up_as_the_users_fault(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvaudit.audit.runs.stages.train.TrainStage.work", crash)
    with pytest.raises(ZeroDivisionError):
        kvaudit("run", spec, "--out", tmp_path / "run")


def test_suites_are_listed_without_the_folder_of_public_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVAUDIT_DATA", raising=False)
    code, out, err = kvaudit("list", "suites")
    assert (code, err) == (0, "")
    assert " gsm8k " in out


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("policies", ["none", "random", "streaming", "h2o", "snapkv"]),
        ("suites", ["refusal", "agent", "math"]),
        ("arms", ["dense", "naive", "sparse-rl", "smd", "smd-distill"]),
        ("rewards", ["classifier", "function", "grade", "judge"]),
    ],
)
def test_list_names_every_plug_in(kind: str, names: list[str]) -> None:
    code, out, _ = kvaudit("list", kind)
    assert code == 0
    assert not [name for name in names if f" {name} " not in out]


PLUGIN = """
from dataclasses import dataclass
import torch
import typer
from kvaudit.audit.policies import Evictor, View

@dataclass(frozen=True)
class Hoard(Evictor):
    name = "hoard"
    keeps = "the oldest"
    window: int = 0

    def importance(self, view: View) -> torch.Tensor:
        return -view.positions.float()
"""


def test_two_processes_write_the_run_that_one_writes(finished: Path, tmp_path: Path) -> None:
    words = ("run", finished / "spec.yaml", "--out", tmp_path / "shared", "--workers", 2)
    code, _, err = kvaudit(*words)
    assert code == 0, err
    assert (tmp_path / "shared" / "logs" / "worker-1.log").exists()
    for record in (finished / "run" / "records").glob("*.jsonl"):
        one, other = (
            [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]
            for path in (record, tmp_path / "shared" / "records" / record.name)
        )
        assert one == other


def test_an_outside_policy_can_be_audited(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hoard.py").write_text(PLUGIN)
    shipped = POLICIES.all()
    text = spec.read_text()
    spec.write_text(text[: text.index("train:")] + text[text.index("evaluate:") :].replace("streaming:", "hoard:"))
    words = ["run", spec, "--out", tmp_path / "run", "--threads", 1, "--plugin", tmp_path / "hoard.py"]
    monkeypatch.setattr(POLICIES, "_classes", dict(shipped))  # as a process finds them
    code, out, err = kvaudit(*words)
    assert code == 0, err
    assert "hoard 64" in out
    assert set(json.loads((tmp_path / "run" / "provenance.json").read_text())["inputs"]["plug-ins"]) == {"hoard.py"}
    (tmp_path / "hoard.py").write_text(PLUGIN.replace("-view", "view"))
    monkeypatch.setattr(POLICIES, "_classes", dict(shipped))
    assert "the run was started with other plug-ins: hoard.py had sha256 " in refused(*words, "--resume")


def test_a_plug_in_file_that_fails_or_brings_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_like_this")
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    assert "fails on import: SystemExit: 0" in refused("list", "policies", "--plugin", tmp_path / "leaves.py")
    assert "fails on import: ModuleNotFoundError" in refused("list", "policies", "--plugin", tmp_path / "broken.py")
    (tmp_path / "older.py").write_text("from audit.gone import Evictor")
    assert "; audit is kvaudit.audit now" in refused("list", "policies", "--plugin", tmp_path / "older.py")
    assert "has no policy, suite, judge, reward, launcher or engine" in refused(
        "list", "policies", "--plugin", tmp_path / "empty.py"
    )
    assert "cannot be read" in refused("list", "policies", "--plugin", tmp_path / "none.py")


def test_code_from_outside_that_ends_the_command_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stopped, user_errors("kvaudit", "run", "spec.yaml", "--resume"):
        sys.exit(0)
    assert stopped.value.exit_code == 2
    assert capsys.readouterr().err == (
        "error: code outside kvaudit ended the command by sys.exit(0); finished work is kept; continue with: "
        "kvaudit run spec.yaml --resume\n"
    )


def test_a_reader_that_stops_reading_is_no_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    end = SystemExit(1)
    end.__context__ = BrokenPipeError()  # as rich raises it
    with pytest.raises(typer.Exit) as stopped, user_errors("kvaudit", "list", "engines"):
        raise end
    assert (stopped.value.exit_code, capsys.readouterr().err) == (1, "")


def test_asking_refused_rows_again_needs_a_run_to_resume() -> None:
    done = CliRunner().invoke(app, ["run", "spec.yaml", "--ask-refused"])
    assert done.exit_code == 2
    assert "--ask-refused needs --resume" in done.stderr


def test_a_folder_that_is_gone_while_a_command_works_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stopped, user_errors("kvaudit", "run", "spec.yaml", "--resume"):
        (tmp_path / "gone" / "records.jsonl").read_bytes()
    assert stopped.value.exit_code == 2
    assert "is gone: it was moved or deleted meanwhile; restore it and continue with: kvaudit run" in (
        capsys.readouterr().err
    )
    going = tmp_path / "going"  # a deletion takes its files first
    going.mkdir()
    threading.Timer(0.2, going.rmdir).start()
    with pytest.raises(typer.Exit), user_errors():
        (going / "records.jsonl").read_bytes()
    assert "is gone: it was moved or deleted meanwhile" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), user_errors():  # in a folder that is there: a fault of ours
        (tmp_path / "lost").read_bytes()
