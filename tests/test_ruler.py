"""RULER's tasks in the files of examples/ruler, over documents that a local tokenizer measures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lm_eval_world import settle

from kvaudit.core.records import Message, Role
from kvaudit.suites.base import SUITES
from kvaudit.suites.harness_task import HarnessTaskName, harness_task

EXAMPLES = Path(__file__).parent.parent / "examples" / "ruler"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of frequent words in 256 tokens, which are words here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    text = (EXAMPLES / "ruler_fwe_4096.yaml").read_text()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ruler.yaml").write_text(
        text.replace("MODEL ", f"{tmp_path / 'words'} ").replace("4096", "256")
    )
    settle(tmp_path / "data")
    monkeypatch.setenv("KVAUDIT_LM_EVAL_TASKS", str(tmp_path / "tasks"))
    return tmp_path


def test_documents_are_the_same_every_time_and_no_longer_than_said(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    random.seed(5)
    before = random.getstate()
    first = harness_task(HarnessTaskName.of("ruler_fwe_256"))
    assert random.getstate() == before
    random.seed(6)
    again = harness_task(HarnessTaskName.of("ruler_fwe_256"))
    assert first.documents == again.documents
    assert first.digest == again.digest
    assert len({document["input"] for document in first.documents}) == len(first.documents) == 500
    assert {document["max_length"] for document in first.documents} == {256}
    assert capfd.readouterr().out == ""


def test_the_beginning_of_the_answer_ends_the_prompt_and_all_words_are_needed(folder: Path) -> None:
    suite = SUITES.get("lm-eval:ruler_fwe_256")()
    item = suite.items("eval", 1, 0, 0, len)[0]
    (message,) = item.messages
    assert message.content.endswith("the three most frequently appeared words are:")
    (gold,) = suite.gold(item)
    words = gold.split(", ")
    assert len(words) == 3
    scores = [
        suite.grade(item, (message, Message(Role.ASSISTANT, said))).score for said in (gold, words[0], "none of them")
    ]
    assert scores == [1.0, pytest.approx(1 / 3), 0.0]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_file_is_named_after_its_task_and_length(file: Path) -> None:
    text = file.read_text()
    assert f"\ntask: {file.stem}\n" in text
    assert text.count(file.stem.rpartition("_")[2]) >= 4
