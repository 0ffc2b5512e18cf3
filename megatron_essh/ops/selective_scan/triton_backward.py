"""Triton kernels of the selective scan's backward pass, in the terms of `triton_forward`.

Chunk by chunk, what the outputs ask of each chunk's entering state is scanned backward to the gradients of the states.
States and gradients are then walked to every tile, so that the gradients of the inputs need no walk: one program a
tile, with few enough values at a time for the registers.

With H the state a tile is handed and G' the gradient of the one it hands on, the tile gives dq and dk of its pairs,
dz H^T for what it read of H and v G'^T for what it wrote, and asks e^{-C} G' + (q e^{-c})^T dz of H. A decay acts on
every pair it stands between, on every read at or behind it, on every writing before it and on what passes through: its
gradient is minus the sum of those products, two running sums and a constant. A row's turn acts on the same, a quarter
turn ahead; summed over a tile, each row's share counts once for every turn on its side.
"""

# mypy: disable-error-code="no-untyped-def"
# The bodies are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from megatron_essh.ops.selective_scan.triton_forward import (
    CHUNK_ROWS,
    CUT_DECAY,
    SIZES,
    TILE_ROWS,
    chunk_base,
    decay_to_end,
    decays,
    lanes,
    lanes_of_row,
    load_clock,
    load_gate,
    load_mode_table,
    load_phases,
    load_values,
    row_marks,
    sigmoid,
    softplus,
    state_block,
    tiles_of,
)

# Rows of the partial sums of table gradients, [B tiles, K, PARTIALS, M].
PARTIALS = tl.constexpr(8)
_WRITE, _READ, _CLOCK, _DECAY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_THETA, _KC, _KS, _OWN = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)


