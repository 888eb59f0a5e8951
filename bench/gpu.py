"""What can only be measured on a GPU: speed of decode steps, exactness, a GRPO step, a paired run? All by one command.

    python -m bench.gpu FOLDER --minutes 8        # everything; FOLDER has a model in Hugging Face format
    python -m bench.gpu random-1.5b               # without a real model: random weights
    python -m bench.gpu --parts tests decode      # some parts, by the beginning of their names
    python -m bench.gpu --small --device cpu      # a rehearsal of small sizes on a CPU, in three minutes

Takes eight minutes; results: docs/results/gpu.md. CONTRIBUTING.md says how to bring it to a GPU machine.

Parts run in order of importance, each in its own process with its own time limit, cut to the minutes that are left.
The page is written after every part, under $OUT if set and else in docs/results, so that a machine that disappears
takes nothing with it. A part that fails says so on the page and stops no other. Parts without timings run together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RANDOM = "random-1.5b"
EXACT = "none;snapkv:budget=256,window=16,interval=8;h2o:budget=256;int8;fp8;kivi"
MAX_OUTPUT, MAX_ERRORS = 8_000, 12  # characters of a part's output, lines of its errors
SHORTEST = 12.0  # fewest seconds in which a part is started
SECONDS, SHARE = "{seconds}", 0.8  # a placeholder in commands for this share of the part's limit
LARGEST = 15 << 20  # bytes of the archive of the paired run
PREPARES = "prepares"  # the name of parts that prepare later ones
FIRST = ("8x2048", "8x8192")  # batch x context, whose static steps are compiled beforehand
FURTHER = (
    *(("1.5b", place) for place in ("1x2048", "32x2048")),
    ("8b", "8x2048"),
    *(("1.5b", place) for place in ("1x8192", "32x8192", "8x32768", "1x32768")),
    ("8b", "8x8192"),
)
WAYS = ("eager", "graph", "compiled")  # values of KVAUDIT_STEP, the ways to compute a decode step
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
  adapter: {{rank: 16, alpha: 32}}
  microbatch_tokens: 8192
evaluate:
  policies: [none, "snapkv:budget=128,window=16,interval=8"]
  suites: {{refusal: {{items: {refusals}}}, math: {{items: {sums}}}}}
  context_tokens: [256]
  pilot: 0
  batch_tokens: 65536
gate: {{reference: dense, margins: {{refusal: 5, math: 5}}}}
"""


class Part(NamedTuple):
    """A part of the page: its command, its time limit, and its environment variables."""

    name: str
    title: str
    command: list[str]
    limit: float  # seconds
    environment: dict[str, str] = {}  # noqa: RUF012  # never changed
    is_table: bool = True  # otherwise its output is indented


class Section(NamedTuple):
    """A part's section of the page, and whether the part succeeded."""

    text: str
    succeeded: bool


