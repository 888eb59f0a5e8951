"""How fast is a decode step beside those of transformers and kvpress, and how near is it to the roofline?

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.decode    # all rows; default: the random and the embedded model
    python -m bench.decode --batch 8 --only snapkv --turns 3
    KVAUDIT_REAL_MODEL=FOLDER python -m bench.decode --device cuda --dtype bfloat16    # by wall time only

Takes about 20 minutes for 135M parameters on one core; results: docs/results/bench.md. kvpress needs ``make
bench-peers``.

Two sides take turns on the same prompt and thread: our uncompressed decoding and ``model.generate``; snapkv and
streaming and kvpress with the same budget; codes and quest and our uncompressed decoding. kvpress compresses the prompt
only, ours also evicts while decoding. Ratios are medians over turns of CPU time, which other processes disturb less,
and of wall time. The roofline is the bytes of weights and entries that a step has to read, over the bandwidth at which
this run sums a large tensor; on a GPU by wall time. Prefill is not timed; the rows of a batch share a prompt.
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
from typing import NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from bench.models import Served, embedded, load_served, random_llama
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import DtypeName
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import RunError

CONTEXT, NEW, TURNS, BUDGET = 2048, 16, 5, 512
PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"
EVICTING = {name: f"{name}:budget={BUDGET}" for name in ("snapkv", "streaming")}
CODING = {"int8": "int8", "kivi 4 bits": "kivi:bits=4"}
SELECTING = {"quest": f"quest:budget={BUDGET}"}
PlayTurn = Callable[[], "Seconds"]  # decodes one turn of one side


class Seconds(NamedTuple):
    """CPU and wall seconds of one turn."""

    cpu: float
    wall: float


class Ours:
    """Rows of one prompt under a policy; each call decodes ``new`` more tokens."""

    def __init__(self, served: Served, policy: str, prompt: list[int], batch: int, new: int) -> None:
        self._new, self._parameters = new, sum(p.nbytes for p in served.model.parameters())
        self._episode = Sampler(pack_weights(served), parse_policy(policy)).open(
            [prompt], list(range(batch)), group=batch
        )

    def __call__(self) -> Seconds:
        return time_call(lambda: self._episode.decode(Decoding(self._new, temperature=0.0)))

    def bytes_a_step(self) -> int:
        """Return the bytes that a step has to read: all weights once, and the rows' caches."""
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
        seconds = time_call(self._generate)
        self._model.set_attn_implementation(ATTENTION_NAME)
        return seconds

    def _generate(self) -> None:
        mask = torch.ones_like(self._ids)
        self._ids = self._model.generate(
            self._ids, attention_mask=mask, past_key_values=self._cache, generation_config=self._config
        )


