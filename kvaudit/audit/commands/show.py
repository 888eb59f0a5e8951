"""``kvaudit show``: what a policy keeps of a short text, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import Plugins, say, user_errors
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.cache.ledger import Rollout
    from kvaudit.audit.commands.picture import Picture
    from kvaudit.audit.policies import Policy
    from kvaudit.audit.sampling.model import LoadedModel

_SUITE, _SEED = "refusal", 0
_SHORTEST_TAIL, _LEAST_CONTEXT = 8, 192  # tokens
_WIDTH_OF_A_PIPE = 110  # characters


def show(
    policy: Annotated[str, argument(help="For example snapkv:budget=24,window=8.")],
    *,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt; a quarter more is decoded.")] = 64,
    layer: Annotated[int | None, option(min=0, help="Default: the first that the policy governs.")] = None,
    head: Annotated[int, typer.Option(min=0, help="The KV head.")] = 0,
    svg: Annotated[Path | None, option(help="Also draw it into this file.")] = None,
    plugin: Plugins = None,
) -> None:
    """Draw what a policy keeps of a short text.

    The picture shows which keys every query still sees, of one layer and head.
    """
    with user_errors():
        from rich.console import Console

        from kvaudit.audit.commands.picture import picture_svg
        from kvaudit.audit.policies import parse_policy
        from kvaudit.audit.runs.names import load_plugins
        from kvaudit.audit.sampling.model import load_model

        load_plugins(plugin or ())
        named = parse_policy(policy)
        drawn_policy, model, console = named.drawn(_SEED), load_model(), Console()
        drawn = _drawn(model, drawn_policy, _rollout(model, drawn_policy, length), layer, head)
        name = drawn_policy.canonical
        say(console, name if drawn_policy == named else f"{name}, which a request drew of the mixture")
        _print(drawn, console)
        if svg is not None:
            try:
                svg.parent.mkdir(parents=True, exist_ok=True)
                svg.write_text(picture_svg(drawn), encoding="utf-8")
            except OSError as error:
                raise RunError(f"cannot write {str(svg)!r} ({error.strerror}); give another --svg") from error
            say(console, f"picture: {inline(str(svg))}")


def _print(drawn: Picture, console: Console) -> None:
    from kvaudit.audit.commands.picture import picture_sentence, terminal

    say(console, f"{drawn.place}; {picture_sentence(drawn)}")
    width, colours = console.width if console.is_terminal else _WIDTH_OF_A_PIPE, console.color_system is not None
    for line in terminal(drawn, width, colours=colours and not console.no_color):
        console.print(line, soft_wrap=True)
    if not drawn.compressed:
        say(
            console,
            f"nothing was compressed: within {drawn.tokens} tokens nothing was due in this layer; raise --length, "
            "or lower the policy's budget or interval",
        )


def _drawn(model: LoadedModel, policy: Policy, rollout: Rollout, layer: int | None, head: int) -> Picture:
    """One head's triangle; without ``layer`` that of the first layer that the policy governs, or quantises."""
    from kvaudit.audit.cache.layers import layer_plans
    from kvaudit.audit.commands.picture import picture

    plans = layer_plans(model.model.config, policy)
    governed = [number for number, plan in enumerate(plans) if plan.governed]
    # without --layer one where a selector chooses, if any does
    choosing = [number for number in governed if plans[number].selector is not None]
    coded = [number for number in governed if plans[number].quantiser is not None]
    layer = (choosing or coded or governed)[0] if layer is None else layer
    for name, value, count in (("layer", layer, len(plans)), ("head", head, rollout.evicted_at.shape[1])):
        if value >= count:
            raise SpecError(f"--{name} is {value}, the embedded model has {count}; wanted 0 to {count - 1}")
    heads, made = rollout.evicted_at.shape[1], rollout.selection
    # query heads of a group may choose apart
    own = " (the first of its query heads)" if made is not None and made.chosen.shape[1] > heads else ""
    return picture(
        policy.canonical,
        f"layer {layer}, KV head {head}{own} of the embedded model",
        rollout.prompt_length,
        rollout.evicted_at[layer, head, :-1],  # the last drawn token asks nothing of the cache
        (rollout.keys_quantised_at, rollout.values_quantised_at) if layer in coded else (None, None),
        () if made is None else tuple(made.keys(layer, head, heads)),
    )


def _rollout(model: LoadedModel, policy: Policy, length: int) -> Rollout:
    """A suite's item of exactly ``length`` tokens, its middle left out, and a greedy answer that does not stop."""
    from kvaudit.audit.sampling.sampler import Decoding, Sampler
    from kvaudit.suites.base import SUITES

    tail = max(_SHORTEST_TAIL, length // 4) + 1  # the last drawn token asks nothing of the cache
    if length + tail > model.max_positions:
        raise SpecError(f"--length {length} needs {length + tail} positions, the model has {model.max_positions}")
    # longer than needed, so that there is a middle to leave out
    (item,) = SUITES.get(_SUITE)().items("eval", 1, _SEED, 2 * length + _LEAST_CONTEXT, model.chat.count_tokens)
    opening = model.chat.opening(item.messages)
    middle = slice(length - length // 2, len(opening.ids) - length // 2)  # keeps length tokens
    ids, roles = ([*row[: middle.start], *row[middle.stop :]] for row in (opening.ids, opening.roles))
    episode = Sampler(model, policy).open([ids], [_SEED], roles=[roles])
    drawn = 0
    while drawn < tail:
        (completion,) = episode.decode(Decoding(tail - drawn, temperature=0.0))
        assert completion is not None
        drawn += len(completion.ids)
    return episode.rollouts()[0]


COMMAND = Command("show", group="Look", order=3, call=show)