@triton.jit(do_not_specialize=SIZES)
def state_gradients_kernel(
    raw, dz, gradients, phases, marks, read_bias, clock_bias, rho_raw, kc, ks,
    length, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each chunk's outputs ask of the state it is entered with: gradients [B, K, N, M, 2, P]."""
    LANES: tl.constexpr = 2 * MODES
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0)
    index = (batch * channels + channel) * tl.num_programs(1) + chunk
    p = tl.arange(0, WIDTH)
    gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_L = lanes_of_row(load_mode_table(kc, channel, M, MODES))
    ks_L = lanes_of_row(load_mode_table(ks, channel, M, MODES))

    local_R = tl.arange(0, CHUNK_ROWS)
    count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    row_R = tl.multiple_of(local_R * stride_t, ALIGN)
    clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
    decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
    read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL)
    phase_RL, slope_RL = load_phases(phases, channel, count_R, LANES)
    arriving_RL = lanes(read_RM * tl.exp(-tl.cumsum(decay_RM, axis=0))) * (kc_L * phase_RL + ks_L * slope_RL)

    dz_base = dz + ((batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel) * P
    dz_at_RP = dz_base + local_R[:, None] * (channels * P) + p[None, :]
    dz_RP = tl.load(dz_at_RP, mask=valid_R[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)
    gradient_LP = tl.dot(tl.trans(arriving_RL), dz_RP, input_precision=PRECISION)
    pointer_LP, mask_LP = state_block(gradients, index, P, M, WIDTH, LANES)
    tl.store(pointer_LP, gradient_LP, mask=mask_LP)


@triton.jit
def pair_gradients(query_RL, key_RL, decay_RM, d_matrix_RR, rows, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """(`pair_matrix`, gradients of query and key from the matrix's), [R, R], [R, L], [R, L]."""
    row_R = tl.arange(0, TILE_ROWS)
    # What turns and decays do to pairs is the small difference of what they do to query and key: TF32 is too coarse.
    FINE: tl.constexpr = "tf32x3" if PRECISION == "tf32" else PRECISION
    if EXACT:
        matrix_RR = tl.zeros_like(d_matrix_RR)
        d_query_RL = tl.zeros_like(query_RL)
        d_key_RL = tl.zeros_like(key_RL)
        for s in range(rows):
            since_RM = tl.cumsum(tl.where(row_R[:, None] > s, decay_RM, 0.0), axis=0)
            shrink_RL = lanes(tl.exp(-since_RM))
            key_L = tl.sum(tl.where(row_R[:, None] == s, key_RL, 0.0), axis=0)
            column_R = tl.sum(query_RL * shrink_RL * key_L[None, :], axis=1)
            matrix_RR = tl.where(row_R[None, :] == s, column_R[:, None], matrix_RR)
            d_column_R = tl.sum(tl.where(row_R[None, :] == s, d_matrix_RR, 0.0), axis=1)
            shrink_RL *= d_column_R[:, None]
            d_query_RL += shrink_RL * key_L[None, :]
            d_key_L = tl.sum(shrink_RL * query_RL, axis=0)
            d_key_RL = tl.where(row_R[:, None] == s, d_key_L[None, :], d_key_RL)
    else:
        shift_RM = 0.5 * tl.sum(decay_RM, axis=0)[None, :] - tl.cumsum(decay_RM, axis=0)
        falling_RL, rising_RL = lanes(tl.exp(shift_RM)), lanes(tl.exp(-shift_RM))
        near_query_RL, near_key_RL = query_RL * falling_RL, key_RL * rising_RL
        matrix_RR = tl.dot(near_query_RL, tl.trans(near_key_RL), input_precision=PRECISION)
        d_query_RL = tl.dot(d_matrix_RR, near_key_RL, input_precision=FINE) * falling_RL
        d_key_RL = tl.dot(tl.trans(d_matrix_RR), near_query_RL, input_precision=FINE) * rising_RL
    return tl.where(row_R[:, None] > row_R[None, :], matrix_RR, 0.0), d_query_RL, d_key_RL


@triton.jit
def of_modes(x_RL):
    """The sum over each mode's two lanes, [R, L] -> [R, M]."""
    return tl.sum(tl.reshape(x_RL, (x_RL.shape[0], x_RL.shape[1] // 2, 2)), axis=2)


@triton.jit
def of_modes_row(x_L):
    """[L] -> [M], likewise."""
    return tl.sum(tl.reshape(x_L, (x_L.shape[0] // 2, 2)), axis=1)


@triton.jit(do_not_specialize=SIZES)
def tile_boundaries_kernel(
    raw, dz, states, gradients, tile_states, tile_gradients, phases, marks,
    write_bias, read_bias, clock_bias, rho_raw, kc, ks, beta,
    length, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states the tiles are handed, and the gradients of those they hand on, [B, K, tiles, M, 2, P] each.

    states, gradients: the same of chunks, [B, K, N, M, 2, P].
    """
    LANES: tl.constexpr = 2 * MODES
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0)
    index = (batch * channels + channel) * tl.num_programs(1) + chunk
    first = (batch * channels + channel) * tl.cdiv(length, TILE_ROWS) + chunk * (CHUNK_ROWS // TILE_ROWS)
    p = tl.arange(0, WIDTH)
    gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_L = lanes_of_row(load_mode_table(kc, channel, M, MODES))
    ks_L = lanes_of_row(load_mode_table(ks, channel, M, MODES))
    blend = tl.load(beta + channel)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    dz_base = dz + ((batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel) * P
    tiles = tiles_of(length, chunk)

    pointer_LP, mask_LP = state_block(states, index, P, M, WIDTH, LANES)
    state_LP = tl.load(pointer_LP, mask=mask_LP, other=0.0)
    for tile in range(tiles):
        pointer_LP, mask_LP = state_block(tile_states, first + tile, P, M, WIDTH, LANES)
        tl.store(pointer_LP, state_LP, mask=mask_LP)
        if tile + 1 < tiles:
            local_R = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
            count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
            row_R = tl.multiple_of(local_R * stride_t, ALIGN)
            _, _, value_RP = load_values(base, row_R, valid_R, blend, eps, P, WIDTH)
            clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
            decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
            write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL)
            phase_RL, _ = load_phases(phases, channel, count_R, LANES)
            leaving_RL = lanes(write_RM * tl.exp(-decay_to_end(decay_RM))) * phase_RL
            state_LP *= lanes_of_row(tl.exp(-tl.sum(decay_RM, axis=0)))[:, None]
            state_LP = tl.dot(tl.trans(leaving_RL), value_RP, acc=state_LP, input_precision=PRECISION)

    pointer_LP, mask_LP = state_block(gradients, index, P, M, WIDTH, LANES)
    gradient_LP = tl.load(pointer_LP, mask=mask_LP, other=0.0)
    for back in range(tiles):
        tile = tiles - 1 - back
        pointer_LP, mask_LP = state_block(tile_gradients, first + tile, P, M, WIDTH, LANES)
        tl.store(pointer_LP, gradient_LP, mask=mask_LP)
        if tile > 0:
            local_R = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
            count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
            row_R = tl.multiple_of(local_R * stride_t, ALIGN)
            clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
            decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
            read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL)
            phase_RL, slope_RL = load_phases(phases, channel, count_R, LANES)
            readout_RL = kc_L * phase_RL + ks_L * slope_RL
            arriving_RL = lanes(read_RM * tl.exp(-tl.cumsum(decay_RM, axis=0))) * readout_RL
            dz_at_RP = dz_base + local_R[:, None] * (channels * P) + p[None, :]
            dz_RP = tl.load(dz_at_RP, mask=valid_R[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)
            gradient_LP *= lanes_of_row(tl.exp(-tl.sum(decay_RM, axis=0)))[:, None]
            gradient_LP = tl.dot(tl.trans(arriving_RL), dz_RP, acc=gradient_LP, input_precision=PRECISION)


@triton.jit(do_not_specialize=SIZES)
def input_gradients_kernel(
    raw, dz, d_raw, tile_states, tile_gradients, exact, partials, beta_partials, phases, marks,
    write_bias, read_bias, clock_bias, rho_raw, kc, ks, zero_lag, beta,
    length, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of raw [B, T, K, X], and each tile's share of those of the tables; of one form: see `outputs_kernel`.

    partials: [B tiles, K, PARTIALS, M]; beta_partials: [B tiles, K].

    tile_states: those the tiles are handed; tile_gradients: of those they hand on.
    """
    LANES: tl.constexpr = 2 * MODES
    PER_CHUNK: tl.constexpr = CHUNK_ROWS // TILE_ROWS
    channel, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunk, tile = tl.program_id(1) // PER_CHUNK, tl.program_id(1) % PER_CHUNK
    channels = tl.num_programs(0)
    if (tl.load(exact + (batch * channels + channel) * tl.cdiv(length, CHUNK_ROWS) + chunk) != 0) != EXACT:
        return
    index = (batch * channels + channel) * tl.num_programs(1) + tl.program_id(1)
    lane_L, p, mode_M = tl.arange(0, LANES), tl.arange(0, WIDTH), tl.arange(0, MODES)
    tile_row_R = tl.arange(0, TILE_ROWS)
    gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_M = load_mode_table(kc, channel, M, MODES)
    kc_L, ks_L = lanes_of_row(kc_M), lanes_of_row(load_mode_table(ks, channel, M, MODES))
    own_M = kc_M * (1.0 - load_mode_table(zero_lag, channel, M, MODES))
    blend = tl.load(beta + channel)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    item = (batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel
    dz_base, d_raw_base = dz + item * P, d_raw + item * (P + 3 * M)

    pointer_LP, mask_LP = state_block(tile_states, index, P, M, WIDTH, LANES)
    state_LP = tl.load(pointer_LP, mask=mask_LP, other=0.0)
    pointer_LP, _ = state_block(tile_gradients, index, P, M, WIDTH, LANES)
    gradient_LP = tl.load(pointer_LP, mask=mask_LP, other=0.0)
    same_LL = lane_L[:, None] == lane_L[None, :]
    other_LL = lane_L[:, None] == (lane_L ^ 1)[None, :]
    # A quarter turn of the state: its second lane against the first's gradient, negative, and the reverse.
    quarter_LL = tl.where(other_LL, tl.where((lane_L % 2 == 0)[:, None], -1.0, 1.0), 0.0)

    rows = length - chunk * CHUNK_ROWS - tile * TILE_ROWS
    local_R = tile * TILE_ROWS + tile_row_R
    count_R, valid_R, cut_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
    row_R = tl.multiple_of(local_R * stride_t, ALIGN)
    raw_RP, norm_R, value_RP = load_values(base, row_R, valid_R, blend, eps, P, WIDTH)
    clock_RM = load_clock(base, row_R, valid_R, clock_bias_M, P + 2 * M, M, MODES)
    decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
    write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL)
    read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL)
    phase_RL, slope_RL = load_phases(phases, channel, count_R, LANES)
    readout_RL = kc_L * phase_RL + ks_L * slope_RL
    write_RL, read_RL = lanes(write_RM), lanes(read_RM)
    query_RL, key_RL = read_RL * readout_RL, write_RL * phase_RL
    dz_at_RP = dz_base + local_R[:, None] * (channels * P) + p[None, :]
    dz_RP = tl.load(dz_at_RP, mask=valid_R[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)

    d_matrix_RR = tl.dot(dz_RP, tl.trans(value_RP), input_precision=PRECISION)
    d_own_R = tl.sum(tl.where(tile_row_R[:, None] == tile_row_R[None, :], d_matrix_RR, 0.0), axis=1)
    d_matrix_RR = tl.where(tile_row_R[:, None] > tile_row_R[None, :], d_matrix_RR, 0.0)
    matrix_RR, d_query_RL, d_key_RL = pair_gradients(
        query_RL, key_RL, decay_RM, d_matrix_RR, tl.minimum(rows, TILE_ROWS), EXACT, PRECISION
    )
    behind_RL = key_RL * d_key_RL - query_RL * d_query_RL

    shrink_in_RL = lanes(tl.exp(-tl.cumsum(decay_RM, axis=0)))
    arriving_RL = query_RL * shrink_in_RL
    d_arriving_RL = tl.dot(dz_RP, tl.trans(state_LP), input_precision=PRECISION)
    behind_RL -= arriving_RL * d_arriving_RL
    d_query_RL += shrink_in_RL * d_arriving_RL

    shrink_out_RL = lanes(tl.exp(-decay_to_end(decay_RM)))
    leaving_RL = key_RL * shrink_out_RL
    d_leaving_RL = tl.dot(value_RP, tl.trans(gradient_LP), input_precision=PRECISION)
    before_RM = of_modes(leaving_RL * d_leaving_RL)
    d_leaving_RL *= shrink_out_RL

    carry_M = tl.exp(-tl.sum(decay_RM, axis=0))
    through_LL = tl.dot(gradient_LP, tl.trans(state_LP), input_precision=PRECISION)
    through_M = carry_M * of_modes_row(tl.sum(tl.where(same_LL, through_LL, 0.0), axis=1))
    d_decay_RM = tl.cumsum(of_modes(behind_RL), axis=0, reverse=True)
    d_decay_RM -= tl.cumsum(before_RM, axis=0) - before_RM + through_M[None, :]
    d_decay_RM = tl.where((decay_RM > 0.0) & (decay_RM < CUT_DECAY), d_decay_RM, 0.0)

    # What is read or paired at a row has the turns up to it behind it; what is written and leaves, those after it.
    turns = tl.sum(valid_R.to(tl.int32), axis=0)
    turned_R = count_R - tl.sum(tl.where(tile_row_R == 0, count_R - valid_R.to(tl.int32), 0), axis=0)
    d_readout_RL = d_query_RL * read_RL
    d_phase_RL = d_readout_RL * (kc_L * slope_RL - ks_L * phase_RL) + d_key_RL * write_RL * slope_RL
    d_theta_RL = d_phase_RL * turned_R.to(tl.float32)[:, None]
    d_theta_RL -= d_leaving_RL * write_RL * slope_RL * (turns - turned_R).to(tl.float32)[:, None]
    d_turn_M = turns.to(tl.float32) * carry_M * of_modes_row(tl.sum(through_LL * quarter_LL, axis=1))
    d_key_RL += d_leaving_RL
    d_kc_RL = d_readout_RL * phase_RL
    d_ks_RL = d_readout_RL * slope_RL
    d_own_RM = d_own_R[:, None] * (read_RM * write_RM)

    inside_R = tile_row_R < rows
    d_raw_at_R = local_R * (channels * (P + 3 * M))
    d_gate_at_RM = d_raw_base + d_raw_at_R[:, None] + (P + mode_M)[None, :]
    inside_RM = inside_R[:, None] & (mode_M < M)[None, :]
    d_clock_RM = d_decay_RM * sigmoid(clock_RM)
    tl.store(d_gate_at_RM + 2 * M, d_clock_RM, mask=inside_RM)
    d_write_RM, d_read_RM = tl.zeros_like(write_RM), tl.zeros_like(read_RM)
    if not NEUTRAL:
        d_write_RM = of_modes(d_key_RL * phase_RL) + d_own_R[:, None] * read_RM * own_M
        d_read_RM = of_modes(d_query_RL * readout_RL) + d_own_R[:, None] * write_RM * own_M
        d_write_RM *= write_RM * (1.0 - 0.5 * write_RM)
        d_read_RM *= read_RM * (1.0 - 0.5 * read_RM)
    tl.store(d_gate_at_RM, d_write_RM, mask=inside_RM)
    tl.store(d_gate_at_RM + M, d_read_RM, mask=inside_RM)

    d_value_RP = tl.dot(tl.trans(matrix_RR), dz_RP, input_precision=PRECISION)
    d_value_RP = tl.dot(leaving_RL, gradient_LP, acc=d_value_RP, input_precision=PRECISION)
    d_value_RP += tl.sum(read_RM * write_RM * own_M, axis=1)[:, None] * dz_RP
    along_R = tl.sum(d_value_RP * raw_RP, axis=1)
    d_beta_R = along_R * (norm_R - 1.0)
    d_raw_RP = d_value_RP * (1.0 - blend + blend * norm_R)[:, None]
    d_raw_RP -= (blend / P * along_R * norm_R * norm_R * norm_R)[:, None] * raw_RP
    d_raw_at_RP = d_raw_base + d_raw_at_R[:, None] + p[None, :]
    tl.store(d_raw_at_RP, d_raw_RP, mask=inside_R[:, None] & (p < P)[None, :])

    place = (batch * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    partial_M = partials + place * (PARTIALS * M) + mode_M
    known_M = mode_M < M
    d_theta_M = d_turn_M + of_modes_row(tl.sum(d_theta_RL, axis=0))
    tl.store(partial_M + _WRITE * M, tl.sum(d_write_RM, axis=0), mask=known_M)
    tl.store(partial_M + _READ * M, tl.sum(d_read_RM, axis=0), mask=known_M)
    tl.store(partial_M + _CLOCK * M, tl.sum(d_clock_RM, axis=0), mask=known_M)
    tl.store(partial_M + _DECAY * M, tl.sum(d_decay_RM, axis=0), mask=known_M)
    tl.store(partial_M + _THETA * M, d_theta_M, mask=known_M)
    tl.store(partial_M + _KC * M, of_modes_row(tl.sum(d_kc_RL, axis=0)), mask=known_M)
    tl.store(partial_M + _KS * M, of_modes_row(tl.sum(d_ks_RL, axis=0)), mask=known_M)
    tl.store(partial_M + _OWN * M, tl.sum(d_own_RM, axis=0), mask=known_M)
    tl.store(beta_partials + place, tl.sum(d_beta_R, axis=0))
