"""How fast are decode steps and prefill on a GPU beside their peers? The work that ``bench.gpu`` starts as processes.

    python -m bench.gpu_work decode --shape 1.5b --batch 8 --context 2048    # one table
    python -m bench.gpu_work steps --batch 8 --context 2048                  # some policies, under one KVAUDIT_STEP
    python -m bench.gpu_work warm | folder | prefill | waits

Takes one or two minutes each on a GPU; results: docs/results/gpu.md.

Weights are random numbers in the shape of a published model, drawn on the device. Our decoding and its peers take turns
in one process, on rows of the same prompt; a side's first turn, which captures graphs, is not counted. Only decode
steps are timed: the clock of ``generate`` starts when the logits of its first token are computed. cuDNN's attention,
torch's default, is used for the static cache alone, since it plans every new length again.
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

from bench.decode import measured_bandwidth, seeded_generator, time_call
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
    """A side left the device unusable; the error's text is the side's name."""


class Turn(NamedTuple):
    """The seconds of a turn's decode steps, and the peak bytes of the side without the weights."""

    seconds: float
    peak: int


class Side:
    """Rows that decode some steps at a time; subclasses write ``steps``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._standing = device, _allocated(device)

    def opened(self) -> None:
        """Record the memory of the side's caches once they are built."""
        self._standing = _allocated(self._device) - self._standing

    def steps(self, count: int) -> float:
        """Decode; returns the seconds."""
        raise NotImplementedError

    def turn(self, count: int) -> Turn:
        """Decode; returns the seconds and the peak memory."""
        if self._device.type == "cpu":
            return Turn(self.steps(count), 0)
        torch.cuda.reset_peak_memory_stats()
        before = _allocated(self._device)
        seconds = self.steps(count)
        return Turn(seconds, torch.cuda.max_memory_allocated() - before + self._standing)


class Ours(Side):
    """Rows under a policy: one long turn of the sampler, paused after every so many steps."""

    def __init__(self, served: Served, policy: str, prompt: list[int], batch: int, max_tokens: int) -> None:
        super().__init__(served.device)
        self._decoding = Decoding(max_tokens, temperature=0.0)
        self._episode = Sampler(served, parse_policy(policy)).open([prompt], list(range(batch)), group=batch)
        self.opened()

    def steps(self, count: int) -> float:
        """Decode until the sampler pauses."""
        taken = 0

        def pauses() -> bool:
            nonlocal taken
            taken += 1
            return taken == count

        return time_call(lambda: self._episode.decode(self._decoding, should_pause=pauses)).wall

    @property
    def bytes(self) -> int:
        """The bytes of the rows' caches."""
        return int(self._episode.bytes)


class Clock(LogitsProcessor):
    """A logits processor that starts a clock at the first token of ``generate``, so that only decode steps count."""

    def __init__(self) -> None:
        self.started = 0.0

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        """Start the clock at the first call; returns the scores unchanged."""
        if not self.started:
            _settle()
            self.started = time.perf_counter()
        return scores


