"""What only a GPU can tell, by one command, written under docs/results by itself.

    make gpu MODEL=FOLDER [VLLM_PYTHON=...] [SGLANG_PYTHON=...]     one CUDA device, 30 minutes at most
    python -m bench.gpu FOLDER --parts decode grpo                  some of it
    python -m bench.gpu random-1.5b --parts decode grpo             of random weights in the shape of Qwen2.5-1.5B
    python -m bench.gpu FOLDER --device cpu --small --out gpu.md    the same commands on a CPU, small: a rehearsal

Exactness of the shadow pass in float32 and bfloat16, how often a decode step waits for the device, ``generate`` with
our cache beside its own, a decode step beside kvpress's, a GRPO step beside TRL's, conditions of serving engines, and a
paired run of twenty steps of a model of 1.5B or whatever FOLDER holds. Every part is a process of its own under a limit
of its own, and a part that fails says so on the page and stops none of the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

PAGES = Path(__file__).parent.parent / "docs" / "results"
RANDOM = "random-1.5b"
POLICIES = ("none", "snapkv:budget=512,window=32,interval=16", "streaming:budget=512", "h2o:budget=512", "int8", "kivi")
EXACT = "none;snapkv:budget=256,window=16,interval=8;h2o:budget=256;int8;fp8;kivi"
LONGEST = 8_000  # characters of a part's output
SPEC = """\
name: gpu
model: {model}
dtype: bfloat16
device: {device}
train:
  arms: [dense, naive, smd]
  seeds: [1]
  policy: "snapkv:budget=128,window=16,interval=8"
  suites: [refusal, math]
  context_tokens: 256
  steps: {steps}
  prompts_per_step: {prompts}
  group: {group}
  learning_rate: 2.0e-4
  gradient_checkpointing: true
  adapter: {{rank: 16, alpha: 32}}
  microbatch_tokens: 4096
evaluate:
  policies: [none, "snapkv:budget=128,window=16,interval=8"]
  suites: {{refusal: {{items: {items}}}, math: {{items: {items}}}}}
  context_tokens: [256]
  pilot: 0
gate: {{reference: dense, margins: {{refusal: 5, math: 5}}}}
"""


class Part(NamedTuple):
    """A part of the page: what is run, and for how long it may."""

    name: str
    title: str
    command: list[str]
    limit: float  # seconds


def main() -> int:
    """Run every part and write the page; the number of parts that failed."""
    asked = arguments()
    if asked.part:
        {"generate": generate, "waits": waits}[asked.part](asked)
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; run it where one is, or rehearse it with --device cpu --small")
        return 2
    failed, pieces = 0, [head(asked)]
    with tempfile.TemporaryDirectory() as folder:
        is_random = asked.model == RANDOM
        asked.model = str(Path(folder) / RANDOM) if is_random else asked.model
        found = list(parts(asked, Path(folder)))
        unknown = set(asked.parts) - {part.name for part in found}
        if unknown:
            print(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in found)}")
            return 2
        if is_random:
            random_model(Path(asked.model), asked.device)
        for part in found:
            if asked.parts and part.name not in asked.parts:
                continue
            print(f"{part.title} ...", flush=True)
            text, went_well = run(part)
            text = text.replace(folder, "RUNS").replace(asked.model, Path(asked.model).name)  # no paths of a machine
            failed += not went_well
            pieces.append(text)
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text("\n\n".join(pieces) + "\n", encoding="utf-8")  # so that nothing measured is lost
    print(f"written: {asked.out}; {failed} of {len(pieces) - 1} parts failed")
    return failed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder in Hugging Face format, or {RANDOM}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--parts", nargs="+", default=[], help="some of them; default: all")
    parser.add_argument("--out", type=Path, help="default: docs/results/gpu-MODEL.md")
    parser.add_argument("--vllm", default=os.environ.get("VLLM_PYTHON", ""), help="the Python that has it")
    parser.add_argument("--sglang", default=os.environ.get("SGLANG_PYTHON", ""))
    parser.add_argument("--kvpress", default=os.environ.get("KVPRESS_PYTHON", ""), help="default: make bench-peers's")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out = asked.out or PAGES / f"gpu-{Path(asked.model).name}.md"
    return asked


def random_model(folder: Path, device: str) -> None:
    """Random weights in the shape of Qwen2.5-1.5B with the embedded model's words, in a folder: for times alone."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from kvaudit.audit.sampling.model import EMBEDDED, locate

    config = Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(locate(EMBEDDED))).save_pretrained(folder)


