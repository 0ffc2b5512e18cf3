"""Triton kernels of the selective scan's forward pass: chunk states, their scan, outputs.

Rows are taken in chunks of `CHUNK_ROWS`, in tiles of `TILE_ROWS`. A mode has two lanes, side by side as in the state
[..., M, 2, P]. Within a chunk the state is kept in the frame that turns with the modes: with n the number of valid
positions from the chunk's first row and phase = n theta, lane i of a mode is written with `phase_lane` = (cos, -sin)
and read with kc (cos, -sin) + ks (-sin, -cos), so that the carried state only decays; the scan over chunks turns it
once a chunk. With c the running decay of a tile and C its total, the tile reads q e^{-c} of the state it is handed,
tril(q e^{C/2 - c} (k e^{c - C/2})^T) of its own values, and hands on e^{-C} H + (k e^{c - C})^T v. Where C is beyond
`ANCHOR_LIMIT` that matrix is summed elementwise instead, each exponent from its own terms.

A document's start is a decay of `CUT_DECAY`, whose exponential is 0 in fp32; a pad neither decays, writes, reads nor
turns. All arithmetic is fp32. Lanes and values are padded inside to powers of two; every load is masked.

Suffixes: R rows of a tile or chunk, L lanes, P values (padded), M modes (padded).
"""

# mypy: disable-error-code="no-untyped-def"
# The bodies are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_ROWS = tl.constexpr(64)
TILE_ROWS = tl.constexpr(16)
# Query and key of a tile are at most e^{50} = 5e21 apart from their factors, well inside fp32 (3e38).
ANCHOR_LIMIT = tl.constexpr(100.0)
# e^{-128} is 0 in fp32. No larger decay is used: it would only cost the sums it enters their last digits.
CUT_DECAY = tl.constexpr(128.0)
# A mark holds the valid positions of the chunk up to and including the row, and two bits.
VALID_BIT = tl.constexpr(256)
CUT_BIT = tl.constexpr(512)
# Arguments whose values compile no new variant: every length runs the same code.
SIZES = ("length", "chunks", "channels", "stride_b", "stride_t", "stride_k")


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate relative to itself however small it is."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    # What 1 + small lost by rounding is put back: the logarithm's derivative is 1 / above.
    return tl.maximum(x, 0.0) + tl.log(above) + (small - (above - 1.0)) / above


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def row_marks(marks, batch, length, chunk, local_R, HAS_MARKS: tl.constexpr):
    """(count, valid, cut) of rows of a chunk: its valid positions up to each, whether it is one, whether it is cut."""
    t_R = chunk * CHUNK_ROWS + local_R
    inside_R = t_R < length
    if HAS_MARKS:
        mark_R = tl.load(marks + batch * length + t_R, mask=inside_R, other=0)
        count_R, valid_R, cut_R = mark_R & (VALID_BIT - 1), (mark_R & VALID_BIT) != 0, (mark_R & CUT_BIT) != 0
    else:
        count_R, valid_R, cut_R = local_R + 1, inside_R, t_R < 0
    return count_R, valid_R, cut_R


@triton.jit
def last_count(marks, batch, length, chunk, HAS_MARKS: tl.constexpr):
    """The chunk's number of valid positions."""
    start = chunk * CHUNK_ROWS
    end = tl.minimum(start + CHUNK_ROWS, length)
    if HAS_MARKS:
        count = tl.load(marks + batch * length + end - 1) & (VALID_BIT - 1)
    else:
        count = end - start
    return count


@triton.jit
def tiles_of(length, chunk):
    """The number of tiles that the chunk's positions fill."""
    return tl.minimum(tl.cdiv(length - chunk * CHUNK_ROWS, TILE_ROWS), CHUNK_ROWS // TILE_ROWS)


@triton.jit
def chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN: tl.constexpr):
    """The channel's columns at the chunk's first row. Offsets from here fit 32 bits."""
    offset = batch * stride_b + channel * stride_k + chunk.to(tl.int64) * CHUNK_ROWS * stride_t
    return raw + tl.multiple_of(offset, ALIGN)


