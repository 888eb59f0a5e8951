"""``kvaudit generate``: one answer under one policy, with what the cache kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.command_line import Plugins, check_seed, say, user_errors
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.text import is_text, visible

if TYPE_CHECKING:
    from kvaudit.audit.cache.ledger import Rollout
    from kvaudit.audit.policies import Policy
    from kvaudit.audit.sampling.model import LoadedModel
    from kvaudit.audit.sampling.sampler import Completion
    from kvaudit.core.records import Message


@dataclass(frozen=True)
class GenerateOptions:
    """What to ask and how to draw the answer; ``text`` "-" is standard input."""

    text: str
    system: str | None
    max_new_tokens: int
    temperature: float
    seed: int

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        from kvaudit.core.records import Message, Role

        text = sys.stdin.read() if self.text == "-" else self.text
        user = Message(Role.USER, text)
        return [user] if self.system is None else [Message(Role.SYSTEM, self.system), user]


def generate(
    text: Annotated[str, typer.Argument(help="What to ask; '-' reads it from standard input.", show_default=False)],
    *,
    model: Annotated[str, typer.Option(help="A hub id, a folder, a .gguf file, or 'embedded'.")] = "embedded",
    policy: Annotated[str, typer.Option(help="For example snapkv:budget=96,window=8.")] = "none",
    system: Annotated[str | None, typer.Option(help="A system prompt.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    plugin: Plugins = None,
) -> None:
    """Answer one question and show what the cache kept."""
    with user_errors():
        asked = GenerateOptions(text, system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        _answer(asked, model=model, dtype=dtype, policy=policy, plugins=plugin or [])


def _answer(question: GenerateOptions, *, model: str, dtype: str, policy: str, plugins: Sequence[Path]) -> None:
    """Print the completion, then retention, bytes and what every layer kept."""
    from rich.console import Console
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.cache.layers import governed_text
    from kvaudit.audit.policies import parse_policy
    from kvaudit.audit.runs.names import load_plugins
    from kvaudit.audit.sampling.checkpoints import load_named
    from kvaudit.audit.sampling.model import DtypeName

    if dtype not in get_args(DtypeName):
        raise UnknownName("dtype", dtype, get_args(DtypeName))
    check_seed(question.seed)
    _check(question)
    load_plugins(plugins)
    set_verbosity_error()  # transformers warns of long texts where _sample refuses those that do not fit
    chosen = parse_policy(policy)
    loaded = load_named(model, dtype=dtype)  # type: ignore[arg-type]  # checked above
    completion, rollout = _sample(question, loaded, chosen)
    console = Console()
    say(console, visible(loaded.chat.text(completion.ids)))
    console.print()
    facts = _facts(completion, rollout, chosen.drawn(question.seed))
    if text := governed_text(loaded.model.config):
        facts.append(f"layers      {text}")
    for line in facts:
        say(console, line)


def _check(question: GenerateOptions) -> None:
    from kvaudit.core.spec_parts import TEMPERATURES, is_temperature

    if not is_temperature(question.temperature):
        raise SpecError(f"--temperature is {question.temperature:g}, wanted {TEMPERATURES}")
    if not all(is_text(text) for text in (question.text, question.system or "")):
        raise SpecError("the text is not UTF-8; give it in UTF-8")


def _sample(question: GenerateOptions, model: LoadedModel, policy: Policy) -> tuple[Completion, Rollout]:
    from kvaudit.audit.sampling.sampler import Decoding, Sampler

    prompt = model.chat.opening(question.messages)
    needed = len(prompt.ids) + question.max_new_tokens
    if needed > model.max_positions:
        raise SpecError(f"prompt and answer need {needed} positions, model {model.name!r} has {model.max_positions}")
    episode = Sampler(model, policy).open([prompt.ids], [question.seed], roles=[prompt.roles])
    decoding = Decoding(question.max_new_tokens, temperature=question.temperature)
    (completion,) = episode.decode(decoding)
    assert completion is not None
    return completion, episode.rollouts()[0]


def _facts(completion: Completion, rollout: Rollout, policy: Policy) -> list[str]:
    from kvaudit.audit.cache.ledger import NEVER

    live, dense, allocated = rollout.kv_bytes_live, rollout.kv_bytes_dense, rollout.kv_bytes_peak
    assert live is not None, "the sampler counts them"
    kept = (rollout.evicted_at == NEVER).double().sum(-1).mean(-1).tolist()  # [L] entries, mean over KV heads
    return [
        f"policy      {policy.canonical}",
        f"tokens      {rollout.prompt_length} prompt + {len(completion.ids)} new, ended by {completion.finish_reason}",
        f"retention   {100 * rollout.retention:.1f} % of entries when the answer starts",
        f"KV bytes    {live:,} at the peak, {dense:,} dense ({100 * live / dense:.1f} %), {allocated:,} allocated",
        f"kept        of {len(rollout.ids)} tokens, per layer: {' '.join(f'{count:g}' for count in kept)}",
    ]


COMMAND = Command("generate", group="Serve and ask", order=2, call=generate)
