"""The conformance suite can fail: policies that are wrong in one way each, and the test that says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import conform.test_eviction as eviction
import conform.test_shadow as identity
import pytest
import torch
from conform.policies import small
from torch import Tensor

from audit.policies import Evictor, View
from audit.policies.int8 import Int8

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class BatchMates(Evictor):
    name: ClassVar[str] = "batch-mates"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        keys = view.keys.float()
        return (keys - keys.mean((0, 2), keepdim=True)).norm(dim=-1)


@dataclass(frozen=True)
class Slots(Evictor):
    """Ranks by how many slots there are: with longer rows beside it, a row has more of them."""

    name: ClassVar[str] = "slots"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        slots = view.positions.shape[2]
        return ((view.positions * 7 + slots) % 11).float()


@dataclass(frozen=True)
class Dice(Evictor):
    name: ClassVar[str] = "dice"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        return torch.rand(view.positions.shape)


@dataclass(frozen=True)
class Reseeds(Evictor):
    name: ClassVar[str] = "reseeds"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        torch.manual_seed(view.layer)
        return torch.rand(view.positions.shape)


@dataclass(frozen=True)
class Remembers(Evictor):
    name: ClassVar[str] = "remembers"
    window: int = 0
    past: ClassVar[list[int]] = []

    def importance(self, view: View) -> Tensor:
        self.past.append(1)
        return ((view.positions * len(self.past)) % 13).float()


@dataclass(frozen=True)
class Infinite(Evictor):
    """Claims that all entries are worth more than a protected one."""

    name: ClassVar[str] = "infinite"

    def importance(self, view: View) -> Tensor:
        return torch.full(view.positions.shape, float("inf"))


@dataclass(frozen=True)
class NotANumber(Evictor):
    name: ClassVar[str] = "not-a-number"

    def importance(self, view: View) -> Tensor:
        return torch.where(view.positions % 2 == 0, float("nan"), 0.0)


@dataclass(frozen=True)
class Greedy(Evictor):
    """Lower layers take more than the upper ones give."""

    name: ClassVar[str] = "greedy"
    window: int = 0

    def for_layer(self, layer: int, layers: int) -> Evictor:
        return replace(self, budget=self.budget + (layer == 0))

    def importance(self, view: View) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True)
class OneScale(Int8):
    """One scale for whatever is quantised together, the other rows included."""

    name: ClassVar[str] = "one-scale"

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.full_like(low, max(high.max(), -low.min()) / 127)[..., None]


@dataclass(frozen=True)
class Neighbours(Evictor):
    """Ranks by the slot before, and says that the order of slots does not matter."""

    name: ClassVar[str] = "neighbours"
    ordered: ClassVar[bool] = False
    window: int = 0

    def importance(self, view: View) -> Tensor:
        return view.keys.float().norm(dim=-1).roll(1, -1)


def test_a_claim_about_the_order_of_slots_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        eviction.test_slots_may_come_in_any_order_where_the_policy_says_so(small(Neighbours), monkeypatch)


@pytest.mark.parametrize(
    ("wrong", "test", "more"),
    [
        (BatchMates, identity.test_batch_mates_and_padding_change_nothing, {}),
        (Slots, identity.test_batch_mates_and_padding_change_nothing, {}),
        (OneScale, identity.test_batch_mates_and_padding_change_nothing, {}),
        (Dice, identity.test_the_same_run_twice_is_the_same, {}),
        (Reseeds, identity.test_the_same_run_twice_is_the_same, {}),
        (Remembers, identity.test_caches_that_share_a_policy_object_share_nothing_else, {}),
        (Infinite, eviction.test_sink_and_window_stay, {}),
        (NotANumber, eviction.test_sink_and_window_stay, {}),
        (Greedy, eviction.test_budgets_of_the_layers_sum_to_the_mean, {"layers": 3}),
    ],
)
def test_a_wrong_policy_is_caught(wrong: type[Evictor], test: Callable[..., None], more: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        test(small(wrong), **more)


OUTSIDERS = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from audit.policies import Evictor, View
from audit.policies.int8 import Int8


@dataclass(frozen=True)
class Oldest(Evictor):
    name: ClassVar[str] = "oldest"
    window: int = 0

    def importance(self, view: View) -> torch.Tensor:
        return -view.positions.float()


@dataclass(frozen=True)
class Whim(Evictor):
    name: ClassVar[str] = "whim"
    window: int = 0

    def importance(self, view: View) -> torch.Tensor:
        return torch.rand(view.positions.shape)
"""


def test_a_file_from_outside_is_held_to_the_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OUTSIDERS)
    asked = ["tests/conform", "--policy-file", str(tmp_path / "mine.py"), "-k", "twice or never_returns", "-rA"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    verdicts = {
        line.split("::")[1].split(" ")[0]: line.split(" ")[0] for line in done.stdout.splitlines() if "::" in line
    }
    assert done.returncode == 1, done.stdout + done.stderr
    assert verdicts["test_the_same_run_twice_is_the_same[oldest]"] == "PASSED"
    assert verdicts["test_the_same_run_twice_is_the_same[whim]"] == "FAILED"
    assert verdicts["test_what_left_never_returns[oldest]"] == "PASSED"
    assert {name.split("[")[1].split(":")[0].rstrip("]") for name in verdicts} == {"oldest", "whim"}
