"""What every test gets: no network, one torch thread, and a tiny random model in a folder."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
import numpy as np
import pytest
import typer.main
import typer.testing

from kvaudit.core.records import Item
from kvaudit.suites.base import CountTokens, Split

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# numpy's products are small here, and its threads would spin between them
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# with it OpenVINO, once imported, sends lines home, each by a process of its own: hundreds in one conversion
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

_DOORS: tuple[tuple[Any, str], ...] = (
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (socket, "getaddrinfo"),
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--policy-file", type=Path, default=None, help="hold the policies of this file, and only them, to tests/conform"
    )
    parser.addoption(
        "--suite-file",
        type=Path,
        default=None,
        help="hold the suites of this file, and only them, to tests/test_suites.py",
    )
    parser.addoption(
        "--measure-file",
        type=Path,
        default=None,
        help="hold the measures of this file, and only them, to tests/test_rerun_contract.py",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected and imported stays to the end, so no search for garbage goes through it, then or in a test.

    Searches are rare after it, because a test makes many objects and few cycles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights that tests convert for engines are not kept with the user's; one is made once for all processes."""
    base = tmp_path_factory.getbasetemp()
    home = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVAUDIT_CACHE", str(home / "conversions"))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Any socket that leaves this machine is an error; one to a server that a test runs is not."""
    plain = {name: getattr(owner, name) for owner, name in _DOORS}

    def refuse(name: str) -> Any:
        def refused(*words: Any, **options: Any) -> Any:
            address = words[0] if name == "getaddrinfo" else words[1]
            host = address[0] if isinstance(address, tuple) else address
            if host not in ("127.0.0.1", "localhost", b"127.0.0.1", b"localhost"):
                raise AssertionError(f"a test reached for the network: {host!r}")
            return plain[name](*words, **options)

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _DOORS:
            patch.setattr(owner, name, refuse(name))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_figures() -> Iterator[None]:
    """Reports come without their figures, which take seconds; who looks at them asks for ``figures``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvaudit.reports.page.formats.html.figures", lambda _: {})
        yield


@contextmanager
def with_figures() -> Iterator[None]:
    """Reports come with their figures, for a fixture that looks at them."""
    from kvaudit.reports.page.plots import figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvaudit.reports.page.formats.html.figures", figures)
        yield


@pytest.fixture
def figures() -> Iterator[None]:
    """The same for a whole test."""
    with with_figures():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """Typer makes the commands of the app once, as a process does, and not for each call of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def items_made_once() -> Iterator[None]:
    """An item of a template, counted by a model's tokenizer, is made once for all runs that ask it."""
    from kvaudit.audit.sampling.chat import Chat
    from kvaudit.suites.templates import Templated

    plain = Templated.item
    tokenizers: WeakKeyDictionary[Chat, str] = WeakKeyDictionary()
    items: dict[tuple[Any, ...], Item] = {}

    def item(
        suite: Templated, split: Split, index: int, seed: int, context_tokens: int, count_tokens: CountTokens
    ) -> Item:
        chat = getattr(count_tokens, "__self__", None)
        if not isinstance(chat, Chat):
            return plain(suite, split, index, seed, context_tokens, count_tokens)
        if chat not in tokenizers:
            tokenizers[chat] = sha256(chat.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        key = (type(suite), repr(vars(suite)), split, index, seed, context_tokens, tokenizers[chat])
        if key not in items:
            items[key] = plain(suite, split, index, seed, context_tokens, count_tokens)
        return items[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Templated, "item", item)
        yield


@pytest.fixture(scope="session", autouse=True)
def roots_found_once() -> Iterator[None]:
    """A root of the same numbers is found once: gate, report and card of one run ask for the same bounds."""
    from kvaudit.reports.stats import rule, tango

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tango, "_root", once(tango._root))
        patch.setattr(rule, "_log_ratio", once(rule._log_ratio))
        yield


@pytest.fixture(scope="session", autouse=True)
def signs_drawn_once() -> Iterator[None]:
    """The random signs of a family depend on its size alone: those of the last sizes are kept."""
    from kvaudit.reports.verdict import family

    plain = family._patterns

    @lru_cache(maxsize=4)
    def drawn(sizes: tuple[tuple[str, int], ...], exact: bool) -> list[Any]:
        return list(plain(dict(sizes), exact=exact))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "_patterns", lambda sizes, *, exact: drawn(tuple(sizes.items()), exact))
        yield


def once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that computes what it was not asked before."""
    found: dict[bytes, Any] = {}

    def remembered(*arrays: Any) -> Any:
        key = sha256()
        for array in map(np.asarray, arrays):
            key.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        if (name := key.digest()) not in found:
            found[name] = plain(*arrays)
        return found[name].copy()

    return remembered


@pytest.fixture(scope="session", autouse=True)
def one_template() -> Iterator[None]:
    """A page's template is compiled once, as in a process that writes one report, and not for each of a test."""
    plain = jinja2.FileSystemLoader.load
    kept: dict[tuple[str, ...], jinja2.Template] = {}

    def load(loader: jinja2.FileSystemLoader, environment: jinja2.Environment, name: str, *more: Any) -> Any:
        place = (*loader.searchpath, name)
        if place not in kept:
            kept[place] = plain(loader, environment, name, *more)
        return kept[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.FileSystemLoader, "load", load)
        yield


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level tokenizer without merges: any text encodes, one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of two labels over the byte tokenizer, which reads 64 tokens at a time."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("classifiers") / "classifier"
    tokenizer = byte_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "SAFE", 1: "ATTACK"},
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with the byte tokenizer, saved as an ordinary Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
