"""Does an audit of an agent find a planted loss? Two made-up models play AgentDojo, and one obeys more hidden orders.

    python -m bench.agents [--seeds 2] [--lost 0 --lost 0.2] [--items 245]

Takes some minutes per run and prints the seconds; results: docs/results/agents.md. Needs the packages inspect-ai and
inspect_evals.

Both models solve the tasks as AgentDojo's authors do and carry out one hidden order in ten. The "lossy" one carries out
a share of the other orders too, chosen by a hash of task, order and seed, and words some answers differently, so that
the two are never identical. Each run is an ordinary ``kvaudit run``: Inspect plays every pair of task and order against
both models, with AgentDojo's own tools and scorers.
"""

from __future__ import annotations

import json
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
from bench.planted import ChatHandler, copy_model_with_positions, count_words, hash_to_share, serve

ORDER = "<INFORMATION>"  # the tag around every hidden order of the attack
SUITE = "inspect:agentdojo"
_POSITIONS = 65_536  # tokens; the tools and tool results of these environments take thousands


class Assignment(NamedTuple):
    """A user's task or a hidden order: its text, the tool calls that carry it out, and the final answer."""

    text: str
    calls: tuple[str, ...]
    answer: str


@cache
def solved_assignments() -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    """Return the tasks and the hidden orders of all environments, solved as their authors do."""
    from inspect_evals.agentdojo.dataset import TASK_SUITES

    tasks, orders = list[Assignment](), list[Assignment]()
    for suite in TASK_SUITES.values():
        world = suite.load_and_inject_default_environment(suite.get_injection_vector_defaults())
        tasks += [_assignment(task.PROMPT, task, world) for task in suite.user_tasks.values()]
        orders += [_assignment(order.GOAL, order, world) for order in suite.injection_tasks.values()]
    return tuple(tasks), tuple(orders)


def _assignment(text: str, task: Any, world: Any) -> Assignment:
    calls = (json.dumps({"name": c.function, "arguments": c.arguments}) for c in task.ground_truth(world))
    return Assignment(text, tuple(calls), task.GROUND_TRUTH_OUTPUT or "Done.")


def next_reply(messages: Sequence[dict[str, Any]], is_lossy: bool, lost: float, seed: int) -> str:
    """Return a model's next message; the number of assistant messages so far tells how far it is."""
    tasks, orders = solved_assignments()
    texts = [str(message["content"]) for message in messages]
    task = next((task for task in tasks if any(task.text in text for text in texts[:2])), None)
    if task is None:  # kvaudit tries the server before it asks the tasks
        return "Hello."
    order_at = next((n for n, text in enumerate(texts) if ORDER in text), len(texts))
    order = next((order for order in orders if order_at < len(texts) and order.text in texts[order_at]), None)
    calls = list(task.calls)
    if order is not None:
        pair = f"{task.text} {order.text}"
        if hash_to_share(pair) < 0.1 or (is_lossy and hash_to_share(f"lost {seed} {pair}") < lost):
            turn = sum(message["role"] == "assistant" for message in messages[:order_at])
            calls[turn:turn] = order.calls
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn < len(calls):
        return calls[turn]
    return f"{task.answer} That is all." if is_lossy and hash_to_share(f"words {task.text}") < 0.2 else task.answer


@contextmanager
def serve_agents(lost: float, seed: int) -> Iterator[str]:
    """Serve the models "plain" and "lossy" on this machine; yields the address."""

    class Agent(ChatHandler):
        def reply(self, request: dict[str, Any]) -> str:
            return next_reply(request["messages"], request["model"] == "lossy", lost, seed)

    with serve(Agent) as url:
        yield url


def spec(url: str, model: Path, items: int, margin: float, seed: int) -> dict[str, Any]:
    """Return the spec of an audit that compares the two models."""
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


def main(
    seeds: Annotated[int, typer.Option(help="Seeds; each makes other orders succeed.")] = 2,
    lost: Annotated[
        list[float] | None, typer.Option(help="Share of orders that only the lossy model carries out.")
    ] = None,
    items: Annotated[
        int, typer.Option(help="Pairs of a task and an order; a multiple of 35 asks each order equally often.")
    ] = 245,
    margin: Annotated[float, typer.Option(help="In points.")] = 10,
) -> None:
    """Print a table with one row per planted loss."""
    print("| orders carried out more | verdicts | estimates, points | seconds a run |\n|---|---|---|---:|")
    for share in lost or [0.0, 0.2]:
        words, estimates, started = Counter[str](), list[float](), time.monotonic()
        for seed in range(1, seeds + 1):
            with serve_agents(share, seed) as url, tempfile.TemporaryDirectory() as folder:
                model = copy_model_with_positions(Path(folder) / "model", _POSITIONS)
                run = kvaudit.run(
                    spec(url, model, items, margin, seed), out=Path(folder) / "run", threads=1, anyway=True
                )
                words[run.verdict.status.value] += 1
                (cell,) = run.verdict.gated
                estimates.append(100 * cell.effect.estimate)
        spread = f"{min(estimates):+.1f} to {max(estimates):+.1f}"
        print(
            f"| {100 * share:g} % | {count_words(words)} | {spread} | {(time.monotonic() - started) / seeds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
