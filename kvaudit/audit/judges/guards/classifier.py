"""A sequence-classification model as a guard, such as a detector of injections or a filter of toxic text.

A passage longer than the model's window is read in windows that overlap by half; one that blocks is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvaudit.audit.judges.guards.base import Guard, Passage
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.options import sha256_of
from kvaudit.core.text import clip, inline

if TYPE_CHECKING:
    from kvaudit.audit.sampling.model import LoadedClassifier

_WINDOW = 512  # tokens at most: what these models are trained with
_BATCH = 16  # windows


@dataclass(frozen=True, kw_only=True)
class Classifier(Guard):
    """``model`` is a folder or a hub id; ``block`` the labels that block, with | between them.

    A passage is blocked where these labels together have a probability of ``threshold`` or more; where labels do not
    exclude each other, any one of them.
    """

    name = "classifier"
    says = "a sequence-classification model"

    model: str
    block: str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise SpecError(f"guard classifier: threshold is {self.threshold:g}, wanted a number between 0 and 1")

    def check(self) -> None:
        super().check()
        _loaded.cache_clear()  # what is sampled meanwhile wants the memory

    @property
    def identity(self) -> str:
        loaded = _loaded(self.model)
        return sha256_of(loaded.sha256, loaded.files, self._columns, self.threshold, _WINDOW)

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        found = self.chances([passage.text for passage in passages])
        # a text without a window has nothing that could be blocked
        worst = [math.nan if any(map(math.isnan, windows)) else max(windows, default=0.0) for windows in found]
        return [None if math.isnan(chance) else chance >= self.threshold for chance in worst]

    def chances(self, texts: Sequence[str]) -> list[list[float]]:
        """The probability of the blocking labels in every window of each text; NaN where the model says none."""
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
        """The probability of the blocking labels, window by window; those of like length go together."""
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
        wanted = self.block.split("|")
        if missing := [label for label in wanted if label not in known]:
            shown = ", ".join(inline(clip(label, 40)) for label in list(known)[:20])
            raise DataError(f"guard classifier: {self.model!r} has no label {missing[0]!r}, it has {shown}")
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

    loaded = load_classifier(expand("model of guard classifier", name))
    if not loaded.tokenizer.is_fast:
        raise DataError(f"guard classifier: {name!r} has no tokenizer.json, without which long texts cannot be read")
    return loaded
