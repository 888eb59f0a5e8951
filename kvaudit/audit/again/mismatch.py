"""Other stacks' rollouts against the learner's dense pass: the mismatch panel of a file, whoever sampled it.

The file is read twice. First everything is checked that needs no model, and rewards are added up by group; then a few
rollouts at a time are passed through the model. So memory is that of those few, and of one number pair per group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.rerun.measure import Measure
from kvaudit.audit.rerun.verify import PASS_TOKENS
from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.replay.rollout_checks import model_misfit
from kvaudit.audit.replay.stacks import ImportedRollout, import_rollouts
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.batch import microbatches
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, LEDGERS
from kvaudit.audit.training.mismatch import MismatchPanel, alarms
from kvaudit.audit.training.token_logprobs import read_tokens
from kvaudit.core.alarms import MISMATCH, Bound
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.text import guide, inline
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.reports.sections.shared.words import scientific

MISMATCH_FORMAT, MISMATCH_VERSION = "kvaudit.mismatch", 1
# nats: that a sampler is sure of a token to the last bit and a learner is not happens seldom, twice in a rollout hardly
_DOUBTED, _REFUTED, _FEWEST_FILLED = -0.05, -2.0, 2
_AT_ONCE = 16 * PASS_TOKENS  # padded tokens that are held


@dataclass
class Survey:
    """What a file holds: counts, its longest rollout and highest id with their places, and what lines declare."""

    path: Path
    rollouts: int = 0
    tokens: int = 0  # sampled
    longest: tuple[int, str] = (0, "")
    highest: tuple[int, str] = (0, "")
    stacks: set[str] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    undeclared: int = 0  # rollouts that say no temperature
    tokenizers: dict[str, str] = field(default_factory=dict)  # hash -> place
    rewards: dict[str, tuple[float, int]] = field(default_factory=dict)  # group -> sum, count
    undrawn: list[str] = field(default_factory=list)  # places of rollouts without a drawn token, which are skipped

    def add(self, row: ImportedRollout) -> None:
        """Count a rollout."""
        self.rollouts += 1
        self.tokens += int(row.rollout.sampled.sum())
        self.longest = max(self.longest, (len(row.rollout.ids), row.place), key=lambda found: found[0])
        self.highest = max(self.highest, (int(row.rollout.ids.max()), row.place), key=lambda found: found[0])
        self.stacks.add(row.stack)
        if row.temperature is not None:
            self.temperatures.add(row.temperature)
        else:
            self.undeclared += 1
        if row.tokenizer_sha256 is not None:
            self.tokenizers.setdefault(row.tokenizer_sha256, row.place)
        if row.group is not None and row.reward is not None:
            total, count = self.rewards.get(row.group, (0.0, 0))
            self.rewards[row.group] = (total + row.reward, count + 1)


@dataclass(frozen=True)
class FilePanel:
    """The numbers of a file, at one temperature, and the declared bounds that they pass."""

    temperature: float
    panel: dict[str, float | None]
    alarms: list[Bound]
    filled: Filled | None = None


@dataclass
class Filled:
    """Log-probs of exactly 0, which are no news where the learner is sure of the token too, and filled in elsewhere.

    ``place`` and ``token``, from 0 in its rollout, are the first zero of the first rollout that must have been filled.
    ``doubted`` are the tokens that the learner is not sure of, ``learner`` the sum of what it gives them, in nats.
    """

    rollouts: int = 0
    tokens: int = 0
    doubted: int = 0
    learner: float = 0.0
    place: str = ""
    token: int = 0

    def add(self, part: PaddedRollouts) -> None:
        """Count the zeros of some rollouts."""
        zeros = part.sampled & (part.sampler == 0)  # [B, R]
        doubted, refuted = zeros & (part.learner < _DOUBTED), zeros & (part.learner < _REFUTED)
        self.rollouts += int(zeros.any(1).sum())
        self.tokens += int(zeros.sum())
        self.doubted += int(doubted.sum())
        self.learner += float(part.learner[doubted].sum())
        wrong = ((doubted.sum(1) >= _FEWEST_FILLED) | refuted.any(1)).nonzero()[:, 0].tolist()
        if wrong and not self.place:
            self.place, first = part.places[wrong[0]], int(zeros[wrong[0]].nonzero()[0])
            self.token = part.prompts[wrong[0]] + first

    @property
    def line(self) -> str:
        """What is said of them."""
        return (
            f"alarm: {self.tokens} log-probs in {self.rollouts} rollouts are exactly 0, first {inline(self.place)} "
            f"token {self.token}, though the learner gives {self.doubted} of these tokens "
            f"{self.learner / self.doubted:.3g} on average: filled in for missing ones, or of a greedy choice. The "
            "numbers above count them as true: record them anew, or mask those tokens"
        )


@dataclass(frozen=True)
class PaddedRollouts:
    """A few rollouts, padded [B, R]: log-probs in nats under sampler and learner, what was drawn, and advantages."""

    sampler: Tensor
    learner: Tensor
    sampled: Tensor
    advantages: Tensor
    places: Sequence[str] = ()
    prompts: Sequence[int] = ()  # tokens before the first column of each

    def __len__(self) -> int:
        return len(self.sampled)


def survey(path: Path) -> Survey:
    """Read a whole file once.

    Raises DataError at the first rollout that is none, where there are none, or where most hold no drawn token.
    """
    found = Survey(path)
    for row in import_rollouts(path, found.undrawn):
        found.add(row)
    if len(found.undrawn) > found.rollouts:
        raise DataError(
            f"{str(path)!r}: {len(found.undrawn)} of {found.rollouts + len(found.undrawn)} rollouts hold no token that "
            f"was drawn, {found.undrawn[0]} first; see that the mask is 1 where the model drew, or leave them out"
        )
    if not found.rollouts:
        raise DataError(f"{str(path)!r} holds no rollout; write one a line, see {guide('rollout-files.md')}")
    return found


class Mismatch(Measure[Survey, PaddedRollouts, FilePanel]):
    """How far a file's sampler was from the learner's dense pass; ``temperature`` replaces the recorded one."""

    name = "mismatch"
    decides = True

    def __init__(self, model: LoadedModel, found: Survey, *, temperature: float | None = None) -> None:
        self._model, self._survey, self._temperature = model, found, temperature

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        folder = run.checkpoint(*run.spec.arms[0])
        return cls(load_model(str(folder)), survey(folder / LEDGERS / f"{FINAL_LEDGER}.safetensors"))

    def pieces(self) -> Sequence[Survey]:
        return [self._survey]

    def size(self, piece: Survey) -> int:
        return piece.rollouts

    def model(self, piece: Survey) -> LoadedModel:  # noqa: ARG002
        return self._model

    def served(self, piece: Survey, model: LoadedModel) -> Iterator[PaddedRollouts]:
        _check_model(model, piece)
        temperature = self._temperature_of(piece)
        for rows in _handfuls(import_rollouts(piece.path)):
            rollouts = [_dense(row.rollout, model.model.config) for row in rows]
            # what stands behind the prompts, padded to the longest: [B, R]
            sampled = _padded([r.sampled[r.prompt_length :] for r in rollouts])
            yield PaddedRollouts(
                sampler=_padded([r.sampler_logprobs[r.prompt_length :] for r in rollouts]),
                # greedy draws are recorded with the log-probs of temperature 1
                learner=_learner(model.model, rollouts, sampled, temperature or 1.0),
                sampled=sampled,
                advantages=_padded([_advantages(row, piece) for row in rows]),
                places=[row.place for row in rows],
                prompts=[row.rollout.prompt_length for row in rows],
            )

    def summed(self, piece: Survey, model: LoadedModel, parts: Iterator[PaddedRollouts]) -> FilePanel:  # noqa: ARG002
        panel, filled = MismatchPanel(), Filled()
        for part in parts:
            panel.add(part.sampler, part.learner, part.sampled, part.advantages)
            filled.add(part)
        numbers = panel.numbers()
        return FilePanel(self._temperature_of(piece), numbers, alarms(numbers), filled if filled.place else None)

    def differs(self, total: FilePanel) -> bool:
        return bool(total.alarms) or total.filled is not None

    def lines(self, found: Sequence[tuple[Survey, FilePanel]]) -> Iterator[str | Table]:
        bounds = {bound.name: bound.limit for bound in MISMATCH}
        for piece, total in found:
            model, written = self._model, ", ".join(sorted(piece.stacks))
            source = f"{inline(str(piece.path))} ({written})"
            yield f"rollouts    {piece.rollouts} of {source}, {piece.tokens} sampled tokens"
            name, dtype = f"{inline(model.name)} {model.sha256[:12]}", str(model.dtype).removeprefix("torch.")
            yield f"model       {name}, {dtype}, temperature {total.temperature:g}"
            if piece.undrawn:
                yield f"skipped     {len(piece.undrawn)} without a drawn token, {piece.undrawn[0]} first"
            rows = ((name, scientific(value), bounds.get(name, "")) for name, value in total.panel.items())
            yield Table(("number", "value", "alarm"), tuple(rows))
            for bound in total.alarms:
                yield f"alarm: {bound.name} is {scientific(total.panel[bound.name])}, {bound.limit}: {bound.meaning}"
            if total.filled:
                yield total.filled.line
            if not self.differs(total):
                yield "no alarm: the numbers keep within the bounds above"

    def to_json(self, total: FilePanel) -> str:
        """The numbers of the file as a program reads them."""
        found, model = self._survey, self._model
        rung = [
            {"name": bound.name, "value": total.panel[bound.name], "least": bound.least, "most": bound.most}
            for bound in total.alarms
        ]
        table = {
            "format": MISMATCH_FORMAT,
            "version": MISMATCH_VERSION,
            "rollouts": found.rollouts,
            "skipped": len(found.undrawn),
            "tokens": found.tokens,
            "written_by": sorted(found.stacks),
            "model": model.name,
            "model_sha256": model.sha256,
            "dtype": str(model.dtype).removeprefix("torch."),
            "temperature": total.temperature,
            "panel": total.panel,
            "alarms": rung,
            "filled": asdict(total.filled) if total.filled else None,
        }
        return json.dumps(table, indent=1, allow_nan=False) + "\n"

    def _temperature_of(self, found: Survey) -> float:
        if self._temperature is not None:
            return self._temperature
        if len(found.temperatures) > 1:
            known = ", ".join(f"{value:g}" for value in sorted(found.temperatures))
            raise SpecError(f"{str(found.path)!r} was sampled at several temperatures ({known}); give a file of each")
        if found.temperatures and found.undeclared:
            [said] = found.temperatures
            raise SpecError(
                f"{str(found.path)!r}: {found.undeclared} of {found.rollouts} rollouts say no temperature, the others "
                f"{said:g}; give --temperature, or a file of each"
            )
        return next(iter(found.temperatures), 1.0)


def tokenizer_sha256(tokenizer: Any) -> str:
    """What a file may declare: sha256 of the vocabulary as sorted pairs of token and id."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _check_model(model: LoadedModel, found: Survey) -> None:
    (tokens, longest), (highest, strange) = found.longest, found.highest
    for place, fault in (
        (longest, model_misfit(tokens, 0, 0, model.model.config, model.max_positions)),
        (strange, model_misfit(0, 0, highest, model.model.config, model.max_positions)),
    ):
        if fault:
            raise DataError(f"{str(found.path)!r}, {place} {fault}")
    own = tokenizer_sha256(model.chat.tokenizer) if found.tokenizers else ""
    for declared, place in found.tokenizers.items():
        if declared != own:
            raise DataError(
                f"{str(found.path)!r}, {place} has tokens of a vocabulary of sha256 {declared[:12]}, that of model "
                f"{model.name!r} is {own[:12]}; give the model that sampled it"
            )


