"""Suites over public rows: on a small made-up data folder anywhere, and on the real rows where KVAUDIT_DATA is set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import test_suites as contract
from suite_world import ask, reads_rows, words, write_rows

from kvaudit.core.errors import DataError
from kvaudit.suites.base import SUITES, Suite
from kvaudit.suites.mathrows import Gsm8k, extract_number
from kvaudit.suites.sources import csv_rows

READERS = [name for name, suite in SUITES.all().items() if reads_rows(suite())]

ON_REAL_ROWS = (  # what made-up rows cannot show
    contract.test_item_ids_are_unique,
    contract.test_gold_answers_score_one,
    contract.test_what_is_right_changes_between_twins,
    contract.test_training_and_evaluation_share_no_template_and_no_text,
    contract.test_enough_templates_are_visited_in_turn,
    contract.test_the_context_is_as_long_as_asked,
)

MORE = {
    "bfcl": 400,
    "tensortrust": 400,
    "cosafe": 500,
    "longsafety": 1200,
}  # items it takes until some template has had all its twins


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    return write_rows(tmp_path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of the public rows without a file."""
    folder = write_rows(tmp_path_factory.mktemp("bare"))
    for path in (*folder.rglob("*.json*"), *folder.rglob("*.csv")):
        path.unlink()
    return folder


@pytest.fixture(params=READERS)
def suite(request: pytest.FixtureRequest) -> Suite:
    return SUITES.get(request.param)()


@pytest.mark.realdata
@pytest.mark.skipif("KVAUDIT_DATA" not in os.environ, reason="needs the public rows that KVAUDIT_DATA names")
def test_public_suites_keep_the_contract_on_the_real_rows(suite: Suite) -> None:
    try:
        asked = ask(suite, MORE.get(suite.name, 240), train=90)
    except DataError as missing:
        pytest.skip(str(missing))
    if suite.name == "competition" and suite.rows("eval") < 60:
        pytest.skip("KVAUDIT_DATA holds too few of the files that it pools")
    for check in ON_REAL_ROWS:
        check(asked)
    contract.test_no_constant_answer_wins(contract.without_understanding(asked))


def test_a_missing_folder_or_file_is_one_line(bare: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_DATA", str(bare))
    with pytest.raises(DataError, match=rf"suite {suite.name} needs .* which is missing in KVAUDIT_DATA="):
        suite.items("eval", 1, 0, 600, words)
    monkeypatch.delenv("KVAUDIT_DATA")
    monkeypatch.setenv("KVAUDIT_CACHE", str(bare / "nothing was fetched"))
    with pytest.raises(DataError, match="and KVAUDIT_DATA is not set"):
        suite.items("eval", 1, 0, 600, words)


def test_a_torn_row_is_named(data: Path) -> None:
    with (data / "gsm8k" / "test.jsonl").open("a") as file:
        file.write('{"question": "Wh')
    with pytest.raises(DataError, match="line 181 is not JSON"):
        Gsm8k().items("eval", 1, 0, 600, words)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"prompt,label\na,safe,more\n", "line 2 is not a valid CSV row .3 cells under a header of 2"),
        (b"# version=1\nprompt,label\na,safe\n\n\xff,safe\n", "line 5 is not a valid CSV row .*utf-8"),
        (b'prompt,label\n"a\nb,safe\n', "line 3 is not a valid CSV row"),
        (b"prompt,kind\na,safe\n", "has no column 'label'; it has prompt, kind"),
        (b"", "has no column 'prompt'; it has no rows"),
    ],
)
def test_a_torn_table_is_named(text: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(text)
    with pytest.raises(DataError, match=told):
        csv_rows(tmp_path / "table.csv", ("prompt", "label"))


def test_a_table_is_read_after_its_comments(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text('# version=1\nprompt,label\n"a, ""b""\nc",safe\n')
    assert csv_rows(tmp_path / "table.csv", ("label",)) == ({"prompt": 'a, "b"\nc', "label": "safe"},)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", 7.0),
        ("#### 5 no wait #### 1,234", 1234.0),
        ("#### $18.50", 18.5),
        ("The answer is 12. I used 3 steps.", 12.0),
        ("**Answer: $1,000.**", 1000.0),
        ("We get 3, then 8.", 8.0),
        ("-4", -4.0),
        ("It costs .5", 0.5),
        ("no idea", None),
    ],
)
def test_the_number_an_answer_ends_on(text: str, number: float | None) -> None:
    assert extract_number(text) == number
