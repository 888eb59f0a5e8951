"""``kvaudit data`` against a server of this machine: what is there, what is fetched, and what is not kept."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.network import download
from kvaudit.suites.base import SUITES
from kvaudit.suites.sources import PublicFile, PublicRows, catalogue, data_file, data_folder, has_file

WHOLE, LINES = b"prompt,label\na,safe\n", b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'
COMMIT = "1" * 40


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


MADE_UP = PublicRows(
    "greetings",
    ("hello",),
    "1 + 2, the first of 1 + 3",
    "MIT",
    "somebody/greetings",
    COMMIT,
    (
        PublicFile("hello/all.csv", "data/all of it.csv", sha256(WHOLE)),
        PublicFile("hello/some.jsonl", "data/some.jsonl", sha256(LINES[:18]), 2),
    ),
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files that a server of this machine has, by their path; its address is under ``""``."""
    files = {
        f"/somebody/greetings/{COMMIT}/data/all%20of%20it.csv": WHOLE,
        f"/somebody/greetings/{COMMIT}/data/some.jsonl": LINES,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b"none"))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("kvaudit.suites.sources.catalogue", lambda: (MADE_UP,))
    files[""] = f"http://127.0.0.1:{server.server_address[1]}".encode()
    yield files
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rows are fetched to: KVAUDIT_DATA is not set."""
    monkeypatch.delenv("KVAUDIT_DATA", raising=False)
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    return tmp_path / "data"


def data(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def fetch(served: dict[str, bytes], *names: str) -> tuple[int, str, str]:
    return data("fetch", *names, "--from", served[""].decode())


def test_rows_are_fetched_by_name_cut_and_held_to_their_hash(served: dict[str, bytes], folder: Path) -> None:
    code, out, err = fetch(served, "greetings")
    assert (code, err) == (0, "")
    assert out == (
        "greetings: 2 of 2 files fetched, 1 + 2, the first of 1 + 3 rows, MIT, from "
        f"github.com/somebody/greetings@1111111\nin {folder}\n"
    )
    assert (folder / "hello" / "all.csv").read_bytes() == WHOLE
    assert (folder / "hello" / "some.jsonl").read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    assert fetch(served, "greetings")[1].startswith("greetings: already present")


def test_a_changed_file_is_refused_and_nothing_is_written(served: dict[str, bytes], folder: Path) -> None:
    served[f"/somebody/greetings/{COMMIT}/data/some.jsonl"] = b'{"n": 7}\n{"n": 2}\n'
    code, out, err = fetch(served, "greetings")
    assert (code, out) == (2, "")
    assert err.startswith("error: the download of hello/some.jsonl has sha256 ")
    assert err.count("\n") == 1
    assert not folder.exists()


def test_a_file_that_is_not_there_is_one_line(served: dict[str, bytes], folder: Path) -> None:
    del served[f"/somebody/greetings/{COMMIT}/data/some.jsonl"]
    code, _, err = fetch(served, "greetings")
    assert (code, err.count("\n")) == (2, 1)
    assert "data/some.jsonl answers 404; nothing was written" in err
    assert not folder.exists()


def test_without_a_network_it_is_one_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    code, _, err = data("fetch", "xstest")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be reached (Name or service not known); fetch where there is a network" in err
    assert not folder.exists()


def test_a_file_that_is_there_is_not_written_over(served: dict[str, bytes], folder: Path) -> None:
    (folder / "hello").mkdir(parents=True)
    (folder / "hello" / "all.csv").write_bytes(b"mine")
    assert fetch(served, "greetings")[1].startswith("greetings: 1 of 2 files fetched")
    assert (folder / "hello" / "all.csv").read_bytes() == b"mine"
    assert "present, but not the pinned version" in data()[1]


@pytest.mark.parametrize("words", [("xtest",), ("xstest", "--from", "ftp://elsewhere")])
def test_a_wrong_name_or_address_is_one_line(words: tuple[str, ...], folder: Path) -> None:
    code, _, err = data("fetch", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert "Did you mean 'xstest'?" in err or "wants http:// or https://" in err
    assert not folder.exists()


def test_missing_rows_are_listed_with_the_command_that_fetches_them(folder: Path) -> None:
    code, out, _ = data()
    assert code == 0
    assert f"folder: {folder}\n" in out
    assert "\nfetch what is missing: kvaudit data fetch xstest strongreject " in out


def test_rows_of_which_some_files_are_there_are_said_to_be_so(served: dict[str, bytes], folder: Path) -> None:
    assert " missing " in data()[1]
    fetch(served, "greetings")
    assert " present " in data()[1]
    (folder / "hello" / "some.jsonl").unlink()
    out = data()[1]
    assert " 1 of 2 files missing " in out
    assert "\nfetch what is missing: kvaudit data fetch greetings\n" in out


def test_suites_read_what_was_fetched_where_no_folder_is_named(
    served: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_file("hello/all.csv")
    with pytest.raises(DataError, match=r"KVAUDIT_DATA is not set; .* fetch it with: kvaudit data fetch greetings"):
        data_file("hello", "hello/all.csv")
    fetch(served, "greetings")
    assert data_file("hello", "hello/all.csv") == folder / "hello" / "all.csv"
    monkeypatch.setenv("KVAUDIT_DATA", str(folder / "elsewhere"))
    assert data_folder() == folder / "elsewhere"
    with pytest.raises(
        DataError, match=r"which is missing in KVAUDIT_DATA=.*elsewhere; fetch it with: kvaudit data fetch greetings"
    ):
        data_file("hello", "hello/all.csv")


def test_every_file_is_pinned_and_read_by_a_suite_of_that_licence() -> None:
    paths = [file.path for rows in catalogue() for file in rows.files]
    assert len(paths) == len(set(paths))
    for rows in catalogue():
        assert len(rows.commit) == 40
        assert all((len(file.sha256), len(file.git_blob)) in ((64, 0), (0, 40)) for file in rows.files)
        for suite in rows.suites:
            assert SUITES.get(suite).licence == rows.licence


def test_a_mirror_that_drips_its_headers_is_given_up() -> None:
    """A byte every tenth of a second keeps a socket's own timeout from ever coming."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def drip() -> None:
            line, _ = door.accept()
            with line, suppress(OSError):
                line.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while True:
                    line.sendall(b"x")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(RunError, match="takes over 1 s"):
            download(f"http://127.0.0.1:{door.getsockname()[1]}/x", seconds=1)
