"""What only a GPU can tell, in eight minutes, by one command; CONTRIBUTING.md says how to bring it along.

    python -m bench.gpu FOLDER --minutes 8           everything; FOLDER has a model in Hugging Face format
    python -m bench.gpu random-1.5b                  what needs no real model: weights are random
    python -m bench.gpu --parts tests decode         some parts, by the beginning of their names
    python -m bench.gpu --small --device cpu         the same parts on a CPU, small: a rehearsal of three minutes

Parts run in order of worth, each in a process of its own under a limit of its own, cut to the minutes that are left.
The page is written after every part, under $OUT where that is set and docs/results otherwise, so a machine that goes
takes nothing with it. A part that fails says so on the page and stops no other. Parts that time nothing run at once.
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
LONGEST, NOTED = 8_000, 12  # characters of a part's output, and lines of its errors
SHORTEST = 12.0  # seconds under which no part begins
SECONDS, SHARE = "{seconds}", 0.8  # what stands for a share of a part's limit in its command
LARGEST = 15 << 20  # bytes of the archive of the paired run
PREPARES = "prepares"  # the name of what runs for the sake of a later part
FIRST = ("8x2048", "8x8192")  # batch x context, whose static steps are compiled beforehand
FURTHER = (
    *(("1.5b", place) for place in ("1x2048", "32x2048")),
    ("8b", "8x2048"),
    *(("1.5b", place) for place in ("1x8192", "32x8192", "8x32768", "1x32768")),
    ("8b", "8x8192"),
)
WAYS = ("eager", "graph", "compiled")  # of a step of the sampler, as KVAUDIT_STEP names them
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
    """A part of the page: what is run, for how long it may, and what it is told by the environment."""

    name: str
    title: str
    command: list[str]
    limit: float  # seconds
    told: dict[str, str] = {}  # noqa: RUF012  # never changed
    is_table: bool = True  # otherwise its output is shown as a program's


class Ended(NamedTuple):
    """A part's section of the page, and whether it went well."""

    text: str
    went_well: bool


def main() -> int:
    """Run the parts and write the page; the number of parts that failed."""
    asked = arguments()
    if asked.device == "cuda" and not _has_cuda():
        print("torch sees no CUDA device here; run it where one is, or rehearse it with --small --device cpu")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        every = list(parts(asked, Path(folder)))
        groups = [[part for part in group if part.name == PREPARES or wanted(part.name, asked)] for group in every]
        if not any(groups):
            names = ", ".join(part.name for group in every for part in group)
            print(f"no part begins with {' or '.join(asked.parts)}; there are {names}")
            return 2
        page, failed = [head(asked)], 0
        for group in groups:
            for ended in together(group, asked.end):
                page.append(clean(ended.text, Path(folder), asked))
                failed += not ended.went_well
                print(f"\n{page[-1]}", flush=True)
                write(asked.out / f"gpu-{Path(asked.model).name}.md", "\n\n".join(page) + "\n")
            if any(part.name == "paired" for part in group):
                keep(Path(folder) / "run", asked.out)
    print(f"\nwritten under {asked.out}; {failed} of {len(page) - 1} parts failed")
    return failed


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help=f"a folder in Hugging Face format; default: {RANDOM}")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything; parts are cut to what is left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--parts", nargs="+", default=[], help="beginnings of names; default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "docs" / "results"))
    asked = parser.parse_args()
    asked.end = time.monotonic() + 60 * asked.minutes
    if asked.small and not asked.model:
        from kvaudit.audit.sampling.model import EMBEDDED, locate

        asked.model = str(locate(EMBEDDED))
    asked.model = asked.model or RANDOM
    return asked


def wanted(name: str, asked: argparse.Namespace) -> bool:
    """Whether the part of this name was asked for."""
    return not asked.parts or name.startswith(tuple(asked.parts))