def main() -> int:
    """Run the parts and write the page; returns the number of parts that failed."""
    options = parse_arguments()
    if options.device == "cuda" and not _has_cuda():
        print("torch sees no CUDA device here; run it on a GPU machine, or rehearse with: --small --device cpu")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        every = list(parts(options, Path(folder)))
        groups = [[part for part in group if part.name == PREPARES or is_wanted(part.name, options)] for group in every]
        if not any(groups):
            names = ", ".join(part.name for group in every for part in group)
            print(f"no part begins with {' or '.join(options.parts)}; parts are: {names}")
            return 2
        page, failed = [head(options)], 0
        for group in groups:
            for section in run_together(group, options.end):
                page.append(clean(section.text, Path(folder), options))
                failed += not section.succeeded
                print(f"\n{page[-1]}", flush=True)
                write(options.out / f"gpu-{Path(options.model).name}.md", "\n\n".join(page) + "\n")
            if any(part.name == "paired" for part in group):
                keep(Path(folder) / "run", options.out)
    print(f"\nwritten under {options.out}; {failed} of {len(page) - 1} parts failed")
    return failed


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help=f"a folder in Hugging Face format; default: {RANDOM}")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, for a rehearsal")
    parser.add_argument("--parts", nargs="+", default=[], help="beginnings of names of parts; default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "docs" / "results"))
    options = parser.parse_args()
    options.end = time.monotonic() + 60 * options.minutes
    if options.small and not options.model:
        from kvaudit.audit.sampling.model import EMBEDDED, locate

        options.model = str(locate(EMBEDDED))
    options.model = options.model or RANDOM
    return options


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    """Return whether the part of this name was asked for."""
    return not options.parts or name.startswith(tuple(options.parts))


def parts(options: argparse.Namespace, folder: Path) -> Iterator[list[Part]]:
    """Yield groups of parts in order of importance; the parts of a group run at the same time."""
    on = ["--device", options.device]
    work = [sys.executable, "-m", "bench.gpu_work"]
    kind = (
        ["--shape", "tiny", "--dtype", "float32", "--turns", "1", "--new", "4", "--warm", "4"] if options.small else []
    )
    real = "" if options.model == RANDOM else options.model
    yield list(checks(options, folder))
    for number in FIRST:
        yield [decode("1.5b", number, [*work, "decode", *on, *kind], options.small)]
    sizes = ["1", "1", "64"] if options.small else ["3", "4", "1024"]
    trained = {"KVAUDIT_REAL_MODEL": real if options.small else str(folder / RANDOM)}
    command = [sys.executable, "-m", "bench.training", *sizes, *on, "--without", "smd"]
    yield [Part("grpo", "A GRPO step beside TRL's", command, 120, trained, is_table=False)]
    if real:
        yield [exactness(options, real), paired(options, folder)]
    short = ["--contexts", "64", "96"] if options.small else []
    place = ["--batch", "2", "--context", "64"] if options.small else ["--batch", "8", "--context", "2048"]
    for way in WAYS:
        title = f"A step of the sampler, {way}"
        words = [*work, "steps", *on, *kind, *place, "--seconds", SECONDS]
        yield [Part(f"steps-{way}", title, words, 60, {"KVAUDIT_STEP": way})]
    yield [Part("prefill", "Prefill beside stock's", [*work, "prefill", *on, *kind, *short], 40)]
    for shape, number in FURTHER[: 1 if options.small else None]:
        yield [decode(shape, number, [*work, "decode", *on, *kind], options.small)]
    yield [Part("waits", "How often a step waits for the device", [*work, "waits", *on, *kind, *short], 60)]


def checks(options: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """Yield the parts without timings: tests, exactness, and preparations for later parts."""
    python, on = [sys.executable, "-m"], ["--device", options.device]
    tests = [*python, "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_cuda.py"]
    yield Part("tests", "Every policy against its replay, and against the CPU", tests, 90, is_table=False)
    yield exactness(options, "")
    work = [*python, "bench.gpu_work"]
    for number in FIRST:
        if is_wanted(f"decode-1.5b-{number}", options) and not options.small:
            title = f"Compiling the static cache's step beforehand, {number}"
            yield Part(PREPARES, title, [*work, "warm", *on, "--places", number], 90)
    if is_wanted("grpo", options) and not options.small:
        words = ["--folder", str(folder / RANDOM)]
        yield Part(PREPARES, "Random weights for the GRPO step", [*work, "folder", *on, *words], 60)


def exactness(options: argparse.Namespace, real: str) -> Part:
    """Return the part that compares replay and sampling: in float32 on a random model, in bfloat16 on a real one."""
    sizes = ["--prompt", "64", "--new", "8"] if options.small else ["--prompt", "1024", "--new", "64"]
    command = [sys.executable, "-m", "bench.exactness", "--policies", EXACT, "--device", options.device, *sizes]
    if real:
        words = ["--model", real, "--dtype", "bfloat16"]
        return Part("exactness-real", "Exactness in bfloat16", [*command, *words], 90)
    return Part("exactness", "Exactness in float32, a small random model", [*command, "--dtype", "float32"], 90)


def decode(shape: str, place: str, command: list[str], small: bool) -> Part:
    """Return the part that times decode steps at one shape, batch and context."""
    batch, context = place.split("x")
    title = f"Decode steps, {shape} shape, batch {batch}, {int(context):,} tokens"
    sizes = ["--batch", "2", "--context", "64"] if small else ["--shape", shape, "--batch", batch, "--context", context]
    return Part(f"decode-{shape}-{place}", title, [*command, *sizes, "--seconds", SECONDS], 100)


def paired(options: argparse.Namespace, folder: Path) -> Part:
    """Return the part that trains and audits three arms of a real model."""
    numbers = {"steps": 2, "prompts": 2, "group": 2, "refusals": 3, "sums": 3} if options.small else {}
    numbers = {"steps": 20, "prompts": 4, "group": 8, "refusals": 144, "sums": 72} | numbers
    spec = folder / "gpu.yaml"
    spec.write_text(SPEC.format(model=options.model, device=options.device, **numbers), encoding="utf-8")
    command = [sys.executable, "-m", "kvaudit", "run", str(spec), "--out", str(folder / "run"), "--anyway"]
    command += ["--workers", "3"] if options.device == "cuda" else []  # a small model leaves most of the device idle
    return Part("paired", "A paired run", command, 300, is_table=False)


def head(options: argparse.Namespace) -> str:
    """Return the head of the page: device, driver, versions, and what else used the device before."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("torch", "transformers")}
    words = " ".join(f"{name} {number}" for name, number in versions.items())
    model = "FOLDER" if Path(options.model).is_dir() else options.model
    command = f"python -m bench.gpu {model} --minutes {options.minutes:g}" + " --small" * options.small
    device = smi("--query-gpu=name,driver_version,memory.used,memory.total") if options.device == "cuda" else ""
    shared = smi("--query-compute-apps=used_memory") if options.device == "cuda" else ""
    lines = [
        f"# {'On a GPU' if options.device == 'cuda' else f'On {options.device}, a rehearsal'}",
        f"`{command}`, {time.strftime('%Y-%m-%d')}.",
        f"{device or options.device}; {words}; Python {sys.version.split()[0]}; {Path(options.model).name}; "
        f"{os.cpu_count()} CPU cores. Other processes on the device before: {shared or 'none seen'}.",
    ]
    return "\n\n".join(lines)


def smi(query: str) -> str:
    """Return the output of nvidia-smi in one line, or an empty text if it fails."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in result.stdout.splitlines() if line.strip())


def run_together(group: Sequence[Part], end: float) -> Iterator[Section]:
    """Run parts at the same time; yield their sections in order, each as soon as it and those before it ended."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        started = []
        for number, part in enumerate(group):
            limit = min(part.limit, end - began)
            if limit < SHORTEST:
                yield Section(f"## {part.title}\n\nNot started: no time was left.", succeeded=False)
                continue
            logs = [Path(folder) / f"{number}.{kind}" for kind in ("out", "err")]
            with logs[0].open("wb") as out, logs[1].open("wb") as err:
                command = [word.replace(SECONDS, f"{SHARE * limit:.0f}") for word in part.command]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1", **part.environment},
                )  # fmt: skip
            print(f"{part.title}, {limit:.0f} s at most ...", flush=True)
            started.append((part, process, limit, logs))
        try:
            for part, process, limit, (out, err) in started:
                ended = wait(process, began + limit)
                seconds = time.monotonic() - began
                yield section_of(part, f"{seconds:.0f} s, {ended}", process.returncode == 0, out, err)
        finally:
            for _, process, _, _ in started:
                stop(process)


def wait(process: subprocess.Popen[bytes], end: float) -> str:
    """Wait for a process until ``end``; returns how it ended."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(process)
        return "stopped at its limit"
    return f"exit {process.returncode}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue


def section_of(part: Part, ended: str, succeeded: bool, out: Path, err: Path) -> Section:
    """Return a part's output as a section: tables as they are, other output indented, and the last error lines."""
    text = out.read_text(encoding="utf-8", errors="replace")[-MAX_OUTPUT:].strip()
    errors = err.read_text(encoding="utf-8", errors="replace").splitlines()
    error_lines = list(dict.fromkeys(line.strip()[:300] for line in errors if line.strip()))[-MAX_ERRORS:]
    shown = [text if part.is_table else indent(text.splitlines())] * bool(text)
    shown += ["On standard error:\n\n" + indent(error_lines)] * bool(error_lines)
    return Section("\n\n".join([f"## {part.title}", f"{ended}.", *shown]), succeeded)


def indent(lines: Sequence[str]) -> str:
    """Return lines as a Markdown code block."""
    return "\n".join("    " + line for line in lines)


def clean(text: str, folder: Path, options: argparse.Namespace) -> str:
    """Return the text without local paths."""
    for path, name in ((str(folder), "RUNS"), (options.model, Path(options.model).name), (str(ROOT), ".")):
        text = text.replace(path, name)
    return text


def write(page: Path, text: str) -> None:
    """Replace the page in one step, so that it is never half written."""
    page.parent.mkdir(parents=True, exist_ok=True)
    half = page.with_name(f".{page.name}.half")
    half.write_text(text, encoding="utf-8")
    half.replace(page)


def keep(run: Path, out: Path) -> None:
    """Copy the paired run's page, and its folder without weights as an archive, to the page's folder."""
    if not run.is_dir():
        return
    page = run / "report" / "report.html"
    if page.is_file():
        shutil.copyfile(page, out / "gpu-paired.html")
    archive = out / "gpu-paired.tar.gz"
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix not in (".safetensors", ".pt")]
    with tarfile.open(archive, "w:gz") as packed:
        # the smallest files first, up to the limit
        for path in sorted(files, key=lambda path: path.stat().st_size):
            if archive.stat().st_size + path.stat().st_size // 3 > LARGEST:
                print(f"left out of {archive.name}: {path.relative_to(run)}, {path.stat().st_size >> 20} MiB")
                continue
            packed.add(path, f"run/{path.relative_to(run)}")
    print(f"kept: {archive.name}, {archive.stat().st_size >> 10} KiB", flush=True)


def _has_cuda() -> bool:
    """Return whether torch sees a device, asked in another process so that this one takes no memory of it."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _path() -> str:
    """Return a PYTHONPATH that begins with this checkout."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


if __name__ == "__main__":
    sys.exit(main())
