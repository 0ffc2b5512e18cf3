"""The Triton selective scan against the fp64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from megatron_essh.ops.selective_scan import ModalTables  # noqa: E402
from megatron_essh.ops.selective_scan import triton as selective_scan_triton  # noqa: E402
from megatron_essh.ops.selective_scan.reference import chunked_scan, controls  # noqa: E402
from megatron_essh.ops.selective_scan.triton import triton_scan  # noqa: E402

# The interpreter multiplies with NumPy, which tells of overflow above the diagonal of a tile.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIDTHS = [8, 14, 16, 24, 28, 32, 56, 64, 112]
HUGE = 80.0  # a clock that empties the state
NAMES = ("z", "leaving state", "raw", "entering state", *ModalTables._fields)
BIASES = ("write_bias", "read_bias", "clock_bias")
OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.004}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.005}

if DEVICE == "cpu":
    # The interpreter keeps bf16 blocks as their bits, which it would multiply, and cuts fp32 off to bf16.
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        one, other = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.data.dtype == np.uint16 else x.data for x in (a, b)
        )
        return TensorHandle(one @ other + d.data, d.dtype.scalar)

    def round_off(self: InterpreterBuilder, x: TensorHandle, to: tl.dtype) -> TensorHandle:
        if to.scalar != tl.bfloat16:
            return self.cast_impl(x, to)
        bits = x.data.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(rounded.astype(np.uint16), to.scalar)

    InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc = dot, round_off

Case = tuple[Tensor, ModalTables, Tensor]


def random_case(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32, *, huge: float = 0.0, seed: int = 0
) -> Case:
    """raw, tables and an entering state of B, T, K, M, P; a share `huge` of the clocks is drawn up to 80."""
    b, t, k, m, p = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    raw = normal(b, t, k, p + 3 * m)
    clock = (2 * HUGE * torch.rand((b, t, k, m), generator=generator)).clamp(max=HUGE)
    chosen = torch.rand((b, t, k, m), generator=generator) < huge
    raw[..., p + 2 * m :] = torch.where(chosen, clock, raw[..., p + 2 * m :])
    bias = [normal(k, m), normal(k, m), normal(k, m) / 10 - 1]
    tables = ModalTables(*bias, 2 * normal(k, m) - 2, 3 * normal(k, m), *(normal(k, m) for _ in range(3)), normal(k))
    tables = ModalTables(*(table.to(DEVICE) for table in tables))
    return raw.to(DEVICE, dtype), tables, normal(b, k, m, 2, p).to(DEVICE)


def random_layout(
    batch: int, length: int, *, documents: bool, pads: bool, seed: int | None = None
) -> tuple[Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    numbers = (torch.rand((batch, length), generator=generator) < 0.06).long().cumsum(1)
    valid = torch.rand((batch, length), generator=generator) < 0.7
    return numbers.to(DEVICE) if documents else None, valid.to(DEVICE) if pads else None


def scan(
    raw: Tensor,
    tables: ModalTables,
    state: Tensor,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    neutral_gates: bool = False,
) -> tuple[Tensor, Tensor]:
    return triton_scan(
        raw,
        tables,
        eps=1e-6,
        neutral_gates=neutral_gates,
        state_BKM2P=state,
        documents_BT=documents,
        valid_BT=valid,
    )


def values_and_gradients(
    case: Case,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    neutral_gates: bool = False,
    reference: torch.dtype | None = None,
) -> list[Tensor | None]:
    """z, the leaving state and the gradients of a random functional of both, in the order of NAMES.

    reference: the type in which to take them from the reference instead.
    """
    raw, tables, state = case
    inputs = [x.detach().to(reference or x.dtype).requires_grad_() for x in (raw, state, *tables)]
    named = ModalTables(*inputs[2:])
    if reference is not None:
        given = controls(inputs[0], named, 1e-6, neutral_gates)
        outputs = chunked_scan(given, named, inputs[1], documents, valid)
    else:
        outputs = scan(inputs[0], named, inputs[1], documents, valid, neutral_gates=neutral_gates)
    generator = torch.Generator().manual_seed(5)
    outgoing = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in outputs]
    outgoing[0] = outgoing[0].to(raw.dtype)
    outgoing = [x.to(y.dtype) for x, y in zip(outgoing, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, inputs, outgoing, allow_unused=True)
    return [*(x.detach() for x in outputs), *gradients]


def assert_follows_the_reference(case: Case, *layout: Tensor | None, neutral_gates: bool = False) -> None:
    """Relative root mean square of every result, and of each kind of column of raw's gradient.

    A table's gradient is a sum over all positions, of which little may be left. So a bias, whose terms are the
    gradients of its pre-activations, is held to the size of the terms; another table, where it is not as near as that
    to its own size, to four times the error of the reference in fp32.
    """
    dtype, modes = case[0].dtype, case[1].theta.shape[1]
    width = case[0].shape[-1] - 3 * modes
    actual = values_and_gradients(case, *layout, neutral_gates=neutral_gates)
    expected = values_and_gradients(case, *layout, neutral_gates=neutral_gates, reference=torch.float64)
    for name, one, other in zip(NAMES, actual, expected, strict=True):
        if other is None:  # a gate's bias, where gates are neutral
            assert one is None or not one.any(), name
            continue
        assert one is not None
        assert torch.isfinite(one).all(), name
        tolerance = (OUTPUT_TOLERANCE if name in NAMES[:2] else GRADIENT_TOLERANCE)[dtype]
        sections = [width, modes, modes, modes] if name == "raw" else [other.shape[-1]]
        for number, (part, wanted) in enumerate(zip(one.split(sections, -1), other.split(sections, -1), strict=True)):
            error = torch.linalg.vector_norm(part.double() - wanted)
            size = wanted
            if name in BIASES:
                terms = expected[NAMES.index("raw")].split([width, modes, modes, modes], -1)[1 + BIASES.index(name)]
                size = terms.abs().sum((0, 1))
            allowed = tolerance * torch.linalg.vector_norm(size)
            if error > allowed and name in ModalTables._fields and name not in BIASES:
                in_fp32 = values_and_gradients(case, *layout, neutral_gates=neutral_gates, reference=torch.float32)[
                    NAMES.index(name)
                ]
                allowed = 4 * torch.linalg.vector_norm(in_fp32.double() - wanted)
            assert error <= allowed, (name, number, error, allowed)


# -- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "modes", "length"),
    [(w, (4, 8, 16)[i % 3], (1, 2, 63, 64, 65, 130, 16, 17, 40)[i]) for i, w in enumerate(WIDTHS)],
)
def test_fp32_follows_the_reference(width, modes, length):
    assert_follows_the_reference(random_case((1, length, 2, modes, width)))


@pytest.mark.parametrize(("width", "modes", "length"), [(28, 8, 80), (14, 4, 65)])
def test_bf16_follows_the_reference(width, modes, length):
    assert_follows_the_reference(random_case((1, length, 3, modes, width), torch.bfloat16))


@pytest.mark.parametrize("huge", [0.01, 0.3])
@pytest.mark.parametrize(("documents", "pads"), [(False, False), (True, False), (False, True), (True, True)])
def test_documents_pads_and_huge_clocks_follow_the_reference(documents, pads, huge):
    layout = random_layout(2, 70, documents=documents, pads=pads)
    assert_follows_the_reference(random_case((2, 70, 2, 4, 8), huge=huge), *layout)


@pytest.mark.parametrize("pads", [False, True])
def test_neutral_gates_follow_the_reference(pads):
    layout = random_layout(1, 40, documents=True, pads=pads)
    assert_follows_the_reference(random_case((1, 40, 2, 8, 14)), *layout, neutral_gates=True)


@pytest.mark.parametrize("marked", [False, True])
def test_many_chunks_are_scanned_in_segments(marked, monkeypatch):
    monkeypatch.setattr(selective_scan_triton, "_SEGMENTED_FROM", 3)
    monkeypatch.setattr(selective_scan_triton, "_SEGMENT_CHUNKS", 2)
    layout = random_layout(1, 300, documents=marked, pads=marked)
    raw, tables, state = random_case((1, 300, 2, 4, 8), huge=0.002 if marked else 0.0)
    raw[..., -4:] -= 4  # what is written in one segment is still there in the next but one
    tables = tables._replace(rho_raw=tables.rho_raw - 4)
    assert_follows_the_reference((raw, tables, state), *layout)


@pytest.mark.parametrize("decay", [4.6, 6.2, 6.3, 30.0])
def test_steep_decays_are_finite_and_right_on_either_side_of_the_anchor_limit(decay):
    """16 rows of 6.25 are the limit of one anchor; beyond, the exact form takes over."""
    raw, tables, state = random_case((1, 70, 1, 4, 8))
    raw[..., -4:] = -30
    tables = tables._replace(rho_raw=torch.full_like(tables.rho_raw, decay))
    for one, other in zip(
        values_and_gradients((raw, tables, state))[:4],
        values_and_gradients((raw, tables, state), reference=torch.float64)[:4],
        strict=True,
    ):
        assert torch.isfinite(one).all()
        assert torch.linalg.vector_norm(one.double() - other) <= 1e-5 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("at", [3, 15, 16, 63])
def test_what_is_written_under_a_huge_clock_reaches_the_next_token_at_full_strength(at):
    raw, tables, state = random_case((1, 66, 1, 4, 8))
    raw[0, at, 0, -4:] = HUGE
    z, _ = scan(raw, tables, state)
    value, write, read, decay = (part[0, :, 0] for part in controls(raw.double(), tables))
    kc, ks, theta = (table[0].double() for table in (tables.kc, tables.ks, tables.theta))
    response = kc * theta.cos() - ks * theta.sin()
    carried = (read[at + 1] * write[at] * torch.exp(-decay[at + 1]) * response).sum() * value[at]
    own = ((1 - tables.zero_lag[0]) * kc * read[at + 1] * write[at + 1]).sum() * value[at + 1]
    assert torch.allclose(z[0, at + 1, 0].double(), carried + own, rtol=1e-5, atol=1e-5)


# -- packed documents ------------------------------------------------------------------------------------------------


def exact_chunks(case: Case, documents: Tensor) -> Tensor:
    """[B, K, N]: the chunks that the forward pass left to the exact form."""
    z, _ = scan(case[0].clone().requires_grad_(), case[1], case[2], documents)
    return z.grad_fn.saved_tensors[3].bool()


def test_document_starts_leave_a_tile_in_the_anchored_form_and_huge_clocks_do_not():
    raw, tables, state = random_case((1, 130, 2, 4, 8))
    documents = torch.arange(130, device=DEVICE)[None] // 3  # a cut in every tile
    raw[0, 96, 0, -4:] = HUGE  # the first row of a document: nothing is carried into it to decay
    assert not exact_chunks((raw, tables, state), documents).any()
    raw[0, 97, 1, -4:] = 2 * HUGE
    assert exact_chunks((raw, tables, state), documents).nonzero().tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("huge", [0.0, 0.02])
def test_packed_documents_are_the_documents_one_by_one(huge):
    raw, tables, state = random_case((1, 150, 2, 4, 8), huge=huge)
    lengths = [1, 15, 16, 1, 2, 31, 70, 14]  # at a tile's first and last rows, two and more in a tile, over a chunk
    documents = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))[None].to(DEVICE)
    raw.requires_grad_()
    z, leaving = scan(raw, tables, state, documents)
    (whole,) = torch.autograd.grad(z.sin().sum() + leaving.sin().sum(), raw)
    entering, alone = state, []
    for part in raw.split(lengths, dim=1):
        one, left = scan(part, tables, entering)
        alone.append(one)
        entering = torch.zeros_like(state)
    assert torch.linalg.vector_norm(left - leaving) <= 1e-5 * torch.linalg.vector_norm(left)
    (parts,) = torch.autograd.grad(sum(one.sin().sum() for one in alone) + left.sin().sum(), raw)
    for one, other in ((z, torch.cat(alone, dim=1)), (whole, parts)):
        assert torch.linalg.vector_norm(one - other) <= 1e-5 * torch.linalg.vector_norm(other)


def test_what_stands_before_a_cut_reaches_no_bit_behind_it_and_the_cuts_own_clock_gets_no_gradient():
    raw, tables, state = random_case((1, 90, 2, 4, 8))
    documents = (torch.arange(90, device=DEVICE) >= 70).long()[None]
    other = raw.clone()
    other[:, :70, :, :8] *= 1000
    (z, leaving), (z_other, leaving_other) = (scan(x, tables, state, documents) for x in (raw, other))
    assert not torch.equal(z[:, :70], z_other[:, :70])
    assert torch.equal(z[:, 70:], z_other[:, 70:])
    assert torch.equal(leaving, leaving_other)
    d_raw = values_and_gradients((raw, tables, state), documents)[2]
    assert (d_raw[0, 70, :, -4:] == 0).all()
    assert (d_raw[0, [69, 71], :, -4:] != 0).all()


# -- pads, states, views ---------------------------------------------------------------------------------------------


def test_a_call_of_pads_alone_leaves_the_state_bitwise():
    raw, tables, state = random_case((1, 70, 2, 4, 8))
    raw.fill_(float("nan"))
    documents = torch.arange(70, device=DEVICE)[None]
    z, leaving = scan(raw, tables, state, documents, torch.zeros(1, 70, dtype=torch.bool, device=DEVICE))
    assert torch.equal(leaving, state)
    assert (z == 0).all()


def test_what_stands_in_a_pad_reaches_no_value_and_no_gradient():
    raw, tables, state = random_case((1, 40, 2, 4, 8))
    valid = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    valid[0, [0, 4, 5, 39]] = False
    results = [
        values_and_gradients((torch.where(valid[..., None, None], raw, filling), tables, state), None, valid)
        for filling in (0.0, float("nan"))
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][2][~valid] == 0).all()


@pytest.mark.parametrize("cut", [1, 64, 77])
def test_cut_anywhere_and_carried_on_the_sequence_and_its_gradients_are_the_same(cut):
    case = random_case((1, 90, 2, 4, 8), huge=0.02)
    raw, tables, state = (case[0].requires_grad_(), case[1], case[2].requires_grad_())
    z, leaving = scan(raw, tables, state)
    first, between = scan(raw[:, :cut], tables, state)
    second, carried = scan(raw[:, cut:], tables, between)
    pairs = [(torch.cat([first, second], dim=1), z), (carried, leaving)]
    whole = torch.autograd.grad(z.sin().sum() + leaving.sin().sum(), (raw, state))
    parts = torch.autograd.grad(first.sin().sum() + second.sin().sum() + carried.sin().sum(), (raw, state))
    for one, other in [*pairs, *zip(parts, whole, strict=True)]:
        assert torch.linalg.vector_norm(one - other) <= 1e-5 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_view_computes_bitwise_what_its_copy_computes(dtype):
    raw, tables, state = random_case((2, 20, 5, 4, 14), dtype)
    view = raw[:, 1:, :3], ModalTables(*(table[:3] for table in tables)), state[:, :3]
    assert not view[0].is_contiguous()
    copy = view[0].clone(), ModalTables(*(table.clone() for table in view[1])), view[2].clone()
    for one, other in zip(values_and_gradients(view), values_and_gradients(copy), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_the_same_bits_every_time():
    case = random_case((1, 40, 2, 4, 8), torch.bfloat16, huge=0.02)
    for one, other in zip(values_and_gradients(case), values_and_gradients(case), strict=True):
        assert torch.equal(one, other)


# -- launch options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "options"), [(64, {"num_warps": 1, "maxnreg": 128}), (112, {"num_warps": 2})])
def test_a_limit_of_no_registers_is_kept_from_the_launch(width, options):
    size = selective_scan_triton._Layout.of(torch.empty(1, 1, 1, width + 24, device=DEVICE), 8)
    assert selective_scan_triton._tuning("outputs", size) == options | {"num_stages": 1}


# -- on a GPU alone --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("modes", [4, 8, 16])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_count_of_modes_at_every_odd_length(width, modes, dtype):
    for length in (1, 2, 63, 64, 65, 130, 2048, 2049):
        assert_follows_the_reference(random_case((2, length, 3, modes, width), dtype, seed=length))
    layout = random_layout(2, 2049, documents=True, pads=True)
    assert_follows_the_reference(random_case((2, 2049, 3, modes, width), dtype, huge=0.01), *layout)


@pytest.mark.gpu
def test_a_thousand_random_calls_follow_the_reference():
    """Any batch, length, channels, prefix of wider channels, marks and clocks, in three kinds: few to compile."""
    random, failures = Random(0), []
    for number in range(1000):
        width, modes, dtype = random.choice([(8, 4, torch.float32), (28, 8, torch.bfloat16), (64, 8, torch.bfloat16)])
        shape = (random.randint(1, 3), random.randint(1, random.choice([20, 80, 300])), 8, modes, width)
        raw, tables, state = random_case(shape, dtype, huge=random.choice([0.0, 0.0, 0.01, 0.2]), seed=number)
        channels, start = random.randint(1, 7), random.randint(0, min(1, shape[1] - 1))
        case = raw[:, start:, :channels], ModalTables(*(table[:channels] for table in tables)), state[:, :channels]
        documents, valid = random_layout(shape[0], shape[1] - start, documents=True, pads=True, seed=number)
        if random.random() < 0.5:
            documents = torch.zeros_like(documents)
        if random.random() < 0.5:
            valid = torch.ones_like(valid)
        try:
            assert_follows_the_reference(case, documents, valid)
        except AssertionError as error:
            failures.append(f"call {number}, {tuple(case[0].shape)}, {dtype}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    length, channels = 150_000, 300
    raw = torch.randn(1, length, channels, 52, device=DEVICE, dtype=torch.bfloat16)
    assert raw.numel() > 2**31
    _, tables, state = random_case((1, 1, channels, 8, 28))
    z, leaving = scan(raw, tables, state)
    last = ModalTables(*(table[-1:] for table in tables))
    expected, expected_leaving = scan(raw[:, :, -1:].contiguous(), last, state[:, -1:])
    assert torch.equal(z[:, :, -1:], expected)
    assert torch.equal(leaving[:, -1:], expected_leaving)


# -- ahead of time ---------------------------------------------------------------------------------------------------

COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.selective_scan import triton_backward, triton_forward

TYPES = dict.fromkeys(("raw", "z", "dz", "d_raw"), "*bf16") | dict.fromkeys(("marks", "exact"), "*i32")
TYPES |= {"numbers": "*i64", "valid": "*i1"}
TYPES |= dict.fromkeys(triton_forward.SIZES, "i32") | {"eps": "fp32"}
CONSTANTS = dict(P=28, M=8, WIDTH=32, MODES=8, ALIGN=4, NEUTRAL=False, HAS_MARKS=True, SPLIT=True, BLOCK=128)
CONSTANTS |= dict(HAS_NUMBERS=True, HAS_VALID=True)
KERNELS = [
    (triton_forward.tables_kernel, {}),
    (triton_forward.marks_kernel, {}),
    (triton_forward.chunk_states_kernel, {}),
    (triton_forward.state_scan_kernel, {"REVERSE": False, "SUMMARY": False}),
    (triton_forward.state_scan_kernel, {"REVERSE": True, "SUMMARY": False}),
    (triton_forward.state_scan_kernel, {"REVERSE": True, "SUMMARY": True}),
    (triton_forward.segment_scan_kernel, {"REVERSE": True}),
    (triton_forward.outputs_kernel, {"EXACT": False}),
    (triton_forward.outputs_kernel, {"EXACT": True}),
    (triton_backward.state_gradients_kernel, {}),
    (triton_backward.input_gradients_kernel, {"EXACT": False}),
    (triton_backward.input_gradients_kernel, {"EXACT": True}),
    (triton_backward.table_gradients_kernel, {}),
]
for kernel, chosen in KERNELS:
    constants = {name: x for name, x in (CONSTANTS | chosen).items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in kernel.arg_names}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    options = {"num_warps": 1, "num_stages": 1}
    compiled = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options=options)
    print(kernel.__name__, len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 13
