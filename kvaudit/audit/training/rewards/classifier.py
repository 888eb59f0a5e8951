"""A sequence-classification model as the reward: how probable a label of the answer is.

An answer longer than the model's window is read in windows that overlap by half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvaudit.audit.training.rewards.base import GradedRows, Reward, Scores
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.plugins import sha256_of
from kvaudit.core.text import clip, inline
from kvaudit.suites.base import SUITES

if TYPE_CHECKING:
    from kvaudit.audit.sampling.model import LoadedClassifier

_WINDOW = 512  # tokens at most: what these models are trained with
_BATCH = 16  # windows
_FORMER_THRESHOLD = 0.5  # of an option that is gone, hashed so that older runs keep their identity


@dataclass(frozen=True)
class Classified(Reward):
    """``classifier`` is a folder or a hub id; it reads the last answer alone.

    ``pays`` names the labels (with | between them) whose probability is the reward, ``costs`` those whose probability
    is taken from 1. An answer longer than the model's window earns what its worst window does.
    """

    name = "classifier"
    says = "the probability of a label of the answer, by a sequence-classification model"

    classifier: str
    pays: str = ""
    costs: str = ""

    def __post_init__(self) -> None:
        if bool(self.pays) == bool(self.costs):
            raise SpecError("reward classifier wants pays: LABEL or costs: LABEL, one of the two")

    @property
    def identity(self) -> str:
        return sha256_of(self._model.identity, bool(self.pays))

    def rewards(self, played: GradedRows) -> Scores:
        from kvaudit.audit.sampling.exchange import grade_degenerate

        broken = [grade_degenerate(SUITES.get(p.item.suite)(), p.item, p.transcript, p.finish_reason) for p in played]
        asked = [row for row, fault in zip(played, broken, strict=True) if fault is None]
        # by answer, a probability for each window of it
        windows = iter(self._model.chances([row.transcript[-1].content for row in asked]))
        # what says nothing earns what its suite gives for that
        return [self._paid(next(windows)) if fault is None else fault.score for fault in broken]

    def _paid(self, windows: Sequence[float]) -> float | None:
        if not windows or any(map(math.isnan, windows)):
            return None
        return min(windows) if self.pays else 1.0 - max(windows)

    @cached_property
    def _model(self) -> LabelChances:
        return LabelChances(self.classifier, self.pays or self.costs)


@dataclass(frozen=True)
class LabelChances:
    """The probabilities that a sequence-classification model gives to ``labels`` (with | between them).

    ``model`` is a folder or a hub id. Labels that exclude each other are added up; of others the likeliest counts.
    """

    model: str
    labels: str

    @property
    def identity(self) -> str:
        """sha256 of the model and of what is read of it."""
        loaded = _loaded(self.model)
        return sha256_of(loaded.sha256, loaded.files, self._columns, _FORMER_THRESHOLD, _WINDOW)

    def chances(self, texts: Sequence[str]) -> list[list[float]]:
        """The probability of the labels in every window of each text; NaN where the model says none."""
        owners, windows = list[int](), list[list[int]]()
        for number, text in enumerate(texts):
            for window in self._windows(text):
                owners.append(number)
                windows.append(window)
        found: list[list[float]] = [[] for _ in texts]
        for number, chance in zip(owners, self._chances(windows), strict=True):
            found[number].append(chance)
        return found

    def _windows(self, text: str) -> Iterator[list[int]]:
        """The token ids of a text, special tokens included, in windows."""
        tokenizer, size = _loaded(self.model).tokenizer, self._size
        text = text.encode(errors="replace").decode()  # a lone surrogate is no text to a tokenizer
        # ``stride`` is what neighbouring windows share
        ids = tokenizer(text, truncation=True, max_length=size, stride=size // 2, return_overflowing_tokens=True)
        yield from filter(None, ids["input_ids"])  # an empty text has a window without a token

    def _chances(self, windows: Sequence[list[int]]) -> list[float]:
        """The probability of the labels, window by window; windows of like length are one batch."""
        import torch

        loaded, found = _loaded(self.model), [0.0] * len(windows)
        order = sorted(range(len(windows)), key=lambda number: len(windows[number]))
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            rows = {"input_ids": [windows[n] for n in part]}
            batch = loaded.tokenizer.pad(rows, return_attention_mask=True, return_tensors="pt")
            with torch.inference_mode():
                logits = loaded.model(**batch.to(loaded.model.device)).logits.float()
            for number, chance in zip(part, self._chance(logits).tolist(), strict=True):
                found[number] = chance
        return found

    def _chance(self, logits: Any) -> Any:
        config = _loaded(self.model).model.config
        # labels that do not exclude each other, or one alone: each has a probability of its own
        if config.problem_type == "multi_label_classification" or config.num_labels == 1:
            return logits.sigmoid()[:, self._columns].amax(-1)  # [windows]
        return logits.softmax(-1)[:, self._columns].sum(-1)  # [windows]

    @cached_property
    def _columns(self) -> list[int]:
        config = _loaded(self.model).model.config
        known = {str(label): int(column) for column, label in config.id2label.items()}
        # a config may name more labels than the model has columns
        known = {label: column for label, column in known.items() if 0 <= column < config.num_labels}
        wanted = self.labels.split("|")
        if missing := [label for label in wanted if label not in known]:
            shown = ", ".join(inline(clip(label, 40)) for label in list(known)[:20])
            raise DataError(f"reward classifier: {self.model!r} has no label {missing[0]!r}, it has {shown}")
        return [known[label] for label in wanted]

    @cached_property
    def _size(self) -> int:
        loaded = _loaded(self.model)
        longest = loaded.model.config.to_dict().get("max_position_embeddings") or _WINDOW
        return int(min(_WINDOW, loaded.tokenizer.model_max_length, longest))


@cache
def _loaded(name: str) -> LoadedClassifier:
    from kvaudit.audit.sampling.model import load_classifier
    from kvaudit.core.spec import expand

    loaded = load_classifier(expand("model of reward classifier", name))
    if not loaded.tokenizer.is_fast:
        raise DataError(f"reward classifier: {name!r} has no tokenizer.json, without which long texts cannot be read")
    return loaded
