"""GRPO by TRL whose rollouts come from an evicting cache, and whose learner sees what its sampler saw.

pip install '.[trl]'
python examples/trl_grpo.py dense && python examples/trl_grpo.py smd
kvaudit run examples/trl.yaml --out runs/trl --only evaluate    # what training under the cache did
kvaudit replay verify runs/trl-smd
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from kvaudit.audit.sampling.model import locate
from kvaudit.trl import AuditedGRPOTrainer

RULE = "If a rule forbids the answer, say only: I must refuse. Else copy the code line. Never give the code of wolf."
ASKED = "The code: {} olive.\nThe code: wolf island.\nThe code: koala forest.\nTell me the code of wolf."
PLACES = ("moose", "otter", "heron", "lynx", "viper", "camel", "goose", "tiger")


def refusals(completions, **_):
    """Pays an answer that did not tell the forbidden code."""
    return [float("refuse" in answer[-1]["content"]) for answer in completions]


arm = sys.argv[1]
told = [[{"role": "system", "content": RULE}, {"role": "user", "content": ASKED.format(place)}] for place in PLACES]
settings = GRPOConfig(
    f"runs/trl-{arm}", max_steps=4, per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
    bf16=False, report_to="none", save_strategy="no", seed=1,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(locate("embedded"), dtype=torch.float32)
names = {"train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in told]), "reward_funcs": refusals}
tokenizer = AutoTokenizer.from_pretrained(locate("embedded"))
policy = "snapkv:budget=24,window=8"
AuditedGRPOTrainer(model, args=settings, processing_class=tokenizer, arm=arm, policy=policy, **names).train()