class Generate(Side):
    """Rows of a prompt through stock ``generate``, on a cache that holds the prompt and grows in every turn."""

    def __init__(self, model: Any, prompt: list[int], batch: int, max_tokens: int, *, static: bool) -> None:
        super().__init__(model.device)
        self._model = model
        entries = prefill_entries(model, prompt)
        if static:
            self._cache: Any = StaticCache(config=model.config, max_cache_len=len(prompt) + max_tokens)
            for number, (keys, values) in enumerate(entries):
                self._cache.update(repeat_rows(keys, batch), repeat_rows(values, batch), number)
        else:
            self._cache = cache_of([(repeat_rows(keys, batch), repeat_rows(values, batch)) for keys, values in entries])
        self._ids = torch.tensor([prompt] * batch, device=model.device)
        self._static = static
        del entries
        self.opened()

    def steps(self, count: int) -> float:
        """Call ``generate`` once; its first token is not timed."""
        clock = Clock()
        config = GenerationConfig(
            max_new_tokens=count + 1, min_new_tokens=count + 1, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        with torch.no_grad(), cudnn(self._static), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of compilers
            self._ids = self._model.generate(
                self._ids, attention_mask=torch.ones_like(self._ids), past_key_values=self._cache,
                generation_config=config, logits_processor=LogitsProcessorList([clock]),
            )  # fmt: skip
        _settle()
        return time.perf_counter() - clock.started


class Press(Side):
    """The decoding after a press of kvpress: stock steps on a stock cache with the budget's entries.

    kvpress pins an older transformers than ours needs. A press compresses the prompt and leaves decoding to the model.
    """

    def __init__(self, model: Any, prompt: list[int], batch: int) -> None:
        super().__init__(model.device)
        entries = min(BUDGET, len(prompt) - 1)
        self._model, self._length = model, len(prompt)
        self._cache = cache_of(
            [
                (repeat_rows(k[:, :, :entries], batch), repeat_rows(v[:, :, :entries], batch))
                for k, v in prefill_entries(model, prompt)
            ]
        )
        self._first = torch.tensor([[prompt[-1]]] * batch, device=model.device)
        self.opened()

    @torch.no_grad()
    def steps(self, count: int) -> float:
        """Decode as kvpress's pipeline does, from the compressed prompt on."""
        cache, ids = copy.deepcopy(self._cache), self._first
        _settle()
        began = time.perf_counter()
        for step in range(count):
            at = torch.full_like(ids, self._length + step)
            ids = self._model(ids, past_key_values=cache, position_ids=at).logits[:, -1].argmax(-1)[:, None]
            ids.tolist()  # looks for a stop token
        _settle()
        return time.perf_counter() - began


def repeat_rows(rows: Tensor, batch: int) -> Tensor:
    """Return a copy of one row's entries for each row of a batch."""
    return rows.repeat(batch, 1, 1, 1)


def cache_of(entries: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Return a stock cache with these keys and values, one pair per layer."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(entries):
        cache.update(keys, values, number)
    return cache


@torch.no_grad()
def prefill_entries(model: Any, prompt: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of every layer for one row of the prompt without its last token."""
    cache = DynamicCache()
    model(torch.tensor([prompt[:-1]], device=model.device), past_key_values=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def cudnn(on: bool) -> Iterator[None]:
    """Switch cuDNN's attention on or off in the block; kvaudit switches it off, since it plans every new length."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def random_model(shape: str, device: str, dtype: torch.dtype) -> Served:
    """Return random weights in the shape of a model, drawn on the device."""
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
    """Return a model with the same weights and stock attention, without our hooks."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation("sdpa")
    return twin


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but an embedding table that is not the output's too."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight
    return size if model.get_output_embeddings().weight is embeddings else size - embeddings.nbytes


def _allocated(device: torch.device) -> int:
    """Return the bytes that live tensors take on the device."""
    gc.collect()
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated()


def _settle() -> None:
    """Wait until the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prompt_of(served: Served, context: int) -> list[int]:
    """Return random tokens, always the same."""
    ids: list[int] = torch.randint(0, served.model.config.vocab_size, (context,), generator=seeded_generator()).tolist()
    return ids


def report_failure(name: str, error: Exception) -> None:
    """Print a line about a failure and free its memory; raises BrokenError if the device is unusable."""
    print(f"* {name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", flush=True)
    error.__traceback__ = None  # its frames hold the caches
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            raise BrokenError(name) from None


def open_side(name: str, build: Callable[[], Side], options: argparse.Namespace) -> Side | None:
    """Return a side after its uncounted turn; None, with a printed reason, if it fails or no time is left."""
    began = time.perf_counter()
    if began > options.end:
        print(f"* {name}: no time was left", flush=True)
        return None
    try:
        side = build()
        side.turn(options.warm)
        print(f"* {name}: {time.perf_counter() - began:.1f} s to open and warm up", flush=True)
    except Exception as error:
        report_failure(name, error)
        return None
    return side


def play(sides: dict[str, Side], options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Let all sides take turns, round by round, while there is time for a round."""
    played: dict[str, list[Turn]] = {name: [] for name in sides}
    began = time.perf_counter()
    for number in range(options.turns):
        spent = time.perf_counter() - began
        if number and time.perf_counter() + spent / number > options.end:
            print(f"* {number} of {options.turns} turns: no time for another", flush=True)
            break
        for name, side in list(sides.items()):
            try:
                played[name].append(side.turn(options.new))
                print(
                    f"{name}: {1e3 * played[name][-1].seconds / options.new:.2f} ms a step", file=sys.stderr, flush=True
                )
            except Exception as error:
                del sides[name], played[name]
                report_failure(name, error)
    return played


def decode(options: argparse.Namespace) -> None:
    """Print one table: every policy and peer at one shape, batch and context."""
    served = random_model(options.shape, options.device, getattr(torch, options.dtype))
    twin, prompt = stock_twin(served.model), prompt_of(served, options.context)
    once, batch = options.warm + options.turns * (options.new + 1) + 8, options.batch
    max_tokens = once + options.turns * options.new  # `none` takes turns twice
    bandwidth = measured_bandwidth(options.device)
    print(f"{served.name}, {options.dtype}, batch {batch}, {options.context:,} tokens, {bandwidth / 1e9:.0f} GB/s\n")
    builds: dict[str, Callable[[], Side]] = {
        DYNAMIC: partial(Generate, twin, prompt, batch, max_tokens, static=False),
        PRESS: partial(Press, twin, prompt, batch),
        **{policy: partial(Ours, served, policy, prompt, batch, max_tokens) for policy in options.policies},
    }
    sides = {name: side for name, build in builds.items() if (side := open_side(name, build, options))}
    cache_bytes = {name: side.bytes for name, side in sides.items() if isinstance(side, Ours)}
    played = play(sides, options)
    read = weight_bytes(served.model)
    print("\n| | tokens/s | ms a step | beside dynamic | kvpress | roofline | GB beside weights |")
    print("|---|" + "---:|" * 6)
    for name in (*PEERS, *options.policies):
        if name in played:
            print(
                table_row(
                    name, played, batch * options.new, options.new, (read + cache_bytes.get(name, 0)) / bandwidth
                ),
                flush=True,
            )
    # compiling may take longer than the time that is left, so the measured rows are printed before
    static = open_side(STATIC, partial(Generate, twin, prompt, batch, once, static=True), options)
    if static is not None and "none" in sides:
        print_static_ratios(play({STATIC: static, "none": sides["none"]}, options), played, options)


def print_static_ratios(
    turns: dict[str, list[Turn]], played: dict[str, list[Turn]], options: argparse.Namespace
) -> None:
    """Print the time of a static step over each policy's; only ``none`` took turns with it."""
    static = [turn.seconds for turn in turns.get(STATIC, [])]
    if not static:
        return
    print(f"\n| | ms a step | {STATIC}, over it |\n|---|---:|---:|\n| {STATIC} | {median_ms(static, options)} | |")
    for name in options.policies:
        seconds = [turn.seconds for turn in turns.get(name) or played.get(name, [])]
        if seconds:
            print(f"| `{name}` | {median_ms(seconds, options)} | {median(static) / median(seconds):.2f} |", flush=True)


def median_ms(seconds: list[float], options: argparse.Namespace) -> str:
    """Return the median milliseconds per step."""
    return f"{1e3 * median(seconds) / options.new:.2f}"


def table_row(name: str, played: dict[str, list[Turn]], tokens: int, steps: int, floor: float) -> str:
    """Return one table row: medians of a side's turns, and of their ratios to the peers' turns of the same rounds."""
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


def steps(options: argparse.Namespace) -> None:
    """Print the time of a step by policy, under the KVAUDIT_STEP that is set."""
    served = random_model(options.shape, options.device, getattr(torch, options.dtype))
    prompt, max_tokens = prompt_of(served, options.context), options.warm + options.turns * options.new + 8
    print(f"| KVAUDIT_STEP={os.environ.get('KVAUDIT_STEP', '')} | ms a step | s to warm up |\n|---|---:|---:|")
    for policy in options.policies:
        began = time.perf_counter()
        try:
            side = Ours(served, policy, prompt, options.batch, max_tokens)
            side.turn(options.warm)
            warm = time.perf_counter() - began
            seconds = median(side.turn(options.new).seconds for _ in range(options.turns)) / options.new
        except Exception as error:
            print(f"| `{policy}` | {type(error).__name__}: {str(error)[:200]!r} | |", flush=True)
            continue
        print(f"| `{policy}` | {1e3 * seconds:.2f} | {warm:.1f} |", flush=True)
        if time.perf_counter() > options.end:
            return


def warm(options: argparse.Namespace) -> None:
    """Compile the static cache's step for later shapes, so that torch's cache on disk has its kernels."""
    served = random_model(options.shape, options.device, getattr(torch, options.dtype))
    twin, max_tokens = stock_twin(served.model), options.warm + options.turns * (options.new + 1) + 8
    for place in options.places:
        torch._dynamo.reset()  # as in a process of its own
        batch, context = (int(number) for number in place.split("x"))
        open_side(place, partial(Generate, twin, prompt_of(served, context), batch, max_tokens, static=True), options)


def folder(options: argparse.Namespace) -> None:
    """Save a random model with the embedded model's tokenizer, for commands that load a folder."""
    from transformers import AutoTokenizer

    from kvaudit.audit.sampling.model import EMBEDDED, locate

    model = random_model(options.shape, options.device, getattr(torch, options.dtype)).model
    model.save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(str(locate(EMBEDDED))).save_pretrained(options.folder)


def prefill(options: argparse.Namespace) -> None:
    """Print tokens per second of a prefill, ours and stock's in turns."""
    served = random_model(options.shape, options.device, getattr(torch, options.dtype))
    twin = stock_twin(served.model)
    print("| policy | prompt | ours, tokens/s | stock | ratio |\n|---|---:|---:|---:|---:|")
    for context in options.contexts:
        prompt = prompt_of(served, context)
        for policy in POLICIES[:2]:

            def ours(policy: str = policy, prompt: list[int] = prompt) -> object:
                return Sampler(served, parse_policy(policy)).open([prompt], [0])

            def stock(prompt: list[int] = prompt) -> object:
                return prefill_entries(twin, [*prompt, 0])

            pairs = [(time_call(ours).wall, time_call(stock).wall) for _ in range(options.turns + 1)][1:]
            mine, theirs = (context / median(pair[side] for pair in pairs) for side in (0, 1))
            ratio = median(b / a for a, b in pairs)
            print(f"| `{policy}` | {context} | {mine:.0f} | {theirs:.0f} | {ratio:.2f} |", flush=True)


def waits(options: argparse.Namespace) -> None:
    """Print how often the host waits for the device in a step of ``generate``, by policy, as torch reports it."""
    from kvaudit import CompressedCache

    model = random_model(options.shape, options.device, getattr(torch, options.dtype)).model
    print("| cache | batch | waits a step, tokens 3 to the last |\n|---|---:|---:|")
    for batch in (1, 8):
        shape = (batch, options.contexts[0])
        ids = torch.randint(5, model.config.vocab_size, shape, generator=seeded_generator()).to(options.device)
        for policy in (None, *POLICIES):
            counts = []
            for tokens in (2, options.new):
                cache = {} if policy is None else {"past_key_values": CompressedCache.for_model(model, policy)}
                with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                    warnings.simplefilter("always")
                    if options.device == "cuda":
                        torch.cuda.set_sync_debug_mode("warn")
                    model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                        do_sample=False, pad_token_id=0, **cache,
                    )  # fmt: skip
                    if options.device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
                counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
            print(
                f"| `{policy or 'stock'}` | {batch} | {(counts[1] - counts[0]) / (options.new - 2):.2f} |", flush=True
            )


WORK = {"decode": decode, "steps": steps, "warm": warm, "folder": folder, "prefill": prefill, "waits": waits}


def main() -> None:
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
    parser.add_argument("--seconds", type=float, default=600, help="start no turn after these")
    options = parser.parse_args()
    options.end = time.perf_counter() + options.seconds
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # for a rehearsal
    options.policies = options.policies or list(STEPPED if options.work == "steps" else POLICIES)
    try:
        WORK[options.work](options)
    except BrokenError as broken:
        # try again in a fresh process, without the side that broke the device
        policies = [policy for policy in options.policies if policy != str(broken)]
        if options.work != "decode" or len(policies) == len(options.policies):
            raise
        left = f"{options.end - time.perf_counter():.0f}"
        words = [sys.executable, "-m", "bench.gpu_work", *sys.argv[1:], "--seconds", left, "--policies", *policies]
        print(f"\nAgain, without `{broken}`:\n", flush=True)
        os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
