"""The selective scan by Triton kernels: one operator between two matrix products, forward and backward.

`triton_scan` computes what `reference` defines. This file prepares what the kernels read beside raw and the tables
(phases of one chunk, marks of rows), launches them, and reduces the tables' gradients; `triton_forward` and
`triton_backward` hold the kernels. Results are deterministic: nothing is added up atomically.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_essh.ops.selective_scan import triton_backward, triton_forward
from megatron_essh.ops.selective_scan.reference import ModalTables, document_segments

_CHUNK_ROWS = triton_forward.CHUNK_ROWS.value
_TILE_ROWS = triton_forward.TILE_ROWS.value
_PARTIALS = triton_backward.PARTIALS.value
_LONGEST = 65535 * _TILE_ROWS  # a launch takes no more tiles
_SCAN_BLOCK = 128


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
        return cls(batch, length, channels, modes, width, chunks, modes_padded, width_padded, alignment)

    @property
    def grid(self) -> tuple[int, int, int]:
        """One program a chunk; neighbours read neighbouring channels."""
        return self.channels, self.chunks, self.batch

    @property
    def scan_grid(self) -> tuple[int, int]:
        return self.batch * self.channels, -(-self.modes * self.width // _SCAN_BLOCK)


def _phase_table(theta_KM: Tensor, modes_padded: int) -> Tensor:
    """Lanes (cos, -sin) and their slopes (-sin, -cos) at theta times 0 to a chunk's rows, [K, rows + 1, 2, L].

    fp32 from fp64 angles.
    """
    count = torch.arange(_CHUNK_ROWS + 1, device=theta_KM.device)
    angle = F.pad(theta_KM.double(), (0, modes_padded - theta_KM.shape[1]))[:, None] * count[:, None]
    cos, sin = angle.cos(), angle.sin()
    lanes, slopes = torch.stack([cos, -sin], dim=-1), torch.stack([-sin, -cos], dim=-1)
    return torch.stack([lanes.flatten(2), slopes.flatten(2)], dim=2).float()


def _row_marks(documents_BT: Tensor | None, valid_BT: Tensor | None, size: _Layout) -> Tensor | None:
    """int32 [B, T]: valid positions of the chunk up to each row, plus VALID_BIT, plus CUT_BIT; None if all plain."""
    if documents_BT is None and valid_BT is None:
        return None
    device = documents_BT.device if documents_BT is not None else valid_BT.device  # type: ignore[union-attr]
    valid = torch.ones(size.batch, size.length, dtype=torch.bool, device=device) if valid_BT is None else valid_BT
    in_chunks = F.pad(valid, (0, size.chunks * _CHUNK_ROWS - size.length)).view(size.batch, size.chunks, _CHUNK_ROWS)
    marks = in_chunks.int().cumsum(-1, dtype=torch.int32).flatten(1)[:, : size.length]
    marks = marks + valid.int() * triton_forward.VALID_BIT.value
    if documents_BT is not None:
        segments = document_segments(documents_BT, valid_BT)
        cut = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        marks = marks + cut.int() * triton_forward.CUT_BIT.value
    return marks.contiguous()


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
        phases = _phase_table(named.theta, size.modes_padded)
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
            named.write_bias, named.clock_bias, named.rho_raw, named.beta, *rows,
            **options, **_tuning("chunk_states", size),
        )  # fmt: skip
        _scan_states(states, totals, phases, marks_BT, state_BKM2P, leaving, size, reverse=False)
        for form in (False, True):
            triton_forward.outputs_kernel[size.grid](
                raw_BTKX, z_BTKP, states, exact, phases, marks_BT,
                named.write_bias, named.read_bias, named.clock_bias, named.rho_raw, named.kc, named.ks, named.zero_lag,
                named.beta, *rows, **options, EXACT=form, **_tuning("outputs", size),
            )  # fmt: skip
        ctx.save_for_backward(raw_BTKX, states, totals, exact, phases, marks_BT, *tables)
        ctx.eps, ctx.neutral, ctx.size = eps, neutral, size
        return z_BTKP, leaving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz_BTKP: Tensor, d_leaving_BKM2P: Tensor) -> tuple[Tensor | None, ...]:
        raw_BTKX, states, totals, exact, phases, marks_BT, *tables = ctx.saved_tensors
        named, size, eps = ModalTables(*tables), ctx.size, ctx.eps
        dz_BTKP = dz_BTKP.contiguous()
        gradients = torch.empty_like(states)
        d_entering = torch.empty_like(d_leaving_BKM2P, memory_format=torch.contiguous_format)
        d_raw = torch.empty(raw_BTKX.shape, dtype=raw_BTKX.dtype, device=raw_BTKX.device)
        tiles = -(-size.length // _TILE_ROWS)
        places = size.batch * tiles
        tile_states, tile_gradients = states.new_empty(2, size.batch, size.channels, tiles, size.modes, 2, size.width)
        partials = states.new_empty(places, size.channels, _PARTIALS, size.modes)
        beta_partials = states.new_empty(places, size.channels)
        options = _options(raw_BTKX, size, marks_BT, ctx.neutral)
        rows = (size.length, eps, *raw_BTKX.stride()[:3])
        triton_backward.state_gradients_kernel[size.grid](
            raw_BTKX, dz_BTKP, gradients, phases, marks_BT,
            named.read_bias, named.clock_bias, named.rho_raw, named.kc, named.ks, size.length, *raw_BTKX.stride()[:3],
            **options, **_tuning("state_gradients", size),
        )  # fmt: skip
        _scan_states(gradients, totals, phases, marks_BT, d_leaving_BKM2P.contiguous(), d_entering, size, reverse=True)
        triton_backward.tile_boundaries_kernel[size.grid](
            raw_BTKX, dz_BTKP, states, gradients, tile_states, tile_gradients, phases, marks_BT,
            named.write_bias, named.read_bias, named.clock_bias, named.rho_raw, named.kc, named.ks, named.beta, *rows,
            **options, **_tuning("tile_boundaries", size),
        )  # fmt: skip
        for form in (False, True):
            triton_backward.input_gradients_kernel[size.channels, tiles, size.batch](
                raw_BTKX, dz_BTKP, d_raw, tile_states, tile_gradients, exact, partials, beta_partials, phases, marks_BT,
                named.write_bias, named.read_bias, named.clock_bias, named.rho_raw, named.kc, named.ks, named.zero_lag,
                named.beta, *rows, **options, EXACT=form, **_tuning("input_gradients", size),
            )  # fmt: skip
        write, read, clock, decay, theta, kc, ks, own = partials.sum(0).unbind(1)
        d_tables = ModalTables(
            write_bias=write,
            read_bias=read,
            clock_bias=clock,
            rho_raw=decay * torch.sigmoid(named.rho_raw),
            theta=theta,
            kc=kc + own * (1 - named.zero_lag),
            ks=ks,
            zero_lag=-own * named.kc,
            beta=beta_partials.sum(0),
        )
        return d_raw, d_entering, None, None, None, *d_tables


def _options(raw_BTKX: Tensor, size: _Layout, marks_BT: Tensor | None, neutral: bool) -> dict[str, Any]:
    """Compile-time arguments of the kernels that take one chunk or tile a program."""
    return {
        "P": size.width,
        "M": size.modes,
        "WIDTH": size.width_padded,
        "MODES": size.modes_padded,
        "ALIGN": size.alignment,
        "NEUTRAL": neutral,
        "HAS_MARKS": marks_BT is not None,
        "PRECISION": "ieee" if raw_BTKX.dtype == torch.float32 else "tf32",
    }


def _tuning(kernel: str, size: _Layout) -> dict[str, int]:
    """Warps and pipeline stages of a kernel, as measured on an H200 for states of up to 8 modes x 64 values."""
    if kernel == "state_scan":
        warps = 4
    elif kernel in ("chunk_states", "state_gradients"):
        warps = 2
    else:
        warps = max(1, min(4, size.modes_padded * size.width_padded // 512))
    return {"num_warps": warps, "num_stages": 1}


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
    triton_forward.state_scan_kernel[size.scan_grid](
        states, totals, phases, marks_BT, first, last, size.length, size.chunks, size.channels,
        P=size.width, M=size.modes, MODES=size.modes_padded, BLOCK=_SCAN_BLOCK,
        HAS_MARKS=marks_BT is not None, REVERSE=reverse,
        **_tuning("state_scan", size),
    )  # fmt: skip


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
    TF32 with fp32 sums, in three passes where gradients are small differences.
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
