"""kvpress beside us: it pins another transformers, so it is played in an environment of its own, turn by turn.

Run by ``bench.decode`` with the Python of ``.venv-peers`` (``make bench-peers``), never by hand: one JSON object a line
on standard input, {"open": {...}} or {"turn": tokens}, one on standard output. Nothing of this project is imported.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from typing import Any

import torch
from kvpress import SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {"snapkv": SnapKVPress, "streaming": StreamingLLMPress}


class Compressed:
    """One prompt's cache, cut to a budget by a press after its prefill and shared by the rows of a batch."""

    def __init__(self, model: Any, press: str, budget: int, prompt: list[int], batch: int) -> None:
        self._model, self._length = model, len(prompt)
        self._cache = DynamicCache()
        # a hair less than the share that goes, or rounding loses an entry
        with PRESSES[press](compression_ratio=1 - (budget + 0.5) / len(prompt))(model):
            ids = torch.tensor([prompt]).to(model.device)
            logits = model(ids, past_key_values=self._cache, logits_to_keep=1).logits
        self.entries = int(self._cache.layers[0].keys.shape[2])
        self._cache.batch_repeat_interleave(batch)
        self._first = logits[:, -1].argmax(-1).repeat(batch)[:, None]

    def turn(self, new: int) -> tuple[float, float]:
        """Seconds of the processor and of the wall for ``new`` greedy tokens a row, from the prompt on."""
        cache, ids = copy.deepcopy(self._cache), self._first  # a press compresses prompts, so the cache would grow
        cpu, wall = time.process_time(), time.perf_counter()
        for step in range(new):  # as kvpress's own pipeline decodes
            at = torch.full_like(ids, self._length + step)
            ids = self._model(ids, past_key_values=cache, position_ids=at).logits[:, -1].argmax(-1)[:, None]
            ids.tolist()  # waits for a GPU, too
        return time.process_time() - cpu, time.perf_counter() - wall


@torch.no_grad()
def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder, device, dtype = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    playing: Compressed | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "open" in asked:
            playing = Compressed(model, **asked["open"])
            said: Any = playing.entries
        else:
            assert playing is not None, "open comes first"
            said = playing.turn(asked["turn"])
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
