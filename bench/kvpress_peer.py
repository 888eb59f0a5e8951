"""The kvpress side of ``bench.decode``, in its own environment because kvpress pins another transformers.

Started by ``bench.decode`` with the Python of ``.venv-peers`` (``make bench-peers``); results: docs/results/bench.md.
Reads one JSON object per line, {"open": {...}} or {"turn": tokens}, and answers with one; imports nothing of kvaudit.
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
    """The cache of one prompt, cut to a budget by a press after its prefill and shared by the rows of a batch."""

    def __init__(self, model: Any, press: str, budget: int, prompt: list[int], batch: int) -> None:
        self._model, self._length = model, len(prompt)
        self._cache = DynamicCache()
        # half an entry above the budget, or rounding would evict one too many
        with PRESSES[press](compression_ratio=1 - (budget + 0.5) / len(prompt))(model):
            ids = torch.tensor([prompt]).to(model.device)
            logits = model(ids, past_key_values=self._cache, logits_to_keep=1).logits
        self.entries = int(self._cache.layers[0].keys.shape[2])
        self._cache.batch_repeat_interleave(batch)
        self._first = logits[:, -1].argmax(-1).repeat(batch)[:, None]

    def turn(self, new: int) -> tuple[float, float]:
        """Decode ``new`` greedy tokens per row after the prompt; returns CPU and wall seconds."""
        cache, ids = copy.deepcopy(self._cache), self._first  # decoding would grow the shared cache
        cpu, wall = time.process_time(), time.perf_counter()
        for step in range(new):  # as kvpress's own pipeline decodes
            at = torch.full_like(ids, self._length + step)
            ids = self._model(ids, past_key_values=cache, position_ids=at).logits[:, -1].argmax(-1)[:, None]
            ids.tolist()  # also waits for a GPU
        return time.process_time() - cpu, time.perf_counter() - wall


@torch.no_grad()
def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print what libraries write to stdout on stderr instead
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder, device, dtype = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    compressed: Compressed | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "open" in request:
            compressed = Compressed(model, **request["open"])
            answer: Any = compressed.entries
        else:
            assert compressed is not None, "open comes first"
            answer = compressed.turn(request["turn"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
