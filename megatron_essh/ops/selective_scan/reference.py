"""The selective scan of a spectral mixer, three ways (specification, section 1).

For channel k and mode i, with R the planar rotation and j the imaginary unit of the mode's two lanes,

    H_t = e^{-decay_t} R(theta) H_{t-1} + write_t e1 v_t^T            the state, [2, P]
    z_t = sum_i read_t (kc H_t[0] - ks H_t[1]) - (sum_i a read_t write_t kc) v_t

`recurrent_scan` is that definition, token by token. `explicit_scan` builds the whole causal matrix that it applies
to the values. `chunked_scan` does the same in rows of 16 by matrix products and is what a CPU trains with. All three
take the same `Controls`, start from any state, leave the state after the last token, cut it at document starts and
pass over pads, and are plain differentiable PyTorch. None knows anything of projections, tiers or devices.

Shape suffixes: B sequences, T positions, K channels, M modes, P values per channel, X = P + 3M, 2 the lanes of a
mode; in `chunked_scan` also F frames of N chunks of S rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ModalTables(NamedTuple):
    """A spectral layer's small parameters: [K, M] each, beta [K]. Stored and used in fp32 (fp64 in tests)."""

    write_bias: Tensor
    """Write gate = 2 sigmoid(pre-activation + write_bias)."""
    read_bias: Tensor
    """Read gate = 2 sigmoid(pre-activation + read_bias)."""
    clock_bias: Tensor
    """Clock = softplus(pre-activation + clock_bias)."""
    rho_raw: Tensor
    """Intrinsic decay gamma = softplus(rho_raw)."""
    theta: Tensor
    """Rotation per token, radians."""
    kc: Tensor
    """Readout of the state's first lane."""
    ks: Tensor
    """Readout of the state's second lane, subtracted."""
    zero_lag: Tensor
    """Share a of the lag-zero response that is taken out again."""
    beta: Tensor
    """Blend of the raw value (0) with its RMS-normalised form (1), [K]."""


class Controls(NamedTuple):
    """What the recurrence is driven by at each position."""

    value_BTKP: Tensor
    """Blended values v."""
    write_BTKM: Tensor
    """Write gates, in (0, 2)."""
    read_BTKM: Tensor
    """Read gates, in (0, 2)."""
    decay_BTKM: Tensor
    """gamma + clock > 0: the state carried into a position shrinks by e^{-decay}."""


def compute_dtype(raw: Tensor) -> torch.dtype:
    """fp64 stays fp64; everything else is worked on in fp32."""
    return torch.float64 if raw.dtype == torch.float64 else torch.float32


def controls(raw_BTKX: Tensor, tables: ModalTables, eps: float = 1e-6, neutral_gates: bool = False) -> Controls:
    """Values, gates and decays from the raw input projection.

    raw_BTKX holds, per channel, P values and the M pre-activations of the write gate, the read gate and the clock.
    `neutral_gates` fixes both gates at 1. Result in fp32 (fp64 if raw is fp64).
    """
    dtype = compute_dtype(raw_BTKX)
    tables = ModalTables(*(table.to(dtype) for table in tables))
    modes = tables.theta.shape[1]
    width = raw_BTKX.shape[-1] - 3 * modes
    assert width > 0, f"raw has {raw_BTKX.shape[-1]} columns a channel, too few for {modes} modes"
    value_raw, write_raw, read_raw, clock_raw = raw_BTKX.to(dtype).split([width, modes, modes, modes], dim=-1)

    root_mean_square = (value_raw.square().mean(-1, keepdim=True) + eps).rsqrt()
    value = value_raw * (1 - tables.beta[:, None] + tables.beta[:, None] * root_mean_square)
    # Above the threshold softplus returns its argument; e^-40 is below a rounding of 40 in fp64.
    gamma = F.softplus(tables.rho_raw, threshold=40)
    decay = gamma + F.softplus(clock_raw + tables.clock_bias, threshold=40)
    if neutral_gates:
        write = read = torch.ones_like(decay)
    else:
        write = 2 * torch.sigmoid(write_raw + tables.write_bias)
        read = 2 * torch.sigmoid(read_raw + tables.read_bias)
    return Controls(value, write, read, decay)