class KVPressProcess:
    """The process in which kvpress runs; raises RunError if it ends."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
        command = [options.peers, str(Path(__file__).parent / "kvpress_peer.py"), folder, options.device, options.dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}
        )

    def side(self, press: str, prompt: list[int], batch: int, new: int) -> PlayTurn:
        """Prefill the prompt under a press; returns the function that decodes one turn."""
        entries = self._ask({"open": {"press": press, "budget": BUDGET, "prompt": prompt, "batch": batch}})
        assert entries == BUDGET, f"kvpress kept {entries} entries, not {BUDGET}"
        return lambda: Seconds(*self._ask({"turn": new}))

    def _ask(self, request: dict[str, object]) -> object:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(request), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise RunError("the process of kvpress ended (its error is above); install it again with: make bench-peers")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    bandwidth = measured_bandwidth(options.device)
    hardware = f"{torch.get_num_threads()} thread(s)" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{hardware}, {options.dtype}, {bandwidth / 1e9:.1f} GB/s, {options.turns} turns of {options.new} tokens\n")
    for served, folder in models(options.device, options.dtype):
        peer = KVPressProcess(folder, options) if folder and Path(options.peers).is_file() else None
        if peer is None:
            print(f"{served.name}: rows of kvpress left out; they need KVAUDIT_REAL_MODEL and: make bench-peers")
        for batch in options.batch:
            compare(served, batch, peer, bandwidth, options)
        if peer:
            peer.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", default=["none", *EVICTING, *CODING, *SELECTING], help="names of rows")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--new", type=int, default=NEW, help="tokens per turn")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="for KVAUDIT_REAL_MODEL")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="for KVAUDIT_REAL_MODEL")
    parser.add_argument("--peers", default=str(PEERS), help="a Python with kvpress")
    return parser.parse_args()


def models(device: str = "cpu", dtype: DtypeName = "float32") -> Iterator[tuple[Served, str]]:
    """Yield the models to decode from, each with its folder for kvpress or an empty text."""
    folder = os.environ.get("KVAUDIT_REAL_MODEL", "")
    if not folder:
        if (device, dtype) != ("cpu", "float32"):
            raise SystemExit("--device and --dtype need a model of your own; set KVAUDIT_REAL_MODEL to its folder")
        yield from ((served, "") for served in (random_llama(512, 8), *embedded()))
        return
    yield load_served(folder, dtype, device), folder


def compare(
    served: Served, batch: int, peer: KVPressProcess | None, bandwidth: float, options: argparse.Namespace
) -> None:
    # leave room for a warm-up and all turns; each turn feeds one token more than it samples
    context = min(CONTEXT, served.max_positions - (options.turns + 1) * (options.new + 1))
    prompt: list[int] = torch.randint(
        0, served.model.config.vocab_size, (context,), generator=seeded_generator()
    ).tolist()
    print(f"\n{served.name}, batch {batch}, {context} tokens of context\n")
    clock = 0 if options.device == "cpu" else 1
    clock_name = "CPU" if options.device == "cpu" else "wall"
    print(
        f"| work | beside | ratio, CPU | ratio, wall | tokens/s, {clock_name} | beside | of the roofline |\n|"
        + "---|" * 7
    )
    for work, policy in {"none": "none", **EVICTING, **CODING, **SELECTING}.items():
        if not {work, work.split()[0]} & set(options.only) or (work in EVICTING and peer is None):
            continue
        ours, name = Ours(served, policy, prompt, batch, options.new), "our none"
        if work == "none":
            name, theirs = "generate", Generate(served, prompt, batch, options.new)
        elif work in EVICTING and peer:
            name, theirs = "kvpress", peer.side(work, prompt, batch, options.new)
        else:
            theirs = Ours(served, "none", prompt, batch, options.new)
        mine, others = turns(ours, theirs, options.turns)
        rate, other = (batch * options.new / median(turn[clock] for turn in side) for side in (mine, others))
        ratios = [median(b[n] / a[n] for a, b in zip(mine, others, strict=True)) for n in range(2)]
        share = ours.bytes_a_step() / bandwidth * rate / batch
        cells = [work, name, *(f"{r:.2f}" for r in ratios), f"{rate:.1f}", f"{other:.1f}", f"{share:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def turns(ours: PlayTurn, theirs: PlayTurn, count: int) -> tuple[list[Seconds], list[Seconds]]:
    """Let both sides decode in turns; returns their seconds without the first turns."""
    played = [(ours(), theirs()) for _ in range(count + 1)][1:]
    return [mine for mine, _ in played], [other for _, other in played]


def measured_bandwidth(device: str) -> float:
    """Return the bytes per second at which one thread, or a GPU, sums 1 GB (more than its caches), the best of some."""
    large = torch.ones(1 << 28, device=device)
    clock = 0 if device == "cpu" else 1
    return max(large.nbytes / time_call(large.sum)[clock] for _ in range(3 if device == "cpu" else 30))


def seeded_generator() -> torch.Generator:
    """Return a generator with a fixed seed."""
    return torch.Generator().manual_seed(1)


def time_call(work: Callable[[], object]) -> Seconds:
    """Return the seconds that a call takes, with its GPU work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    main()
