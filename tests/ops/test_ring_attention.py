"""Attention of one token a row to its slot's ring, held to the reference; in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_essh.ops.decode_step import reference
from megatron_essh.ops.decode_step.weights import AttentionWeights, PackedWeight

# What the interpreter's NumPy says of places that hold no token.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative RMS. Triton's interpreter cuts to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.004 if DEVICE == "cuda" else 0.012}
BASE = 10_000.0


@pytest.fixture(scope="module")
def ring():
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.decode_step import ring_attention

    return ring_attention


class Case:
    """Rows of random queries, keys and values, and the slots that they go to."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int,
        window: int,
        head_dim: int,
        dtype: torch.dtype,
        slots: int = 0,
        seed: int = 0,
    ) -> None:
        """rows: (slot, position) of each."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        slots = slots or max(slot for slot, _ in rows) + 2
        self.qkv = normal(len(rows), heads * 3 * head_dim)
        self.keys, self.values = normal(slots, heads, window, head_dim), normal(slots, heads, window, head_dim)
        self.position = torch.randint(0, 4 * window, (slots,), generator=generator)
        for slot, position in rows:
            if slot >= 0:
                self.position[slot] = position
        self.position = self.position.to(DEVICE)
        self.slot = torch.tensor([slot for slot, _ in rows], dtype=torch.int32, device=DEVICE)
        nothing = PackedWeight(torch.empty(0, 0))
        self.weights = AttentionWeights(torch.empty(0), nothing, nothing, heads)
        self.y = torch.full((len(rows), heads * head_dim), torch.nan, device=DEVICE, dtype=dtype)

    def run(self, attend, base: float = BASE) -> tuple[Tensor, Tensor, Tensor]:
        """(y, keys, values) after an attention of the same rows to a copy of the same rings."""
        keys, values, y = self.keys.clone(), self.values.clone(), self.y.clone()
        attend(self.qkv, self.weights, base, keys, values, self.position, self.slot, y)
        return y, keys, values


def assert_attends(ring, case: Case, base: float = BASE) -> None:
    (y, keys, values), expected = case.run(ring.attend, base), case.run(reference.attend, base)
    live = case.slot >= 0
    tolerance = TOLERANCE[y.dtype]
    error = (y[live].double() - expected[0][live].double()).norm() / expected[0][live].double().norm()
    assert error <= tolerance, f"relative RMS {error:.2e}"
    assert y.isfinite().all()
    # The token's own key and value are in the ring, and nothing else has changed.
    torch.testing.assert_close(keys, expected[1], rtol=2 * tolerance, atol=2 * tolerance)
    torch.testing.assert_close(values, expected[2], rtol=2 * tolerance, atol=0)
    for rings, before in ((keys, case.keys), (values, case.values)):
        changed = (rings != before).nonzero()[:, [0, 2]].unique(dim=0).tolist()
        window = before.shape[2]
        written = [[int(slot), int(case.position[slot]) % window] for slot in case.slot[live]]
        assert changed == sorted(written)


@pytest.mark.parametrize("position", [0, 1, 6, 36, 37, 38, 79, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_and_after_the_window_wraps(ring, position, dtype):
    assert_attends(ring, Case([(1, position), (0, 3), (3, position)], 2, 37, 8, dtype))


@pytest.mark.parametrize(
    ("heads", "window", "head_dim"), [(1, 1, 2), (3, 16, 12), (2, 200, 64), (1, 64, 128), (2, 9, 6)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_shapes(ring, heads, window, head_dim, dtype):
    rows = [(2, window // 2), (0, window - 1), (1, 3 * window + 1)]
    assert_attends(ring, Case(rows, heads, window, head_dim, dtype))


def test_idle_rows_change_no_slot_and_stay_finite(ring):
    assert_attends(ring, Case([(-1, 0), (2, 20), (-1, 0), (0, 5), (-1, 0)], 2, 12, 8, torch.float32))
    case = Case([(-1, 0), (-1, 0)], 2, 12, 8, torch.float32, slots=1)
    y, keys, values = case.run(ring.attend)
    assert y.isfinite().all()
    assert torch.equal(keys, case.keys)
    assert torch.equal(values, case.values)


@pytest.mark.parametrize("shares", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("position", [0, 17, 130, 300])
def test_a_head_dealt_out_over_programs_is_the_same_head(ring, monkeypatch, shares, stages, position):
    chosen = {"BLOCK": 16, "SPLITS": shares, "STAGES": stages, "num_warps": 2}
    monkeypatch.setattr(ring, "options", lambda *_: chosen)
    case = Case([(1, position), (0, 128), (-1, 0)], 2, 130, 16, torch.float32)
    for _ in range(2):  # the counters are as they were
        assert_attends(ring, case)


def test_programs_are_as_many_as_there_is_work_for(ring, monkeypatch):
    monkeypatch.setattr(ring, "_capability", lambda _: 9)

    def chosen(heads: int, window: int = 2048) -> tuple[int, ...]:
        options = ring.options(heads, window, 64, torch.device("cpu"))
        return tuple(options.get(name, 0) for name in ("BLOCK", "SPLITS", "STAGES", "num_warps", "maxnreg"))

    assert chosen(32) == (32, 32, 1, 2, 128)
    assert chosen(16 * 32) == (32, 8, 4, 2, 0)
    assert chosen(128 * 32) == chosen(512 * 32) == (64, 1, 3, 4, 0)
    assert chosen(1, window=40) == (64, 1, 1, 4, 0)


def test_pipelines_are_for_compute_capability_9_alone(ring, monkeypatch):
    for capability in (8, 10, 12):
        monkeypatch.setattr(ring, "_capability", lambda _, major=capability: major)
        for heads in (32, 512, 4096):
            assert ring.options(heads, 2048, 64, torch.device("cpu"))["STAGES"] == 1


def test_places_that_hold_no_token_are_never_seen(ring):
    case = Case([(0, 3), (1, 20), (2, 0)], 2, 21, 8, torch.float32)
    for rings in (case.keys, case.values):
        for slot, position in ((0, 3), (1, 20), (2, 0)):
            rings[slot, :, position:] = torch.nan  # the token's own place too: it is written, not read
    y, _, _ = case.run(ring.attend)
    assert y.isfinite().all()


def test_a_score_far_above_the_others_does_not_overflow(ring):
    case = Case([(0, 9), (1, 40)], 2, 16, 8, torch.float32)
    case.qkv *= 300
    assert_attends(ring, case)


@pytest.mark.parametrize("position", [0, 1, 2047, 65_537, 999_999])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_angles_are_exact_to_a_millionth_of_a_radian(ring, position, base):
    case = Case([(0, position)], 1, 4, 64, torch.float32)
    case.qkv[:] = 0
    case.qkv[0, 64:96] = 1  # the first half of the key: turned by an angle it is that angle's cosine, then its sine
    _, keys, _ = case.run(ring.attend, base)
    angle = position * base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    turned = keys[0, 0, position % 4].double().cpu()
    torch.testing.assert_close(turned[:32], angle.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[32:], angle.sin(), rtol=0, atol=1e-6)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 16, 128, 512])
@pytest.mark.parametrize(("heads", "window"), [(32, 2048), (14, 2048)])
def test_the_sizes_of_decoding(ring, batch, heads, window):
    slots = min(batch, 40)  # the reference holds fp32 copies of the rings: a few slots at a time
    for first in range(0, batch, slots):
        count = min(slots, batch - first)
        rows = [(slot, (first + slot) * 997 % 6000) for slot in range(count)]
        assert_attends(ring, Case(rows, heads, window, 64, torch.bfloat16, seed=first))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(ring):
    slots = 520
    case = Case([(slots - 1, 5000), (slots - 2, 100)], 32, 2048, 64, torch.bfloat16, slots=slots)
    assert case.keys.numel() > 2**31
    near = Case([(1, 5000), (0, 100)], 32, 2048, 64, torch.bfloat16, slots=2)
    near.qkv, near.keys, near.values = case.qkv, case.keys[-2:].clone(), case.values[-2:].clone()
    for one, other in zip(case.run(ring.attend), near.run(ring.attend), strict=True):
        assert torch.equal(one[-2:], other)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_it_can_be_recorded_and_follows_its_buffers(ring, batch):
    case = Case([(slot, 50 + slot) for slot in range(batch)], 4, 64, 64, torch.bfloat16)
    keys, values, y = case.keys.clone(), case.values.clone(), case.y.clone()
    arguments = (case.qkv, case.weights, BASE, keys, values, case.position, case.slot, y)
    ring.attend(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring.attend(*arguments)
    for step in range(30):  # past the window's end
        case.qkv.normal_()
        case.position += 1
        case.keys.copy_(keys)
        case.values.copy_(values)
        expected = case.run(ring.attend)
        graph.replay()
        for one, other in zip((y, keys, values), expected, strict=True):
            assert torch.equal(one, other), f"step {step}"


COMPILE_ALL = """
import math
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.decode_step import ring_attention

