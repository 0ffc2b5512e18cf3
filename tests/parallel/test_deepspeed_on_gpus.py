"""Two GPUs under DeepSpeed take the native engine's steps: recorded passes under ZeRO 0, plain ones from 1 on."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_essh.config import load_config
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.engine import build_engine

pytestmark = pytest.mark.multi_gpu
QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
FAST = [
    "elastic.full_only_fraction=0", "elastic.full_share=0.5", "elastic.ordering_interval=3", "model.bank_length=64",
    "elastic.training_budgets=[4,12]",
]  # fmt: skip
"""Of the three capacities, each replica meets two at least twice: those passes are recorded."""
STEPS = 7


def steps(tp, *overrides):
    """Reports of steps in which every budget comes more than once and units are ordered twice, and the end."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = load_config(QUICKSTART, [*FAST, "optimizer.learning_rate=1e-4", *overrides])
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0))
    engine = build_engine(model, config, "pretrain", Mesh.build(tp, torch.device("cuda", dist.get_rank())))
    reports, casts, honest = [], set(), engine._loss

    def seen(*arguments):
        casts.add(torch.is_autocast_enabled("cuda"))
        return honest(*arguments)

    engine._loss = seen
    for step in range(STEPS):
        tokens = torch.randint(0, 4096, (16, 129), generator=torch.Generator().manual_seed(step))
        reports.append(engine.train_step(step, tokens[engine.rows(step)]))
    engine.compare_replicas()
    recorded = 0 if engine._passes is None else len(engine._passes._graphs)
    state = {n: t.cpu() for n, t in engine.whole_state().items()}
    engine.close()
    assert casts == {config.training.precision == "bf16"}
    return reports, state, recorded


@pytest.fixture(scope="module")
def one_gpu(run_ranks):
    """What `steps` gives of a precision on one GPU, run once."""
    return cache(
        lambda precision: run_ranks(1, steps, 1, f"training.precision={precision}", backend="nccl", timeout=240)[0]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_gpus_under_deepspeed_take_one_gpus_steps(run_ranks, one_gpu, zero, precision):
    setting = f"training.precision={precision}"
    expected, state, _ = one_gpu(precision)
    own = (setting, "parallel.engine=deepspeed", f"parallel.zero_stage={zero}")
    (reports, found, recorded), other = run_ranks(2, steps, 1, *own, backend="nccl", timeout=240)
    assert reports == other[0]
    assert (recorded >= 2) == (zero == 0)
    tolerance = 2e-5 if precision == "fp32" else 5e-3
    for a, b in zip(expected, reports, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=tolerance), a.step
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3 if precision == "fp32" else 0.05), a.step
        assert b.ordered == a.ordered
    if precision == "fp32":
        for name, tensor in state.items():
            if name.startswith("model."):
                assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
