"""What has no room in memory is one line; all other errors stay what they are."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from megatron_essh.benchmarks.room import check_room, within_memory
from megatron_essh.errors import UserError

CPU = torch.device("cpu")


def test_more_than_all_memory_is_refused_and_no_less() -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    check_room("tokens", there, CPU)
    with pytest.raises(UserError, match=r"^tokens: would take .* GiB at least, more than cpu has; take fewer"):
        check_room("tokens", there + 1, CPU)


@pytest.mark.gpu
def test_a_gpus_memory_is_its_own() -> None:
    device = torch.device("cuda")
    there = torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(UserError, match=r"^tokens: would take .* GiB at least, more than cuda has; take fewer"):
        check_room("tokens", there + 2**30, device)
    with (
        pytest.raises(UserError, match=r"^tokens: takes more memory than cuda has; take"),
        within_memory("tokens", device),
    ):
        torch.empty(2 * there, dtype=torch.uint8, device=device)


def test_what_an_allocator_raises_is_one_line() -> None:
    said = r"^tokens: takes more memory than cpu has; take fewer at a time, or shorter ones$"
    with pytest.raises(UserError, match=said), within_memory("tokens", CPU):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(UserError, match=said), within_memory("tokens", CPU):
        np.empty(2**60, dtype=np.uint8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), within_memory("tokens", CPU):
        torch.ones(2, 3) @ torch.ones(2, 3)