TYPES = {"position": "*i64", "slot": "*i32", "counter": "*i32"} | dict.fromkeys(("parts", "maxima", "sums"), "*fp32")
DEVICE = torch.device("cpu")
capability = int(sys.argv[1])
ring_attention._capability = lambda _: capability // 10
kernel = ring_attention.attend_kernel
for element, per_thread in (("*bf16", 8), ("*fp32", 16)):
    for heads in (32, 512, 4096):
        chosen = ring_attention.options(heads, 2048, 64, DEVICE)
        constants = {
            "H": 32, "WINDOW": 2048, "E": 64, "WIDTH": 64, "LOG_BASE": math.log(10_000.0), "DEPENDENT": True,
        } | {name: value for name, value in chosen.items() if name.isupper()}
        if chosen["SPLITS"] == 1:
            constants |= dict.fromkeys(("parts", "maxima", "sums", "counter"))
        signature = {
            name: "constexpr" if name in constants else TYPES.get(name, element) for name in kernel.arg_names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"
        }
        options = {name: value for name, value in chosen.items() if not name.isupper()}
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=options | {"num_stages": 1, "launch_pdl": True}
        )
        ptx = compiled.asm["ptx"]
        assert ptx.count("griddepcontrol.wait") == 1
        # Keys and values come 16 bytes a thread: the first block, before the wait, and the next one, or all stages'.
        if chosen["STAGES"] == 1:
            assert ptx.count(".L2::cache_hint.v4.b32") == 2 * per_thread
            early = ptx[: ptx.index("griddepcontrol.wait")]
            assert early.count(".L2::cache_hint.v4.b32") == per_thread
        else:
            assert ptx.count("cp.async.cg.shared.global") == chosen["STAGES"] * per_thread
        assert (".maxnreg 128" in ptx) == (heads == 32)
        assert compiled.metadata.shared <= 64 * 1024
        print(element, heads, compiled.metadata.shared)
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 6
