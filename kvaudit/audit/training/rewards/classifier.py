"""The reward that is the probability of a label, as a sequence-classification model gives it.

An answer longer than the model's input limit is read in pieces (windows) that overlap by half.
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

_WINDOW = 512  # tokens at most; such models are trained with that
_BATCH = 16  # windows
_REMOVED_THRESHOLD = 0.5  # of a removed option, still hashed so that older runs keep their identity


@dataclass(frozen=True)
class Classified(Reward):
    """The reward that is a classifier's probability of labels for the last answer.

    ``classifier`` is a folder or a hub id. The reward is the probability of the labels ``pays`` (separated by |), or 1
    minus that of the labels ``costs``. Probabilities of exclusive labels are added; otherwise the most probable label
    counts. An answer longer than the model's window gets the reward of its worst window. Degenerate answers get their
    suite's score instead.
    """

    name = "classifier"
    says = "the probability of a label of the answer, by a sequence-classification model"

    classifier: str
    pays: str = ""
    costs: str = ""

    def __post_init__(self) -> None:
        if bool(self.pays) == bool(self.costs):
            raise SpecError("reward classifier needs either pays: LABEL or costs: LABEL")

    @property
    def identity(self) -> str:
        loaded = self._loaded
        # two nested hashes, so that older runs keep their identity
        model = sha256_of(loaded.sha256, loaded.files, self._columns, _REMOVED_THRESHOLD, _WINDOW)
        return sha256_of(model, bool(self.pays))

    def rewards(self, rows: GradedRows) -> Scores:
        from kvaudit.audit.sampling.exchange import grade_degenerate

        # degenerate answers get their suite's score and are not classified
        faults = [grade_degenerate(SUITES.get(r.item.suite)(), r.item, r.transcript, r.finish_reason) for r in rows]
        texts = [row.transcript[-1].content for row, fault in zip(rows, faults, strict=True) if fault is None]
        windows = [list(self._windows(text)) for text in texts]
        probabilities = iter(self._classify([window for text in windows for window in text]))
        answers = iter([self._reward([next(probabilities) for _ in text]) for text in windows])
        return [next(answers) if fault is None else fault.score for fault in faults]

    def _reward(self, windows: Sequence[float]) -> float | None:
        """Return an answer's reward from the probability in each window; None if the model gave NaN."""
        if not windows or any(map(math.isnan, windows)):
            return None
        return min(windows) if self.pays else 1.0 - max(windows)

    def _windows(self, text: str) -> Iterator[list[int]]:
        """Yield the token ids of each window (piece that fits the model) of a text, special tokens included."""
        tokenizer, config = self._loaded.tokenizer, self._loaded.model.config
        longest = config.to_dict().get("max_position_embeddings") or _WINDOW
        size = int(min(_WINDOW, tokenizer.model_max_length, longest))
        text = text.encode(errors="replace").decode()  # tokenizers reject lone surrogates
        # ``stride`` is the overlap of neighbouring windows
        ids = tokenizer(text, truncation=True, max_length=size, stride=size // 2, return_overflowing_tokens=True)
        yield from filter(None, ids["input_ids"])  # an empty text has a window without a token

    def _classify(self, windows: Sequence[list[int]]) -> list[float]:
        """Return, for each window, the probability of the labels; windows of similar length share a batch."""
        import torch
        from transformers import BatchEncoding

        loaded, probabilities = self._loaded, [0.0] * len(windows)
        order = sorted(range(len(windows)), key=lambda number: len(windows[number]))
        # many classifiers made from a causal model have no padding token, and read one window at a time
        pads = None not in (loaded.tokenizer.pad_token_id, loaded.model.config.pad_token_id)
        size = _BATCH if pads else 1
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            ids = {"input_ids": [windows[n] for n in numbers]}
            if pads:
                batch = loaded.tokenizer.pad(ids, return_attention_mask=True, return_tensors="pt")
            else:
                batch = BatchEncoding(ids, tensor_type="pt")
            with torch.inference_mode():
                logits = loaded.model(**batch.to(loaded.model.device)).logits.float()
            for number, probability in zip(numbers, self._label_probability(logits).tolist(), strict=True):
                probabilities[number] = probability
        return probabilities

    def _label_probability(self, logits: Any) -> Any:
        config = self._loaded.model.config
        # labels that are not exclusive, or a single one, have independent probabilities
        if config.problem_type == "multi_label_classification" or config.num_labels == 1:
            return logits.sigmoid()[:, self._columns].amax(-1)  # [windows]
        return logits.softmax(-1)[:, self._columns].sum(-1)  # [windows]

    @cached_property
    def _columns(self) -> list[int]:
        config = self._loaded.model.config
        columns = {str(label): int(column) for column, label in config.id2label.items()}
        # a config may name more labels than the model has columns
        columns = {label: column for label, column in columns.items() if 0 <= column < config.num_labels}
        labels = (self.pays or self.costs).split("|")
        if missing := [label for label in labels if label not in columns]:
            names = ", ".join(inline(clip(label, 40)) for label in list(columns)[:20])
            raise DataError(f"reward classifier: {self.classifier!r} has no label {missing[0]!r}, it has {names}")
        return [columns[label] for label in labels]

    @property
    def _loaded(self) -> LoadedClassifier:
        return _load(self.classifier)


@cache
def _load(name: str) -> LoadedClassifier:
    from kvaudit.audit.sampling.model import load_classifier
    from kvaudit.core.spec import expand

    loaded = load_classifier(expand("model of reward classifier", name))
    if not loaded.tokenizer.is_fast:
        raise DataError(f"reward classifier: {name!r} has no tokenizer.json, which is needed to read long texts")
    return loaded
