"""What ``kvaudit replay verify`` notices: rollouts tampered with in nine ways, by policy, with and without codes.

    python -m bench.verify                                        every evicting policy, alone and with int8
    python -m bench.verify --policies snapkv,random --files 50

A small random Llama in float32 samples rollouts of two turns (120 tokens of prompt, 24 drawn, 20 given, 24 drawn); one
rollout is one file, and each is tampered with once in each way, at a place drawn from its number. What a hash or a
provenance would notice is left out: the file is as its forger would sign it. A cell is caught / tampered, with * for
files that pass because the replay is not off by more than an honest one and counting cannot tell: no difference. The
columns before say whose choices the victims are: the least share of a file under its own name, and the largest under
the other's of the same budget, where the counts are the other's too ("-": they never are).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.models import Served, random_llama
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.policies import POLICIES, Policy, parse_policy
from kvaudit.audit.replay.ranking_check import RankingAgreement
from kvaudit.audit.replay.rollout_checks import RecordedRollouts
from kvaudit.audit.rerun.measure import run_measure
from kvaudit.audit.rerun.verify import Verification, Verify
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

FIELDS = "budget=32,sink=0,window=4,interval=4,chunk=64"
VOCABULARY, PROMPT, NEW, GIVEN = 97, 120, 24, 20
ROUNDING = 2e-5  # nats: twice what an honest file of this model is off by, at most


class File(NamedTuple):
    """One rollout and the policy it names."""

    rollout: Rollout
    policy: str


Forgery = Callable[[File, torch.Generator, Sequence[str]], File]


def main() -> None:
    asked = arguments()
    served = random_llama(64, 3, vocabulary=VOCABULARY, spread=0.2)
    registered = [name for name, cls in POLICIES.all().items() if cls.evicts]
    print("| policy | honest | own choice, least | another's, most | " + " | ".join(FORGERIES) + " |")
    print("|" + "---|" * (4 + len(FORGERIES)), flush=True)
    for codec in ("", "+int8"):
        specs = {name: parse_policy(f"{name}:{FIELDS}{codec}").canonical for name in registered}
        for name in asked.policies.split(",") if asked.policies else registered:
            others = [spec for other, spec in specs.items() if other != name]
            print(line(served, specs[name], others, asked.files), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", help="names separated by commas; default: every evicting policy")
    parser.add_argument("--files", type=int, default=15)
    return parser.parse_args()


def line(served: Served, policy: str, others: Sequence[str], files: int) -> str:
    """One row of the table."""
    honest = [File(rollout, policy) for rollout in sampled(served, parse_policy(policy), files)]
    found = [judged(served, file) for file in honest]
    own = min(one.ranked.lowest for one in found if isinstance(one.ranked, RankingAgreement))
    cells = [f"{sum(one.explained for one in found)} of {files} explained", f"{100 * own:.2f} %"]
    counts: list[str] = []
    foreign: list[float] = []
    for name, forge in FORGERIES.items():
        caught, alike = 0, 0
        for number, file in enumerate(honest):
            one = judged(served, forge(file, torch.Generator().manual_seed(number), others))
            caught += not one.explained
            alike += one.explained and one.shadow.largest <= ROUNDING
            if name == "renamed" and isinstance(one.ranked, RankingAgreement):
                foreign.append(one.ranked.lowest)
        counts.append(f"{caught} / {files}" + (f" ({alike}*)" if alike else ""))
    return "| " + " | ".join([f"`{policy.partition(':')[0]}`{'+int8' * ('+' in policy)}", *cells,
                              f"{100 * max(foreign):.0f} %" if foreign else "-", *counts]) + " |"  # fmt: skip


def sampled(served: Served, policy: Policy, files: int) -> list[Rollout]:
    """Honest rollouts, one per file."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(0, VOCABULARY, (files, PROMPT), generator=generator).tolist()
    episode = Sampler(served, policy).open(prompts, list(range(files)))
    episode.decode(Decoding(NEW))
    episode.extend([prompt[:GIVEN] for prompt in prompts])
    episode.decode(Decoding(NEW))
    return episode.rollouts()


def judged(served: Any, file: File) -> Verification:
    """What verify says of a file."""
    recorded = RecordedRollouts("bench", (file.rollout,), parse_policy(file.policy))
    ((_, found),) = run_measure(Verify(served, [recorded]))
    return found


def _drawn(file: File, generator: torch.Generator) -> int:
    places = file.rollout.sampled.nonzero()[:, 0]
    return int(places[torch.randint(0, len(places), (), generator=generator)])


def sampled_token(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    return _other_token(file, _drawn(file, generator))


def prompt_token(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    return _other_token(file, int(torch.randint(0, PROMPT, (), generator=generator)))


def _other_token(file: File, place: int) -> File:
    ids = file.rollout.ids.clone()
    ids[place] = (ids[place] + 1) % VOCABULARY
    return file._replace(rollout=replace(file.rollout, ids=ids))


def log_prob(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    logprobs = file.rollout.sampler_logprobs.clone()
    logprobs[_drawn(file, generator)] -= 0.002
    return file._replace(rollout=replace(file.rollout, sampler_logprobs=logprobs))


def one_entry(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    gone = file.rollout.evicted_at.clone()
    places = (gone < NEVER).nonzero()
    gone[tuple(places[torch.randint(0, len(places), (), generator=generator)])] = NEVER
    return file._replace(rollout=replace(file.rollout, evicted_at=gone))


def off_by_one(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    gone = file.rollout.evicted_at
    return file._replace(rollout=replace(file.rollout, evicted_at=torch.where(gone < NEVER, gone + 1, gone)))


def budget(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    return file._replace(policy=file.policy.replace("budget=32", "budget=33"))


def interval(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    return file._replace(policy=file.policy.replace("interval=4", "interval=5"))


def renamed(file: File, generator: torch.Generator, others: Sequence[str]) -> File:
    """Under ``random`` the forger also makes the keys of rows up."""
    other = others[int(torch.randint(0, len(others), (), generator=generator))]
    return File(replace(file.rollout, row_keys=file.rollout.row_keys or (0, 0)), other)


def declared_given(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    place = _drawn(file, generator)
    drawn, logprobs = file.rollout.sampled.clone(), file.rollout.sampler_logprobs.clone()
    drawn[place], logprobs[place] = False, 0.0
    return file._replace(rollout=replace(file.rollout, sampled=drawn, sampler_logprobs=logprobs))


FORGERIES: dict[str, Forgery] = {
    "sampled token": sampled_token,
    "prompt token": prompt_token,
    "log-prob .002": log_prob,
    "one entry": one_entry,
    "all off by one": off_by_one,
    "budget + 1": budget,
    "interval + 1": interval,
    "renamed": renamed,
    "drawn declared given": declared_given,
}


if __name__ == "__main__":
    main()
