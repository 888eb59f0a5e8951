"""``kvaudit generate``: one answer under one policy, with what the cache kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import Plugins, check_seed, say, user_errors
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.text import is_text, visible

if TYPE_CHECKING:
    from kvaudit.audit.cache.ledger import Rollout
    from kvaudit.audit.policies import Policy
    from kvaudit.audit.sampling.model import LoadedModel
    from kvaudit.audit.sampling.sampler import Completion, Decoding
    from kvaudit.core.records import Message


def generate(
    text: Annotated[str, argument(help="What to ask; '-' reads it from standard input.")],
    *,
    model: Annotated[str, typer.Option(help="A hub id, a folder, a .gguf file, or 'embedded'.")] = "embedded",
    policy: Annotated[str, typer.Option(help="For example snapkv:budget=96,window=8.")] = "none",
    system: Annotated[str | None, option(help="A system prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    plugin: Plugins = None,
) -> None:
    """Answer one question and show what the cache kept."""
    with user_errors():
        from rich.console import Console
        from transformers.utils.logging import set_verbosity_error

        from kvaudit.audit.cache.layers import governed_text
        from kvaudit.audit.policies import parse_policy
        from kvaudit.audit.runs.names import load_plugins
        from kvaudit.audit.sampling.checkpoints import load_named
        from kvaudit.audit.sampling.model import DtypeName
        from kvaudit.audit.sampling.sampler import Decoding
        from kvaudit.core.spec_parts import TEMPERATURES, is_temperature

        if dtype not in get_args(DtypeName):
            raise UnknownName("dtype", dtype, get_args(DtypeName))
        check_seed(seed)
        if not is_temperature(temperature):
            raise SpecError(f"--temperature is {temperature:g}, wanted {TEMPERATURES}")
        if not all(is_text(one) for one in (text, system or "")):
            raise SpecError("the text is not UTF-8; give it in UTF-8")
        load_plugins(plugin or ())
        set_verbosity_error()  # transformers warns of long texts where _sample refuses those that do not fit
        chosen = parse_policy(policy)
        loaded = load_named(model, dtype=dtype)  # type: ignore[arg-type]  # checked above
        decoding = Decoding(max_new_tokens, temperature=temperature)
        completion, rollout = _sample(_messages(text, system), decoding, seed, loaded, chosen)
        console = Console()
        say(console, visible(loaded.chat.text(completion.ids)))
        console.print()
        facts = _facts(completion, rollout, chosen.drawn(seed))
        if layers := governed_text(loaded.model.config):
            facts.append(f"layers      {layers}")
        for line in facts:
            say(console, line)


def _messages(text: str, system: str | None) -> list[Message]:
    """The conversation so far; ``text`` "-" is standard input."""
    from kvaudit.core.records import Message, Role

    user = Message(Role.USER, sys.stdin.read() if text == "-" else text)
    return [user] if system is None else [Message(Role.SYSTEM, system), user]


def _sample(
    messages: Sequence[Message], decoding: Decoding, seed: int, model: LoadedModel, policy: Policy
) -> tuple[Completion, Rollout]:
    from kvaudit.audit.sampling.sampler import Sampler

    prompt = model.chat.opening(messages)
    needed = len(prompt.ids) + decoding.max_new_tokens
    if needed > model.max_positions:
        raise SpecError(f"prompt and answer need {needed} positions, model {model.name!r} has {model.max_positions}")
    episode = Sampler(model, policy).open([prompt.ids], [seed], roles=[prompt.roles])
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
