"""Compare the log-probs in a file of rollouts, of any training stack, with those of the model without compression.

The file is read twice: first for checks without a model and for the sums of rewards by group, then to pass a few
rollouts at a time through the model. Memory holds these few rollouts and two numbers per group.
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

from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.replay.rollout_checks import model_misfit
from kvaudit.audit.replay.stacks import ImportedRollout, import_rollouts
from kvaudit.audit.rerun.measure import Measure
from kvaudit.audit.rerun.verify import PASS_TOKENS
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.batch import microbatches
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, LEDGERS
from kvaudit.audit.training.learner import read_tokens
from kvaudit.audit.training.mismatch import MismatchPanel, alarms
from kvaudit.core.alarms import MISMATCH_BOUNDS, Bound
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.text import guide_path, inline
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.reports.sections.shared.words import scientific

MISMATCH_FORMAT, MISMATCH_VERSION = "kvaudit.mismatch", 1
# nats: recorded zeros were surely filled in if the learner gives one below _REFUTED or _FEWEST_FILLED below _DOUBTED
_DOUBTED, _REFUTED, _FEWEST_FILLED = -0.05, -2.0, 2
_AT_ONCE = 16 * PASS_TOKENS  # padded tokens in memory


@dataclass
class Survey:
    """The summary of a rollout file: counts, its longest rollout and highest token id, and the settings it declares.

    ``longest`` and ``highest`` come with their location in the file, such as ``line 3``.
    """

    path: Path
    rollouts: int = 0
    tokens: int = 0  # sampled
    longest: tuple[int, str] = (0, "")
    highest: tuple[int, str] = (0, "")
    stacks: set[str] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    undeclared: int = 0  # rollouts without a temperature
    tokenizers: dict[str, str] = field(default_factory=dict)  # hash -> place
    rewards: dict[str, tuple[float, int]] = field(default_factory=dict)  # group -> sum, count
    undrawn: list[str] = field(default_factory=list)  # places of rollouts without a sampled token, which are skipped

    def add(self, row: ImportedRollout) -> None:
        """Add a rollout of the file to the summary."""
        self.rollouts += 1
        self.tokens += int(row.rollout.sampled.sum())
        self.longest = max(self.longest, (len(row.rollout.ids), row.place), key=lambda pair: pair[0])
        self.highest = max(self.highest, (int(row.rollout.ids.max()), row.place), key=lambda pair: pair[0])
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
    """The mismatch numbers of a rollout file at one temperature, by name, and the bounds that they exceed (alarms)."""

    temperature: float
    panel: dict[str, float | None]
    alarms: list[Bound]
    filled: FilledLogprobs | None = None


@dataclass
class FilledLogprobs:
    """The count of recorded log-probs that are exactly 0.

    Unless the model is sure of the token, such a zero stands for a missing log-prob. ``doubted`` counts the zeros where
    the model is not sure; ``learner`` is the sum of the model's log-probs there, in nats. ``place`` and ``token`` (from
    0) locate the first zero of the first rollout whose zeros cannot all be true.
    """

    rollouts: int = 0
    tokens: int = 0
    doubted: int = 0
    learner: float = 0.0
    place: str = ""
    token: int = 0

    def add(self, batch: PaddedRollouts) -> None:
        """Count the recorded log-probs of a batch that are exactly 0."""
        zeros = batch.sampled & (batch.sampler == 0)  # [B, R]
        doubted, refuted = zeros & (batch.learner < _DOUBTED), zeros & (batch.learner < _REFUTED)
        self.rollouts += int(zeros.any(1).sum())
        self.tokens += int(zeros.sum())
        self.doubted += int(doubted.sum())
        self.learner += float(batch.learner[doubted].sum())
        wrong = ((doubted.sum(1) >= _FEWEST_FILLED) | refuted.any(1)).nonzero()[:, 0].tolist()
        if wrong and not self.place:
            self.place, first = batch.places[wrong[0]], int(zeros[wrong[0]].nonzero()[0])
            self.token = batch.prompts[wrong[0]] + first

    @property
    def line(self) -> str:
        """The text of the alarm that these log-probs raise, on one line."""
        return (
            f"alarm: {self.tokens} log-probs in {self.rollouts} rollouts are exactly 0, first {inline(self.place)} "
            f"token {self.token}, though the learner gives {self.doubted} of these tokens "
            f"{self.learner / self.doubted:.3g} on average: filled in, or from greedy sampling. The numbers above take "
            "them as true; record them again, or mask those tokens"
        )


@dataclass(frozen=True)
class PaddedRollouts:
    """A padded batch of B rollouts without their prompts; R tokens follow the prompt of the longest one.

    All tensors are [B, R]. ``sampler`` are the recorded log-probs and ``learner`` those of the model, in nats.
    ``sampled`` marks sampled tokens. ``advantages`` are NaN where unknown.
    """

    sampler: Tensor
    learner: Tensor
    sampled: Tensor
    advantages: Tensor
    places: Sequence[str] = ()
    prompts: Sequence[int] = ()  # prompt length of each; column 0 is the token after it

    def __len__(self) -> int:
        return len(self.sampled)


def survey(path: Path) -> Survey:
    """Return the summary of a rollout file, which is read once from start to end.

    Raises DataError for a malformed rollout, for a file without rollouts, and if most have no sampled token.
    """
    result = Survey(path)
    for row in import_rollouts(path, result.undrawn):
        result.add(row)
    if len(result.undrawn) > result.rollouts:
        raise DataError(
            f"{str(path)!r}: {len(result.undrawn)} of {result.rollouts + len(result.undrawn)} rollouts have no sampled "
            f"token, {result.undrawn[0]} first; set the mask to 1 where the model sampled, or leave them out"
        )
    if not result.rollouts:
        raise DataError(f"{str(path)!r} holds no rollout; write one per line, see {guide_path('rollout-files.md')}")
    return result


class Mismatch(Measure[Survey, PaddedRollouts, FilePanel]):
    """Measures how far a file's recorded log-probs are from those of the model without compression.

    ``temperature`` replaces the recorded one.
    """

    name = "mismatch"
    decides = True

    def __init__(self, model: LoadedModel, contents: Survey, *, temperature: float | None = None) -> None:
        self._model, self._survey, self._temperature = model, contents, temperature

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        folder = run.checkpoint(*run.spec.arms[0])
        return cls(load_model(str(folder)), survey(folder / LEDGERS / f"{FINAL_LEDGER}.safetensors"))

    def units(self) -> Sequence[Survey]:
        return [self._survey]

    def size(self, unit: Survey) -> int:
        return unit.rollouts

    def model(self, unit: Survey) -> LoadedModel:  # noqa: ARG002
        return self._model

    def serve(self, unit: Survey, model: LoadedModel) -> Iterator[PaddedRollouts]:
        _check_model(model, unit)
        temperature = self._temperature_of(unit)
        for rows in _batches(import_rollouts(unit.path)):
            rollouts = [_dense(row.rollout, model.model.config) for row in rows]
            # the tokens after the prompts, padded to the longest: [B, R]
            sampled = _pad([r.sampled[r.prompt_length :] for r in rollouts])
            yield PaddedRollouts(
                sampler=_pad([r.sampler_logprobs[r.prompt_length :] for r in rollouts]),
                # greedy rollouts record the log-probs of temperature 1
                learner=_learner_logprobs(model.model, rollouts, sampled, temperature or 1.0),
                sampled=sampled,
                advantages=_pad([_advantages(row, unit) for row in rows]),
                places=[row.place for row in rows],
                prompts=[row.rollout.prompt_length for row in rows],
            )

    def reduce(self, unit: Survey, model: LoadedModel, batches: Iterator[PaddedRollouts]) -> FilePanel:  # noqa: ARG002
        panel, filled = MismatchPanel(), FilledLogprobs()
        for batch in batches:
            panel.add(batch.sampler, batch.learner, batch.sampled, batch.advantages)
            filled.add(batch)
        numbers = panel.numbers()
        return FilePanel(self._temperature_of(unit), numbers, alarms(numbers), filled if filled.place else None)

    def differs(self, total: FilePanel) -> bool:
        return bool(total.alarms) or total.filled is not None

    def lines(self, results: Sequence[tuple[Survey, FilePanel]]) -> Iterator[str | Table]:
        bounds = {bound.name: bound.limit for bound in MISMATCH_BOUNDS}
        for unit, total in results:
            model, stacks = self._model, ", ".join(sorted(unit.stacks))
            source = f"{inline(str(unit.path))} ({stacks})"
            yield f"rollouts    {unit.rollouts} of {source}, {unit.tokens} sampled tokens"
            name, dtype = f"{inline(model.name)} {model.sha256[:12]}", str(model.dtype).removeprefix("torch.")
            yield f"model       {name}, {dtype}, temperature {total.temperature:g}"
            if unit.undrawn:
                yield f"skipped     {len(unit.undrawn)} without a sampled token, {unit.undrawn[0]} first"
            rows = ((name, scientific(value), bounds.get(name, "")) for name, value in total.panel.items())
            yield Table(("number", "value", "alarm"), tuple(rows))
            for bound in total.alarms:
                yield f"alarm: {bound.name} is {scientific(total.panel[bound.name])}, {bound.limit}: {bound.meaning}"
            if total.filled:
                yield total.filled.line
            if not self.differs(total):
                yield "no alarm: all numbers are within the bounds above"

    def to_json(self, total: FilePanel) -> str:
        """Return the mismatch of a rollout file, its numbers and alarms, as JSON."""
        contents, model = self._survey, self._model
        raised = [
            {"name": bound.name, "value": total.panel[bound.name], "least": bound.least, "most": bound.most}
            for bound in total.alarms
        ]
        table = {
            "format": MISMATCH_FORMAT,
            "version": MISMATCH_VERSION,
            "rollouts": contents.rollouts,
            "skipped": len(contents.undrawn),
            "tokens": contents.tokens,
            "written_by": sorted(contents.stacks),
            "model": model.name,
            "model_sha256": model.sha256,
            "dtype": str(model.dtype).removeprefix("torch."),
            "temperature": total.temperature,
            "panel": total.panel,
            "alarms": raised,
            "filled": asdict(total.filled) if total.filled else None,
        }
        return json.dumps(table, indent=1, allow_nan=False) + "\n"

    def _temperature_of(self, contents: Survey) -> float:
        if self._temperature is not None:
            return self._temperature
        path = str(contents.path)
        if len(contents.temperatures) > 1:
            values = ", ".join(f"{value:g}" for value in sorted(contents.temperatures))
            raise SpecError(f"{path!r} was sampled at several temperatures ({values}); give one file for each")
        if contents.temperatures and contents.undeclared:
            [declared] = contents.temperatures
            raise SpecError(
                f"{path!r}: {contents.undeclared} of {contents.rollouts} rollouts have no temperature, the others "
                f"{declared:g}; give --temperature, or one file for each"
            )
        return next(iter(contents.temperatures), 1.0)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the sha256 of a vocabulary, as sorted pairs of token and id; rollout files may declare it."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _check_model(model: LoadedModel, contents: Survey) -> None:
    (tokens, longest_place), (highest_id, id_place) = contents.longest, contents.highest
    for place, fault in (
        (longest_place, model_misfit(tokens, 0, 0, model.model.config, model.max_positions)),
        (id_place, model_misfit(0, 0, highest_id, model.model.config, model.max_positions)),
    ):
        if fault:
            raise DataError(f"{str(contents.path)!r}, {place} {fault}")
    vocabulary = tokenizer_sha256(model.chat.tokenizer) if contents.tokenizers else ""
    for declared, place in contents.tokenizers.items():
        if declared != vocabulary:
            raise DataError(
                f"{str(contents.path)!r}, {place} has tokens of a vocabulary of sha256 {declared[:12]}, that of model "
                f"{model.name!r} is {vocabulary[:12]}; give the model that sampled it"
            )


def _batches(rows: Iterator[ImportedRollout]) -> Iterator[list[ImportedRollout]]:
    """Yield batches of rollouts with at most ``_AT_ONCE`` padded tokens, at least one rollout each."""
    batch: list[ImportedRollout] = []
    longest = 0
    for row in rows:
        width = max(longest, len(row.rollout.ids))
        if batch and (len(batch) + 1) * width > _AT_ONCE:
            yield batch
            batch, width = [], len(row.rollout.ids)
        batch.append(row)
        longest = width
    if batch:
        yield batch


def _dense(rollout: Rollout, config: Any) -> Rollout:
    """Return the rollout with a ledger in which nothing is ever evicted; the ledger takes no memory."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    never = torch.full((1, 1, 1), NEVER, dtype=torch.int32).expand(layers, kv_heads(config), len(rollout.ids))
    return replace(rollout, evicted_at=never)


@torch.no_grad()
def _learner_logprobs(model: Any, rollouts: list[Rollout], sampled: Tensor, temperature: float) -> Tensor:
    """Return the model's log-probs [B, R] of the sampled tokens without compression, in nats; 0 elsewhere."""
    result = torch.zeros(sampled.shape)
    for rows in microbatches(rollouts, 1, PASS_TOKENS):
        read = read_tokens(model, [rollouts[row] for row in rows], 1, "dense", temperature)
        # flat, in the order in which the mask is read
        result[rows] = torch.zeros(sampled[rows].shape).masked_scatter(sampled[rows], read.logprobs.float().cpu())
    return result


def _advantages(row: ImportedRollout, contents: Survey) -> Tensor:
    """Return the advantage of each token after the prompt, as the file gives it.

    If the file gives none, the advantage is the reward minus the group's mean reward. Without reward or group it is
    NaN.
    """
    length = len(row.rollout.ids) - row.rollout.prompt_length
    if row.advantages is not None:
        return row.advantages
    if row.reward is None or row.group is None:
        return torch.full((length,), math.nan, dtype=torch.float64)
    total, count = contents.rewards[row.group]
    return torch.full((length,), row.reward - total / count, dtype=torch.float64)


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
