"""``kvaudit show``: what a policy keeps of a short text, drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from audit.cache.layers import layer_plans
from audit.cache.ledger import Rollout
from audit.commands.console import say
from audit.commands.picture import Entry, Picture, legend, picture, summary, svg, ticks
from audit.commands.plugins import load_plugins
from audit.core.errors import RunError, SpecError
from audit.core.text import inline
from audit.policies import Policy, parse_policy
from audit.sampling.model import LoadedModel, load_model
from audit.sampling.sampler import Decoding, Sampler
from suites.base import SUITES

_SUITE, _SEED = "refusal", 0
_SHORTEST_TAIL, _LEAST_CONTEXT = 8, 192  # tokens
_WIDTH_OF_A_PIPE, _MARGIN, _NARROWEST, _LABELLED = 110, 6, 10, 10  # characters; every tenth query has its number
_COLOURS = {Entry.SEEN: "#2f86cf", Entry.CODED: "#e09a3e", Entry.PASSED: "#26435a", Entry.GONE: "#6b7480"}
_SHADES = {Entry.SEEN: "█", Entry.CODED: "▒", Entry.PASSED: "░", Entry.GONE: "·", Entry.FUTURE: " "}


@dataclass(frozen=True)
class Asked:
    """The command's options. Without ``layer`` the first layer that the policy governs is drawn."""

    policy: str
    length: int
    layer: int | None
    head: int
    svg: Path | None
    plugins: Sequence[Path] = ()


def show_policy(asked: Asked) -> None:
    """Run the policy over ``length`` tokens of a suite's item and a decoded tail, and draw one head's triangle."""
    load_plugins(asked.plugins)
    named = parse_policy(asked.policy)
    policy = named.drawn(_SEED)
    model = load_model()
    rollout = _rollout(model, policy, asked.length)
    drawn = _drawn(model, policy, rollout, asked)
    console = Console()
    say(console, policy.canonical if policy == named else f"{policy.canonical}, which a request drew of the mixture")
    say(console, f"{drawn.place}; {summary(drawn)}")
    for line in terminal(drawn, console.width if console.is_terminal else _WIDTH_OF_A_PIPE, colours=_coloured(console)):
        console.print(line, soft_wrap=True)
    if not drawn.compressed:
        say(
            console,
            f"nothing was compressed: within {drawn.tokens} tokens nothing was due in this layer; raise --length, "
            "or lower the policy's budget or interval",
        )
    if asked.svg is not None:
        _write(asked.svg, svg(drawn))
        say(console, f"picture: {inline(str(asked.svg))}")


def _drawn(model: LoadedModel, policy: Policy, rollout: Rollout, asked: Asked) -> Picture:
    plans = layer_plans(model.model.config, policy)
    governed = [number for number, plan in enumerate(plans) if plan.governed]
    choosing = [number for number in governed if plans[number].selector is not None]
    first = (choosing or governed)[0]
    layer = first if asked.layer is None else asked.layer
    for name, value, count in (("layer", layer, len(plans)), ("head", asked.head, rollout.evicted_at.shape[1])):
        if value >= count:
            raise SpecError(f"--{name} is {value}, the embedded model has {count}; wanted 0 to {count - 1}")
    heads, made = rollout.evicted_at.shape[1], rollout.selection
    own = " (the first of its query heads)" if made is not None and made.chosen.shape[1] > heads else ""
    return picture(
        policy.canonical,
        f"layer {layer}, KV head {asked.head}{own} of the embedded model",
        rollout.prompt_length,
        rollout.evicted_at[layer, asked.head, :-1],
        (rollout.keys_quantised_at, rollout.values_quantised_at),
        () if made is None else tuple(made.keys(layer, asked.head, heads)),
    )


def _rollout(model: LoadedModel, policy: Policy, length: int) -> Rollout:
    """A suite's item of exactly ``length`` tokens, its middle left out, and a greedy answer that does not stop."""
    tail = max(_SHORTEST_TAIL, length // 4) + 1  # the last drawn token asks nothing of the cache
    if length + tail > model.max_positions:
        raise SpecError(f"--length {length} needs {length + tail} positions, the model has {model.max_positions}")
    (item,) = SUITES.get(_SUITE)().items("eval", 1, _SEED, 2 * length + _LEAST_CONTEXT, model.chat.count_tokens)
    opening = model.chat.opening(item.messages)
    middle = slice(length - length // 2, len(opening.ids) - length // 2)
    ids, roles = ([*row[: middle.start], *row[middle.stop :]] for row in (opening.ids, opening.roles))
    episode = Sampler(model, policy).open([ids], [_SEED], roles=[roles])
    drawn = 0
    while drawn < tail:
        (completion,) = episode.decode(Decoding(tail - drawn, temperature=0.0))
        assert completion is not None
        drawn += len(completion.ids)
    return episode.rollouts()[0]


def _coloured(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r} ({error.strerror}); give another --svg") from error


def terminal(drawn: Picture, width: int, *, colours: bool) -> Iterator[Text]:
    """The triangle in half blocks, two queries to a line, then the keys' positions and what the shades mean."""
    cells = drawn.cells(max(_NARROWEST, width - _MARGIN))
    step = -(-drawn.tokens // len(cells))  # tokens in a cell
    rows = [*cells, [Entry.FUTURE] * len(cells)]
    for top in range(0, len(cells), 2):
        label = f"{top * step:>{_MARGIN - 1}} " if top % _LABELLED == 0 else " " * _MARGIN
        line = Text(label)
        for upper, lower in zip(rows[top], rows[top + 1], strict=True):
            line.append(*_half(upper, lower) if colours else (_plain(upper, lower), ""))
        line.rstrip()
        yield line
    yield Text(" " * _MARGIN + _scale(drawn.tokens, step))
    yield _words(drawn, colours=colours)


def _half(upper: Entry, lower: Entry) -> tuple[str, Style]:
    """A character whose two halves have the colours of two entries."""
    above, below = _COLOURS.get(upper), _COLOURS.get(lower)
    if above is None:
        return ("▄", Style(color=below)) if below else (" ", Style())
    return ("█", Style(color=above)) if above == below else ("▀", Style(color=above, bgcolor=below))


def _plain(upper: Entry, lower: Entry) -> str:
    """The same without colours, where a half can only be full or empty."""
    if upper is lower:
        return _SHADES[upper]
    if Entry.CODED in (upper, lower):
        return "▓" if Entry.SEEN in (upper, lower) else "▒"
    if Entry.SEEN in (upper, lower):
        return "▀" if upper is Entry.SEEN else "▄"
    return _SHADES[Entry.PASSED if Entry.PASSED in (upper, lower) else Entry.GONE]


def _scale(tokens: int, step: int) -> str:
    """Positions of keys under their columns."""
    line = ""
    for tick in ticks(tokens):
        if tick // step >= len(line) + bool(line):
            line = f"{line:<{tick // step}}{tick}"
    return line


def _words(drawn: Picture, *, colours: bool) -> Text:
    line = Text(" " * _MARGIN)
    for entry, words in legend(drawn):
        line.append(_SHADES[Entry.SEEN] if colours else _SHADES[entry], Style(color=_COLOURS[entry]) if colours else "")
        line.append(f" {words}   ")
    line.append("rows: queries, columns: keys")
    if drawn.prompt_length < drawn.tokens:
        line.append(f"; decoded from {drawn.prompt_length}")
    return line
