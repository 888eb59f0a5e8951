"""What a run reads is held to what it was started with: on resume, by every process that joins, and by the gate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from suite_world import write_agent_rows, write_requests, write_rows
from test_cli import kvaudit, refused

from kvaudit.audit.runs import folder as runs
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.names import NAMES, load_plugins
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.sampling import packing
from kvaudit.audit.sampling.packing import is_packable_dtype
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import inputs_sha256
from kvaudit.core.spec import load_spec
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.suites.base import SUITES
from kvaudit.suites.mathrows import Gsm8k
from kvaudit.suites.sources import collect_file_hashes

SPEC = """\
name: held
model: {model}
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{gsm8k: {{items: 2, context: [published, book], context_tokens: 700}}}}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with public rows, a model and a finished run on both, one of its two units lost again; and a copy."""
    folder = tmp_path_factory.mktemp("inputs") / "here"
    shutil.copytree(tiny_folder, folder / "model")
    write_rows(folder)
    (folder / "spec.yaml").write_text(SPEC.format(model=folder / "model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVAUDIT_DATA", str(folder))
        patch.setattr(Gsm8k, "max_new_tokens", 4)
        code, out, err = kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, out + err
    for path in (folder / "run" / "records").glob(f"{sealed(folder)[0].name.partition('.')[0]}.*"):
        path.unlink()
    shutil.copytree(folder, folder.with_name("untouched"))
    return folder


@pytest.fixture
def started(whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder as it was before the last test: its run knows the model by path."""
    shutil.rmtree(whole)
    shutil.copytree(whole.with_name("untouched"), whole)
    monkeypatch.setenv("KVAUDIT_DATA", str(whole))
    monkeypatch.setattr(Gsm8k, "max_new_tokens", 4)
    return whole


def sealed(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "records").glob("*.done.json"))


def goes_on(folder: Path) -> tuple[object, ...]:
    return ("run", folder / "spec.yaml", "--out", folder / "run", "--resume", "--threads", 1)


