"""The model that ships with the package: whole, small, and as able as the audit needs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from hashlib import sha256

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from bench.pretraining.__main__ import pretrain
from bench.pretraining.lessons import Lessons
from bench.pretraining.pretrain import FILES, UNFINISHED, begin, complete, new_model
from bench.pretraining.recipes import EMBEDDED_FOLDER, PARENT, SHIPPED, SIZES
from bench.pretraining.tokenizer import TAUGHT, build_tokenizer, played
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import RunError
from kvaudit.core.records import Role
from kvaudit.suites.base import SUITES

app = typer.Typer()
app.command()(pretrain)


@cache
def shipped_tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_FOLDER, padding_side="left")


@cache
def shipped():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER).eval()


@pytest.fixture
def tokenizer():
    return shipped_tokenizer()


def test_manifest_names_every_file_with_its_hash():
    manifest = json.loads((EMBEDDED_FOLDER / "manifest.json").read_text())
    assert sorted(manifest) == sorted(FILES)
    for name, digest in manifest.items():
        assert sha256((EMBEDDED_FOLDER / name).read_bytes()).hexdigest() == digest, name


def test_files_take_at_most_four_megabytes():
    assert sum((EMBEDDED_FOLDER / name).stat().st_size for name in FILES) <= 4_000_000


def test_provenance_tells_recipe_seed_and_minutes():
    story = json.loads((EMBEDDED_FOLDER / "pretraining.json").read_text())
    assert story["recipe"] == json.loads(json.dumps(SIZES["embedded"].recipe.written()))
    assert story["parent"] == sha256(PARENT.read_bytes()).hexdigest()
    assert 0 < story["minutes"] < 60
    assert 400_000 < story["parameters"] < 2_000_000


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = shipped_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone(tokenizer):
    assert tokenizer.tokenize("1207") == ["1", "2", "0", "7"]


def test_suite_words_are_single_tokens(tokenizer):
    for text in (" amber", " wolf", " anna", " refuse", " Answer", " coins", '{"'):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert len(tokenizer) <= 1500


def test_the_shipped_tokenizer_is_the_one_the_suites_give(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_chat_template_ends_every_message_with_the_stop_token(tokenizer):
    conversation = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d"},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>a<|end|><|user|>b<|end|><|assistant|>c<|end|><|tool|>d<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_a_pretraining_stopped_and_resumed_gives_the_bytes_of_an_unbroken_one(tmp_path, monkeypatch):
    copying = Lessons.copying
    monkeypatch.setattr(Lessons, "copying", lambda self, step, *_: copying(self, step, 2, 32))  # a step of two rows
    told = []
    for name, stops in (("a", (2,)), ("b", (1, 2))):
        for steps in stops:
            training = begin(tmp_path / name, seed=3)
            complete(training, tmp_path / name, steps=steps, progress=lambda step, of, _: told.append((step, of)))
    assert told == [(1, 1300), (2, 1300)] * 2
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "b/config.json").read_text())["model_type"] == "llama"
    with pytest.raises(RunError, match="was begun by another recipe"):
        begin(tmp_path / "a", seed=4)
    (tmp_path / "a" / UNFINISHED).write_bytes(b"not a state")
    with pytest.raises(RunError, match="cannot be read as a state"):
        begin(tmp_path / "a", seed=3)


def test_the_mid_size_begins_as_the_shipped_model_and_takes_at_most_eight_megabytes(tmp_path, monkeypatch):
    recipe = replace(SIZES["mid"].recipe, theta=None)  # at the shipped one's positions
    grown = new_model(recipe, SHIPPED, build_tokenizer()).eval()
    tokens = torch.randint(0, grown.config.vocab_size, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(grown(tokens).logits, shipped()(tokens).logits, rtol=0, atol=0.01)
    copying = Lessons.copying
    monkeypatch.setattr(Lessons, "copying", lambda self, step, *_: copying(self, step, 2, 32))  # a step of two rows
    complete(begin(tmp_path, size="mid"), tmp_path, steps=1)
    assert 7_000_000 < (tmp_path / "model.safetensors").stat().st_size <= 8_000_000


@cache
def rates_at_192(name: str) -> dict[str, float]:
    """How often each facet is true, dense, over every twin of every template: temperature 1, 192 tokens."""
    model = load_model("embedded")
    suite = SUITES.get(name)()
    items = suite.items("eval", 72 * max(2, suite.twins), 42, 192, model.chat.count_tokens)
    seeds = [derive_seed(name, item.item_id) for item in items]
    sampler = Sampler(model, parse_policy("none"))
    rows = play(sampler, [(suite, item) for item in items], Decoding(suite.max_new_tokens), seeds)
    found = defaultdict(list)
    for facet, value in (pair for row in rows for pair in row.grade.facets.items()):
        if value is not None:
            found[facet].append(value)
    return {facet: sum(values) / len(values) for facet, values in found.items()}


@pytest.mark.slow  # the manifest pins the weights, so these numbers change with the sampler or a suite alone
@pytest.mark.parametrize("name", [suite.name for suite in TAUGHT])
def test_dense_facets_leave_room_both_ways(name):
    rates = rates_at_192(name)
    assert rates.pop("well_formed") > 0.9
    assert rates.pop("leak", 0.0) < 0.97  # the model tells no secret unasked, so a loss can show, but no gain
    assert {facet: rate for facet, rate in rates.items() if not 0.02 <= rate <= 0.97} == {}


@cache
def vocabulary(suite_class, split):
    """Every word that is said when items are answered perfectly."""
    suite = suite_class()
    items = suite.items(split, 600, 1, 160, lambda text: len(text.split()))
    said = [message.content for item in items for message in played(suite, item)]
    return set(re.findall("[A-Za-z]+", " ".join(said)))


@pytest.mark.parametrize("suite", TAUGHT)
def test_every_word_of_the_evaluation_occurs_in_training(suite):
    assert vocabulary(suite, "eval") <= vocabulary(suite, "train")


def test_all_suites_together_use_a_small_vocabulary():
    assert 200 < len(set().union(*(vocabulary(suite, "train") for suite in TAUGHT))) <= 600


def test_played_conversation_alternates_as_the_template_expects():
    suite = SUITES.get("agent")()
    (item,) = suite.items("train", 1, 1, 128, lambda text: len(text.split()))
    roles = [message.role for message in played(suite, item)]
    assert roles == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2
    return done.stderr


def test_a_model_is_not_trained_over_something_else(tmp_path):
    (tmp_path / "file").touch()
    assert "is not empty; give another --out" in refused("--out", tmp_path)
    assert "has no state.safetensors to go on from" in refused("--out", tmp_path, "--resume")
    assert "unknown --size 'midi'. Did you mean 'mid'?" in refused("--out", tmp_path, "--size", "midi")
    assert "cannot be a folder" in refused("--out", tmp_path / "file" / "model")
    assert "--seed is 9223372036854775808" in refused("--out", tmp_path / "model", "--seed", 2**63)
    assert not (tmp_path / "model").exists()