def parts(asked: argparse.Namespace, folder: Path) -> Iterator[list[Part]]:
    """All parts in order of worth; those of one list run at once."""
    on = ["--device", asked.device]
    work = [sys.executable, "-m", "bench.gpu_work"]
    kind = ["--shape", "tiny", "--dtype", "float32", "--turns", "1", "--new", "4", "--warm", "4"] if asked.small else []
    real = "" if asked.model == RANDOM else asked.model
    yield list(checks(asked, folder))
    for number in FIRST:
        yield [decode("1.5b", number, [*work, "decode", *on, *kind], asked.small)]
    sizes = ["1", "1", "64"] if asked.small else ["3", "4", "1024"]
    trained = {"KVAUDIT_REAL_MODEL": real if asked.small else str(folder / RANDOM)}
    command = [sys.executable, "-m", "bench.training", *sizes, *on, "--without", "smd"]
    yield [Part("grpo", "A GRPO step beside TRL's", command, 120, trained, is_table=False)]
    if real:
        yield [exactness(asked, real), paired(asked, folder)]
    short = ["--contexts", "64", "96"] if asked.small else []
    place = ["--batch", "2", "--context", "64"] if asked.small else ["--batch", "8", "--context", "2048"]
    for way in WAYS:
        title = f"A step of the sampler, {way}"
        words = [*work, "steps", *on, *kind, *place, "--seconds", SECONDS]
        yield [Part(f"steps-{way}", title, words, 60, {"KVAUDIT_STEP": way})]
    yield [Part("prefill", "Prefill beside stock's", [*work, "prefill", *on, *kind, *short], 40)]
    for shape, number in FURTHER[: 1 if asked.small else None]:
        yield [decode(shape, number, [*work, "decode", *on, *kind], asked.small)]
    yield [Part("waits", "How often a step waits for the device", [*work, "waits", *on, *kind, *short], 60)]


def checks(asked: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """What times nothing: tests, exactness, and what later parts find prepared."""
    python, on = [sys.executable, "-m"], ["--device", asked.device]
    tests = [*python, "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_cuda.py"]
    yield Part("tests", "Every policy against its replay, and against the CPU", tests, 90, is_table=False)
    yield exactness(asked, "")
    work = [*python, "bench.gpu_work"]
    for number in FIRST:
        if wanted(f"decode-1.5b-{number}", asked) and not asked.small:
            title = f"Compiling the static cache's step beforehand, {number}"
            yield Part(PREPARES, title, [*work, "warm", *on, "--places", number], 90)
    if wanted("grpo", asked) and not asked.small:
        words = ["--folder", str(folder / RANDOM)]
        yield Part(PREPARES, "Random weights for the GRPO step", [*work, "folder", *on, *words], 60)


def exactness(asked: argparse.Namespace, real: str) -> Part:
    """How far replay is from what was sampled: in float32 by a small random model, in bfloat16 by a real one."""
    sizes = ["--prompt", "64", "--new", "8"] if asked.small else ["--prompt", "1024", "--new", "64"]
    command = [sys.executable, "-m", "bench.exactness", "--policies", EXACT, "--device", asked.device, *sizes]
    if real:
        words = ["--model", real, "--dtype", "bfloat16"]
        return Part("exactness-real", "Exactness in bfloat16", [*command, *words], 90)
    return Part("exactness", "Exactness in float32, a small random model", [*command, "--dtype", "float32"], 90)


def decode(shape: str, place: str, command: list[str], small: bool) -> Part:
    """A table of decode steps at one shape, batch and context."""
    batch, context = place.split("x")
    title = f"Decode steps, {shape} shape, batch {batch}, {int(context):,} tokens"
    sizes = ["--batch", "2", "--context", "64"] if small else ["--shape", shape, "--batch", batch, "--context", context]
    return Part(f"decode-{shape}-{place}", title, [*command, *sizes, "--seconds", SECONDS], 100)


def paired(asked: argparse.Namespace, folder: Path) -> Part:
    """Three arms of a real model, trained and audited."""
    numbers = {"steps": 2, "prompts": 2, "group": 2, "refusals": 3, "sums": 3} if asked.small else {}
    numbers = {"steps": 20, "prompts": 4, "group": 8, "refusals": 144, "sums": 72} | numbers
    spec = folder / "gpu.yaml"
    spec.write_text(SPEC.format(model=asked.model, device=asked.device, **numbers), encoding="utf-8")
    command = [sys.executable, "-m", "kvaudit", "run", str(spec), "--out", str(folder / "run"), "--anyway"]
    command += ["--workers", "3"] if asked.device == "cuda" else []  # they share the device: small models leave it idle
    return Part("paired", "A paired run", command, 300, is_table=False)


def head(asked: argparse.Namespace) -> str:
    """Whose figures these are: device, driver, versions, and what else was on the device before."""
    from importlib.metadata import version

    own = {name: version(name) for name in ("torch", "transformers")}
    words = " ".join(f"{name} {number}" for name, number in own.items())
    model = "FOLDER" if Path(asked.model).is_dir() else asked.model
    command = f"python -m bench.gpu {model} --minutes {asked.minutes:g}" + " --small" * asked.small
    device = smi("--query-gpu=name,driver_version,memory.used,memory.total") if asked.device == "cuda" else ""
    shared = smi("--query-compute-apps=used_memory") if asked.device == "cuda" else ""
    lines = [
        f"# {'On a GPU' if asked.device == 'cuda' else f'On {asked.device}, a rehearsal'}",
        f"`{command}`, {time.strftime('%Y-%m-%d')}.",
        f"{device or asked.device}; {words}; Python {sys.version.split()[0]}; {Path(asked.model).name}; "
        f"{os.cpu_count()} CPU cores. Other processes on the device before: {shared or 'none seen'}.",
    ]
    return "\n\n".join(lines)


def smi(query: str) -> str:
    """What nvidia-smi says, with the names of its columns; nothing where it fails."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in found.stdout.splitlines() if line.strip())


def together(group: Sequence[Part], end: float) -> Iterator[Ended]:
    """Run parts at once, and yield their sections in their order, each as soon as it and those before it ended."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        started = []
        for number, part in enumerate(group):
            limit = min(part.limit, end - began)
            if limit < SHORTEST:
                yield Ended(f"## {part.title}\n\nNot begun: no time was left.", went_well=False)
                continue
            logs = [Path(folder) / f"{number}.{kind}" for kind in ("out", "err")]
            with logs[0].open("wb") as out, logs[1].open("wb") as err:
                command = [word.replace(SECONDS, f"{SHARE * limit:.0f}") for word in part.command]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1", **part.told},
                )  # fmt: skip
            print(f"{part.title}, {limit:.0f} s at most ...", flush=True)
            started.append((part, process, limit, logs))
        try:
            for part, process, limit, (out, err) in started:
                ended = wait(process, began + limit)
                seconds = time.monotonic() - began
                yield section(part, f"{seconds:.0f} s, {ended}", process.returncode == 0, out, err)
        finally:
            for _, process, _, _ in started:
                stop(process)