@triton.jit
def load_values(base, row_R, valid_R, beta, eps, P: tl.constexpr, WIDTH: tl.constexpr):
    """(raw values [R, P], their 1 / root mean square [R], blended values [R, P]); row: offsets from base."""
    p = tl.arange(0, WIDTH)
    mask_RP = valid_R[:, None] & (p < P)[None, :]
    raw_RP = tl.load(base + row_R[:, None] + p[None, :], mask=mask_RP, other=0.0).to(tl.float32)
    norm_R = 1.0 / tl.sqrt(tl.sum(raw_RP * raw_RP, axis=1) / P + eps)
    return raw_RP, norm_R, raw_RP * (1.0 - beta + beta * norm_R)[:, None]


@triton.jit
def load_mode_table(table, channel, M: tl.constexpr, MODES: tl.constexpr):
    mode_M = tl.arange(0, MODES)
    return tl.load(table + channel * M + mode_M, mask=mode_M < M, other=0.0)


@triton.jit
def load_clock(base, row_R, valid_R, bias_M, column, M: tl.constexpr, MODES: tl.constexpr):
    """Pre-activations from `column` on, the biases added, [R, M]."""
    mode_M = tl.arange(0, MODES)
    mask_RM = valid_R[:, None] & (mode_M < M)[None, :]
    pointer_RM = base + row_R[:, None] + (column + mode_M)[None, :]
    return tl.load(pointer_RM, mask=mask_RM, other=0.0).to(tl.float32) + bias_M


@triton.jit
def load_gate(
    base, row_R, valid_R, bias_M, column, M: tl.constexpr, MODES: tl.constexpr, NEUTRAL: tl.constexpr
):  # fmt: skip
    """A gate, 0 in pads, [R, M]."""
    live_RM = valid_R[:, None] & (tl.arange(0, MODES) < M)[None, :]
    if NEUTRAL:
        gate_RM = tl.where(live_RM, 1.0, 0.0)
    else:
        logit_RM = load_clock(base, row_R, valid_R, bias_M, column, M, MODES)
        gate_RM = tl.where(live_RM, 2.0 * sigmoid(logit_RM), 0.0)
    return gate_RM


@triton.jit
def decays(clock_RM, valid_R, cut_R, gamma_M, M: tl.constexpr, MODES: tl.constexpr):
    """Decays of clock pre-activations, [R, M]: a pad's is 0, a cut's CUT_DECAY."""
    decay_RM = tl.minimum(gamma_M + softplus(clock_RM), CUT_DECAY)
    decay_RM = tl.where(cut_R[:, None], CUT_DECAY, decay_RM)
    return tl.where(valid_R[:, None] & (tl.arange(0, MODES) < M)[None, :], decay_RM, 0.0)


@triton.jit
def load_phases(phases, channel, count_R, LANES: tl.constexpr):
    """The lanes (cos, -sin) of each row's phase and their derivatives (-sin, -cos), [R, L]."""
    lane_L = tl.arange(0, LANES)
    at_RL = phases + channel * ((CHUNK_ROWS + 1) * 2 * LANES) + count_R[:, None] * (2 * LANES) + lane_L[None, :]
    return tl.load(at_RL), tl.load(at_RL + LANES)


@triton.jit
def lanes(x_RM):
    """[R, M] -> [R, L]: the same in both lanes of a mode."""
    return tl.reshape(tl.join(x_RM, x_RM), (x_RM.shape[0], 2 * x_RM.shape[1]))


@triton.jit
def lanes_of_row(x_M):
    """[M] -> [L], likewise."""
    return tl.reshape(tl.join(x_M, x_M), (2 * x_M.shape[0],))


