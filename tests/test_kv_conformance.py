"""The conformance suite can fail: a file of policies that are wrong in one way each, and the test that says so.

The file is an outsider's, held to the suite by ``--policy-file`` as CONTRIBUTING tells outsiders to do it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvaudit.audit.policies import POLICIES

CONFORM = Path(__file__).parent / "conform"
OUTSIDE = """
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvaudit.audit.policies import Evictor, View
from kvaudit.audit.policies.eight_bits import Int8
from kvaudit.audit.policies.quest import Quest


@dataclass(frozen=True)
class Oldest(Evictor):
    "The one that is right."

    name: ClassVar[str] = "oldest"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        return -view.positions.float()


@dataclass(frozen=True)
class BatchMates(Evictor):
    name: ClassVar[str] = "batch-mates"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        keys = view.keys.float()
        return (keys - keys.mean((0, 2), keepdim=True)).norm(dim=-1)


@dataclass(frozen=True)
class Slots(Evictor):
    "Ranks by how many slots there are: with longer rows beside it, a row has more of them."

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
    "Claims that all entries are worth more than a protected one."

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
    "Lower layers take more than the upper ones give."

    name: ClassVar[str] = "greedy"
    window: int = 0

    def for_layer(self, layer: int, layers: int) -> Evictor:
        return replace(self, budget=self.budget + (layer == 0))

    def importance(self, view: View) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True)
class OneScale(Int8):
    "One scale for whatever is quantised together, the other rows included."

    name: ClassVar[str] = "one-scale"

    def fit(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.full_like(low, max(high.max(), -low.min()) / 127)[..., None]


@dataclass(frozen=True)
class Neighbours(Evictor):
    "Ranks by the slot before, and says that the order of slots does not matter."

    name: ClassVar[str] = "neighbours"
    ordered: ClassVar[bool] = False
    window: int = 0

    def importance(self, view: View) -> Tensor:
        return view.keys.float().norm(dim=-1).roll(1, -1)


@dataclass(frozen=True)
class Scribbles(Evictor):
    "Scales the keys where they lie."

    name: ClassVar[str] = "scribbles"
    window: int = 0

    def importance(self, view: View) -> Tensor:
        return view.keys.mul_(1.01).float().norm(dim=-1)


@dataclass(frozen=True)
class Fewer(Evictor):
    "Ranks fewer entries than there are."

    name: ClassVar[str] = "fewer"

    def importance(self, view: View) -> Tensor:
        return view.positions[..., :-1].float()


@dataclass(frozen=True)
class Stingy(Evictor):
    "Keeps one entry less than its budget."

    name: ClassVar[str] = "stingy"
    window: int = 0

    def capacities(self, rank: Tensor, budgets: Tensor) -> Tensor:
        return super().capacities(rank, budgets) - 1

    def importance(self, view: View) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True)
class Follower(Quest):
    "Chooses for every row what is best for the first."

    name: ClassVar[str] = "follower"

    def choose(self, view: View) -> Tensor:
        units = super().choose(view)
        return units[:1].expand_as(units).clone()
"""

TWICE = "test_shadow.py::test_the_same_run_twice_is_the_same"
MATES = "test_shadow.py::test_batch_mates_and_padding_change_nothing"
APART = "test_shadow.py::test_caches_that_share_a_policy_object_share_nothing_else"
EXACT = "test_shadow.py::test_shadow_pass_is_exact_under_every_schedule"
STAY = "test_eviction.py::test_sink_and_window_stay"
MEETS = "test_eviction.py::test_every_eviction_meets_the_budget_exactly_and_comes_when_it_is_due"
SUM = "test_eviction.py::test_budgets_of_the_layers_sum_to_the_mean"
ORDER = "test_eviction.py::test_slots_may_come_in_any_order_where_the_policy_says_so"
WRONG = [
    ("batch-mates", MATES),
    ("slots", MATES),
    ("one-scale", MATES),
    ("follower", MATES),
    ("dice", TWICE),
    ("reseeds", TWICE),
    ("remembers", APART),
    ("scribbles", EXACT),
    ("infinite", STAY),
    ("not-a-number", STAY),
    ("fewer", STAY),
    ("stingy", MEETS),
    ("greedy", SUM),
    ("neighbours", ORDER),
]


class Verdicts:
    """Hears how every test of a run ended, by file and name."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.rpartition("/")[2]] = report.outcome


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How the policies of the file fare in the tests that should catch one of them."""
    file, heard = tmp_path_factory.mktemp("outside") / "mine.py", Verdicts()
    file.write_text(OUTSIDE)
    asked = {case(name, test) for wrong, test in WRONG for name in (wrong, "oldest")} - {case("oldest", ORDER)}
    nodes = [str(CONFORM / node) for node in sorted(asked)]
    quiet = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no", "--tb=no", "-qq"]
    with pytest.MonkeyPatch.context() as patch:
        # a run inside this one spares it the imports; the policies it registers are gone afterwards
        patch.setattr(POLICIES, "_classes", dict(POLICIES.all()))
        pytest.main([*quiet, "--policy-file", str(file), *nodes], [heard])
    assert set(heard.of) == asked
    return heard.of


def case(policy: str, test: str) -> str:
    return f"{test}[{policy}-3]" if test == SUM else f"{test}[{policy}]"


@pytest.mark.parametrize(("wrong", "test"), WRONG, ids=[name for name, _ in WRONG])
def test_a_wrong_policy_fails_the_test_that_should_catch_it(wrong: str, test: str, verdicts: dict[str, str]) -> None:
    assert verdicts[case(wrong, test)] == "failed"


def test_a_right_policy_from_outside_passes_them_all(verdicts: dict[str, str]) -> None:
    assert {outcome for name, outcome in verdicts.items() if "oldest" in name} == {"passed"}