def wait(process: subprocess.Popen[bytes], end: float) -> str:
    """Wait for a process until ``end``, and say how it ended."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(process)
        return "stopped at its limit"
    return f"exit {process.returncode}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue


def section(part: Part, ended: str, went_well: bool, out: Path, err: Path) -> Ended:
    """A part's output as a section: a table as it is, a program's indented, and the errors' last lines."""
    text = out.read_text(encoding="utf-8", errors="replace")[-LONGEST:].strip()
    errors = err.read_text(encoding="utf-8", errors="replace").splitlines()
    noted = list(dict.fromkeys(line.strip()[:300] for line in errors if line.strip()))[-NOTED:]
    shown = [text if part.is_table else indented(text.splitlines())] * bool(text)
    shown += ["On standard error:\n\n" + indented(noted)] * bool(noted)
    return Ended("\n\n".join([f"## {part.title}", f"{ended}.", *shown]), went_well)


def indented(lines: Sequence[str]) -> str:
    """Lines as Markdown shows a program's."""
    return "\n".join("    " + line for line in lines)


def clean(text: str, folder: Path, asked: argparse.Namespace) -> str:
    """The text without the paths of a machine."""
    for path, name in ((str(folder), "RUNS"), (asked.model, Path(asked.model).name), (str(ROOT), ".")):
        text = text.replace(path, name)
    return text


def write(page: Path, text: str) -> None:
    """Replace the page at once, so that it is never half there."""
    page.parent.mkdir(parents=True, exist_ok=True)
    half = page.with_name(f".{page.name}.half")
    half.write_text(text, encoding="utf-8")
    half.replace(page)


def keep(run: Path, out: Path) -> None:
    """Bring the paired run's page and, without weights, its folder to where the page is."""
    if not run.is_dir():
        return
    page = run / "report" / "report.html"
    if page.is_file():
        shutil.copyfile(page, out / "gpu-paired.html")
    archive = out / "gpu-paired.tar.gz"
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix not in (".safetensors", ".pt")]
    with tarfile.open(archive, "w:gz") as packed:
        # the small ones first, as long as all of it can be sent
        for path in sorted(files, key=lambda path: path.stat().st_size):
            if archive.stat().st_size + path.stat().st_size // 3 > LARGEST:
                print(f"left out of {archive.name}: {path.relative_to(run)}, {path.stat().st_size >> 20} MiB")
                continue
            packed.add(path, f"run/{path.relative_to(run)}")
    print(f"kept: {archive.name}, {archive.stat().st_size >> 10} KiB", flush=True)


def _has_cuda() -> bool:
    """Whether torch sees a device, asked in a process of its own, which takes no memory of it."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _path() -> str:
    """This checkout before whatever is on the path."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


if __name__ == "__main__":
    sys.exit(main())