@triton.jit
def state_block(states, index, P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """(pointers, mask) of the [L, P] state number `index` of a buffer [..., M, 2, P]."""
    lane_L, p = tl.arange(0, LANES), tl.arange(0, WIDTH)
    pointer_LP = states + index * (2 * M * P) + lane_L[:, None] * P + p[None, :]
    return pointer_LP, (lane_L < 2 * M)[:, None] & (p < P)[None, :]


@triton.jit
def decay_to_end(decay_RM):
    """The decay each row's writing undergoes from the next row to the last, [R, M]."""
    return tl.maximum(tl.cumsum(decay_RM, axis=0, reverse=True) - decay_RM, 0.0)


@triton.jit
def pair_matrix(query_RL, key_RL, decay_RM, rows, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Entry (t, s < t) is sum over lanes of query_t key_s e^{-(decay_{s+1} + ... + decay_t)}, [R, R]."""
    row_R = tl.arange(0, TILE_ROWS)
    if EXACT:
        matrix_RR = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
        for s in range(rows):
            since_RM = tl.cumsum(tl.where(row_R[:, None] > s, decay_RM, 0.0), axis=0)
            key_L = tl.sum(tl.where(row_R[:, None] == s, key_RL, 0.0), axis=0)
            column_R = tl.sum(query_RL * lanes(tl.exp(-since_RM)) * key_L[None, :], axis=1)
            matrix_RR = tl.where(row_R[None, :] == s, column_R[:, None], matrix_RR)
    else:
        shift_RM = 0.5 * tl.sum(decay_RM, axis=0)[None, :] - tl.cumsum(decay_RM, axis=0)
        near_query_RL, near_key_RL = query_RL * lanes(tl.exp(shift_RM)), key_RL * lanes(tl.exp(-shift_RM))
        matrix_RR = tl.dot(near_query_RL, tl.trans(near_key_RL), input_precision=PRECISION)
    # Above the diagonal the product may have overflowed.
    return tl.where(row_R[:, None] > row_R[None, :], matrix_RR, 0.0)


@triton.jit(do_not_specialize=SIZES)
def chunk_states_kernel(
    raw, states, totals, exact, phases, marks, write_bias, clock_bias, rho_raw, beta,
    length, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each chunk leaves of its own writing, in its own frame: states [B, K, N, M, 2, P]; its decay [B, K, N, M].

    exact [B, K, N]: 1 where a tile of the chunk decays beyond what one anchor spans.
    """
    LANES: tl.constexpr = 2 * MODES
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = (batch * tl.num_programs(0) + channel) * tl.num_programs(1) + chunk
    mode_M = tl.arange(0, MODES)
    gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)

    local_R = tl.arange(0, CHUNK_ROWS)
    count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    row_R = tl.multiple_of(local_R * stride_t, ALIGN)
    _, _, value_RP = load_values(base, row_R, valid_R, tl.load(beta + channel), eps, P, WIDTH)
    clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
    decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
    write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL)
    phase_RL, _ = load_phases(phases, channel, count_R, LANES)
    leaving_RL = lanes(write_RM * tl.exp(-decay_to_end(decay_RM))) * phase_RL
    state_LP = tl.dot(tl.trans(leaving_RL), value_RP, input_precision=PRECISION)
    pointer_LP, mask_LP = state_block(states, index, P, M, WIDTH, LANES)
    tl.store(pointer_LP, state_LP, mask=mask_LP)
    tl.store(totals + index * M + mode_M, tl.sum(decay_RM, axis=0), mask=mode_M < M)
    in_tiles = tl.sum(tl.reshape(decay_RM, (CHUNK_ROWS // TILE_ROWS, TILE_ROWS, MODES)), axis=1)
    tl.store(exact + index, (tl.max(tl.max(in_tiles, axis=1), axis=0) > ANCHOR_LIMIT).to(tl.int32))


@triton.jit(do_not_specialize=SIZES)
def state_scan_kernel(
    states, totals, phases, marks, first, last, length, chunks, channels,
    P: tl.constexpr, M: tl.constexpr, MODES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_MARKS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From chunk to chunk, in place: what each chunk leaves becomes the state it is entered with.

    first, last [B, K, M, 2, P]: the state before the first chunk and after the last. REVERSE does the same to
    gradients: from that of the leaving state (`first`) to that of the entering one (`last`); what each chunk's outputs
    ask of its entering state becomes the gradient of the state it leaves, in its own frame.
    """
    LANES: tl.constexpr = 2 * MODES
    at = tl.program_id(0).to(tl.int64)
    batch, channel = at // channels, at % channels
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = element < M * P
    mode = element // P
    lower = mode * 2 * P + element % P  # of the mode's first lane; the second is P further
    size = 2 * M * P
    zero = tl.load(first + at * size + lower, mask=known, other=0.0)
    one = tl.load(first + at * size + lower + P, mask=known, other=0.0)
    step = 1 if not REVERSE else -1
    chunk = 0 if not REVERSE else chunks - 1
    pointer = states + (at * chunks + chunk) * size + lower
    next_zero = tl.load(pointer, mask=known, other=0.0)
    next_one = tl.load(pointer + P, mask=known, other=0.0)
    next_total = tl.load(totals + (at * chunks + chunk) * M + mode, mask=known, other=0.0)
    for number in range(chunks):
        written_zero, written_one, carry = next_zero, next_one, tl.exp(-next_total)
        current = pointer
        count = last_count(marks, batch, length, chunk, HAS_MARKS)
        # The next chunk is fetched before this one is worked on.
        more = known & (number + 1 < chunks)
        chunk += step
        pointer += step * size
        next_zero = tl.load(pointer, mask=more, other=0.0)
        next_one = tl.load(pointer + P, mask=more, other=0.0)
        next_total = tl.load(totals + (at * chunks + chunk) * M + mode, mask=more, other=0.0)
        angle = phases + (channel * (CHUNK_ROWS + 1) + count) * (2 * LANES) + 2 * mode
        cos = tl.load(angle, mask=known, other=0.0)
        sin = -tl.load(angle + 1, mask=known, other=0.0)
        if REVERSE:
            zero, one = cos * zero + sin * one, cos * one - sin * zero
            tl.store(current, zero, mask=known)
            tl.store(current + P, one, mask=known)
            zero, one = carry * zero + written_zero, carry * one + written_one
        else:
            tl.store(current, zero, mask=known)
            tl.store(current + P, one, mask=known)
            zero, one = carry * zero + written_zero, carry * one + written_one
            zero, one = cos * zero - sin * one, cos * one + sin * zero
    tl.store(last + at * size + lower, zero, mask=known)
    tl.store(last + at * size + lower + P, one, mask=known)


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    raw, z, states, exact, phases, marks,
    write_bias, read_bias, clock_bias, rho_raw, kc, ks, zero_lag, beta,
    length, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """z [B, T, K, P] of each chunk from the state it is entered with, tile by tile; of those of one form.

    The elementwise form has a launch of its own, whose programs mostly end at once: in one kernel with the other it
    would take registers from every chunk.
    """
    LANES: tl.constexpr = 2 * MODES
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0)
    index = (batch * channels + channel) * tl.num_programs(1) + chunk
    if (tl.load(exact + index) != 0) != EXACT:
        return
    gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_M = load_mode_table(kc, channel, M, MODES)
    kc_L, ks_L = lanes_of_row(kc_M), lanes_of_row(load_mode_table(ks, channel, M, MODES))
    own_M = kc_M * (1.0 - load_mode_table(zero_lag, channel, M, MODES))  # what is left of the response at lag zero
    blend = tl.load(beta + channel)

    pointer_LP, mask_LP = state_block(states, index, P, M, WIDTH, LANES)
    state_LP = tl.load(pointer_LP, mask=mask_LP, other=0.0)
    p = tl.arange(0, WIDTH)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    z_base = z + ((batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel) * P
    for tile in range(tiles_of(length, chunk)):
        local_R = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        rows = length - chunk * CHUNK_ROWS - tile * TILE_ROWS
        count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
        row_R = tl.multiple_of(local_R * stride_t, ALIGN)
        _, _, value_RP = load_values(base, row_R, valid_R, blend, eps, P, WIDTH)
        clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
        decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
        write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL)
        read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL)
        phase_RL, slope_RL = load_phases(phases, channel, count_R, LANES)
        readout_RL = kc_L * phase_RL + ks_L * slope_RL

        matrix_RR = pair_matrix(
            lanes(read_RM) * readout_RL,
            lanes(write_RM) * phase_RL,
            decay_RM,
            tl.minimum(rows, TILE_ROWS),
            EXACT,
            PRECISION,
        )
        own_R = tl.sum(read_RM * write_RM * own_M, axis=1)
        arriving_RL = lanes(read_RM * tl.exp(-tl.cumsum(decay_RM, axis=0))) * readout_RL
        z_RP = tl.dot(matrix_RR, value_RP, input_precision=PRECISION)
        z_RP = tl.dot(arriving_RL, state_LP, acc=z_RP, input_precision=PRECISION)
        z_RP += own_R[:, None] * value_RP
        z_RP_at = z_base + local_R[:, None] * (channels * P) + p[None, :]
        tl.store(z_RP_at, z_RP, mask=(tl.arange(0, TILE_ROWS) < rows)[:, None] & (p < P)[None, :])

        leaving_RL = lanes(write_RM * tl.exp(-decay_to_end(decay_RM))) * phase_RL
        state_LP *= lanes_of_row(tl.exp(-tl.sum(decay_RM, axis=0)))[:, None]
        state_LP = tl.dot(tl.trans(leaving_RL), value_RP, acc=state_LP, input_precision=PRECISION)