def parts(asked: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """Every part, the cheapest first."""
    python, device = [sys.executable, "-m"], ["--device", asked.device]
    tests = [*python, "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_cuda.py"]
    yield Part("tests", "Every policy against its replay, and against the CPU", tests, 300)
    sizes = ["--prompt", "64", "--new", "8"] if asked.small else ["--prompt", "1024", "--new", "64"]
    of_model = ["--model", asked.model, "--dtype", "bfloat16"]
    for name, title, words in (
        ("exactness-random", "Exactness in float32, a small random model", ["--dtype", "float32"]),
        ("exactness", "Exactness in bfloat16", of_model),
    ):
        words += ["--policies", EXACT, *device, *sizes]
        yield Part(name, title, [*python, "bench.exactness", *words], 300)
    small = ["--small"] if asked.small else []
    for name, title in (
        ("waits", "How often a step of generate waits for the device"),
        ("generate", "Stock generate with our cache, beside its own"),
    ):
        yield Part(name, title, [*python, "bench.gpu", asked.model, "--part", name, *device, *small], 300)
    turns = ["--turns", "1", "--new", "4"] if asked.small else ["--turns", "3", "--new", "32"]
    peers = ["--peers", asked.kvpress] if asked.kvpress else []
    yield Part(
        "decode",
        "A decode step beside generate, kvpress and our own uncompressed",
        [*setting(asked), *python, "bench.decode", "--dtype", "bfloat16", *device, *turns, *peers],
        300,
    )
    step = ["1", "1", "64"] if asked.small else ["3", "8", "1024"]
    yield Part("grpo", "A GRPO step beside TRL", [*setting(asked), *python, "bench.training", *step, *device], 600)
    for engine, interpreter in (("vllm", asked.vllm), ("sglang", asked.sglang)):
        for kv in ("fp8_e4m3", "fp8_e5m2"):
            words = ["--engine", engine, "--kv", kv, "--fast", "--python", interpreter]
            command = [*python, "kvaudit", "check", asked.model, *words, "--out", str(folder / f"{engine}-{kv}")]
            if interpreter:
                yield Part(f"{engine}-{kv}", f"{engine} {kv}", command, 420)
    numbers = {"steps": 2, "prompts": 2, "group": 2, "items": 3} if asked.small else {}
    numbers = {"steps": 20, "prompts": 8, "group": 8, "items": 72} | numbers
    spec = folder / "gpu.yaml"
    spec.write_text(SPEC.format(model=asked.model, device=asked.device, **numbers), encoding="utf-8")
    command = [*python, "kvaudit", "run", str(spec), "--out", str(folder / "run"), "--anyway"]
    yield Part("paired", "A paired run", command, 900)


def setting(asked: argparse.Namespace) -> list[str]:
    """What a command that takes its model from the environment begins with."""
    return ["env", f"KVAUDIT_REAL_MODEL={asked.model}"]


def head(asked: argparse.Namespace) -> str:
    """Whose figures these are."""
    name = torch.cuda.get_device_name() if asked.device == "cuda" else f"{asked.device}, a rehearsal"
    words = "--small" if asked.small else ""
    return (
        f"# On a GPU\n\n`python -m bench.gpu FOLDER --device {asked.device} {words}`".rstrip()
        + f"\n\n{name}; torch {torch.__version__}; {Path(asked.model).name}; {time.strftime('%Y-%m-%d')}."
    )


def run(part: Part) -> tuple[str, bool]:
    """One part as a section of the page, and whether it went well."""
    began = time.perf_counter()
    try:
        found = subprocess.run(part.command, capture_output=True, text=True, timeout=part.limit, check=False)
        text, ended = found.stdout + (found.stderr if found.returncode else ""), f"exit {found.returncode}"
        # a check's exit code is its verdict
        went_well = found.returncode == 0 or ("check" in part.command and found.returncode in (3, 4, 5, 6))
    except subprocess.TimeoutExpired as late:
        text, ended, went_well = str(late.stdout or ""), f"stopped after {part.limit:g} s", False
    shown = "\n".join("    " + line for line in text[-LONGEST:].splitlines())
    seconds = time.perf_counter() - began
    return f"## {part.title}\n\n{seconds:.0f} s, {ended}.\n\n{shown}", went_well


def waits(asked: argparse.Namespace) -> None:
    """Times a step that torch's own watch saw the host wait for the device, by policy and batch."""
    from kvaudit import CompressedCache
    from kvaudit.audit.sampling.model import load_model

    loaded = load_model(asked.model, dtype="bfloat16", device=asked.device)
    model = loaded.model
    model.generation_config.eos_token_id = None
    length, new = (48, 8) if asked.small else (1024, 128)
    print("| cache | batch | waits a step, tokens 3 to the last |\n|---|---:|---:|")
    for batch in (1, 8):
        ids = torch.randint(5, 1000, (batch, length), generator=torch.Generator().manual_seed(0)).to(loaded.device)
        for policy in (None, *POLICIES):
            seen = []
            for tokens in (2, new):
                cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
                with warnings.catch_warnings(record=True) as said, torch.no_grad():
                    warnings.simplefilter("always")
                    if asked.device == "cuda":
                        torch.cuda.set_sync_debug_mode("warn")
                    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **cache)
                    if asked.device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
                seen.append(sum("synchronizing" in str(one.message) for one in said))
            print(f"| `{policy or 'stock'}` | {batch} | {(seen[1] - seen[0]) / (new - 2):.2f} |", flush=True)


def generate(asked: argparse.Namespace) -> None:
    """Tokens a second of ``generate`` under our cache over those under stock's, by policy and batch, sides in turn."""
    from kvaudit import CompressedCache
    from kvaudit.audit.sampling.model import load_model

    loaded = load_model(asked.model, dtype="bfloat16", device=asked.device)
    model = loaded.model
    model.generation_config.eos_token_id = None
    length, new, turns = (48, 8, 1) if asked.small else (2048, 32, 3)
    print("| policy | batch | ours, tokens/s | stock | ratio |\n|---|---:|---:|---:|---:|")
    for batch in (1, 8):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, min(1000, model.config.vocab_size), (batch, length), generator=generator).to(
            loaded.device
        )

        def seconds(policy: str | None, ids: torch.Tensor = ids) -> float:
            cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
            began = time.perf_counter()
            with torch.no_grad():
                model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **cache)
            if asked.device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        seconds(None)  # kernels are chosen at their first call
        for policy in POLICIES:
            seconds(policy)
            taken = [(seconds(policy), seconds(None)) for _ in range(turns)]
            ours, stock = (median(turn[side] for turn in taken) for side in (0, 1))
            ratio = median(turn[1] / turn[0] for turn in taken)
            rates = [batch * new / one for one in (ours, stock)]
            print(f"| `{policy}` | {batch} | {rates[0]:.1f} | {rates[1]:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