def _handfuls(rows: Iterator[ImportedRollout]) -> Iterator[list[ImportedRollout]]:
    """As many at a time as fit ``_AT_ONCE`` padded tokens, one at least."""
    held: list[ImportedRollout] = []
    longest = 0
    for row in rows:
        wider = max(longest, len(row.rollout.ids))
        if held and (len(held) + 1) * wider > _AT_ONCE:
            yield held
            held, wider = [], len(row.rollout.ids)
        held.append(row)
        longest = wider
    if held:
        yield held


def _dense(rollout: Rollout, config: Any) -> Rollout:
    """The rollout with the ledger of a dense cache of this model, which takes no memory."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    never = torch.full((1, 1, 1), NEVER, dtype=torch.int32).expand(layers, kv_heads(config), len(rollout.ids))
    return replace(rollout, evicted_at=never)


@torch.no_grad()
def _learner(model: Any, rollouts: list[Rollout], sampled: Tensor, temperature: float) -> Tensor:
    """Log-probs [B, R] of the sampled tokens under the dense pass, nats; 0 elsewhere."""
    result = torch.zeros(sampled.shape)
    for rows in microbatches(rollouts, 1, PASS_TOKENS):
        read = read_tokens(model, [rollouts[row] for row in rows], 1, "dense", temperature)
        # flat, in the order in which the mask is read
        result[rows] = torch.zeros(sampled[rows].shape).masked_scatter(sampled[rows], read.logprobs.float().cpu())
    return result


def _advantages(row: ImportedRollout, found: Survey) -> Tensor:
    """Of every token behind the prompt; NaN where neither an advantage is known nor a group to compare rewards in."""
    length = len(row.rollout.ids) - row.rollout.prompt_length
    if row.advantages is not None:
        return row.advantages
    if row.reward is None or row.group is None:
        return torch.full((length,), math.nan, dtype=torch.float64)
    total, count = found.rewards[row.group]
    return torch.full((length,), row.reward - total / count, dtype=torch.float64)


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
