"""The selective scan by Triton kernels: one operator between two matrix products, forward and backward.

`triton_scan` computes what `reference` defines. This file prepares what the kernels read beside raw and the tables
(phases of one chunk, marks of rows) and launches them; `triton_forward` and `triton_backward` hold the kernels. Results
are deterministic: nothing is added up atomically.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_essh.ops import tuning
from megatron_essh.ops.selective_scan import triton_backward, triton_forward
from megatron_essh.ops.selective_scan.reference import ModalTables, document_segments

_CHUNK_ROWS = triton_forward.CHUNK_ROWS.value
_TILE_ROWS = triton_forward.TILE_ROWS.value
_PARTIALS = triton_backward.PARTIALS.value
_LONGEST = 65535 * _CHUNK_ROWS  # a launch takes no more chunks
_SCAN_BLOCK = 128
_SUM_BLOCK = 256
# From so many chunks on, the state scan takes them in segments of so many, side by side.
_SEGMENTED_FROM = 256
_SEGMENT_CHUNKS = 64
# Programs of a launch that looks for chunks of the exact form: as many as an H200 holds at once.
_EXACT_PROGRAMS = 1024


class _Layout(NamedTuple):
    """Sizes of a call, and the blocks the kernels take it in."""

    batch: int
    length: int
    channels: int
    modes: int
    width: int
    chunks: int
    modes_padded: int
    width_padded: int
    device: torch.device
    alignment: int
    """Power of two, up to 8, that divides the offset of every row of every channel, in elements."""

    @classmethod
    def of(cls, raw_BTKX: Tensor, modes: int) -> _Layout:
        batch, length, channels, columns = raw_BTKX.shape
        width = columns - 3 * modes
        # A matrix product takes no fewer than 16 lanes, two a mode, or values.
        modes_padded = max(8, triton.next_power_of_2(modes))
        width_padded = max(16, triton.next_power_of_2(width))
        chunks = -(-length // _CHUNK_ROWS)
        alignment = math.gcd(8, raw_BTKX.data_ptr() // raw_BTKX.element_size(), *raw_BTKX.stride()[:3])
        return cls(
            batch, length, channels, modes, width, chunks, modes_padded, width_padded, raw_BTKX.device, alignment
        )

    @property
    def items(self) -> int:
        return self.batch * self.channels * self.chunks

    @property
    def grid(self) -> tuple[int, int, int]:
        """One program a chunk; neighbours read neighbouring channels."""
        return self.channels, self.chunks, self.batch

    @property
    def exact_grid(self) -> tuple[int]:
        return (min(self.items, _EXACT_PROGRAMS),)

    @property
    def scan_grid(self) -> tuple[int, int]:
        """Programs of a scan of all chunks in one."""
        return self.batch * self.channels, -(-self.modes * self.width // _SCAN_BLOCK)


def _row_marks(documents_BT: Tensor | None, valid_BT: Tensor | None, size: _Layout) -> Tensor | None:
    """int32 [B, T], as `triton_forward.row_marks` takes them apart; None if all positions are plain."""
    if documents_BT is None and valid_BT is None:
        return None
    numbers_BT = documents_BT
    if documents_BT is not None and valid_BT is not None:
        numbers_BT = document_segments(documents_BT, valid_BT)  # whatever stands in pads
    numbers_BT, valid_BT = (x if x is None else x.contiguous() for x in (numbers_BT, valid_BT))
    marks_BT = torch.empty(size.batch, size.length, dtype=torch.int32, device=size.device)
    triton_forward.marks_kernel[size.chunks, size.batch](
        numbers_BT, valid_BT, marks_BT, size.length,
        HAS_NUMBERS=numbers_BT is not None, HAS_VALID=valid_BT is not None, num_warps=1,
    )  # fmt: skip
    return marks_BT


class _Scan(torch.autograd.Function):
    """Saves raw, the tables and the states the chunks are entered with (fp32, M 2 P values every 64 positions)."""

    @staticmethod
    def forward(
        ctx: Any,
        raw_BTKX: Tensor,
        state_BKM2P: Tensor,
        marks_BT: Tensor | None,
        eps: float,
        neutral: bool,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:
        named = ModalTables(*tables)
        size = _Layout.of(raw_BTKX, named.theta.shape[1])
        phases = named.theta.new_empty(size.channels, _CHUNK_ROWS + 1, 2, size.modes_padded)
        gamma = torch.empty_like(named.rho_raw)
        triton_forward.tables_kernel[size.channels, _CHUNK_ROWS + 1](
            named.theta, named.rho_raw, phases, gamma, M=size.modes, MODES=size.modes_padded, num_warps=1
        )
        states = raw_BTKX.new_empty(
            size.batch, size.channels, size.chunks, size.modes, 2, size.width, dtype=torch.float32
        )
        totals = states.new_empty(size.batch, size.channels, size.chunks, size.modes)
        exact = states.new_empty(size.batch, size.channels, size.chunks, dtype=torch.int32)
        leaving = torch.empty_like(state_BKM2P)
        z_BTKP = raw_BTKX.new_empty(size.batch, size.length, size.channels, size.width)
        options = _options(raw_BTKX, size, marks_BT, neutral)
        rows = (size.length, eps, *raw_BTKX.stride()[:3])
        triton_forward.chunk_states_kernel[size.grid](
            raw_BTKX, states, totals, exact, phases, marks_BT,
            named.write_bias, named.clock_bias, gamma, named.beta, *rows,
            **options, **_tuning("chunk_states", size),
        )  # fmt: skip
        _scan_states(states, totals, phases, marks_BT, state_BKM2P, leaving, size, reverse=False)
        for form in (False, True):
            triton_forward.outputs_kernel[size.exact_grid if form else size.grid](
                raw_BTKX, z_BTKP, states, exact, phases, marks_BT,
                named.write_bias, named.read_bias, named.clock_bias, gamma, named.kc, named.ks, named.zero_lag,
                named.beta, size.length, size.chunks, size.channels, size.items, *rows[1:],
                **options, EXACT=form, **_tuning("outputs", size),
            )  # fmt: skip
        ctx.save_for_backward(raw_BTKX, states, totals, exact, phases, gamma, marks_BT, *tables)
        ctx.eps, ctx.neutral, ctx.size = eps, neutral, size
        return z_BTKP, leaving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz_BTKP: Tensor, d_leaving_BKM2P: Tensor) -> tuple[Tensor | None, ...]:
        raw_BTKX, states, totals, exact, phases, gamma, marks_BT, *tables = ctx.saved_tensors
        named, size, eps = ModalTables(*tables), ctx.size, ctx.eps
        dz_BTKP = dz_BTKP.contiguous()
        gradients = torch.empty_like(states)
        d_entering = torch.empty_like(d_leaving_BKM2P, memory_format=torch.contiguous_format)
        d_raw = torch.empty(raw_BTKX.shape, dtype=raw_BTKX.dtype, device=raw_BTKX.device)
        tile_states = states.new_empty(size.items, _CHUNK_ROWS // _TILE_ROWS - 1, size.modes, 2, size.width)
        places = size.batch * size.chunks
        partials = states.new_empty(places, size.channels, _PARTIALS, size.modes)
        d_tables = states.new_empty(len(named) - 1, size.channels, size.modes)
        d_beta = torch.empty_like(named.beta)
        options = _options(raw_BTKX, size, marks_BT, ctx.neutral)
        strides = raw_BTKX.stride()[:3]
        triton_backward.state_gradients_kernel[size.grid](
            raw_BTKX, dz_BTKP, gradients, phases, marks_BT,
            named.read_bias, named.clock_bias, gamma, named.kc, named.ks, size.length, *strides,
            **options, **_tuning("state_gradients", size),
        )  # fmt: skip
        _scan_states(gradients, totals, phases, marks_BT, d_leaving_BKM2P.contiguous(), d_entering, size, reverse=True)
        for form in (False, True):
            triton_backward.input_gradients_kernel[size.exact_grid if form else size.grid](
                raw_BTKX, dz_BTKP, d_raw, states, gradients, tile_states, exact, partials, phases, marks_BT,
                named.write_bias, named.read_bias, named.clock_bias, gamma, named.kc, named.ks, named.zero_lag,
                named.beta, size.length, size.chunks, size.channels, size.items, eps, *strides,
                **options, EXACT=form, **_tuning("input_gradients", size),
            )  # fmt: skip
        triton_backward.table_gradients_kernel[size.channels, _PARTIALS](
            partials, d_tables, d_beta, named.rho_raw, named.kc, named.zero_lag, places,
            M=size.modes, MODES=size.modes_padded, BLOCK=_SUM_BLOCK, **_tuning("table_gradients", size),
        )  # fmt: skip
        return d_raw, d_entering, None, None, None, *d_tables, d_beta


def _options(raw_BTKX: Tensor, size: _Layout, marks_BT: Tensor | None, neutral: bool) -> dict[str, Any]:
    """Compile-time arguments of the kernels that take a chunk a program."""
    return {
        "P": size.width,
        "M": size.modes,
        "WIDTH": size.width_padded,
        "MODES": size.modes_padded,
        "ALIGN": size.alignment,
        "NEUTRAL": neutral,
        "HAS_MARKS": marks_BT is not None,
        "SPLIT": raw_BTKX.dtype == torch.bfloat16,
    }


def _chunk_defaults(modes: int, width: int) -> dict[str, int]:
    return {"num_warps": 4 if width >= 64 else 2, "num_stages": 1, "maxnreg": 0}


def _tile_defaults(modes: int, width: int) -> dict[str, int]:
    """One warp a program needs no barrier."""
    return {"num_warps": 2 if modes * width >= 1024 else 1, "num_stages": 1, "maxnreg": 0}


def _output_defaults(modes: int, width: int) -> dict[str, int]:
    """Of narrow values, more programs at once gain more than the registers that they leave each other."""
    return _tile_defaults(modes, width) | ({"maxnreg": 128} if width <= 64 else {})


def _plain_defaults(modes: int, width: int) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 1}


def _declare() -> None:
    """The kernels' launch options; maxnreg: registers a thread, 0 for no limit."""
    warps, stages, registers = (1, 2, 4), (1,), (0, 96, 128, 168, 224)
    plain: dict[str, tuple[int, ...]] = {"num_warps": warps, "num_stages": stages}
    chunk = plain | {"maxnreg": registers}
    # The kernels that walk tiles transpose their products: with four warps or more some of these would be of Hopper's
    # warp groups, whose transposed results some Triton releases get wrong.
    tile = chunk | {"num_warps": (1, 2)}
    for kernel, defaults, choices in (
        ("chunk_states", _chunk_defaults, chunk),
        ("state_scan", _plain_defaults, plain),
        ("outputs", _output_defaults, tile),
        ("state_gradients", _chunk_defaults, chunk),
        ("input_gradients", _tile_defaults, tile),
        ("table_gradients", _plain_defaults, plain),
    ):
        tuning.declare(f"selective_scan.{kernel}", shape_class=("modes", "width"), defaults=defaults, choices=choices)


