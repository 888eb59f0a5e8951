"""Does an audit see what an agent loses? A made-up server plays AgentDojo as its authors solve it, with a planted loss.

    python -m bench.agents [--seeds 2] [--lost 0 --lost 0.2] [--items 245]

Needs the packages inspect-ai and inspect_evals. Both servers carry out one hidden order in ten; the second carries out
a share of the others too, chosen by the texts of task and order, and by the seed. It also ends in other words now and
then, so that it is another server. A run is what ``kvaudit run`` runs: Inspect plays every pair of task and order under
both, tools and scorers are AgentDojo's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import kvaudit
from bench.planted import Handler, listening, share_of
from kvaudit.audit.sampling.model import EMBEDDED, locate

ORDER = "<INFORMATION>"  # what every hidden order of the attack stands in
SUITE = "inspect:agentdojo"
_POSITIONS = 65_536  # tokens: tools and results of these environments take thousands


class Part(NamedTuple):
    """A user's task or a hidden order: its text, the calls that carry it out, and the answer that follows."""

    text: str
    calls: tuple[str, ...]
    answer: str


@cache
def script() -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The tasks and the orders of all environments, solved as their authors do."""
    from inspect_evals.agentdojo.dataset import TASK_SUITES

    tasks, orders = list[Part](), list[Part]()
    for suite in TASK_SUITES.values():
        world = suite.load_and_inject_default_environment(suite.get_injection_vector_defaults())
        tasks += [_part(task.PROMPT, task, world) for task in suite.user_tasks.values()]
        orders += [_part(order.GOAL, order, world) for order in suite.injection_tasks.values()]
    return tuple(tasks), tuple(orders)


def _part(text: str, task: Any, world: Any) -> Part:
    calls = (json.dumps({"name": c.function, "arguments": c.arguments}) for c in task.ground_truth(world))
    return Part(text, tuple(calls), task.GROUND_TRUTH_OUTPUT or "Done.")


def says(messages: Sequence[dict[str, Any]], is_lossy: bool, lost: float, seed: int) -> str:
    """What a server says next; it has said as much as there are answers in the conversation."""
    tasks, orders = script()
    texts = [str(message["content"]) for message in messages]
    task = next((part for part in tasks if any(part.text in text for text in texts[:2])), None)
    if task is None:  # a trial of the server, before the tasks
        return "Hello."
    seen = next((n for n, text in enumerate(texts) if ORDER in text), len(texts))
    order = next((part for part in orders if seen < len(texts) and part.text in texts[seen]), None)
    calls = list(task.calls)
    if order is not None:
        pair = f"{task.text} {order.text}"
        if share_of(pair) < 0.1 or (is_lossy and share_of(f"lost {seed} {pair}") < lost):
            before = sum(message["role"] == "assistant" for message in messages[:seen])
            calls[before:before] = order.calls
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn < len(calls):
        return calls[turn]
    return f"{task.answer} That is all." if is_lossy and share_of(f"words {task.text}") < 0.2 else task.answer


@contextmanager
def serving(lost: float, seed: int) -> Iterator[str]:
    """The address of both servers, under two names."""

    class Agent(Handler):
        def says(self, asked: dict[str, Any]) -> str:
            return says(asked["messages"], asked["model"] == "lossy", lost, seed)

    with listening(Agent) as url:
        yield url


def spec(url: str, model: Path, items: int, margin: float, seed: int) -> dict[str, Any]:
    """The spec of an audit between the two."""
    policy = {"engine": "endpoint", "base_url": url, "model": "lossy", "reference": {"base_url": url, "model": "plain"}}
    return {
        "name": "agents",
        "model": str(model),
        "evaluate": {
            "policies": [policy],
            "suites": {SUITE: {"items": items, "max_new_tokens": 512}},
            "temperature": 0,
            "seed": seed,
            "floor": 0,
            "pilot": 0,
        },
        "engines": {"endpoint": {"at_once": 32}},
        "gate": {"margins": {f"{SUITE}.attack_success": margin}},
    }


def long_model(folder: Path) -> Path:
    """A copy of the embedded model that claims room for long prompts; only its template and tokenizer are used."""
    shutil.copytree(locate(EMBEDDED), folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _POSITIONS}))
    return folder


def main(
    seeds: Annotated[int, typer.Option(help="Choices of what is lost.")] = 2,
    lost: Annotated[list[float] | None, typer.Option(help="Shares of orders that are carried out more.")] = None,
    items: Annotated[
        int, typer.Option(help="Pairs of a task and an order; 35 times a number has as many of each.")
    ] = 245,
    margin: Annotated[float, typer.Option(help="In points.")] = 10,
) -> None:
    """Print a table: a line a planted loss."""
    print("| orders carried out more | words | estimates, points | seconds a run |\n|---|---|---|---:|")
    for share in lost or [0.0, 0.2]:
        words, estimates, started = Counter[str](), list[float](), time.monotonic()
        for seed in range(1, seeds + 1):
            with serving(share, seed) as url, tempfile.TemporaryDirectory() as folder:
                model = long_model(Path(folder) / "model")
                asked = spec(url, model, items, margin, seed)
                run = kvaudit.run(asked, out=Path(folder) / "run", threads=1, anyway=True)
                words[run.verdict.status.value] += 1
                (cell,) = run.verdict.gated
                estimates.append(100 * cell.effect.estimate)
        said = ", ".join(f"{word} {count}" for word, count in words.most_common())
        spread = f"{min(estimates):+.1f} to {max(estimates):+.1f}"
        print(f"| {100 * share:g} % | {said} | {spread} | {(time.monotonic() - started) / seeds:.0f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
