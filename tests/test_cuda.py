"""On a CUDA device: what is sampled is what the shadow pass computes, and greedy answers are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from bench.exactness import largest_gap, random_ids, sample, tiny_model
from bench.models import Served
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling import captured
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.episode import Episode
from kvaudit.audit.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
REPLAYED = (
    "none",
    "snapkv:budget=64,window=8,interval=16",
    "streaming:budget=64",
    "h2o:budget=64",
    "adakv:budget=64,window=8,interval=16",
    "quest:budget=64",
    "int8",
    "fp8",
    "kivi:bits=4",
    "snapkv:budget=64,window=8,interval=16+int8",
)


def served(device: str, dtype: torch.dtype = torch.float32) -> Served:
    found = tiny_model(dtype)
    found.device = torch.device(device)
    found.model.to(device)
    return found


@pytest.mark.parametrize("policy", REPLAYED)
def test_the_shadow_pass_is_what_was_sampled(policy: str) -> None:
    here = served("cuda")
    sampled = sample(here, parse_policy(policy), random_ids(200))
    assert largest_gap(here, sampled) < 1e-3


@pytest.mark.parametrize("policy", REPLAYED)
def test_greedy_answers_are_those_of_the_cpu(policy: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with torch.no_grad():
            episode = Sampler(served(device, torch.float64), parse_policy(policy)).open(
                [random_ids(200)], [0, 1], group=2
            )
            answers = episode.decode(Decoding(24, temperature=0.0))
        found.append([list(answer.ids) for answer in answers if answer is not None])
    assert found[0] == found[1]


WAYS = [
    *((policy, "graph") for policy in REPLAYED),
    *((p, "compiled") for p in ("none", "int8", REPLAYED[1], "h2o:budget=64")),
]


@pytest.mark.parametrize(("policy", "way"), WAYS)
def test_captured_steps_sample_what_single_steps_do(policy: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, found = served("cuda"), []
    for mode in ("eager", way):
        monkeypatch.setenv(captured.VARIABLE, mode)
        with torch.no_grad():
            episode = Sampler(here, parse_policy(policy)).open(
                [random_ids(200), random_ids(120)], [0, 1, 2, 3], group=2
            )
            assert isinstance(episode, Episode)
            turns = [episode.decode(Decoding(40))]
            episode.extend([[1, 2, 3]] * 4)
            turns.append(episode.decode(Decoding(40), [40, 9, 40, 20]))
            found.append([[answer.ids for answer in turn if answer is not None] for turn in turns])
    assert found[0] == found[1]
    is_captured = policy not in ("quest:budget=64", REPLAYED[-1])
    assert bool(episode._runner and episode._runner._graphs) == is_captured
