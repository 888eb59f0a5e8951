"""Entries by number, against ``torch.gather``."""

from __future__ import annotations

import pytest
import torch

from kvaudit.audit.cache.tensors import gather_entries


@pytest.mark.parametrize("rest", [(), (5,), (5, 2)])
@pytest.mark.parametrize(("places", "asked"), [(7, 3), (3, 7), (1, 1), (4, 0), (0, 0)])
def test_entries_are_those_of_torch_gather(places: int, asked: int, rest: tuple[int, ...]) -> None:
    table = torch.randn(2, 3, places + 2, *rest)[:, :, 1:-1]  # not in one piece
    numbers = torch.randint(0, max(places, 1), (2, 3, asked))
    wide = numbers.reshape(*numbers.shape, *[1] * len(rest)).expand(*numbers.shape, *table.shape[3:])
    assert torch.equal(gather_entries(table, numbers), table.gather(2, wide))
    assert torch.equal(gather_entries(table, numbers.int()), table.gather(2, wide))


@pytest.mark.parametrize("place", [-1, 3])
def test_a_number_outside_the_head_is_an_error(place: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        gather_entries(torch.arange(6).view(1, 2, 3), torch.tensor([[[0], [place]]]))
