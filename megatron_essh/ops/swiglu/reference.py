"""SwiGLU over unit-major gates and ups (specification, section 3), and the statistics that order the units."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def reference_swiglu(gate_up: Tensor, square_sum_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [..., n], of interleaved [..., 2n]; sums of squares over all rows are added to square_sum_N."""
    gate, up = gate_up.unflatten(-1, (gate_up.shape[-1] // 2, 2)).unbind(-1)
    units = F.silu(gate) * up
    if square_sum_N is not None:
        square_sum_N += units.detach().flatten(0, -2).float().square().sum(0)
    return units
