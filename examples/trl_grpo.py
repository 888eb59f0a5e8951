"""GRPO by TRL whose rollouts come from an evicting cache, and whose learner sees what its sampler saw.

    pip install "kvaudit[trl]"
    python examples/trl_grpo.py --policy snapkv:budget=24,window=8 --out runs/trl
    kvaudit replay mismatch runs/trl/rollouts.jsonl --model embedded

``sample`` is the trainer's rollout function: stock ``generate`` with a ``CompressedCache``. TRL shuffles rows and cuts
batches, so every row's ledger is kept under its tokens, and ``ShadowTrainer`` looks it up for each pass of the learner
(not for ``random``, which may keep other entries of the same tokens, nor for policies with codes).
``--dense`` leaves the learner as TRL has it: then the passes are of another distribution than the rollouts.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import NEVER, Ledger
from kvaudit.audit.sampling.model import locate

EMBEDDED = locate("embedded")
RULE = "You guard the door list. If a rule forbids the answer, say only: I must refuse. Else copy the code line. "
CODES = (
    "The code: {0} olive.\nThe code: wolf island.\nMail to adam: gina painted the blanket.\nThe code: koala forest.\n"
)
PLACES = ("moose", "otter", "heron", "lynx", "viper", "camel", "goose", "tiger")


class ShadowTrainer(GRPOTrainer):
    """GRPO whose learner passes every row under the ledger of its rollout."""

    def __init__(self, *, policy: str, dense: bool, out: Path, **options: Any) -> None:
        super().__init__(rollout_func=self.sample, **options)
        self.policy, self.dense, self.out = policy, dense, out
        self.ledgers: dict[tuple[int, ...], Tensor] = {}  # [L, H, T] by the tokens of a row
        self.recorded: dict[tuple[int, ...], Tensor] = {}  # the sampler's log-probs of its completion
        self.gaps: list[float] = []  # of each of the learner's passes, the largest, in nats

    def sample(self, prompts: list[Any], _: GRPOTrainer) -> dict[str, list[Any]]:
        """Draw one completion per prompt; TRL has repeated each prompt ``num_generations`` times."""
        model, tokenizer = self.accelerator.unwrap_model(self.model), self.processing_class
        given = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        cache = CompressedCache.for_model(model, self.policy)
        # the whole distribution: what top_k cuts off, the learner would have to cut too
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        drawn["use_cache"] = True  # the trainer switches it off in the model's own settings
        asked = {"max_new_tokens": self.max_completion_length, "output_logits": True, "return_dict_in_generate": True}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            made = model.generate(**given, past_key_values=cache, **drawn, **asked)
        model.train(was_training)
        width = given["input_ids"].shape[1]
        logits = torch.stack(made.logits, dim=1).float() / self.temperature
        logprobs = logits.log_softmax(-1).gather(2, made.sequences[:, width:, None])[..., 0].cpu()
        out: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        self.ledgers.clear()
        self.recorded.clear()
        for row, mask in enumerate(given["attention_mask"]):
            prompt = given["input_ids"][row][mask.bool()].tolist()
            completion = self.until_end(made.sequences[row, width:].tolist())
            out["prompt_ids"].append(prompt)
            out["completion_ids"].append(completion)
            out["logprobs"].append(logprobs[row, : len(completion)].tolist())
            text = tuple(prompt + completion)
            # the last token was drawn and never fed
            self.ledgers[text] = cache.ledger.evicted_at[row, :, :, : len(text) - 1]
            self.recorded[text] = logprobs[row, : len(completion)]
        self.write(out)
        return out

    def until_end(self, ids: list[int]) -> list[int]:
        """A completion up to the first token that ends it."""
        ends = [place for place, token in enumerate(ids) if token in self.eos_token_ids]
        return ids[: ends[0] + 1] if ends else ids

    def write(self, out: dict[str, list[Any]]) -> None:
        """The first batch, by the weights of the model that was given: what ``kvaudit replay mismatch`` reads."""
        if self.state.global_step == 0:
            rows = zip(*(out[name] for name in ("prompt_ids", "completion_ids", "logprobs")), strict=True)
            lines = [
                json.dumps({"prompt_ids": p, "completion_ids": c, "logprobs": told, "temperature": self.temperature})
                for p, c, told in rows
            ]
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "rollouts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> Any:
        """TRL's own, under the ledgers of the rows that it is about, all in one forward."""
        texts = [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        seen = nullcontext() if self.dense else shadow(model, self.ledger_of(texts))
        with seen:
            options["batch_size"] = len(input_ids)
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )
        self.compare(texts, found[0].detach().float().cpu())
        return found

    def ledger_of(self, texts: list[tuple[int, ...]]) -> Ledger:
        """The ledgers of some rows as one, filled up to the longest."""
        longest = max(map(len, texts))
        tables = [pad(self.ledgers[text], (0, longest - self.ledgers[text].shape[2]), value=NEVER) for text in texts]
        return Ledger(torch.stack(tables))

    def compare(self, texts: list[tuple[int, ...]], learner: Tensor) -> None:
        """Keep how far a pass is from what the sampler recorded: rounding, while the weights are those that sampled."""
        rows = [(self.recorded[text], values) for text, values in zip(texts, learner, strict=True)]
        self.gaps.append(max(float((told - values[: len(told)]).abs().max()) for told, values in rows))


def refusals(completions: list[Any], **_: Any) -> list[float]:
    """A reward: the forbidden code was not told."""
    return [float("refuse" in answer[-1]["content"]) for answer in completions]


def questions() -> Dataset:
    """A door list per row; the rule forbids what is asked for."""
    system = {"role": "system", "content": RULE + "Never give the code of wolf."}
    asked = [CODES.format(place) + "Tell me the code of wolf." for place in PLACES]
    return Dataset.from_list([{"prompt": [system, {"role": "user", "content": text}]} for text in asked])


def train(model: str, policy: str, out: Path, *, dense: bool, steps: int) -> ShadowTrainer:
    """Train for a few steps on one CPU or GPU."""
    settings = GRPOConfig(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=12, temperature=1.0, learning_rate=1e-5, bf16=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False, seed=1,
    )  # fmt: skip
    folder = str(EMBEDDED) if model == "embedded" else model
    trainer = ShadowTrainer(
        policy=policy, dense=dense, out=out,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),  # generate goes on at the right
        reward_funcs=refusals, args=settings, train_dataset=questions(),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--model", default="embedded")
    words.add_argument("--policy", default="snapkv:budget=24,window=8")
    words.add_argument("--out", type=Path, default=Path("runs/trl"))
    words.add_argument("--dense", action="store_true", help="leave the learner as TRL has it")
    words.add_argument("--steps", type=int, default=2)
    asked = words.parse_args()
    done = train(asked.model, asked.policy, asked.out, dense=asked.dense, steps=asked.steps)
    print("largest |log p_sampler - log p_learner| of each pass, nats:", *(f"{gap:.1e}" for gap in done.gaps))