_declare()


def _tuning(kernel: str, size: _Layout) -> dict[str, int]:
    """Launch options of a kernel. Triton knows no limit of 0 registers: it is told of none."""
    options = tuning.options(f"selective_scan.{kernel}", size.device, modes=size.modes_padded, width=size.width_padded)
    return {name: value for name, value in options.items() if value}


def _scan_states(
    states: Tensor,
    totals: Tensor,
    phases: Tensor,
    marks_BT: Tensor | None,
    first: Tensor,
    last: Tensor,
    size: _Layout,
    *,
    reverse: bool,
) -> None:
    """From what chunks leave, in place, to what they are entered with; in many chunks, by way of segments of them."""
    blocks: dict[str, Any] = {"P": size.width, "M": size.modes, "BLOCK": _SCAN_BLOCK, "REVERSE": reverse}
    blocks |= _tuning("state_scan", size)
    segment_chunks = _SEGMENT_CHUNKS if size.chunks >= _SEGMENTED_FROM else size.chunks
    segments = -(-size.chunks // segment_chunks)

    def scan(first: Tensor, last: Tensor, carries: Tensor | None, summary: bool) -> None:
        triton_forward.state_scan_kernel[*size.scan_grid, segments](
            states, totals, phases, marks_BT, first, last, carries,
            size.length, size.chunks, size.channels, segment_chunks,
            MODES=size.modes_padded, HAS_MARKS=marks_BT is not None, SUMMARY=summary, **blocks,
        )  # fmt: skip

    if segments > 1:
        entering = states.new_empty(size.batch, size.channels, segments, *states.shape[3:])
        carries = totals.new_empty(size.batch, size.channels, segments, 2, size.modes)
        scan(first, entering, carries, summary=True)
        triton_forward.segment_scan_kernel[size.scan_grid](entering, carries, first, segments, **blocks)
        first = entering
    scan(first, last, None, summary=False)


def triton_scan(
    raw_BTKX: Tensor,
    tables: ModalTables,
    *,
    eps: float,
    neutral_gates: bool,
    state_BKM2P: Tensor,
    documents_BT: Tensor | None,
    valid_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` (specification, section 1) for bf16 or fp32 raw of at least one position, on a CUDA device.

    raw_BTKX: X = P + 3M columns a channel, those contiguous; any strides else: a prefix of the channels is read in
        place.
    tables: fp32 [K, M], beta [K].
    state_BKM2P: the entering state, fp32.
    documents_BT, valid_BT: document numbers and valid positions, or None, as `selective_scan` takes them.

    Returns z_BTKP in raw's dtype and the leaving state in fp32. Matrix products are fp32 for fp32 raw; for bf16 raw
    they are of bf16 halves of fp32 factors wherever modes, or small differences, are still to be summed.
    """
    assert raw_BTKX.dtype in (torch.bfloat16, torch.float32), f"raw is {raw_BTKX.dtype}; the kernels take bf16 and fp32"
    assert 1 <= raw_BTKX.shape[1] <= _LONGEST, f"{raw_BTKX.shape[1]} positions; the kernels take 1 to {_LONGEST}"
    assert raw_BTKX.stride(3) == 1, "the columns of a channel must lie side by side"
    tables = ModalTables(*(table.float().contiguous() for table in tables))
    size = _Layout.of(raw_BTKX, tables.theta.shape[1])
    assert tables.theta.shape[0] == size.channels, (
        f"raw has {size.channels} channels, the tables {tables.theta.shape[0]}"
    )
    marks_BT = _row_marks(documents_BT, valid_BT, size)
    state_BKM2P = state_BKM2P.float().contiguous()
    z_BTKP, leaving_BKM2P = _Scan.apply(raw_BTKX, state_BKM2P, marks_BT, eps, neutral_gates, *tables)
    return z_BTKP, leaving_BKM2P