@pytest.fixture
def elsewhere(started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same public rows in another folder: a process caches what it has parsed by path."""
    for name in ("gsm8k", "long_text"):
        shutil.copytree(started / name, tmp_path / name)
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    return tmp_path


def edited(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(read_json(path) | values))


def test_a_run_notes_what_it_reads_and_goes_on_with_the_same_from_another_folder(
    started: Path, elsewhere: Path
) -> None:
    noted = read_json(started / "run" / "provenance.json")["inputs"]
    assert set(noted["rows"]) == {"gsm8k/test.jsonl", "long_text/book.txt"}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(noted["model files"])
    assert noted["plug-ins"] == {}
    code, _, err = kvaudit(*goes_on(started))
    assert code == 0, err
    assert len({read_json(seal)["inputs"] for seal in sealed(started)}) == 1


@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "long_text/book.txt"])
def test_public_rows_that_changed_are_refused_by_name(started: Path, elsewhere: Path, name: str) -> None:
    path = elsewhere / name
    path.write_text(path.read_text().replace("1", "2"))
    before = {path: path.read_bytes() for path in (started / "run" / "records").iterdir()}
    judged = ("grade", "judge", started / "run", "--out", started / "again")
    for words in (goes_on(started), ("run", "--join", started / "run"), judged):
        message = refused(*words)
        assert f"started with other rows: {name} had sha256 " in message
        assert ", now " in message
    assert {path: path.read_bytes() for path in (started / "run" / "records").iterdir()} == before


def test_rows_that_vanished_are_named_in_place_of_a_number_of_items_to_request(started: Path, elsewhere: Path) -> None:
    path = elsewhere / "gsm8k" / "test.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    message = refused(*goes_on(started))
    assert "the run was started with other rows under KVAUDIT_DATA: gsm8k/test.jsonl had sha256 " in message
    assert "put back what it was started with" in message
    assert "request fewer" not in message
    shutil.rmtree(started / "run")  # of a new run the rows are simply too few
    assert "2 items requested, but its rows make 1 for eval; request fewer" in refused(*goes_on(started))


@pytest.mark.parametrize("name", ["harm", "benign", "bfcl", "injecagent"])
def test_a_second_run_in_a_process_notes_the_files_that_the_first_one_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for write in (write_agent_rows, write_requests):
        write(tmp_path)
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    read = []
    for _ in range(2):
        with collect_file_hashes() as hashes:
            SUITES.get(name)().items("eval", 4, 0, 0, len)
        read.append(hashes)
    assert read[0]
    assert read[0] == read[1]


def test_a_book_that_was_added_is_refused(started: Path, elsewhere: Path) -> None:
    (elsewhere / "long_text" / "new.txt").write_text("One more sentence. And one more.")
    assert "long_text/new.txt had sha256 none (it was not read), now " in refused(*goes_on(started))


def test_a_tokenizer_that_changed_is_refused(started: Path) -> None:
    template = started / "model" / "chat_template.jinja"
    template.write_text("{{ '' }}" + template.read_text())
    assert "started with other model files: chat_template.jinja had sha256 " in refused(*goes_on(started))


def test_base_weights_that_changed_are_refused(started: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = started / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    message = refused(*goes_on(started))
    assert "the run was started with base weights " in message
    assert ", '" in message


def test_plug_ins_are_held(started: Path) -> None:
    run = RunFolder(started / "run", load_spec(started / "run" / "spec.yaml", NAMES))
    edited(run.path / "provenance.json", inputs=run.provenance()["inputs"] | {"plug-ins": {"mine.py": "a" * 64}})
    Pipeline(run, Console(quiet=True), 1, plugins={"mine.py": "a" * 64})
    for plugins in ({"mine.py": "b" * 64}, {}, {"mine.py": "a" * 64, "more.py": "c" * 64}):
        with pytest.raises(RunError, match="started with other plug-ins: "):
            Pipeline(run, Console(quiet=True), 1, plugins=plugins)
    assert "started with other plug-ins: mine.py had sha256 aaaaaaaaaaaa" in refused("explain", run.path, "item")


def test_two_plug_in_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"two plug-in files are called 'mine\.py'"):
        load_plugins([tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py"])


def test_the_first_process_notes_what_all_of_them_are_held_to(started: Path) -> None:
    run = RunFolder(started / "run", load_spec(started / "run" / "spec.yaml", NAMES))
    assert run.keep("inputs", "more", {"x": "1"}) == {"x": "1"}
    assert run.keep("inputs", "more", {"x": "2"}) == {"x": "1"}


def reasons(run: Path) -> list[str]:
    report = decide_run(load_run(run))
    return [reason.text for reason in report.drift.reasons if reason.code == "INPUTS"]


def test_records_of_other_inputs_make_the_run_invalid(started: Path) -> None:
    assert kvaudit(*goes_on(started))[0] == 0
    assert reasons(started / "run") == []
    unit = sealed(started)[1]
    edited(unit, inputs="f" * 64)
    (text,) = reasons(started / "run")
    assert text.startswith(
        "1 units were evaluated from another spec, rows, plug-ins or model files than provenance lists"
    )
    assert unit.name.replace(".done.json", ".jsonl") in text
    code, out, _ = kvaudit("gate", started / "run")
    assert code == 5
    assert "INPUTS: 1 units" in out
    unit.write_text(json.dumps({key: value for key, value in read_json(unit).items() if key != "inputs"}))
    assert reasons(started / "run") == [text], "a seal without a hash of the inputs"
    edited(unit, inputs=["f" * 64])
    assert reasons(started / "run") == [text], "a hash that is no text"


def test_a_list_of_inputs_that_was_edited_makes_the_run_invalid(started: Path) -> None:
    provenance = started / "run" / "provenance.json"
    noted = read_json(provenance)["inputs"]
    edited(provenance, inputs=noted | {"rows": dict.fromkeys(noted["rows"], "0" * 64)})
    assert len(reasons(started / "run")) == 1


def test_a_run_whose_provenance_lists_no_inputs_goes_on(started: Path) -> None:
    provenance = started / "run" / "provenance.json"
    old = {key: value for key, value in read_json(provenance).items() if key not in ("inputs", "worked_with")}
    inputs = {kind: files for kind, files in read_json(provenance)["inputs"].items() if kind != "spec"}
    provenance.write_text(json.dumps(old))
    for seal in sealed(started):
        edited(seal, inputs=inputs_sha256(inputs))
    assert kvaudit(*goes_on(started))[0] == 0
    assert set(read_json(provenance)["inputs"]) == {"rows", "model files", "plug-ins"}
    assert reasons(started / "run") == []


def test_other_versions_are_a_remark(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = decide_run(load_run(started / "run"))
    assert not [line for line in remarks(report) if line.startswith("VERSIONS")]
    monkeypatch.setattr(runs, "_versions", lambda: {"kvaudit": "0.1.0", "torch": "9.9"})
    assert kvaudit(*goes_on(started))[0] == 0
    report = decide_run(load_run(started / "run"))
    (line,) = [line for line in remarks(report) if line.startswith("VERSIONS")]
    assert "used 2 sets of versions: kvaudit " in line
    assert "torch 9.9, python 3." in line
    assert not [reason for reason in report.drift.reasons if reason.code in ("INPUTS", "HASH")]


@pytest.mark.skipif(not is_packable_dtype(torch.float32), reason="this processor has no packed products")
def test_packed_products_are_a_remark_where_the_run_began_without(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [line for line in read_json(started / "run" / "provenance.json")["worked_with"] if "packed" in line]
    monkeypatch.setattr(packing, "LARGE", dict.fromkeys(packing.LARGE, 1))
    code, out, _ = kvaudit(*goes_on(started))
    assert code == 0
    assert " of 1 thread" in out
    assert "large products" not in out
    (line,) = [line for line in remarks(decide_run(load_run(started / "run"))) if line.startswith("VERSIONS")]
    assert "large products packed (since " in line
