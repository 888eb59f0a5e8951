"""How does a model get onto a GPU machine that reaches no registry and accepts only small files? In pieces.

    python -m bench.pieces split MODEL.gguf FOLDER --size 52    # cut into pieces of at most 52 MB, and their list
    python -m bench.pieces join FOLDER MODEL.gguf               # join them, if all are there and intact
    python -m bench.pieces plain MODEL.gguf FOLDER              # dequantise to bfloat16 in Hugging Face format

Takes seconds (``plain`` a minute); CONTRIBUTING.md says when to use it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

LIST = "pieces.json"


def split(source: Path, folder: Path, size: int) -> int:
    """Cut a file into numbered pieces of at most ``size`` bytes; the list has every piece's sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, str] = {}
    whole_hash = hashlib.sha256()
    with source.open("rb") as file:
        while data := file.read(size):
            name = f"{len(pieces):03d}.piece"
            (folder / name).write_bytes(data)
            pieces[name] = hashlib.sha256(data).hexdigest()
            whole_hash.update(data)
    (folder / LIST).write_text(json.dumps({"sha256": whole_hash.hexdigest(), "pieces": pieces}, indent=1) + "\n")
    print(f"{len(pieces)} pieces, sha256 {whole_hash.hexdigest()}")
    return 0


def join(folder: Path, target: Path) -> int:
    """Join the pieces; returns 1 and prints their names if some are missing or damaged."""
    listing = json.loads((folder / LIST).read_text())
    missing = [name for name in listing["pieces"] if not (folder / name).is_file()]
    if missing:
        print(f"missing: {', '.join(missing)}")
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    damaged = []
    with target.open("wb") as file:
        for name, digest in listing["pieces"].items():
            data = (folder / name).read_bytes()
            file.write(data)
            damaged += [name] * (hashlib.sha256(data).hexdigest() != digest)
    if damaged:
        target.unlink()
        print(f"damaged: {', '.join(damaged)}")
        return 1
    print(f"{target.name}: {target.stat().st_size} bytes, sha256 {listing['sha256']}")
    return 0


def plain(source: Path, folder: Path) -> int:
    """Dequantise a GGUF file once, so that the parts of a benchmark need not."""
    from kvaudit.audit.sampling.model import load_model

    loaded = load_model(str(source), dtype="bfloat16", device="cpu")
    loaded.model.save_pretrained(folder)
    loaded.chat.tokenizer.save_pretrained(folder)
    print(f"{folder.name}: {sum(path.stat().st_size for path in folder.iterdir())} bytes")
    return 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("split", "join", "plain"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--size", type=float, default=52, help="megabytes of a piece")
    options = parser.parse_args(words)
    if options.what == "split":
        return split(options.source, options.target, int(options.size * 1e6))
    return {"join": join, "plain": plain}[options.what](options.source, options.target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
