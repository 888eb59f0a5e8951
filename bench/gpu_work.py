"""What ``bench.gpu`` times in processes of its own: decode steps beside their peers, prefill, waits.

    python -m bench.gpu_work decode --shape 1.5b --batch 8 --context 2048      one table
    python -m bench.gpu_work steps --batch 8 --context 2048                    a few policies under one KVAUDIT_STEP
    python -m bench.gpu_work warm | folder | prefill | waits

Weights are random numbers in the shape of a published model, drawn on the device. Ours and its peers take turns in one
process, each on rows of the same prompt; a side's first turn is longer than a capture and is not counted. Only decode
steps are timed: the clock of ``generate`` starts when its first token's logits are there, with nothing left in flight.
cuDNN's attention, torch's default, is left to the static cache alone: it plans every new length anew.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from bench.decode import measured_bandwidth, seeded, timed
from bench.models import Served
from kvaudit.audit.cache.attention import ATTENTION_NAME, disable_cudnn_attention
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

BUDGET = 512  # entries that evicting policies keep
POLICIES = (
    "none",
    f"snapkv:budget={BUDGET},window=32,interval=128",
    f"streaming:budget={BUDGET}",
    f"h2o:budget={BUDGET}",
    "int8",
    "fp8",
    "kivi:bits=4",
)
STEPPED = (*POLICIES[:3], "int8", "kivi:bits=4")  # in the table of KVAUDIT_STEP
WARM, NEW, TURNS = 16, 32, 3  # tokens of the turn that is not counted, of one that is, and how many are
DYNAMIC, STATIC = "generate, dynamic cache", "generate, static cache, compiled"
PRESS = f"kvpress (a stock cache of {BUDGET} entries, which its decode step reads)"
PEERS = (DYNAMIC, PRESS)
SHAPES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "1.5b": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
    "8b": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        },
    ),
    "tiny": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


class BrokenError(RuntimeError):
    """A side left the device in a state in which nothing works; its text is the side's name."""


class Turn(NamedTuple):
    """Seconds of a turn's decode steps, and the most bytes its side held, without the weights."""

    seconds: float
    peak: int


class Side:
    """Rows that decode, a number of steps at a time; subclasses write ``steps``, which returns seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._standing = device, _allocated(device)

    def opened(self) -> None:
        """Note what the side's caches take, once they stand."""
        self._standing = _allocated(self._device) - self._standing

    def steps(self, count: int) -> float:
        """Decode and return the seconds."""
        raise NotImplementedError

    def turn(self, count: int) -> Turn:
        """Decode, and note the most memory in use meanwhile."""
        if self._device.type == "cpu":
            return Turn(self.steps(count), 0)
        torch.cuda.reset_peak_memory_stats()
        before = _allocated(self._device)
        seconds = self.steps(count)
        return Turn(seconds, torch.cuda.max_memory_allocated() - before + self._standing)


class Ours(Side):
    """Rows under a policy: one long turn of the sampler, paused after so many steps."""

    def __init__(self, served: Served, policy: str, prompt: list[int], batch: int, most: int) -> None:
        super().__init__(served.device)
        self._decoding = Decoding(most, temperature=0.0)
        self._episode = Sampler(served, parse_policy(policy)).open([prompt], list(range(batch)), group=batch)
        self.opened()

    def steps(self, count: int) -> float:
        """Decode until the sampler is asked to pause."""
        taken = 0

        def pauses() -> bool:
            nonlocal taken
            taken += 1
            return taken == count

        return timed(lambda: self._episode.decode(self._decoding, should_pause=pauses)).wall

    @property
    def bytes(self) -> int:
        """What the rows' caches hold."""
        return int(self._episode.bytes)


class Clock(LogitsProcessor):
    """Starts when ``generate`` has the logits of its first token, so that only decode steps are counted."""

    def __init__(self) -> None:
        self.started = 0.0

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        """Change nothing."""
        if not self.started:
            _settle()
            self.started = time.perf_counter()
        return scores


