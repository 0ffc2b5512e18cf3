"""Triton kernels of the selective scan's backward pass, in the terms of `triton_forward`.

Chunk by chunk, what the outputs ask of each chunk's entering state is scanned backward to the gradients of the states.
Then one program a chunk walks its tiles: forward for the states they are handed, backward with the gradient G of the
state that each hands on.

With query and key anchored at the tile's middle, H' = e^{-C/2} H, G' = e^{-C/2} G, and E = tril(dz v^T), the gradient
of query is E key + dz H'^T, that of key E^T query + v G'^T, and the tile asks e^{-C/2} (G' + query^T dz) of H. A decay
acts on every pair it stands between, on every read at or behind it, on every writing before it and on what passes
through. Its gradient is minus the sum of those products: the sum, over the rows from its own on, of key times its
gradient less query times its gradient, less what G' has of key^T v and of H'. A row's turn acts on the same, a quarter
turn ahead; summed over a tile, each row's share counts once for every turn on its side.

With X and Y the products of a query's gradient with its phase (cos, -sin) and with the phase a quarter turn ahead,
gates and decays in it, the gradients of kc and ks are sums of X and Y, and both products of query and its gradient
follow from them.
"""

# mypy: disable-error-code="no-untyped-def"
# The bodies are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from megatron_essh.ops.selective_scan.triton_forward import (
    CHUNK_ROWS,
    FLAGS,
    LARGEST_DECAY,
    SIZES,
    TILE_ROWS,
    chunk_base,
    counted,
    decays,
    kept,
    laid,
    lanes,
    load_columns,
    load_gate,
    load_mode_table,
    load_phases,
    load_raw,
    pair,
    product,
    product_of_given,
    product_with_given,
    row_marks,
    sigmoid,
    spans,
    state_block,
    tile_parts,
    tiles_of,
    together,
)

# Rows of the partial sums of table gradients, [B N, K, PARTIALS, M].
PARTIALS = tl.constexpr(9)
_WRITE, _READ, _CLOCK, _DECAY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_THETA, _KC, _KS, _OWN, _BETA = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)


