"""The native engine on a GPU: the CPU's steps to rounding, fp32 tables under bf16, exports bitwise, device changes."""

from pathlib import Path

import pytest
import torch

from megatron_essh.config import load_config
from megatron_essh.elastic.capacity import parse_capacity
from megatron_essh.export.slice import slice_config, slice_tensors
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.training.engine import NativeEngine

pytestmark = pytest.mark.gpu
QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
FAST = ["elastic.full_only_fraction=0", "elastic.full_share=0.5", "elastic.ordering_interval=2", "model.bank_length=64"]


def engine(device, *overrides):
    config = load_config(QUICKSTART, [*FAST, "optimizer.learning_rate=1e-4", *overrides])
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0))
    return NativeEngine(model, config, "pretrain", torch.device(device))


def batch(step):
    return torch.randint(0, 4096, (16, 129), generator=torch.Generator().manual_seed(step))


@pytest.fixture
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("exact_products")
def test_steps_are_the_cpus_to_rounding_and_a_checkpoint_changes_device():
    cpu, gpu = engine("cpu"), engine("cuda")
    for step in range(3):
        a, b = cpu.train_step(step, batch(step)), gpu.train_step(step, batch(step))
        assert b.loss == pytest.approx(a.loss, rel=2e-5)
        assert b.loss_by_capacity == pytest.approx(a.loss_by_capacity, rel=2e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
    moved = engine("cuda")
    moved.load_state(cpu.state_tensors(), cpu.state_values())
    back = engine("cpu")
    back.load_state(gpu.state_tensors(), gpu.state_values())
    a, b, c = (e.train_step(3, batch(3)).loss for e in (cpu, moved, back))
    assert b == pytest.approx(a, rel=2e-5)
    assert c == pytest.approx(a, rel=2e-4)


@pytest.mark.usefixtures("exact_products")
def test_bf16_trains_beside_fp32_with_fp32_tables():
    exact, rounded = engine("cuda"), engine("cuda", "training.precision=bf16")
    for step in range(4):
        a, b = exact.train_step(step, batch(step)), rounded.train_step(step, batch(step))
        assert b.loss == pytest.approx(a.loss, rel=5e-3)
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    assert {t.dtype for n, t in rounded.state_tensors().items() if n.startswith("exp_avg")} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_passes_take_the_steps_of_ordinary_ones(precision):
    recorded = engine("cuda", f"training.precision={precision}")
    ordinary = engine("cuda", f"training.precision={precision}", "training.capture=false")
    for step in range(6):  # every budget's first passes, their replays, and orderings after the second and fourth
        a, b = recorded.train_step(step, batch(step)), ordinary.train_step(step, batch(step))
        assert b.loss == pytest.approx(a.loss, rel=1e-6)
        assert b.loss_by_capacity == pytest.approx(a.loss_by_capacity, rel=1e-6)
        assert b.ordered == a.ordered
    assert len(recorded._passes._graphs) > 2
    tensors = ordinary.state_tensors()
    for name, tensor in recorded.state_tensors().items():
        if not name.startswith("rng."):
            torch.testing.assert_close(tensor, tensors[name], rtol=1e-4, atol=1e-6)


def test_a_resume_continues_recorded_passes():
    whole, first = engine("cuda"), engine("cuda")
    for step in range(3):
        whole.train_step(step, batch(step))
        first.train_step(step, batch(step))
    then = engine("cuda")
    for step in range(3):  # recorded over other weights
        then.train_step(step, batch(10 + step))
    then.load_state(first.state_tensors(), first.state_values())
    a, b = whole.train_step(3, batch(3)), then.train_step(3, batch(3))
    assert b.loss == pytest.approx(a.loss, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["T1", "T4", "T7", "5,130"])
def test_an_export_is_bitwise_the_shared_model_at_its_tier(tier, precision):
    config = load_config(QUICKSTART, FAST)
    shared = LanguageModel(config.model, generator=torch.Generator().manual_seed(0)).cuda()
    capacity = parse_capacity(tier, config.model, config.elastic)
    tensors = slice_tensors(dict(shared.named_parameters()), config.model, capacity)
    export = LanguageModel(slice_config(config.model, capacity)).cuda()
    export.load_state_dict(tensors, strict=True)
    tokens = batch(0).cuda()
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(export(tokens), shared(tokens, capacity))