class Generate(Side):
    """Rows of a prompt through stock ``generate``, on a cache that holds the prompt and grows from turn to turn."""

    def __init__(self, model: Any, prompt: list[int], batch: int, most: int, *, static: bool) -> None:
        super().__init__(model.device)
        self._model = model
        held = prefilled(model, prompt)
        if static:
            self._cache: Any = StaticCache(config=model.config, max_cache_len=len(prompt) + most)
            for number, (keys, values) in enumerate(held):
                self._cache.update(repeated(keys, batch), repeated(values, batch), number)
        else:
            self._cache = filled([(repeated(keys, batch), repeated(values, batch)) for keys, values in held])
        self._ids = torch.tensor([prompt] * batch, device=model.device)
        self._static = static
        del held
        self.opened()

    def steps(self, count: int) -> float:
        """One call of ``generate``; its first token is not timed."""
        clock = Clock()
        config = GenerationConfig(
            max_new_tokens=count + 1, min_new_tokens=count + 1, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        with torch.no_grad(), cudnn(self._static), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of compilers
            self._ids = self._model.generate(
                self._ids, attention_mask=torch.ones_like(self._ids), past_key_values=self._cache,
                generation_config=config, logits_processor=LogitsProcessorList([clock]),
            )  # fmt: skip
        _settle()
        return time.perf_counter() - clock.started


class Press(Side):
    """What a press of kvpress leaves to decode: stock steps on a stock cache of the budget's entries.

    kvpress pins a transformers older than ours needs. A press compresses the prompt and leaves decoding to the model.
    """

    def __init__(self, model: Any, prompt: list[int], batch: int) -> None:
        super().__init__(model.device)
        kept = min(BUDGET, len(prompt) - 1)
        self._model, self._length = model, len(prompt)
        self._cache = filled(
            [(repeated(k[:, :, :kept], batch), repeated(v[:, :, :kept], batch)) for k, v in prefilled(model, prompt)]
        )
        self._first = torch.tensor([[prompt[-1]]] * batch, device=model.device)
        self.opened()

    @torch.no_grad()
    def steps(self, count: int) -> float:
        """Decode as kvpress's own pipeline does, from the compressed prompt on."""
        cache, ids = copy.deepcopy(self._cache), self._first
        _settle()
        began = time.perf_counter()
        for step in range(count):
            at = torch.full_like(ids, self._length + step)
            ids = self._model(ids, past_key_values=cache, position_ids=at).logits[:, -1].argmax(-1)[:, None]
            ids.tolist()  # looks for a stop token
        _settle()
        return time.perf_counter() - began


def repeated(rows: Tensor, batch: int) -> Tensor:
    """One row's entries for a whole batch, in memory of their own."""
    return rows.repeat(batch, 1, 1, 1)


def filled(held: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A stock cache that holds these keys and values, a pair for each layer."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(held):
        cache.update(keys, values, number)
    return cache


@torch.no_grad()
def prefilled(model: Any, prompt: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer for one row of the prompt without its last token."""
    cache = DynamicCache()
    model(torch.tensor([prompt[:-1]], device=model.device), past_key_values=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def cudnn(on: bool) -> Iterator[None]:
    """Let torch choose cuDNN's attention, its default, which kvaudit turns off since it plans every new length."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def random_model(shape: str, device: str, dtype: torch.dtype) -> Served:
    """Random weights in the shape of a model, drawn on the device."""
    config_type, model_type, sizes = SHAPES[shape]
    config = config_type(**sizes, max_position_embeddings=65_536)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = model_type(config).eval()
    torch.set_default_dtype(torch.float32)
    disable_cudnn_attention(torch.device(device))
    model.generation_config.eos_token_id = None
    return Served(f"{shape} shape", model, 65_536, torch.device(device))


def stock_twin(model: Any) -> Any:
    """The same weights in a model with stock attention, which no hook of ours reaches."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation("sdpa")
    return twin


def weight_bytes(model: Any) -> int:
    """What a step reads of the weights: all but a table of embeddings that is not the output's too."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight
    return size if model.get_output_embeddings().weight is embeddings else size - embeddings.nbytes


def _allocated(device: torch.device) -> int:
    """Bytes of the device that live tensors take."""
    gc.collect()
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated()


def _settle() -> None:
    """Wait until the device has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prompt_of(served: Served, context: int) -> list[int]:
    """Random tokens, the same every time."""
    ids: list[int] = torch.randint(0, served.model.config.vocab_size, (context,), generator=seeded()).tolist()
    return ids


def failed(name: str, error: Exception) -> None:
    """Say in a line what failed and free its memory; raises BrokenError where the device works no longer."""
    print(f"* {name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", flush=True)
    error.__traceback__ = None  # its frames would keep the caches
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            raise BrokenError(name) from None


def opened(name: str, build: Callable[[], Side], asked: argparse.Namespace) -> Side | None:
    """A side after its turn that is not counted; None, with a line that says why, where there is none."""
    began = time.perf_counter()
    if began > asked.end:
        print(f"* {name}: no time was left", flush=True)
        return None
    try:
        side = build()
        side.turn(asked.warm)
        print(f"* {name}: {time.perf_counter() - began:.1f} s to open and warm up", flush=True)
    except Exception as error:
        failed(name, error)
        return None
    return side


def play(sides: dict[str, Side], asked: argparse.Namespace) -> dict[str, list[Turn]]:
    """The turns of all sides, one round after the other; a round begins only while there is time for it."""
    played: dict[str, list[Turn]] = {name: [] for name in sides}
    began = time.perf_counter()
    for number in range(asked.turns):
        spent = time.perf_counter() - began
        if number and time.perf_counter() + spent / number > asked.end:
            print(f"* {number} of {asked.turns} turns: no time for more", flush=True)
            break
        for name, side in list(sides.items()):
            try:
                played[name].append(side.turn(asked.new))
                print(
                    f"{name}: {1e3 * played[name][-1].seconds / asked.new:.2f} ms a step", file=sys.stderr, flush=True
                )
            except Exception as error:
                del sides[name], played[name]
                failed(name, error)
    return played


def decode(asked: argparse.Namespace) -> None:
    """Print one table: every policy and every peer at one shape, batch and context."""
    served = random_model(asked.shape, asked.device, getattr(torch, asked.dtype))
    twin, prompt = stock_twin(served.model), prompt_of(served, asked.context)
    once, batch = asked.warm + asked.turns * (asked.new + 1) + 8, asked.batch
    most = once + asked.turns * asked.new  # `none` takes turns twice
    bandwidth = measured_bandwidth(asked.device)
    print(f"{served.name}, {asked.dtype}, batch {batch}, {asked.context:,} tokens, {bandwidth / 1e9:.0f} GB/s\n")
    builds: dict[str, Callable[[], Side]] = {
        DYNAMIC: partial(Generate, twin, prompt, batch, most, static=False),
        PRESS: partial(Press, twin, prompt, batch),
        **{policy: partial(Ours, served, policy, prompt, batch, most) for policy in asked.policies},
    }
    sides = {name: side for name, build in builds.items() if (side := opened(name, build, asked))}
    held = {name: side.bytes for name, side in sides.items() if isinstance(side, Ours)}
    played = play(sides, asked)
    read = weight_bytes(served.model)
    print("\n| | tokens/s | ms a step | beside dynamic | kvpress | roofline | GB beside weights |")
    print("|---|" + "---:|" * 6)
    for name in (*PEERS, *asked.policies):
        if name in played:
            print(row(name, played, batch * asked.new, asked.new, (read + held.get(name, 0)) / bandwidth), flush=True)
    # compiling may take longer than the time that is left, so what was measured stands before
    static = opened(STATIC, partial(Generate, twin, prompt, batch, once, static=True), asked)
    if static is not None and "none" in sides:
        beside_static(play({STATIC: static, "none": sides["none"]}, asked), played, asked)


def beside_static(turns: dict[str, list[Turn]], played: dict[str, list[Turn]], asked: argparse.Namespace) -> None:
    """Print how long a static step takes over each policy's; ``none`` took turns with it, the others came before."""
    static = [turn.seconds for turn in turns.get(STATIC, [])]
    if not static:
        return
    print(f"\n| | ms a step | {STATIC}, over it |\n|---|---:|---:|\n| {STATIC} | {each(static, asked)} | |")
    for name in asked.policies:
        seconds = [turn.seconds for turn in turns.get(name) or played.get(name, [])]
        if seconds:
            print(f"| `{name}` | {each(seconds, asked)} | {median(static) / median(seconds):.2f} |", flush=True)


def each(seconds: list[float], asked: argparse.Namespace) -> str:
    """The median turn as milliseconds a step."""
    return f"{1e3 * median(seconds) / asked.new:.2f}"


def row(name: str, played: dict[str, list[Turn]], tokens: int, steps: int, floor: float) -> str:
    """One line: medians of a side's turns, and of their ratios to the peers' turns of the same rounds."""
    turns = played[name]
    seconds = median(turn.seconds for turn in turns)
    ratios = []
    for peer in PEERS:
        pairs = list(zip(played.get(peer, []), turns, strict=False))
        ratios.append(f"{median(b.seconds / a.seconds for b, a in pairs):.2f}" if pairs and peer != name else "")
    share = "" if name in PEERS else f"{floor * steps / seconds:.2f}"
    peak = max(turn.peak for turn in turns) / 1e9
    shown = name if name in PEERS else f"`{name}`"
    cells = [shown, f"{tokens / seconds:.0f}", f"{1e3 * seconds / steps:.2f}", *ratios, share, f"{peak:.2f}"]
    return "| " + " | ".join(cells) + " |"


def steps(asked: argparse.Namespace) -> None:
    """Print how long a step takes under the sampler's way that KVAUDIT_STEP names, policy by policy."""
    served = random_model(asked.shape, asked.device, getattr(torch, asked.dtype))
    prompt, most = prompt_of(served, asked.context), asked.warm + asked.turns * asked.new + 8
    print(f"| KVAUDIT_STEP={os.environ.get('KVAUDIT_STEP', '')} | ms a step | s to warm up |\n|---|---:|---:|")
    for policy in asked.policies:
        began = time.perf_counter()
        try:
            side = Ours(served, policy, prompt, asked.batch, most)
            side.turn(asked.warm)
            warm = time.perf_counter() - began
            each = median(side.turn(asked.new).seconds for _ in range(asked.turns)) / asked.new
        except Exception as error:
            print(f"| `{policy}` | {type(error).__name__}: {str(error)[:200]!r} | |", flush=True)
            continue
        print(f"| `{policy}` | {1e3 * each:.2f} | {warm:.1f} |", flush=True)
        if time.perf_counter() > asked.end:
            return


def warm(asked: argparse.Namespace) -> None:
    """Compile the static cache's step for the shapes to come, so that its kernels lie in torch's cache on disk."""
    served = random_model(asked.shape, asked.device, getattr(torch, asked.dtype))
    twin, most = stock_twin(served.model), asked.warm + asked.turns * (asked.new + 1) + 8
    for place in asked.places:
        torch._dynamo.reset()  # as in a process of its own
        batch, context = (int(number) for number in place.split("x"))
        opened(place, partial(Generate, twin, prompt_of(served, context), batch, most, static=True), asked)


def folder(asked: argparse.Namespace) -> None:
    """Save a random model with the embedded model's tokenizer, for what loads a folder."""
    from transformers import AutoTokenizer

    from kvaudit.audit.sampling.model import EMBEDDED, locate

    model = random_model(asked.shape, asked.device, getattr(torch, asked.dtype)).model
    model.save_pretrained(asked.folder)
    AutoTokenizer.from_pretrained(str(locate(EMBEDDED))).save_pretrained(asked.folder)


def prefill(asked: argparse.Namespace) -> None:
    """Print tokens a second of a prompt's prefill, ours beside stock's, sides in turn."""
    served = random_model(asked.shape, asked.device, getattr(torch, asked.dtype))
    twin = stock_twin(served.model)
    print("| policy | prompt | ours, tokens/s | stock | ratio |\n|---|---:|---:|---:|---:|")
    for context in asked.contexts:
        prompt = prompt_of(served, context)
        for policy in POLICIES[:2]:

            def ours(policy: str = policy, prompt: list[int] = prompt) -> object:
                return Sampler(served, parse_policy(policy)).open([prompt], [0])

            def stock(prompt: list[int] = prompt) -> object:
                return prefilled(twin, [*prompt, 0])

            pairs = [(timed(ours).wall, timed(stock).wall) for _ in range(asked.turns + 1)][1:]
            mine, theirs = (context / median(pair[side] for pair in pairs) for side in (0, 1))
            ratio = median(b / a for a, b in pairs)
            print(f"| `{policy}` | {context} | {mine:.0f} | {theirs:.0f} | {ratio:.2f} |", flush=True)


def waits(asked: argparse.Namespace) -> None:
    """Print how often torch's own watch saw the host wait for the device in a step of ``generate``, by policy."""
    from kvaudit import CompressedCache

    model = random_model(asked.shape, asked.device, getattr(torch, asked.dtype)).model
    print("| cache | batch | waits a step, tokens 3 to the last |\n|---|---:|---:|")
    for batch in (1, 8):
        shape = (batch, asked.contexts[0])
        ids = torch.randint(5, model.config.vocab_size, shape, generator=seeded()).to(asked.device)
        for policy in (None, *POLICIES):
            seen = []
            for tokens in (2, asked.new):
                cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
                with warnings.catch_warnings(record=True) as said, torch.no_grad():
                    warnings.simplefilter("always")
                    if asked.device == "cuda":
                        torch.cuda.set_sync_debug_mode("warn")
                    model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                        do_sample=False, pad_token_id=0, **cache,
                    )  # fmt: skip
                    if asked.device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
                seen.append(sum("synchronizing" in str(one.message) for one in said))
            print(f"| `{policy or 'stock'}` | {batch} | {(seen[1] - seen[0]) / (asked.new - 2):.2f} |", flush=True)


WORK = {"decode": decode, "steps": steps, "warm": warm, "folder": folder, "prefill": prefill, "waits": waits}


def main() -> None:
    """Do one piece of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[2048, 8192], help="of prefill; waits reads the first"
    )
    parser.add_argument("--places", nargs="+", default=["8x2048", "8x8192"], help="BATCHxCONTEXT to compile for")
    parser.add_argument("--folder", help="where to save")
    parser.add_argument("--policies", nargs="+", default=[])
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--seconds", type=float, default=600, help="begin no further turns after these")
    asked = parser.parse_args()
    asked.end = time.perf_counter() + asked.seconds
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # for a rehearsal
    asked.policies = asked.policies or list(STEPPED if asked.work == "steps" else POLICIES)
    try:
        WORK[asked.work](asked)
    except BrokenError as broken:
        # once more in a fresh process, without the side that broke the device
        policies = [policy for policy in asked.policies if policy != str(broken)]
        if asked.work != "decode" or len(policies) == len(asked.policies):
            raise
        left = f"{asked.end - time.perf_counter():.0f}"
        words = [sys.executable, "-m", "bench.gpu_work", *sys.argv[1:], "--seconds", left, "--policies", *policies]
        print(f"\nOnce more, without `{broken}`:\n", flush=True)
        os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
