"""A decode step beside its peers: ratios of tokens per second, sides taking turns on the same prompt and thread.

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.decode            every row; without the variable, what needs no folder
    python -m bench.decode --batch 8 --only snapkv --turns 3
    KVAUDIT_REAL_MODEL=FOLDER python -m bench.decode --device cuda --dtype bfloat16      by the wall alone

Uncompressed decoding stands beside ``model.generate``, snapkv and streaming beside kvpress with the same budget (``make
bench-peers`` sets its environment up), codes and quest beside our own uncompressed decoding. A press of kvpress cuts
the prompt alone; ours goes on cutting while it decodes. Ratios are medians over turns of CPU time first, which other
processes disturb less, then of wall time. The roofline: bytes of weights and entries that a step has to read, over the
bandwidth at which this run sums a large tensor; on a GPU, whose work no CPU time counts, by the wall. Prefill is not
timed here; rows of a batch share that of one prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from bench.models import Served, embedded, random_llama
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import RunError

CONTEXT, NEW, TURNS, BUDGET = 2048, 16, 5, 512
PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"
EVICTING = {name: f"{name}:budget={BUDGET}" for name in ("snapkv", "streaming")}
CODING = {"int8": "int8", "kivi 4 bits": "kivi:bits=4"}
SELECTING = {"quest": f"quest:budget={BUDGET}"}
Side = Callable[[], "Seconds"]  # plays one turn


class Seconds(NamedTuple):
    """What one turn took of the processor and on the wall."""

    cpu: float
    wall: float


class Ours:
    """Rows of one prompt under a policy; every turn goes on where the last one ended."""

    def __init__(self, served: Served, policy: str, prompt: list[int], batch: int, new: int) -> None:
        self._new, self._parameters = new, sum(p.nbytes for p in served.model.parameters())
        self._episode = Sampler(pack_weights(served), parse_policy(policy)).open(
            [prompt], list(range(batch)), group=batch
        )

    def __call__(self) -> Seconds:
        return timed(lambda: self._episode.decode(Decoding(self._new, temperature=0.0)))

    def bytes_a_step(self) -> int:
        """What a step has to read: all weights once, and what the rows' caches hold."""
        return self._parameters + self._episode.bytes


class Generate:
    """The same rows through ``model.generate`` with stock attention, on a cache that holds the prompt."""

    def __init__(self, served: Served, prompt: list[int], batch: int, new: int) -> None:
        self._model, self._cache = served.model, DynamicCache()
        self._model.set_attn_implementation("sdpa")
        with torch.no_grad():
            ids = torch.tensor([prompt[:-1]]).to(served.device)
            self._model(ids, past_key_values=self._cache, logits_to_keep=1)
        self._model.set_attn_implementation(ATTENTION_NAME)
        self._cache.batch_repeat_interleave(batch)
        self._ids = torch.tensor([prompt] * batch).to(served.device)
        self._config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)

    def __call__(self) -> Seconds:
        self._model.set_attn_implementation("sdpa")
        seconds = timed(self._generate)
        self._model.set_attn_implementation(ATTENTION_NAME)
        return seconds

    def _generate(self) -> None:
        mask = torch.ones_like(self._ids)
        self._ids = self._model.generate(
            self._ids, attention_mask=mask, past_key_values=self._cache, generation_config=self._config
        )


class KVPress:
    """The process that kvpress lives in; raises RunError where it ends."""

    def __init__(self, folder: str, asked: argparse.Namespace) -> None:
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
        command = [asked.peers, str(Path(__file__).parent / "kvpress_peer.py"), folder, asked.device, asked.dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}
        )

    def side(self, press: str, prompt: list[int], batch: int, new: int) -> Side:
        """A press after the prefill of the prompt."""
        held = self._ask({"open": {"press": press, "budget": BUDGET, "prompt": prompt, "batch": batch}})
        assert held == BUDGET, f"kvpress held {held} entries, not {BUDGET}"
        return lambda: Seconds(*self._ask({"turn": new}))

    def _ask(self, what: dict[str, object]) -> object:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None, "a pipe"
        assert back is not None, "a pipe"
        print(json.dumps(what), file=to, flush=True)
        line = back.readline()
        if not line:
            raise RunError("the process of kvpress ended; what it said last stands above, make bench-peers mends it")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    bandwidth = measured_bandwidth(asked.device)
    where = f"{torch.get_num_threads()} thread(s)" if asked.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, {asked.dtype}, {bandwidth / 1e9:.1f} GB/s, {asked.turns} turns of {asked.new} tokens\n")
    for served, folder in models(asked.device, asked.dtype):
        peer = KVPress(folder, asked) if folder and Path(asked.peers).is_file() else None
        if peer is None:
            print(f"{served.name}: no rows of kvpress, which wants KVAUDIT_REAL_MODEL and make bench-peers")
        for batch in asked.batch:
            compare(served, batch, peer, bandwidth, asked)
        if peer:
            peer.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--only", nargs="+", default=["none", *EVICTING, *CODING, *SELECTING], help="rows by their first word"
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of a turn")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the folder's model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="likewise")
    parser.add_argument("--peers", default=str(PEERS), help="the Python that has kvpress")
    return parser.parse_args()