@triton.jit(do_not_specialize=SIZES)
def state_gradients_kernel(
    raw, dz, gradients, phases, marks, read_bias, clock_bias, gamma, kc, ks,
    length, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What each chunk's outputs ask of the state it is entered with: gradients [B, K, N, M, 2, P]."""
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0)
    index = (batch * channels + channel) * tl.num_programs(1) + chunk
    p = tl.arange(0, WIDTH)
    gamma_M = load_mode_table(gamma, channel, M, MODES)
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_M, ks_M = load_mode_table(kc, channel, M, MODES), load_mode_table(ks, channel, M, MODES)

    local_R = tl.arange(0, CHUNK_ROWS)
    count_R, valid_R, cut_R, cuts_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    row_R = tl.multiple_of(local_R * stride_t, ALIGN)
    clock_RM = load_columns(base, row_R, valid_R, P + 2 * M, M, MODES).to(tl.float32) + clock_bias_M
    decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
    read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL, SPLIT)
    cos_RM, sin_RM = load_phases(phases, channel, count_R, MODES)
    arriving_RM = kept(read_RM * tl.exp(-tl.cumsum(decay_RM, axis=0)), cuts_R == 0, HAS_MARKS)
    zero_RM, one_RM = kc_M * cos_RM - ks_M * sin_RM, -kc_M * sin_RM - ks_M * cos_RM
    arriving_RL = pair(arriving_RM * zero_RM, arriving_RM * one_RM)

    dz_base = dz + ((batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel) * P
    dz_at_RP = dz_base + local_R[:, None] * (channels * P) + p[None, :]
    dz_RP = tl.load(dz_at_RP, mask=valid_R[:, None] & (p < P)[None, :], other=0.0)
    gradient_PL = tl.zeros([WIDTH, 2 * MODES], tl.float32)
    gradient_PL = product_of_given(tl.trans(dz_RP), arriving_RL, gradient_PL, SPLIT)
    pointer_PL, mask_PL = state_block(gradients, index, P, M, WIDTH, MODES)
    tl.store(pointer_PL, gradient_PL, mask=mask_PL)


@triton.jit
def exact_pairs(query_RL, key_RL, decay_RM, d_matrix_RR, rows):
    """(matrix^T of `exact_matrix`, gradients of query and key from the matrix's), [R, R], [R, L], [R, L]."""
    row_R = tl.arange(0, TILE_ROWS)
    transposed_RR = tl.zeros_like(d_matrix_RR)
    d_query_RL = tl.zeros_like(query_RL)
    d_key_RL = tl.zeros_like(key_RL)
    for s in range(rows):
        since_RM = tl.cumsum(tl.where(row_R[:, None] > s, decay_RM, 0.0), axis=0)
        shrink_RM = tl.exp(-since_RM)
        shrink_RL = pair(shrink_RM, shrink_RM)
        key_L = tl.sum(tl.where(row_R[:, None] == s, key_RL, 0.0), axis=0)
        column_R = tl.sum(query_RL * shrink_RL * key_L[None, :], axis=1)
        transposed_RR = tl.where(row_R[:, None] == s, column_R[None, :], transposed_RR)
        d_column_R = tl.sum(tl.where(row_R[None, :] == s, d_matrix_RR, 0.0), axis=1)
        shrink_RL *= d_column_R[:, None]
        d_query_RL += shrink_RL * key_L[None, :]
        d_key_L = tl.sum(shrink_RL * query_RL, axis=0)
        d_key_RL = tl.where(row_R[:, None] == s, d_key_L[None, :], d_key_RL)
    return transposed_RR, d_query_RL, d_key_RL


@triton.jit
def unpair(x_XL):
    """The first lanes of all modes and the second, [X, L] -> [X, M] twice: the reverse of `pair`."""
    x_X2M = tl.reshape(x_XL, (x_XL.shape[0], 2, x_XL.shape[1] // 2))
    return tl.split(tl.permute(x_X2M, (0, 2, 1)))


@triton.jit
def chunk_gradients(
    raw, dz, d_raw, states, gradients, tile_states, partials, phases, marks,
    write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
    length, chunks, channels, eps, stride_b, stride_t, stride_k, batch, chunk, channel,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of raw [B, T, K, X] in one chunk, and the chunk's share of those of the tables."""
    LATER: tl.constexpr = CHUNK_ROWS // TILE_ROWS - 1  # tiles behind a chunk's first
    index = (batch * channels + channel) * chunks + chunk
    p, mode_M, tile_row_R = tl.arange(0, WIDTH), tl.arange(0, MODES), tl.arange(0, TILE_ROWS)
    gamma_M = load_mode_table(gamma, channel, M, MODES)
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_M, ks_M = load_mode_table(kc, channel, M, MODES), load_mode_table(ks, channel, M, MODES)
    own_M = kc_M * (1.0 - load_mode_table(zero_lag, channel, M, MODES))
    blend = tl.load(beta + channel)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    item = (batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel
    dz_base, d_raw_base = dz + item * P, d_raw + item * (P + 3 * M)
    tiles = tiles_of(length, chunk)

    pointer_PL, mask_PL = state_block(states, index, P, M, WIDTH, MODES)
    state_PL = tl.load(pointer_PL, mask=mask_PL, other=0.0)
    for tile in range(tiles - 1):
        local_R = tile * TILE_ROWS + tile_row_R
        count_R, valid_R, cut_R, cuts_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
        row_R = tl.multiple_of(local_R * stride_t, ALIGN)
        raw_RP, norm_R = load_raw(base, row_R, valid_R, eps, P, WIDTH)
        clock_RM = load_columns(base, row_R, valid_R, P + 2 * M, M, MODES).to(tl.float32) + clock_bias_M
        decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
        write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL, SPLIT)
        cos_RM, sin_RM = load_phases(phases, channel, count_R, MODES)
        cos_RM, sin_RM = laid(cos_RM, SPLIT), laid(sin_RM, SPLIT)
        falling_RM, rising_RM, before_M, through_M, after_M = spans(decay_RM, EXACT)
        leaving_RM = write_RM * rising_RM * (1.0 - blend + blend * norm_R)[:, None]
        _, leaving_R, whole = tile_parts(marks, batch, length, chunk, tile, cuts_R, HAS_MARKS)
        if HAS_MARKS:
            leaving_RM, through_M = kept(leaving_RM, leaving_R, HAS_MARKS), through_M * whole
        leaving_RL = pair(leaving_RM * cos_RM, -leaving_RM * sin_RM)
        state_PL = product_of_given(tl.trans(raw_RP), leaving_RL, state_PL * lanes(through_M), SPLIT) * lanes(after_M)
        pointer_PL, mask_PL = state_block(tile_states, index * LATER + tile, P, M, WIDTH, MODES)
        tl.store(pointer_PL, state_PL, mask=mask_PL)
    tl.debug_barrier()  # the program's own stores are read below

    d_write_bias_RM = tl.zeros([TILE_ROWS, MODES], tl.float32)
    d_read_bias_RM, d_clock_bias_RM = tl.zeros_like(d_write_bias_RM), tl.zeros_like(d_write_bias_RM)
    d_gamma_RM, d_theta_RM, d_own_RM = (
        tl.zeros_like(d_write_bias_RM),
        tl.zeros_like(d_write_bias_RM),
        tl.zeros_like(d_write_bias_RM),
    )
    d_kc_RM, d_ks_RM = tl.zeros_like(d_write_bias_RM), tl.zeros_like(d_write_bias_RM)
    d_turn_M = tl.zeros([MODES], tl.float32)
    d_beta_R = tl.zeros([TILE_ROWS], tl.float32)
    pointer_PL, mask_PL = state_block(gradients, index, P, M, WIDTH, MODES)
    gradient_PL = tl.load(pointer_PL, mask=mask_PL, other=0.0)
    for back in range(tiles):
        tile = tiles - 1 - back
        if tile > 0:
            pointer_PL, _ = state_block(tile_states, index * LATER + tile - 1, P, M, WIDTH, MODES)
        else:
            pointer_PL, _ = state_block(states, index, P, M, WIDTH, MODES)
        state_PL = tl.load(pointer_PL, mask=mask_PL, other=0.0)
        rows = length - chunk * CHUNK_ROWS - tile * TILE_ROWS
        local_R = tile * TILE_ROWS + tile_row_R
        count_R, valid_R, cut_R, cuts_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
        row_R = tl.multiple_of(local_R * stride_t, ALIGN)
        raw_RP, norm_R = load_raw(base, row_R, valid_R, eps, P, WIDTH)
        dz_at_RP = dz_base + local_R[:, None] * (channels * P) + p[None, :]
        dz_RP = tl.load(dz_at_RP, mask=valid_R[:, None] & (p < P)[None, :], other=0.0)
        scale_R = 1.0 - blend + blend * norm_R  # value = scale raw
        clock_RM = laid(load_columns(base, row_R, valid_R, P + 2 * M, M, MODES), SPLIT) + clock_bias_M
        decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
        write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL, SPLIT)
        read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL, SPLIT)
        cos_RM, sin_RM = load_phases(phases, channel, count_R, MODES)
        cos_RM, sin_RM = laid(cos_RM, SPLIT), laid(sin_RM, SPLIT)
        falling_RM, rising_RM, before_M, through_M, after_M = spans(decay_RM, EXACT)
        reading_RM, writing_RM = read_RM * falling_RM, write_RM * rising_RM
        readout_RL = pair(kc_M * cos_RM - ks_M * sin_RM, -kc_M * sin_RM - ks_M * cos_RM)
        phase_RL = pair(cos_RM, -sin_RM)
        query_RL, key_RL = pair(reading_RM, reading_RM) * readout_RL, pair(writing_RM, writing_RM) * phase_RL
        after_PL = gradient_PL * lanes(after_M)
        reached_R, leaving_R, whole = tile_parts(marks, batch, length, chunk, tile, cuts_R, HAS_MARKS)
        if HAS_MARKS:
            through_M *= whole

        # The gradients of query and key: of pairs, of what the state was read, of what was written to it.
        d_matrix_RR = tl.dot(dz_RP, tl.trans(raw_RP), input_precision="ieee") * scale_R[None, :]
        own_R = tl.sum(tl.where(tile_row_R[:, None] == tile_row_R[None, :], d_matrix_RR, 0.0), axis=1)
        d_matrix_RR = tl.where(tile_row_R[:, None] > tile_row_R[None, :], d_matrix_RR, 0.0)
        d_matrix_RR = together(d_matrix_RR, cuts_R, HAS_MARKS)
        none_RL = tl.zeros([TILE_ROWS, 2 * MODES], tl.float32)
        d_read_RL = product_of_given(dz_RP, state_PL, none_RL, SPLIT) * lanes(before_M)
        d_read_RL = kept(d_read_RL, reached_R, HAS_MARKS)
        d_leaving_RL = tl.dot(raw_RP, after_PL.to(raw_RP.dtype), input_precision="ieee") * scale_R[:, None]
        d_leaving_RL = kept(d_leaving_RL, leaving_R, HAS_MARKS)
        if EXACT:
            bare_query_RL, bare_key_RL = pair(read_RM, read_RM) * readout_RL, pair(write_RM, write_RM) * phase_RL
            transposed_RR, d_query_RL, d_key_RL = exact_pairs(
                bare_query_RL, bare_key_RL, decay_RM, d_matrix_RR, tl.minimum(rows, TILE_ROWS)
            )
            d_query_RL += d_read_RL * pair(falling_RM, falling_RM)
            d_leaving_RL *= pair(rising_RM, rising_RM)
            reading_RM, writing_RM = read_RM, write_RM
        else:
            transposed_RR = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
            transposed_RR = product(key_RL, tl.trans(query_RL), transposed_RR, SPLIT)
            d_query_RL = product(d_matrix_RR, key_RL, d_read_RL, SPLIT)
            d_key_RL = product(tl.trans(d_matrix_RR), query_RL, none_RL, SPLIT)
        transposed_RR = tl.where(tile_row_R[:, None] < tile_row_R[None, :], transposed_RR, 0.0)
        transposed_RR = together(transposed_RR, cuts_R, HAS_MARKS)

        # The gradient of raw values.
        d_value_RP = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
        d_value_RP = product(key_RL, tl.trans(after_PL), d_value_RP, SPLIT)
        d_value_RP = kept(d_value_RP, leaving_R, HAS_MARKS)
        own_RR = tl.where(
            tile_row_R[:, None] == tile_row_R[None, :],
            tl.sum(read_RM * write_RM * own_M, axis=1)[:, None],
            transposed_RR,
        )
        d_value_RP = product_with_given(own_RR, dz_RP, d_value_RP, SPLIT)
        along_R = tl.sum(d_value_RP * raw_RP.to(tl.float32), axis=1)
        d_beta_R += along_R * (norm_R - 1.0)
        d_raw_RP = d_value_RP * scale_R[:, None]
        d_raw_RP -= (blend / P * along_R * norm_R * norm_R * norm_R)[:, None] * raw_RP.to(tl.float32)
        inside_R = tile_row_R < rows
        d_raw_at_R = local_R * (channels * (P + 3 * M))
        d_raw_at_RP = d_raw_base + d_raw_at_R[:, None] + p[None, :]
        tl.store(d_raw_at_RP, d_raw_RP, mask=inside_R[:, None] & (p < P)[None, :])

        # Products of query and key with their gradients, and with those a quarter turn back.
        d_zero_RM, d_one_RM = unpair(d_query_RL)
        x_RM = reading_RM * (d_zero_RM * cos_RM - d_one_RM * sin_RM)
        y_RM = -reading_RM * (d_zero_RM * sin_RM + d_one_RM * cos_RM)
        of_query_RM, turned_query_RM = kc_M * x_RM + ks_M * y_RM, kc_M * y_RM - ks_M * x_RM
        d_kc_RM += x_RM
        d_ks_RM += y_RM
        d_zero_RM, d_one_RM = unpair(d_leaving_RL)
        of_leaving_RM = writing_RM * (d_zero_RM * cos_RM - d_one_RM * sin_RM)
        turned_leaving_RM = -writing_RM * (d_zero_RM * sin_RM + d_one_RM * cos_RM)
        d_zero_RM, d_one_RM = unpair(d_key_RL)
        of_key_RM = writing_RM * (d_zero_RM * cos_RM - d_one_RM * sin_RM) + of_leaving_RM
        turned_key_RM = -writing_RM * (d_zero_RM * sin_RM + d_one_RM * cos_RM) + turned_leaving_RM

        # What passes through, and a quarter turn of it.
        zero_PM, one_PM = unpair(state_PL)
        after_zero_PM, after_one_PM = unpair(after_PL)
        passing_M = through_M * tl.sum(after_zero_PM * zero_PM + after_one_PM * one_PM, axis=0)
        turned_passing_M = through_M * tl.sum(after_one_PM * zero_PM - after_zero_PM * one_PM, axis=0)

        behind_RM = of_key_RM - of_query_RM
        d_decay_RM = tl.sum(behind_RM, axis=0)[None, :] - tl.cumsum(behind_RM, axis=0) + behind_RM
        d_decay_RM -= (tl.sum(of_leaving_RM, axis=0) + passing_M)[None, :]
        d_decay_RM = tl.where((decay_RM > 0.0) & (decay_RM < LARGEST_DECAY), d_decay_RM, 0.0)
        # What is read or paired at a row has the turns up to it behind it; what is written and leaves, those after it.
        before, _ = counted(marks, batch, length, chunk, tile * TILE_ROWS, HAS_MARKS)
        upto, _ = counted(marks, batch, length, chunk, (tile + 1) * TILE_ROWS, HAS_MARKS)
        turns = (upto - before).to(tl.float32)
        turned_R = (count_R - before).to(tl.float32)
        d_theta_RM += turned_R[:, None] * (turned_query_RM + turned_key_RM) - turns * turned_leaving_RM
        d_turn_M += turns * turned_passing_M

        d_clock_RM = d_decay_RM * sigmoid(clock_RM)
        d_gate_at_RM = d_raw_base + d_raw_at_R[:, None] + (P + mode_M)[None, :]
        inside_RM = inside_R[:, None] & (mode_M < M)[None, :]
        tl.store(d_gate_at_RM + 2 * M, d_clock_RM, mask=inside_RM)
        own_RM = own_R[:, None] * (read_RM * write_RM)
        d_own_RM += own_RM
        d_write_RM, d_read_RM = tl.zeros_like(d_clock_RM), tl.zeros_like(d_clock_RM)
        if not NEUTRAL:
            d_write_RM = (of_key_RM + own_RM * own_M) * (1.0 - 0.5 * write_RM)
            d_read_RM = (of_query_RM + own_RM * own_M) * (1.0 - 0.5 * read_RM)
        tl.store(d_gate_at_RM, d_write_RM, mask=inside_RM)
        tl.store(d_gate_at_RM + M, d_read_RM, mask=inside_RM)
        d_write_bias_RM += d_write_RM
        d_read_bias_RM += d_read_RM
        d_clock_bias_RM += d_clock_RM
        d_gamma_RM += d_decay_RM

        # The gradient of the state that the tile was handed.
        query_RL = kept(query_RL, reached_R, HAS_MARKS)
        if HAS_MARKS:
            after_PL *= whole
        if EXACT:
            gradient_PL = product_of_given(tl.trans(dz_RP), query_RL, after_PL * lanes(through_M), SPLIT)
        else:
            gradient_PL = product_of_given(tl.trans(dz_RP), query_RL, after_PL, SPLIT) * lanes(before_M)

    partial_M = partials + ((batch * chunks + chunk) * channels + channel) * (PARTIALS * M) + mode_M
    known_M = mode_M < M
    tl.store(partial_M + _WRITE * M, tl.sum(d_write_bias_RM, axis=0), mask=known_M)
    tl.store(partial_M + _READ * M, tl.sum(d_read_bias_RM, axis=0), mask=known_M)
    tl.store(partial_M + _CLOCK * M, tl.sum(d_clock_bias_RM, axis=0), mask=known_M)
    tl.store(partial_M + _DECAY * M, tl.sum(d_gamma_RM, axis=0), mask=known_M)
    tl.store(partial_M + _THETA * M, tl.sum(d_theta_RM, axis=0) + d_turn_M, mask=known_M)
    tl.store(partial_M + _KC * M, tl.sum(d_kc_RM, axis=0), mask=known_M)
    tl.store(partial_M + _KS * M, tl.sum(d_ks_RM, axis=0), mask=known_M)
    tl.store(partial_M + _OWN * M, tl.sum(d_own_RM, axis=0), mask=known_M)
    tl.store(partial_M + _BETA * M, tl.where(mode_M == 0, tl.sum(d_beta_R, axis=0), 0.0), mask=known_M)


@triton.jit(do_not_specialize=SIZES)
def input_gradients_kernel(
    raw, dz, d_raw, states, gradients, tile_states, exact, partials, phases, marks,
    write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
    length, chunks, channels, items, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`chunk_gradients` of the chunks of one form: see `outputs_kernel`.

    states: what the chunks are entered with; gradients: of what they leave. tile_states [B, K, N, 3, M, 2, P]: room
    for what a chunk's later tiles are handed. partials: [B N, K, PARTIALS, M].
    """
    if EXACT:
        program, programs = tl.program_id(0), tl.num_programs(0)
        for start in range(program, items, programs * FLAGS):
            index_F = start + tl.arange(0, FLAGS) * programs
            if tl.max(tl.load(exact + index_F, mask=index_F < items, other=0), axis=0) > 0:
                for index in range(start, tl.minimum(items, start + programs * FLAGS), programs):
                    if tl.load(exact + index) > 0:
                        chunk = index % chunks
                        channel, batch = (index // chunks % channels).to(tl.int64), index // chunks // channels
                        chunk_gradients(
                            raw, dz, d_raw, states, gradients, tile_states, partials, phases, marks,
                            write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
                            length, chunks, channels, eps, stride_b, stride_t, stride_k,
                            batch.to(tl.int64), chunk, channel,
                            P, M, WIDTH, MODES, ALIGN, NEUTRAL, HAS_MARKS, SPLIT, EXACT,
                        )  # fmt: skip
    else:
        channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if tl.load(exact + (batch * channels + channel) * chunks + chunk) == 0:
            chunk_gradients(
                raw, dz, d_raw, states, gradients, tile_states, partials, phases, marks,
                write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
                length, chunks, channels, eps, stride_b, stride_t, stride_k, batch, chunk, channel,
                P, M, WIDTH, MODES, ALIGN, NEUTRAL, HAS_MARKS, SPLIT, EXACT,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def table_gradients_kernel(
    partials, d_tables, d_beta, rho_raw, kc, zero_lag, places,
    M: tl.constexpr, MODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the tables from the partial sums of `places` chunks: d_tables [8, K, M], d_beta [K].

    d_tables stands in the order of `ModalTables`. A program sums one row of the partials of a channel, always in the
    same order; that of kc sums two.
    """
    channel, channels, kind = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    mode_M = tl.arange(0, MODES)
    known_M = mode_M < M
    at_M = partials + channel.to(tl.int64) * (PARTIALS * M) + mode_M
    sum_BM = tl.zeros([BLOCK, MODES], tl.float32)
    own_BM = tl.zeros([BLOCK, MODES], tl.float32)
    for start in range(0, places, BLOCK):
        place_B = start + tl.arange(0, BLOCK)
        offset_BM = place_B.to(tl.int64)[:, None] * (channels * PARTIALS * M) + at_M[None, :]
        mask_BM = (place_B < places)[:, None] & known_M[None, :]
        sum_BM += tl.load(offset_BM + kind * M, mask=mask_BM, other=0.0)
        if kind == _KC:
            own_BM += tl.load(offset_BM + _OWN * M, mask=mask_BM, other=0.0)
    sum_M = tl.sum(sum_BM, axis=0)
    if kind == _DECAY:
        sum_M *= sigmoid(load_mode_table(rho_raw, channel, M, MODES))
    if kind == _KC:
        sum_M += tl.sum(own_BM, axis=0) * (1.0 - load_mode_table(zero_lag, channel, M, MODES))
    if kind == _OWN:
        sum_M *= -load_mode_table(kc, channel, M, MODES)
    if kind == _BETA:
        tl.store(d_beta + channel, tl.sum(sum_M, axis=0))
    else:
        tl.store(d_tables + (kind * channels + channel) * M + mode_M, sum_M, mask=known_M)
