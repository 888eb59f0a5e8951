"""A GGUF header is held to the bytes that are there before a library loops over its counts."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvaudit.audit.sampling.weights import check_gguf, check_gguf_biases
from kvaudit.core.errors import DataError


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


PAIRS = [
    text(b"general.name") + struct.pack("<I", 8) + text(b"tiny"),
    text(b"llama.block_count") + struct.pack("<II", 4, 2),
    text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b"),
    text(b"scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 0.5, 1.5),
]
TENSOR = text(b"output.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 1, pairs: int = len(PAIRS)) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(PAIRS) + TENSOR


def test_a_whole_header_passes(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header())
    assert check_gguf(tmp_path / "m.gguf") == ["output.weight"]


def test_biases_that_transformers_drops_are_refused() -> None:
    model = SimpleNamespace(state_dict=lambda: {"model.layers.0.self_attn.q_proj.bias": None})
    names = ["blk.0.attn_q.bias", "blk.0.attn_q.weight", "blk.0.exp_probs_b.bias", "blk.0.ffn_up_exps.bias"]
    check_gguf_biases("m.gguf", names, model)
    with pytest.raises(DataError, match=r"has 2 biases, such as blk\.0\.attn_q\.bias, transformers loads 1; give the"):
        check_gguf_biases("m.gguf", [*names, "blk.0.attn_v.bias"], model)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    for size in range(len(header())):
        (tmp_path / "m.gguf").write_bytes(header()[:size])
        with pytest.raises(DataError, match="no usable GGUF file"):
            check_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (header(magic=b"GGML"), "begins with b'GGML'"),
        (header(version=0x03000000), "has version 50331648"),
        (header(pairs=2**63), "names 1 tensors and 9223372036854775808 keys"),
        (header(tensors=2**40), "names 1099511627776 tensors"),
        (header(tensors=2**16), "it ends at byte"),
        (
            header().replace(struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 8, 2**50)),
            "names 1125899906842624 texts",
        ),
        (header().replace(struct.pack("<IIQ", 9, 6, 2), struct.pack("<IIQ", 9, 6, 2**60)), "its header asks for"),
        (header().replace(struct.pack("<IIQ", 9, 6, 2), struct.pack("<IIQ", 9, 9, 2)), "values of type 9"),
    ],
)
def test_counts_that_lie_are_refused(tmp_path: Path, body: bytes, said: str) -> None:
    (tmp_path / "m.gguf").write_bytes(body)
    with pytest.raises(DataError, match=said):
        check_gguf(tmp_path / "m.gguf")