def models(device: str = "cpu", dtype: str = "float32") -> Iterator[tuple[Served, str]]:
    """What is decoded from, and its folder where it has one for kvpress."""
    folder = os.environ.get("KVAUDIT_REAL_MODEL", "")
    if not folder:
        if (device, dtype) != ("cpu", "float32"):
            raise SystemExit("--device and --dtype are of a model of one's own: set KVAUDIT_REAL_MODEL to its folder")
        yield from ((served, "") for served in (random_llama(512, 8), *embedded()))
        return
    loaded = load_model(folder, dtype=dtype, device=device)
    loaded.model.generation_config.eos_token_id = None  # neither side stops early
    unstopped = SimpleNamespace(stop_ids=frozenset())
    yield Served(Path(folder).name, loaded.model, loaded.max_positions, loaded.device, unstopped), folder


def compare(served: Served, batch: int, peer: KVPress | None, bandwidth: float, asked: argparse.Namespace) -> None:
    """Print one table."""
    # room for a warm-up and all turns, each of which feeds one token more than it draws
    context = min(CONTEXT, served.max_positions - (asked.turns + 1) * (asked.new + 1))
    prompt: list[int] = torch.randint(0, served.model.config.vocab_size, (context,), generator=seeded()).tolist()
    print(f"\n{served.name}, batch {batch}, {context} tokens of context\n")
    counted = 0 if asked.device == "cpu" else 1
    by = "CPU" if asked.device == "cpu" else "wall"
    print(f"| work | beside | ratio, CPU | ratio, wall | tokens/s, {by} | beside | of the roofline |\n|" + "---|" * 7)
    for work, policy in {"none": "none", **EVICTING, **CODING, **SELECTING}.items():
        if not {work, work.split()[0]} & set(asked.only) or (work in EVICTING and peer is None):
            continue
        ours, name = Ours(served, policy, prompt, batch, asked.new), "our none"
        if work == "none":
            name, theirs = "generate", Generate(served, prompt, batch, asked.new)
        elif work in EVICTING and peer:
            name, theirs = "kvpress", peer.side(work, prompt, batch, asked.new)
        else:
            theirs = Ours(served, "none", prompt, batch, asked.new)
        mine, others = turns(ours, theirs, asked.turns)
        rate, other = (batch * asked.new / median(turn[counted] for turn in side) for side in (mine, others))
        ratios = [median(b[n] / a[n] for a, b in zip(mine, others, strict=True)) for n in range(2)]
        share = ours.bytes_a_step() / bandwidth * rate / batch
        cells = [work, name, *(f"{r:.2f}" for r in ratios), f"{rate:.1f}", f"{other:.1f}", f"{share:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def turns(ours: Side, theirs: Side, count: int) -> tuple[list[Seconds], list[Seconds]]:
    """Both sides' turns, one after the other; the first of each is not counted."""
    played = [(ours(), theirs()) for _ in range(count + 1)][1:]
    return [mine for mine, _ in played], [other for _, other in played]


def measured_bandwidth(device: str) -> float:
    """Bytes a second at which one thread, or a GPU, reads memory: the best of sums of 1 GB, which no cache holds."""
    large = torch.ones(1 << 28, device=device)
    counted = 0 if device == "cpu" else 1
    return max(large.nbytes / timed(large.sum)[counted] for _ in range(3 if device == "cpu" else 30))


def seeded() -> torch.Generator:
    """The same numbers every time."""
    return torch.Generator().manual_seed(1)


def timed(work: Callable[[], object]) -> Seconds:
    """How long it takes, with what it asked of a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    main()
