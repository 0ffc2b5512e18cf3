"""Two GPUs take one GPU's steps: recorded passes with exchanges inside, kept gradients, both precisions."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_essh.config import load_config
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.engine import NativeEngine

pytestmark = pytest.mark.multi_gpu
QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
FAST = [
    "elastic.full_only_fraction=0", "elastic.full_share=0.5", "elastic.ordering_interval=3", "model.bank_length=64",
    "elastic.training_budgets=[4,12]",
]  # fmt: skip
"""Of the three capacities, each replica meets two at least twice: those passes are recorded."""
STEPS = 7


def steps(tp, *overrides):
    """Reports of steps in which every budget is recorded and replayed, and units are ordered twice."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = load_config(QUICKSTART, [*FAST, "optimizer.learning_rate=1e-4", *overrides])
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0))
    place = Mesh.build(tp, torch.device("cuda", dist.get_rank()))
    engine = NativeEngine(model, config, "pretrain", place)
    reports = []
    for step in range(STEPS):
        tokens = torch.randint(0, 4096, (16, 129), generator=torch.Generator().manual_seed(step))
        reports.append(engine.train_step(step, tokens[engine.rows(step)]))
    engine.compare_replicas()
    recorded = 0 if engine._passes is None else len(engine._passes._graphs)
    return reports, {n: t.cpu() for n, t in engine.whole_state().items()}, recorded, engine.times.take()


LAYOUTS = {
    "data parallel": (1, ()),
    "tensor parallel": (2, ("parallel.tensor=2",)),
    "positions shared": (2, ("parallel.tensor=2", "parallel.sequence_parallel=true")),
}
PRECISIONS = ("fp32", "bf16")


def every(layouts):
    """`steps` of each layout and precision, by both."""
    found = {}
    for name, (tp, layout) in layouts.items():
        for precision in PRECISIONS:
            found[name, precision] = steps(tp, f"training.precision={precision}", *layout)
            gc.collect()  # recorded passes hold memory
    return found


@pytest.fixture(scope="module")
def one_gpu(run_ranks):
    return run_ranks(1, every, {"one": (1, ())}, backend="nccl", timeout=240)[0]


@pytest.fixture(scope="module")
def two_gpus(run_ranks):
    return run_ranks(2, every, LAYOUTS, backend="nccl", timeout=240)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_take_one_gpus_steps(one_gpu, two_gpus, layout, precision):
    expected, state, _, _ = one_gpu["one", precision]
    (reports, found, recorded, times), other = (rank[layout, precision] for rank in two_gpus)
    assert reports == other[0]
    assert recorded >= 2
    tolerance = 2e-5 if precision == "fp32" else 5e-3
    for a, b in zip(expected, reports, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=tolerance), a.step
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3 if precision == "fp32" else 0.05), a.step
        assert b.ordered == a.ordered
    if precision == "fp32":
        for name, tensor in state.items():
            if name.startswith("model."):
                assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
    assert 0 < times["slowest_pace"] < 10
