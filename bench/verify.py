"""Which forgeries of recorded rollouts does ``kvaudit replay verify`` notice?

    python -m bench.verify    # every evicting policy, alone and with int8
    python -m bench.verify --policies snapkv,random --files 50

Takes half a minute per policy; results: docs/results/verify.md.

A small random Llama in float32 samples rollouts of two turns (120 prompt tokens, 24 sampled, 20 given, 24 sampled). One
rollout is one file, and each is forged once in each of nine ways, at a random place. Hashes and provenance are those
that the forger would sign. A cell is caught / forged; (n*) counts forged files that pass because neither the replay nor
the counts differ by more than in an honest file. The columns before have the lowest share of a file's evictions that
its own policy chooses again, and the highest share that another policy with the same counts does ("-": none has).
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
ROUNDING = 2e-5  # nats, twice the largest error of an honest file of this model


class File(NamedTuple):
    """A rollout and the policy that its file names."""

    rollout: Rollout
    policy: str


Forgery = Callable[[File, torch.Generator, Sequence[str]], File]


def main() -> None:
    options = parse_arguments()
    served = random_llama(64, 3, vocabulary=VOCABULARY, spread=0.2)
    registered = [name for name, cls in POLICIES.all().items() if cls.evicts]
    print("| policy | honest | own choices, lowest | other policy's, highest | " + " | ".join(FORGERIES) + " |")
    print("|" + "---|" * (4 + len(FORGERIES)), flush=True)
    for codec in ("", "+int8"):
        specs = {name: parse_policy(f"{name}:{FIELDS}{codec}").canonical for name in registered}
        for name in options.policies.split(",") if options.policies else registered:
            others = [spec for other, spec in specs.items() if other != name]
            print(table_row(served, specs[name], others, options.files), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", help="names separated by commas; default: every evicting policy")
    parser.add_argument("--files", type=int, default=15)
    return parser.parse_args()


def table_row(served: Served, policy: str, others: Sequence[str], files: int) -> str:
    honest = [File(rollout, policy) for rollout in sample_files(served, parse_policy(policy), files)]
    results = [verify_file(served, file) for file in honest]
    lowest = min(r.ranked.lowest for r in results if isinstance(r.ranked, RankingAgreement))
    cells = [f"{sum(result.explained for result in results)} of {files} explained", f"{100 * lowest:.2f} %"]
    counts: list[str] = []
    other_shares: list[float] = []
    for name, forge in FORGERIES.items():
        caught, same = 0, 0
        for number, file in enumerate(honest):
            result = verify_file(served, forge(file, torch.Generator().manual_seed(number), others))
            caught += not result.explained
            same += result.explained and result.shadow.largest <= ROUNDING
            if name == "renamed" and isinstance(result.ranked, RankingAgreement):
                other_shares.append(result.ranked.lowest)
        counts.append(f"{caught} / {files}" + (f" ({same}*)" if same else ""))
    return "| " + " | ".join([f"`{policy.partition(':')[0]}`{'+int8' * ('+' in policy)}", *cells,
                              f"{100 * max(other_shares):.0f} %" if other_shares else "-", *counts]) + " |"  # fmt: skip


def sample_files(served: Served, policy: Policy, files: int) -> list[Rollout]:
    """Sample honest rollouts, one per file."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(0, VOCABULARY, (files, PROMPT), generator=generator).tolist()
    episode = Sampler(served, policy).open(prompts, list(range(files)))
    episode.decode(Decoding(NEW))
    episode.extend([prompt[:GIVEN] for prompt in prompts])
    episode.decode(Decoding(NEW))
    return episode.rollouts()


def verify_file(served: Any, file: File) -> Verification:
    recorded = RecordedRollouts("bench", (file.rollout,), parse_policy(file.policy))
    ((_, verification),) = run_measure(Verify(served, [recorded]))
    return verification


def _random_sampled_place(file: File, generator: torch.Generator) -> int:
    places = file.rollout.sampled.nonzero()[:, 0]
    return int(places[torch.randint(0, len(places), (), generator=generator)])


def sampled_token(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    return _other_token(file, _random_sampled_place(file, generator))


def prompt_token(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    return _other_token(file, int(torch.randint(0, PROMPT, (), generator=generator)))


def _other_token(file: File, place: int) -> File:
    ids = file.rollout.ids.clone()
    ids[place] = (ids[place] + 1) % VOCABULARY
    return file._replace(rollout=replace(file.rollout, ids=ids))


def log_prob(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    logprobs = file.rollout.sampler_logprobs.clone()
    logprobs[_random_sampled_place(file, generator)] -= 0.002
    return file._replace(rollout=replace(file.rollout, sampler_logprobs=logprobs))


def one_entry(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    evicted_at = file.rollout.evicted_at.clone()
    places = (evicted_at < NEVER).nonzero()
    evicted_at[tuple(places[torch.randint(0, len(places), (), generator=generator)])] = NEVER
    return file._replace(rollout=replace(file.rollout, evicted_at=evicted_at))


def off_by_one(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    evicted_at = file.rollout.evicted_at
    return file._replace(
        rollout=replace(file.rollout, evicted_at=torch.where(evicted_at < NEVER, evicted_at + 1, evicted_at))
    )


def budget(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    return file._replace(policy=file.policy.replace("budget=32", "budget=33"))


def interval(file: File, _: torch.Generator, __: Sequence[str]) -> File:
    return file._replace(policy=file.policy.replace("interval=4", "interval=5"))


def other_policy(file: File, generator: torch.Generator, others: Sequence[str]) -> File:
    """Name another policy; under ``random`` the forger also makes up the rows' keys."""
    other = others[int(torch.randint(0, len(others), (), generator=generator))]
    return File(replace(file.rollout, row_keys=file.rollout.row_keys or (0, 0)), other)


def marked_given(file: File, generator: torch.Generator, _: Sequence[str]) -> File:
    place = _random_sampled_place(file, generator)
    sampled, logprobs = file.rollout.sampled.clone(), file.rollout.sampler_logprobs.clone()
    sampled[place], logprobs[place] = False, 0.0
    return file._replace(rollout=replace(file.rollout, sampled=sampled, sampler_logprobs=logprobs))


FORGERIES: dict[str, Forgery] = {
    "sampled token": sampled_token,
    "prompt token": prompt_token,
    "log-prob .002": log_prob,
    "one entry": one_entry,
    "all off by one": off_by_one,
    "budget + 1": budget,
    "interval + 1": interval,
    "renamed": other_policy,
    "sampled marked as given": marked_given,
}


if __name__ == "__main__":
    main()
