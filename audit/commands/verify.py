"""``kvaudit verify``: replay recorded rollouts and say whether their policy explains them."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from kvaudit.audit.commands.command_line import Plugins, say, user_errors, wide_console
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.audit.replay.recorded import Recorded
    from kvaudit.audit.runs.verify import Gaps, Verification
    from kvaudit.audit.sampling.model import LoadedModel

NOT_EXPLAINED = 3
_COLUMNS = ("view", "max |log p_s - log p|", "mean |log p_s - log p|", "mismatch_kl", "mismatch_kl (k3)")


@dataclass(frozen=True)
class VerifyOptions:
    """The command's options. ``rollouts`` is a count of a checkpoint's own, or the path of a file."""

    checkpoint: Path | None
    rollouts: str | None
    model: str | None
    dtype: str
    tolerance: float | None
    temperature: float | None
    plugins: tuple[Path, ...] = ()


def verify(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="The folder of a finished checkpoint.", show_default=False)
    ] = None,
    *,
    rollouts: Annotated[
        str | None,
        typer.Option(help="How many of its rollouts, default all; or a file of rollouts.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that sampled a file.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as it was sampled.")] = "auto",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Nats on the worst token; default: the dtype's.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.", show_default=False),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Replay recorded rollouts; exits with 3 where their policy does not explain their log-probs."""
    with user_errors():
        asked = VerifyOptions(checkpoint, rollouts, model, dtype, tolerance, temperature, tuple(plugin or ()))
        raise typer.Exit(_verify(asked))


def _verify(asked: VerifyOptions) -> int:
    """Print the table and the verdict; returns 0, or 3 where the recorded policy does not explain the log-probs."""
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.runs import verify as replay
    from kvaudit.audit.runs.names import load_plugins
    from kvaudit.audit.sampling.given import load_named
    from kvaudit.audit.sampling.model import DtypeName
    from kvaudit.core.spec_parts import HEATS, is_heat

    if asked.dtype not in get_args(DtypeName):
        raise UnknownName("dtype", asked.dtype, get_args(DtypeName))
    if asked.tolerance is not None and not math.isfinite(asked.tolerance):
        raise SpecError(f"--tolerance is {asked.tolerance:g}, wanted a finite number of nats")
    if asked.temperature is not None and not is_heat(asked.temperature):
        raise SpecError(f"--temperature is {asked.temperature:g}, wanted {HEATS}")
    load_plugins(asked.plugins)
    set_verbosity_error()  # of loading; what is wrong with a model is said in one line
    sources, name = _sources(asked)
    model = load_named(name, dtype=asked.dtype)  # type: ignore[arg-type]  # checked above
    explained = True
    for recorded in sources:
        found = replay.verify(model, recorded, tolerance=asked.tolerance, temperature=asked.temperature)
        _print(recorded, model, found)
        explained = explained and found.explained
    return 0 if explained else NOT_EXPLAINED


def check_reading(dtype: str, temperature: float | None) -> None:
    """Raise SpecError for a dtype or a temperature that no rollout can be read with."""
    from kvaudit.audit.sampling.model import DtypeName
    from kvaudit.core.spec_parts import HEATS, is_heat

    if dtype not in get_args(DtypeName):
        raise UnknownName("dtype", dtype, get_args(DtypeName))
    if temperature is not None and not is_heat(temperature):
        raise SpecError(f"--temperature is {temperature:g}, wanted {HEATS}")


def _sources(asked: VerifyOptions) -> tuple[list[Recorded], str]:
    """The rollouts by their files, and the name of the model that is to explain them."""
    from kvaudit.audit.replay.interchange import read_rollouts
    from kvaudit.audit.runs.verify import checkpoint_rollouts

    if asked.checkpoint is not None:
        if asked.model is not None or (asked.rollouts is not None and not asked.rollouts.isdecimal()):
            raise SpecError(
                "a checkpoint is verified by its own weights and rollouts; give CHECKPOINT [--rollouts COUNT], "
                "or --rollouts FILE --model MODEL"
            )
        return _first(checkpoint_rollouts(asked.checkpoint), asked.rollouts), str(asked.checkpoint)
    if asked.model is None or asked.rollouts is None or asked.rollouts.isdecimal():
        raise SpecError(
            "what to verify is missing; give CHECKPOINT [--rollouts COUNT], or --rollouts FILE --model MODEL"
        )
    return [read_rollouts(Path(asked.rollouts))], asked.model


def _first(sources: list[Recorded], count: str | None) -> list[Recorded]:
    if count is None:
        return sources
    left, kept = int(count), sum(len(recorded.rollouts) for recorded in sources)
    if not 1 <= left <= kept:
        raise SpecError(f"--rollouts is {count}, the checkpoint keeps {kept}; give 1 to that many")
    found: list[Recorded] = []
    for recorded in sources:
        found += [replace(recorded, rollouts=recorded.rollouts[:left])] if left > 0 else []
        left -= len(recorded.rollouts)
    return found


def _print(recorded: Recorded, model: LoadedModel, found: Verification) -> None:
    from rich.table import Table

    console = wide_console()
    say(console, f"rollouts    {found.rollouts} of {inline(recorded.source)}, {found.tokens} sampled tokens")
    say(console, f"policy      {inline(found.policy or 'not named')}")
    say(console, f"model       {inline(model.name)} {model.sha256[:12]}, {str(model.dtype).removeprefix('torch.')}")
    if found.rerouted:
        say(console, "experts     not recorded: the model chose them anew, and a choice that rounding flips is a gap")
    table = Table(*_COLUMNS)
    for view, gaps in (("shadow, under the ledger", found.shadow), ("dense, all visible", found.dense)):
        table.add_row(view, *_numbers(gaps))
    console.print(table, markup=False)
    say(console, f"choices     {_choices(found)}")
    for line in _verdict(found):
        say(console, line)


def _numbers(gaps: Gaps) -> list[str]:
    from kvaudit.reports.layout.words import scientific

    return [scientific(value) for value in astuple(gaps)]


def _choices(found: Verification) -> str:
    """What ranking again said, in one line."""
    ranked = found.ranked
    if isinstance(ranked, str):
        return f"not made again: {ranked}"
    return (
        f"of {ranked.evicted} entries that left, the policy chooses {_percent(ranked.share)} again; "
        f"rollout {ranked.rollout} has the least, {_percent(ranked.least)}"
    )


def _percent(share: float) -> str:
    """Two digits, and 100 % only for all."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def _verdict(found: Verification) -> list[str]:
    from kvaudit.reports.layout.words import scientific

    worst, bound = found.worst, f"{found.tolerance:g} nats"
    if found.explained:
        return [f"explained: no token is off by more than {bound}; p_s is the sampler's, numbers are in nats"]
    lines = []
    if not found.token_explained:
        lines.append(
            f"not explained: rollout {worst.rollout}, token {worst.token} is recorded at {worst.recorded:.4f} nats, "
            f"the ledger gives {worst.replayed:.4f}; at most {bound} may lie between"
        )
    elif not found.mean_explained:
        lines.append(
            f"not explained: tokens are off by {scientific(found.shadow.mean)} nats in the mean, at most "
            f"{found.mean_tolerance:g} is rounding; the worst is rollout {worst.rollout}, token {worst.token}"
        )
    if found.breach is not None:
        lines.append(f"not explained: {inline(found.breach)}")
    if not isinstance(found.ranked, str) and not found.rank_explained:
        lines.append(
            f"not explained: of what left rollout {found.ranked.rollout}, the policy would have chosen "
            f"{_percent(found.ranked.least)}; at least {_percent(found.ranked.wanted)} of its own come again"
        )
    return lines