def without_pads(given: Controls, valid_BT: Tensor | None) -> Controls:
    """The controls with pads silenced: nothing decays, is written or is read there, whatever stood in the pad."""
    if valid_BT is None:
        return given
    return Controls(*(torch.where(valid_BT[:, :, None, None], part, 0) for part in given))


def document_segments(documents_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Number of cuts up to and including each position, int64 [B, T]; segment 0 continues the entering state.

    A cut falls on a valid position whose document differs from that of the valid position before it in this call.
    What a pad is numbered does not matter.
    """
    if valid_BT is None:
        cuts = documents_BT[:, 1:] != documents_BT[:, :-1]
        return F.pad(cuts.long().cumsum(1), (1, 0))
    position = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    latest_valid = torch.where(valid_BT, position, -1).cummax(1).values
    before = F.pad(latest_valid[:, :-1], (1, 0), value=-1)
    differs = documents_BT != documents_BT.gather(1, before.clamp(min=0))
    return (valid_BT & (before >= 0) & differs).long().cumsum(1)


def _turn(state_KM2P: Tensor, cos_KM: Tensor, sin_KM: Tensor) -> Tensor:
    """R(angle) applied to the lanes of [..., M, 2, P] states."""
    first, second = state_KM2P.unbind(-2)
    cos, sin = cos_KM[..., None], sin_KM[..., None]
    return torch.stack([cos * first - sin * second, sin * first + cos * second], dim=-2)


def _zero_lag(given: Controls, tables: ModalTables) -> Tensor:
    """The correction sum_i a read write kc of each position, [B, T, K, 1]."""
    return (given.read_BTKM * given.write_BTKM * (tables.zero_lag * tables.kc)).sum(-1, keepdim=True)


def _advance(state_BKM2P: Tensor, value_BKP: Tensor, write_BKM: Tensor, decay_BKM: Tensor, theta_KM: Tensor) -> Tensor:
    """The state after one token."""
    carried = _turn(state_BKM2P, theta_KM.cos(), theta_KM.sin()) * torch.exp(-decay_BKM)[..., None, None]
    first, second = carried.unbind(-2)
    return torch.stack([first + write_BKM[..., None] * value_BKP[..., None, :], second], dim=-2)


def _read(state_BKM2P: Tensor, read_BKM: Tensor, tables: ModalTables) -> Tensor:
    """sum_i read (kc H[0] - ks H[1]), [B, K, P]."""
    first, second = state_BKM2P.unbind(-2)
    readout = tables.kc[..., None] * first - tables.ks[..., None] * second
    return (read_BKM[..., None] * readout).sum(-2)


def recurrent_scan(
    given: Controls,
    tables: ModalTables,
    state_BKM2P: Tensor,
    documents_BT: Tensor | None = None,
    valid_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence itself: (z_BTKP, state after the last token), in the controls' dtype."""
    if given.value_BTKP.shape[1] == 0:
        return given.value_BTKP, state_BKM2P
    given = without_pads(given, valid_BT)
    segments = None if documents_BT is None else document_segments(documents_BT, valid_BT)
    outputs = []
    for t in range(given.value_BTKP.shape[1]):
        value, write, read, decay = (part[:, t] for part in given)
        entering = state_BKM2P
        if segments is not None:
            cut = segments[:, t] != (segments[:, t - 1] if t else 0)
            entering = entering.masked_fill(cut[:, None, None, None, None], 0)
        after = _advance(entering, value, write, decay, tables.theta)
        if valid_BT is not None:
            after = torch.where(valid_BT[:, t, None, None, None, None], after, state_BKM2P)
        state_BKM2P = after
        outputs.append(_read(state_BKM2P, read, tables))
    return torch.stack(outputs, dim=1) - _zero_lag(given, tables) * given.value_BTKP, state_BKM2P


def scan_step(
    raw_BKX: Tensor, tables: ModalTables, state_BKM2P: Tensor, *, eps: float = 1e-6, neutral_gates: bool = False
) -> tuple[Tensor, Tensor]:
    """One token: (z_BKP in raw's dtype, the new state in fp32, fp64 if raw is fp64)."""
    with torch.autocast(raw_BKX.device.type, enabled=False):
        dtype = compute_dtype(raw_BKX)
        tables = ModalTables(*(table.to(dtype) for table in tables))
        given = controls(raw_BKX[:, None], tables, eps, neutral_gates)
        value, write, read, decay = (part[:, 0] for part in given)
        state = _advance(state_BKM2P.to(dtype), value, write, decay, tables.theta)
        z = _read(state, read, tables) - _zero_lag(given, tables)[:, 0] * value
        return z.to(raw_BKX.dtype), state


def segment_sums(decay: Tensor) -> Tensor:
    """[..., T, M] -> [..., T, T, M]: entry (t, s) is decay_{s+1} + ... + decay_t for s <= t and 0 above the diagonal.

    Every entry is summed from its own terms. A difference of two running sums would lose the small decays that
    follow a large clock.
    """
    length = decay.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=decay.device).tril(-1)[..., None]
    return torch.where(later, decay.unsqueeze(-2), 0).cumsum(-3)


