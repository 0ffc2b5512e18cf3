"""A layout that cannot be is refused with one that can."""

from pathlib import Path

import pytest

from megatron_essh.config import load_config
from megatron_essh.errors import UserError

QUICKSTART = Path(__file__).parents[2] / "configs/runs/quickstart.yaml"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.tensor=0"], "parallel: tensor must be at least 1, got 0"),
        (["parallel.timeout_seconds=0"], "parallel: timeout_seconds must be at least 1"),
        (["parallel.sequence_parallel=true"], "set sequence_parallel: false, or tensor to 2 or more"),
        (["parallel.tensor=3", "parallel.sequence_parallel=true"], "use 126 or set parallel.sequence_parallel: false"),
        (["parallel.tensor=5000"], "a rank would hold nothing; use at most"),
        (["training.skip_limit=-1"], "training: skip_limit must not be negative"),
        (["training.compare_every=-1"], "training: compare_every must not be negative"),
        (["parallel.tensors=2"], "did you mean parallel.tensor?"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_a_remedy(settings, said):
    with pytest.raises(UserError) as refusal:
        load_config(QUICKSTART, settings)
    assert said in str(refusal.value)


def test_a_layout_is_read():
    parallel = load_config(QUICKSTART, ["parallel.tensor=3"]).parallel
    assert (parallel.tensor, parallel.sequence_parallel) == (3, False)
