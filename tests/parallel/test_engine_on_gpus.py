"""Two GPUs take one GPU's steps, natively and under DeepSpeed: recorded passes with exchanges inside, kept gradients,
plain passes from ZeRO 1 on, both precisions."""

import gc
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from whole import whole_state

from megatron_essh.config import load_config
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.engine import build_engine

pytestmark = pytest.mark.multi_gpu
QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
FAST = [
    "elastic.full_only_fraction=0", "elastic.full_share=0.5", "elastic.ordering_interval=3", "model.bank_length=64",
    "elastic.training_budgets=[4,12]", "optimizer.learning_rate=1e-4",
]  # fmt: skip
"""Of the three capacities, each replica meets two at least twice: those passes are recorded."""
STEPS = 7
PRECISIONS = ("fp32", "bf16")
LAYOUTS = {
    "native": {
        "data parallel": (1, ()),
        "tensor parallel": (2, ("parallel.tensor=2",)),
        "positions shared": (2, ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    },
    "deepspeed": {
        f"ZeRO {stage}": (1, ("parallel.engine=deepspeed", f"parallel.zero_stage={stage}")) for stage in range(4)
    },
}
"""By engine, tp and settings of each layout of two GPUs."""
PLAIN = ("ZeRO 1", "ZeRO 2", "ZeRO 3")
"""Layouts whose passes are not recorded."""


def steps(mesh, *overrides):
    """Reports of steps in which every budget comes more than once and units are ordered twice, and the end."""
    config = load_config(QUICKSTART, [*FAST, *overrides])
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0))
    engine = build_engine(model, config, "pretrain", mesh)
    reports, casts, honest = [], set(), engine._loss

    def seen(*arguments):
        casts.add(torch.is_autocast_enabled("cuda"))
        return honest(*arguments)

    engine._loss = seen
    for step in range(STEPS):
        tokens = torch.randint(0, 4096, (16, 129), generator=torch.Generator().manual_seed(step))
        reports.append(engine.train_step(step, tokens[engine.rows(step)]))
    engine.compare_replicas()
    assert casts == {config.training.precision == "bf16"}
    recorded = 0 if engine._passes is None else len(engine._passes._graphs)
    state = {name: tensor.cpu() for name, tensor in whole_state(engine).items()}
    times = engine.times.take()
    engine.close()
    return reports, state, recorded, times


def every(layouts):
    """`steps` by layout and precision: of one GPU, which every rank takes alone, and of two."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, found = torch.device("cuda", dist.get_rank()), {}
    meshes = {"one GPU": (Mesh.single(device), ())}
    meshes |= {name: (Mesh.build(tp, device), settings) for name, (tp, settings) in layouts.items()}
    for name, (mesh, settings) in meshes.items():
        for precision in PRECISIONS:
            found[name, precision] = steps(mesh, f"training.precision={precision}", *settings)
            gc.collect()  # recorded passes hold memory
    return found


@pytest.fixture(scope="module")
def ranks_of(run_ranks):
    """What both ranks found of all layouts of an engine, by its name: one launch each."""
    return cache(lambda name: run_ranks(2, every, LAYOUTS[name], backend="nccl", timeout=240))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("engine", "layout"), [(engine, layout) for engine, layouts in LAYOUTS.items() for layout in layouts]
)
def test_two_gpus_take_one_gpus_steps(ranks_of, engine, layout, precision):
    ranks = ranks_of(engine)
    expected, state, _, _ = ranks[0]["one GPU", precision]
    (reports, found, recorded, times), other = (rank[layout, precision] for rank in ranks)
    assert reports == other[0]
    assert recorded == 0 if layout in PLAIN else recorded >= 2
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
