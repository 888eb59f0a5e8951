"""What only a GPU can tell, by one command, written under docs/results by itself.

    make gpu MODEL=FOLDER [VLLM_PYTHON=...] [SGLANG_PYTHON=...]     one CUDA device, 30 minutes at most
    python -m bench.gpu FOLDER --device cpu --small --out gpu.md    the same commands on a CPU, small: a rehearsal

Exactness of the shadow pass in bfloat16, a decode step beside stock ``generate``, a GRPO step beside TRL's, conditions
of serving engines, and a paired run of twenty steps of a model of 1.5B or whatever FOLDER holds. Every part is a
process of its own under a limit of its own, and a part that fails says so on the page and stops none of the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

PAGE = Path(__file__).parent.parent / "docs" / "results" / "gpu.md"
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

    title: str
    command: list[str]
    limit: float  # seconds


def main() -> int:
    """Run every part and write the page; the number of parts that failed."""
    asked = arguments()
    if asked.part == "decode":
        decode(asked)
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; run it where one is, or rehearse it with --device cpu --small")
        return 2
    failed, pieces = 0, [head(asked)]
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(asked, Path(folder)):
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
    parser.add_argument("model", help="a folder in Hugging Face format")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--vllm", default=os.environ.get("VLLM_PYTHON", ""), help="the Python that has it")
    parser.add_argument("--sglang", default=os.environ.get("SGLANG_PYTHON", ""))
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def parts(asked: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """Every part, the cheapest first."""
    python, device = [sys.executable, "-m"], ["--device", asked.device]
    sizes = ["--prompt", "64", "--new", "8"] if asked.small else ["--prompt", "1024", "--new", "64"]
    words = ["--model", asked.model, "--dtype", "bfloat16", "--policies", EXACT, *device, *sizes]
    yield Part("Exactness in bfloat16", [*python, "bench.exactness", *words], 300)
    small = ["--small"] if asked.small else []
    yield Part(
        "Decode beside stock generate",
        [*python, "bench.gpu", asked.model, "--part", "decode", *device, *small],
        300,
    )
    step = ["1", "1", "64"] if asked.small else ["5", "8", "1024"]
    yield Part(
        "A GRPO step beside TRL",
        ["env", f"KVAUDIT_REAL_MODEL={asked.model}", *python, "bench.training", *step, *device],
        600,
    )
    for engine, interpreter in (("vllm", asked.vllm), ("sglang", asked.sglang)):
        for kv in ("fp8_e4m3", "fp8_e5m2"):
            if interpreter:
                words = ["--engine", engine, "--kv", kv, "--fast", "--python", interpreter]
                yield Part(
                    f"{engine} {kv}", [*python, "kvaudit", "check", asked.model, *words, "--out", str(folder / kv)], 420
                )
    numbers = {"steps": 2, "prompts": 2, "group": 2, "items": 3} if asked.small else {}
    numbers = {"steps": 20, "prompts": 8, "group": 8, "items": 72} | numbers
    spec = folder / "gpu.yaml"
    spec.write_text(SPEC.format(model=asked.model, device=asked.device, **numbers), encoding="utf-8")
    yield Part("A paired run", [*python, "kvaudit", "run", str(spec), "--out", str(folder / "run"), "--anyway"], 900)


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


def decode(asked: argparse.Namespace) -> None:
    """Tokens a second of ``generate`` under our cache over those under stock's, by policy and batch, sides in turn."""
    from kvaudit import CompressedCache
    from kvaudit.audit.sampling.model import load_model

    loaded = load_model(asked.model, dtype="bfloat16", device=asked.device)
    model = loaded.model
    model.generation_config.eos_token_id = None
    length, new, turns = (48, 8, 1) if asked.small else (2048, 64, 3)
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