def causal_matrix(write: Tensor, read: Tensor, decay: Tensor, tables_KM: ModalTables, count: Tensor) -> Tensor:
    """The matrix that takes values to core readouts: [..., T, M] controls -> [..., T, T].

    Entry (t, s <= t) is sum_i read_t write_s e^{-(decay_{s+1} + ... + decay_t)} (kc cos - ks sin)(theta lag), the lag
    counted by `count` [..., T], the number of valid positions up to each. Tables broadcast against [..., M].
    """
    lag = (count.unsqueeze(-1) - count.unsqueeze(-2)).unsqueeze(-1).to(decay.dtype)
    theta, kc, ks = (t.unsqueeze(-2).unsqueeze(-2) for t in (tables_KM.theta, tables_KM.kc, tables_KM.ks))
    angle = theta * lag
    response = kc * angle.cos() - ks * angle.sin()
    gates = read.unsqueeze(-2) * write.unsqueeze(-3)
    return (gates * torch.exp(-segment_sums(decay)) * response).sum(-1).tril()


def explicit_scan(
    given: Controls,
    tables: ModalTables,
    state_BKM2P: Tensor,
    documents_BT: Tensor | None = None,
    valid_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same through the whole matrix G_k [T, T] of every channel: memory B K T T M, for checks and figures."""
    given = without_pads(given, valid_BT)
    value, write, read, decay = (part.transpose(1, 2) for part in given)  # [B, K, T, .]
    batch, length = given.value_BTKP.shape[:2]
    if length == 0:
        return given.value_BTKP, state_BKM2P
    counted = value.new_ones(batch, length) if valid_BT is None else valid_BT.to(value.dtype)
    count_BT = counted.cumsum(1)
    segments = torch.zeros_like(count_BT) if documents_BT is None else document_segments(documents_BT, valid_BT)

    matrix = causal_matrix(write, read, decay, tables, count_BT[:, None])
    matrix = matrix * (segments[:, None, :, None] == segments[:, None, None, :])
    z = matrix @ value

    def propagated(decayed: Tensor, angle: Tensor, lanes: Tensor) -> Tensor:
        """Lanes [..., M, 2, P] shrunk by e^{-decayed} and turned by angle, both [..., M]."""
        return _turn(lanes, angle.cos(), angle.sin()) * torch.exp(-decayed)[..., None, None]

    # The entering state, seen by the positions before the first cut.
    angle = tables.theta[:, None] * count_BT[:, None, :, None]
    entering = propagated(decay.cumsum(2), angle, state_BKM2P[:, :, None])
    entering = entering * (segments == 0)[:, None, :, None, None, None]
    first, second = entering.unbind(-2)
    readout = tables.kc[:, None, :, None] * first - tables.ks[:, None, :, None] * second
    z = z + (read[..., None] * readout).sum(-2)

    # The leaving state: what each position of the last segment wrote, and the entering state if nothing cut it.
    suffix = segment_sums(decay)[:, :, -1]
    angle = tables.theta[:, None] * (count_BT[:, -1:] - count_BT)[:, None, :, None]
    written = write[..., None] * value[..., None, :]
    written = propagated(suffix, angle, torch.stack([written, torch.zeros_like(written)], dim=-2))
    state = (written * (segments == segments[:, -1:])[:, None, :, None, None, None]).sum(2) + entering[:, :, -1]
    return z.transpose(1, 2) - _zero_lag(given, tables) * given.value_BTKP, state


# Chunks of a frame count their phases from one origin, so that from chunk to chunk the carried state only decays; it
# is turned once a frame. Angles are computed in fp64: a frame's length costs no accuracy.
_FRAME_ROWS = 256
# A chunk's query and key are e^{-c} and e^{+c} about the middle of its total decay: at most e^{50} = 5e21 each for a
# total of 100, well inside fp32 (3e38), with 1e16 to spare for gates, readouts, values and gradients. What lies above
# the diagonal may reach e^{100} and overflow; it is dropped, not multiplied. Chunks beyond take the exact form.
_MIDDLE_LIMIT = 100.0


class _Phases(NamedTuple):
    """Lanes of the queries and keys of every position, and the turn of the state at the end of every frame."""

    query_lanes: Tensor
    """(kc cos - ks sin, -kc sin - ks cos) at each position's phase, [K, 1, N, S, 2M]; [B, K, F, N, S, 2M] with pads."""
    key_lanes: Tensor
    """(cos, -sin), likewise."""
    turns: list[tuple[Tensor, Tensor]]
    """(cos, sin) of the frame's whole angle, one for each frame, [K, M, 1] or [B, K, M, 1]."""
    count_BFNS: Tensor
    """Valid positions of the frame up to each position."""


def _phases(
    tables: ModalTables, valid_BT: Tensor | None, batch: int, length: int, frames: int, chunks: int, rows: int
) -> _Phases:
    """Phases theta * (valid positions since the frame's start)."""
    channels, modes = tables.theta.shape
    frame_rows = chunks * rows
    positions = torch.arange(frame_rows + 1, device=tables.theta.device)
    angle = tables.theta.double()[:, None] * positions[:, None]  # [K, frame_rows + 1, M]
    cos, sin = angle.cos().to(tables.theta.dtype), angle.sin().to(tables.theta.dtype)
    if valid_BT is None:
        count = positions[1:].view(1, 1, chunks, rows).expand(batch, frames, chunks, rows)
        cos_rows, sin_rows = (x[:, 1:].reshape(channels, 1, chunks, rows, modes) for x in (cos, sin))
        last_frame = length - frame_rows * (frames - 1)
        ends = [frame_rows] * (frames - 1) + [last_frame]
        turns = [(cos[:, end, :, None], sin[:, end, :, None]) for end in ends]
    else:
        padded = F.pad(valid_BT, (0, frames * frame_rows - length)).view(batch, frames, frame_rows)
        count = padded.long().cumsum(-1).view(batch, frames, chunks, rows)
        cos_rows, sin_rows = (x[:, count].transpose(0, 1) for x in (cos, sin))  # [B, K, F, N, S, M]
        turns = [
            (cos[:, end].transpose(0, 1)[..., None], sin[:, end].transpose(0, 1)[..., None])
            for end in count[:, :, -1, -1].unbind(1)
        ]
    kc, ks = tables.kc[:, None, None, None], tables.ks[:, None, None, None]
    query_lanes = torch.cat([kc * cos_rows - ks * sin_rows, -kc * sin_rows - ks * cos_rows], dim=-1)
    return _Phases(query_lanes, torch.cat([cos_rows, -sin_rows], dim=-1), turns, count)


def chunked_scan(
    given: Controls,
    tables: ModalTables,
    state_BKM2P: Tensor,
    documents_BT: Tensor | None = None,
    valid_BT: Tensor | None = None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """The same in chunks of `chunk` rows, by matrix products of 2M lanes.

    In a chunk with running decay c, total decay C and phases theta t, the matrix below the diagonal is q k^T with
    q_t = read e^{a - c_t} (kc cos - ks sin, -kc sin - ks cos) and k_s = write e^{c_s - a} (cos, -sin), anchored at the
    middle, a = C / 2. The same lanes read the entering state H as q (e^{-a} H), and leave e^{-C} H + e^{-a} k^T v.
    Where C exceeds the limit, a = 0, k decays to the chunk's end instead, e^{c_s - C}, and the matrix is summed
    elementwise: there no exponent is positive.
    """
    given = without_pads(given, valid_BT)
    batch, length, channels, width = given.value_BTKP.shape
    modes = given.decay_BTKM.shape[-1]
    if length == 0:
        return given.value_BTKP, state_BKM2P
    rows = min(chunk, length)
    frames = -(-length // max(rows, _FRAME_ROWS))
    chunks = -(-length // (frames * rows))
    padding = frames * chunks * rows - length
    query_lanes, key_lanes, turns, count_BFNS = _phases(tables, valid_BT, batch, length, frames, chunks, rows)

    def in_chunks(x_BTKX: Tensor) -> Tensor:
        """[B, T, K, X] -> [B, K, F, N, S, X]. Zeros behind the last position decay, write and read nothing."""
        x_BKTX = x_BTKX.transpose(1, 2)
        if padding:
            x_BKTX = F.pad(x_BKTX, (0, 0, 0, padding))
        return x_BKTX.contiguous().view(batch, channels, frames, chunks, rows, x_BTKX.shape[-1])

    value, write, read, decay = (in_chunks(part) for part in given)

    # Exponents; `exact` indexes the chunks whose decay spans too much for one anchor.
    running = decay.cumsum(-2)
    total = running[..., -1, :]  # [B, K, F, N, M]
    beyond = (total.detach() > _MIDDLE_LIMIT).any(-1)
    exact = beyond.nonzero(as_tuple=True) if beyond.any() else None
    anchor = total / 2 if exact is None else torch.where(beyond[..., None], 0, total / 2)
    query_exponent = anchor[..., None, :] - running
    key_exponent = -query_exponent
    if exact is not None:
        to_end = F.pad(decay[exact][:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
        key_exponent = key_exponent.index_put(exact, -to_end)

    query, key = read * query_exponent.exp(), write * key_exponent.exp()
    query = torch.cat([query, query], dim=-1) * query_lanes  # [B, K, F, N, S, 2M]
    key = torch.cat([key, key], dim=-1) * key_lanes
    matrix = (query @ key.transpose(-1, -2)).tril_(-1)  # [B, K, F, N, S, S]
    if exact is not None:
        sequence, channel, *place = exact
        tables_of = ModalTables(*(table[channel] for table in tables))
        count = count_BFNS[sequence, *place]
        summed = causal_matrix(write[exact], read[exact], decay[exact], tables_of, count)
        matrix = matrix.index_put(exact, summed.tril(-1))
    # On the diagonal decays and phases cancel; in the lanes they would do so only to rounding.
    diagonal = (read * write).flatten(2, 4) @ (tables.kc - tables.zero_lag * tables.kc)[..., None]
    matrix = matrix + diagonal.view(batch, channels, frames, chunks, rows).diag_embed()

    shrink = torch.exp(-anchor).repeat(1, 1, 1, 1, 2)[..., None]  # [B, K, F, N, 2M, 1]
    carry = torch.exp(-total).repeat(1, 1, 1, 1, 2)[..., None]
    query_in, key_out = query, key
    if documents_BT is not None:
        segments = document_segments(documents_BT, valid_BT)
        segments = torch.cat([segments, segments[:, -1:].expand(batch, padding)], dim=1)
        segments = segments.view(batch, 1, frames, chunks, rows)
        last = segments[..., -1]
        before = F.pad(last.flatten(2)[..., :-1], (1, 0)).view(last.shape)
        matrix = matrix * (segments[..., None] == segments[..., None, :])
        query_in = query * (segments == before[..., None])[..., None]
        key_out = key * (segments == last[..., None])[..., None]
        carry = carry * (last == before)[..., None, None]
    written = shrink * (key_out.transpose(-1, -2) @ value)  # [B, K, F, N, 2M, P]

    # From chunk to chunk.
    state = state_BKM2P.transpose(2, 3).flatten(2, 3)  # [B, K, 2M, P], as the lanes lie
    entering = []
    steps = zip(carry.flatten(2, 3).unbind(2), written.flatten(2, 3).unbind(2), strict=True)
    for number, (carry_chunk, written_chunk) in enumerate(steps, start=1):
        entering.append(state)
        state = torch.addcmul(written_chunk, carry_chunk, state)
        if number % chunks == 0:
            cos, sin = turns[number // chunks - 1]
            first, second = state.split(modes, dim=2)
            state = torch.cat([cos * first - sin * second, sin * first + cos * second], dim=2)

    arriving = shrink * torch.stack(entering, dim=2).view(written.shape)
    z = torch.baddbmm(*(x.flatten(0, 3) for x in (matrix @ value, query_in, arriving)))
    z_BKTP = z.view(batch, channels, frames * chunks * rows, width)[:, :, :length]
    return z_BKTP.transpose(1, 2), state.unflatten(2, (2, modes)).transpose(2, 3)
