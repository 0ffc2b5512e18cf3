"""Triton kernels of the selective scan's forward pass: chunk states, their scan, outputs.

Rows are taken in chunks of `CHUNK_ROWS`, in tiles of `TILE_ROWS`. A mode has two lanes, side by side as in the state
[..., M, 2, P]. Within a chunk the state is kept in the frame that turns with the modes: with n the number of valid
positions from the chunk's first row and a = n theta, the lanes of a mode are written with write (cos a, -sin a) and
read with read (kc cos a - ks sin a, -kc sin a - ks cos a), so that the carried state only decays; the scan over chunks
turns it once a chunk. With c the running decay of a tile and C its total, query q e^{C/2 - c} and key k e^{c - C/2}
are anchored at the tile's middle: the tile's matrix is tril(query key^T), it reads query (e^{-C/2} H) of the state it
is handed, and hands on e^{-C/2} (e^{-C/2} H + key^T v). Where C is beyond `ANCHOR_LIMIT` the matrix is summed
elementwise instead, each exponent from its own terms, and q and k decay from the tile's start and to its end.

The first row of a document (a cut) does not decay. What a cut parts is masked instead: pairs of rows of two documents,
the arriving state to rows from the tile's first cut on, what rows before its last one would leave, the carried state if
there is any. The same goes for chunks. A pad neither decays, writes, reads nor turns.

Arithmetic and state are fp32. A fitted bank's modes cancel to a hundredth and less of themselves, so nothing is
rounded before modes are summed: for bf16 input, a product of fp32 blocks is one of their bf16 halves, good to 2^-16.
Raw values enter as they stand, in bf16; what the blend makes of them is a factor of the row's key.

Lanes and values are padded inside to powers of two; every load is masked. In blocks of lanes, the first of all modes
come before the second.
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
LARGEST_DECAY = tl.constexpr(128.0)
# A mark holds the valid positions of the chunk up to and including the row, two bits, and above them the cuts likewise.
VALID_BIT = tl.constexpr(256)
CUT_BIT = tl.constexpr(512)
ONE_CUT = tl.constexpr(1024)
# Flags that a program of a launch of the exact form looks at together.
FLAGS = tl.constexpr(32)
# Arguments whose values compile no new variant: every length runs the same code.
SIZES = (
    *("length", "chunks", "channels", "items", "places", "segments", "segment_chunks"),
    *("stride_b", "stride_t", "stride_k"),
)


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate relative to itself however small it is.

    With s = e^{-|x|} and u = s / (2 + s) <= 1/3, log(1 + s) = 2 atanh(u): its series, the last terms fitted.
    """
    small = tl.exp(-tl.abs(x))
    u = small / (2.0 + small)
    y = u * u
    series = 2.0 + y * (0.66666317 + y * (0.40024853 + y * (0.27961418 + y * 0.28174657)))
    return tl.maximum(x, 0.0) + u * series


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def halves(x):
    """x as the sum of two bf16 blocks, to 16 bits: its upper half as it stands, and what that leaves."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), (x - high).to(tl.bfloat16)


@triton.jit
def product(x, y, sums, SPLIT: tl.constexpr):
    """sums + x y of fp32 blocks; SPLIT by bf16 halves, whose least product is left out."""
    if SPLIT:
        x_high, x_low = halves(x)
        y_high, y_low = halves(y)
        sums = tl.dot(x_low, y_high, acc=sums)
        sums = tl.dot(x_high, y_low, acc=sums)
        sums = tl.dot(x_high, y_high, acc=sums)
    else:
        sums = tl.dot(x, y, acc=sums, input_precision="ieee")
    return sums


@triton.jit
def product_of_given(given, y, sums, SPLIT: tl.constexpr):
    """sums + given y, where `given` is as it stands in memory: bf16 if SPLIT."""
    if SPLIT:
        y_high, y_low = halves(y)
        sums = tl.dot(given, y_low, acc=sums)
        sums = tl.dot(given, y_high, acc=sums)
    else:
        sums = tl.dot(given, y, acc=sums, input_precision="ieee")
    return sums


@triton.jit
def product_with_given(x, given, sums, SPLIT: tl.constexpr):
    """sums + x given, likewise."""
    if SPLIT:
        x_high, x_low = halves(x)
        sums = tl.dot(x_low, given, acc=sums)
        sums = tl.dot(x_high, given, acc=sums)
    else:
        sums = tl.dot(x, given, acc=sums, input_precision="ieee")
    return sums


@triton.jit
def laid(x_RM, SPLIT: tl.constexpr):
    """x of a tile's rows, spread over the threads as tensor cores leave results and take factors.

    As a product with the identity: exact for bf16, to 16 bits for fp32. What is made of it then need not be moved.
    """
    if SPLIT and x_RM.shape[0] == TILE_ROWS:
        row_R = tl.arange(0, TILE_ROWS)
        identity_RR = tl.where(row_R[:, None] == row_R[None, :], 1.0, 0.0).to(tl.bfloat16)
        if x_RM.dtype == tl.bfloat16:
            return tl.dot(identity_RR, x_RM)
        else:
            high_RM, low_RM = halves(x_RM)
            return tl.dot(identity_RR, high_RM, acc=tl.dot(identity_RR, low_RM))
    else:
        return x_RM.to(tl.float32)


@triton.jit
def row_marks(marks, batch, length, chunk, local_R, HAS_MARKS: tl.constexpr):
    """(count, valid, cut, cuts) of rows of a chunk: its valid positions up to each, whether it is one, whether it is
    cut, and the chunk's cuts up to it."""
    t_R = chunk * CHUNK_ROWS + local_R
    inside_R = t_R < length
    if HAS_MARKS:
        mark_R = tl.load(marks + batch * length + t_R, mask=inside_R, other=0)
        count_R, cuts_R = mark_R & (VALID_BIT - 1), mark_R // ONE_CUT
        valid_R, cut_R = (mark_R & VALID_BIT) != 0, (mark_R & CUT_BIT) != 0
    else:
        count_R, valid_R, cuts_R = local_R + 1, inside_R, tl.zeros_like(local_R)
        cut_R = tl.full(local_R.shape, False, tl.int1)
    return count_R, valid_R, cut_R, cuts_R


@triton.jit
def counted(marks, batch, length, chunk, rows, HAS_MARKS: tl.constexpr):
    """(valid positions, cuts) among the chunk's first `rows`."""
    count, cuts = tl.minimum(rows, length - chunk * CHUNK_ROWS), 0
    if HAS_MARKS:
        last = batch * length + chunk * CHUNK_ROWS + count - 1
        mark = tl.load(marks + last, mask=count > 0, other=0)
        count, cuts = mark & (VALID_BIT - 1), mark // ONE_CUT
    return count, cuts


@triton.jit
def tile_parts(marks, batch, length, chunk, tile, cuts_R, HAS_MARKS: tl.constexpr):
    """(reached, leaving, whole) of a tile: which rows the state it is handed reaches, the writing of which rows it
    hands on, and 1.0 if the state passes, 0.0 if the tile holds a cut."""
    _, before = counted(marks, batch, length, chunk, tile * TILE_ROWS, HAS_MARKS)
    _, after = counted(marks, batch, length, chunk, (tile + 1) * TILE_ROWS, HAS_MARKS)
    return cuts_R == before, cuts_R == after, tl.where(before == after, 1.0, 0.0)


@triton.jit
def kept(x_RX, kept_R, HAS_MARKS: tl.constexpr):
    """x with other rows at 0; where there are no marks, all rows are kept."""
    if HAS_MARKS:
        return tl.where(kept_R[:, None], x_RX, 0.0)
    else:
        return x_RX


@triton.jit
def together(x_RR, cuts_R, HAS_MARKS: tl.constexpr):
    """x with pairs of rows of two documents at 0."""
    if HAS_MARKS:
        return tl.where(cuts_R[:, None] == cuts_R[None, :], x_RR, 0.0)
    else:
        return x_RR


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
def load_raw(base, row_R, valid_R, eps, P: tl.constexpr, WIDTH: tl.constexpr):
    """(raw values [R, P] as they stand, 1 / their root mean square [R]); row: offsets from base."""
    p = tl.arange(0, WIDTH)
    mask_RP = valid_R[:, None] & (p < P)[None, :]
    raw_RP = tl.load(base + row_R[:, None] + p[None, :], mask=mask_RP, other=0.0)
    square_RP = raw_RP.to(tl.float32) * raw_RP.to(tl.float32)
    return raw_RP, tl.rsqrt(tl.sum(square_RP, axis=1) / P + eps)


@triton.jit
def load_mode_table(table, channel, M: tl.constexpr, MODES: tl.constexpr):
    mode_M = tl.arange(0, MODES)
    return tl.load(table + channel * M + mode_M, mask=mode_M < M, other=0.0)


@triton.jit
def load_columns(base, row_R, valid_R, column, M: tl.constexpr, MODES: tl.constexpr):
    """Pre-activations from `column` on, without their biases, [R, M]."""
    mode_M = tl.arange(0, MODES)
    mask_RM = valid_R[:, None] & (mode_M < M)[None, :]
    return tl.load(base + row_R[:, None] + (column + mode_M)[None, :], mask=mask_RM, other=0.0)


@triton.jit
def load_gate(
    base, row_R, valid_R, bias_M, column,
    M: tl.constexpr, MODES: tl.constexpr, NEUTRAL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A gate, 0 in pads, [R, M]."""
    live_RM = valid_R[:, None] & (tl.arange(0, MODES) < M)[None, :]
    if NEUTRAL:
        gate_RM = tl.where(live_RM, 1.0, 0.0)
    else:
        logit_RM = laid(load_columns(base, row_R, valid_R, column, M, MODES), SPLIT) + bias_M
        gate_RM = tl.where(live_RM, 2.0 / (1.0 + tl.exp(-logit_RM)), 0.0)
    return gate_RM


@triton.jit
def decays(clock_RM, valid_R, cut_R, gamma_M, M: tl.constexpr, MODES: tl.constexpr):
    """Decays of clock pre-activations, [R, M]: a pad's and a cut's are 0."""
    decay_RM = tl.minimum(gamma_M + softplus(clock_RM), LARGEST_DECAY)
    return tl.where((valid_R & ~cut_R)[:, None] & (tl.arange(0, MODES) < M)[None, :], decay_RM, 0.0)


@triton.jit
def load_phases(phases, channel, count_R, MODES: tl.constexpr):
    """cos and sin of each row's phase, [R, M]."""
    at_RM = phases + (channel * (CHUNK_ROWS + 1) + count_R[:, None]) * (2 * MODES) + tl.arange(0, MODES)[None, :]
    return tl.load(at_RM), tl.load(at_RM + MODES)


@triton.jit
def pair(zero_RM, one_RM):
    """The lanes [R, L] of which the modes' first are zero_RM and the second one_RM."""
    rows: tl.constexpr = zero_RM.shape[0]
    modes: tl.constexpr = zero_RM.shape[1]
    first_2 = tl.arange(0, 2)[None, :, None] == 0
    both_R2M = tl.where(first_2, tl.reshape(zero_RM, (rows, 1, modes)), tl.reshape(one_RM, (rows, 1, modes)))
    return tl.reshape(both_R2M, (rows, 2 * modes))


@triton.jit
def lanes(x_M):
    """[M] -> [1, L]: the same in both lanes of a mode."""
    both_2M = tl.broadcast_to(x_M[None, :], (2, x_M.shape[0]))
    return tl.reshape(both_2M, (1, 2 * x_M.shape[0]))


@triton.jit
def state_block(states, index, P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr):
    """(pointers, mask) of state number `index` of a buffer [..., M, 2, P], taken as [P, L]."""
    lane_L, p = tl.arange(0, 2 * MODES), tl.arange(0, WIDTH)
    mode_L = lane_L % MODES
    at_L = (2 * mode_L + lane_L // MODES) * P
    return states + index * (2 * M * P) + at_L[None, :] + p[:, None], (mode_L < M)[None, :] & (p < P)[:, None]


@triton.jit
def decay_to_end(decay_RM):
    """The decay each row's writing undergoes from the next row to the last, [R, M]."""
    return tl.maximum(tl.cumsum(decay_RM, axis=0, reverse=True) - decay_RM, 0.0)


@triton.jit
def spans(decay_RM, EXACT: tl.constexpr):
    """What a tile's decays make of query [R, M] and key [R, M], of the state as it is read, as it is carried up to
    where keys are anchored, and from there to the end [M]."""
    total_M = tl.sum(decay_RM, axis=0)
    running_RM = tl.cumsum(decay_RM, axis=0)
    if EXACT:
        one_M = tl.full(total_M.shape, 1.0, tl.float32)
        return tl.exp(-running_RM), tl.exp(-decay_to_end(decay_RM)), one_M, tl.exp(-total_M), one_M
    else:
        shift_RM = 0.5 * total_M[None, :] - running_RM
        half_M = tl.exp(-0.5 * total_M)
        return tl.exp(shift_RM), tl.exp(-shift_RM), half_M, half_M, half_M


@triton.jit
def exact_matrix(query_RL, key_RL, decay_RM, rows):
    """Entry (t, s) is sum over lanes of query_t key_s e^{-(decay_{s+1} + ... + decay_t)} for s <= t, [R, R]."""
    row_R = tl.arange(0, TILE_ROWS)
    matrix_RR = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    for s in range(rows):
        since_RM = tl.cumsum(tl.where(row_R[:, None] > s, decay_RM, 0.0), axis=0)
        shrink_RM = tl.exp(-since_RM)
        key_L = tl.sum(tl.where(row_R[:, None] == s, key_RL, 0.0), axis=0)
        column_R = tl.sum(query_RL * pair(shrink_RM, shrink_RM) * key_L[None, :], axis=1)
        matrix_RR = tl.where(row_R[None, :] == s, column_R[:, None], matrix_RR)
    return matrix_RR


@triton.jit(do_not_specialize=SIZES)
def tables_kernel(theta, rho_raw, phases, gamma, M: tl.constexpr, MODES: tl.constexpr):
    """cos and sin of theta times 0 to a chunk's rows, from fp64 angles: [K, rows + 1, 2, MODES]; gamma [K, M]."""
    channel, count = tl.program_id(0), tl.program_id(1)
    mode_M = tl.arange(0, MODES)
    angle_M = load_mode_table(theta, channel, M, MODES).to(tl.float64) * count
    at_M = phases + (channel * (CHUNK_ROWS + 1) + count) * (2 * MODES) + mode_M
    tl.store(at_M, tl.cos(angle_M).to(tl.float32))
    tl.store(at_M + MODES, tl.sin(angle_M).to(tl.float32))
    if count == 0:
        gamma_M = softplus(load_mode_table(rho_raw, channel, M, MODES))
        tl.store(gamma + channel * M + mode_M, gamma_M, mask=mode_M < M)


@triton.jit(do_not_specialize=SIZES)
def marks_kernel(numbers, valid, marks, length, HAS_NUMBERS: tl.constexpr, HAS_VALID: tl.constexpr):
    """The mark of every row of a chunk: marks, int32 [B, T].

    numbers [B, T]: a row is cut where its number is not that of the row before.
    """
    chunk, batch, local_R = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, CHUNK_ROWS)
    t_R = chunk * CHUNK_ROWS + local_R
    inside_R = t_R < length
    at_R = batch * length + t_R
    valid_R = inside_R.to(tl.int32)
    if HAS_VALID:
        valid_R = tl.load(valid + at_R, mask=inside_R, other=0).to(tl.int32)
    mark_R = tl.cumsum(valid_R, axis=0) + valid_R * VALID_BIT
    if HAS_NUMBERS:
        later_R = inside_R & (t_R > 0)
        number_R = tl.load(numbers + at_R, mask=later_R, other=0)
        cut_R = (number_R != tl.load(numbers + at_R - 1, mask=later_R, other=0)).to(tl.int32)
        mark_R += cut_R * CUT_BIT + tl.cumsum(cut_R, axis=0) * ONE_CUT
    tl.store(marks + at_R, mark_R, mask=inside_R)


@triton.jit(do_not_specialize=SIZES)
def chunk_states_kernel(
    raw, states, totals, exact, phases, marks, write_bias, clock_bias, gamma, beta,
    length, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What each chunk leaves of its own writing, in its own frame: states [B, K, N, M, 2, P]; its decay [B, K, N, M],
    LARGEST_DECAY if it holds a cut.

    exact [B, K, N]: 1 where a tile of the chunk decays beyond what one anchor spans.
    """
    channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = (batch * tl.num_programs(0) + channel) * tl.num_programs(1) + chunk
    mode_M = tl.arange(0, MODES)
    gamma_M = load_mode_table(gamma, channel, M, MODES)
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    blend = tl.load(beta + channel)

    local_R = tl.arange(0, CHUNK_ROWS)
    count_R, valid_R, cut_R, cuts_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    row_R = tl.multiple_of(local_R * stride_t, ALIGN)
    raw_RP, norm_R = load_raw(base, row_R, valid_R, eps, P, WIDTH)
    clock_RM = load_columns(base, row_R, valid_R, P + 2 * M, M, MODES).to(tl.float32) + clock_bias_M
    decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
    write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL, SPLIT)
    cos_RM, sin_RM = load_phases(phases, channel, count_R, MODES)
    _, cuts = counted(marks, batch, length, chunk, CHUNK_ROWS, HAS_MARKS)
    leaving_RM = write_RM * tl.exp(-decay_to_end(decay_RM)) * (1.0 - blend + blend * norm_R)[:, None]
    leaving_RM = kept(leaving_RM, cuts_R == cuts, HAS_MARKS)
    leaving_RL = pair(leaving_RM * cos_RM, -leaving_RM * sin_RM)
    state_PL = tl.zeros([WIDTH, 2 * MODES], tl.float32)
    state_PL = product_of_given(tl.trans(raw_RP), leaving_RL, state_PL, SPLIT)
    pointer_PL, mask_PL = state_block(states, index, P, M, WIDTH, MODES)
    tl.store(pointer_PL, state_PL, mask=mask_PL)
    total_M = tl.sum(decay_RM, axis=0)
    if HAS_MARKS:
        total_M = tl.where(cuts > 0, LARGEST_DECAY, total_M)
    tl.store(totals + index * M + mode_M, total_M, mask=mode_M < M)
    in_tiles = tl.sum(tl.reshape(decay_RM, (CHUNK_ROWS // TILE_ROWS, TILE_ROWS, MODES)), axis=1)
    tl.store(exact + index, (tl.max(tl.max(in_tiles, axis=1), axis=0) > ANCHOR_LIMIT).to(tl.int32))


@triton.jit(do_not_specialize=SIZES)
def state_scan_kernel(
    states, totals, phases, marks, first, last, carries, length, chunks, channels, segment_chunks,
    P: tl.constexpr, M: tl.constexpr, MODES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_MARKS: tl.constexpr, REVERSE: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """From chunk to chunk, in place: what each chunk leaves becomes the state it is entered with.

    Chunks go in S segments, one a program. first [B, K, S, M, 2, P]: the state before each segment; last
    [B, K, M, 2, P]: that after them all. SUMMARY leaves the chunks alone and starts from zero: last [B, K, S, M, 2, P]
    is then what each segment leaves of its own, carries [B, K, S, 2, M] what it makes of a state, as a complex number.

    REVERSE does the same to gradients: from that of the leaving state (`first`) to that of the entering one (`last`);
    what each chunk's outputs ask of its entering state becomes the gradient of the state it leaves, in its own frame.
    """
    at, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    batch, channel = at // channels, at % channels
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = element < M * P
    mode = element // P
    lower = mode * 2 * P + element % P  # of the mode's first lane; the second is P further
    size = 2 * M * P
    here = at * segments + segment
    zero, one = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    real, imaginary = tl.full([BLOCK], 1.0, tl.float32), tl.zeros([BLOCK], tl.float32)
    if not SUMMARY:
        zero = tl.load(first + here * size + lower, mask=known, other=0.0)
        one = tl.load(first + here * size + lower + P, mask=known, other=0.0)
    count = tl.minimum(segment_chunks, chunks - segment * segment_chunks)
    step = 1 if not REVERSE else -1
    chunk = segment * segment_chunks
    if REVERSE:
        chunk += count - 1
    pointer = states + (at * chunks + chunk) * size + lower
    next_zero = tl.load(pointer, mask=known, other=0.0)
    next_one = tl.load(pointer + P, mask=known, other=0.0)
    next_total = tl.load(totals + (at * chunks + chunk) * M + mode, mask=known, other=0.0)
    for number in range(count):
        written_zero, written_one, carry = next_zero, next_one, tl.exp(-next_total)
        current = pointer
        turns, _ = counted(marks, batch, length, chunk, CHUNK_ROWS, HAS_MARKS)
        # The next chunk is fetched before this one is worked on.
        more = known & (number + 1 < count)
        chunk += step
        pointer += step * size
        next_zero = tl.load(pointer, mask=more, other=0.0)
        next_one = tl.load(pointer + P, mask=more, other=0.0)
        next_total = tl.load(totals + (at * chunks + chunk) * M + mode, mask=more, other=0.0)
        angle = phases + (channel * (CHUNK_ROWS + 1) + turns) * (2 * MODES) + mode
        cos = tl.load(angle, mask=known, other=0.0)
        sin = tl.load(angle + MODES, mask=known, other=0.0)
        if REVERSE:
            sin = -sin
            zero, one = cos * zero - sin * one, cos * one + sin * zero
        if not SUMMARY:
            tl.store(current, zero, mask=known)
            tl.store(current + P, one, mask=known)
        zero, one = carry * zero + written_zero, carry * one + written_one
        if not REVERSE:
            zero, one = cos * zero - sin * one, cos * one + sin * zero
        if SUMMARY:
            cos, sin = carry * cos, carry * sin
            real, imaginary = cos * real - sin * imaginary, cos * imaginary + sin * real
    if SUMMARY:
        leads = known & (element % P == 0)
        tl.store(carries + here * 2 * M + mode, real, mask=leads)
        tl.store(carries + here * 2 * M + M + mode, imaginary, mask=leads)
        tl.store(last + here * size + lower, zero, mask=known)
        tl.store(last + here * size + lower + P, one, mask=known)
    else:
        known = known & (segment == (0 if REVERSE else segments - 1))
        tl.store(last + at * size + lower, zero, mask=known)
        tl.store(last + at * size + lower + P, one, mask=known)


@triton.jit(do_not_specialize=SIZES)
def segment_scan_kernel(
    left, carries, first, segments,
    P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From segment to segment, in place: `left` [B, K, S, M, 2, P], what each leaves of its own, becomes the state it
    is entered with; first [B, K, M, 2, P]: the state before them all.
    """
    at = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = element < M * P
    mode = element // P
    lower = mode * 2 * P + element % P
    size = 2 * M * P
    zero = tl.load(first + at * size + lower, mask=known, other=0.0)
    one = tl.load(first + at * size + lower + P, mask=known, other=0.0)
    for number in range(segments):
        here = at * segments + (segments - 1 - number if REVERSE else number)
        pointer = left + here * size + lower
        left_zero = tl.load(pointer, mask=known, other=0.0)
        left_one = tl.load(pointer + P, mask=known, other=0.0)
        real = tl.load(carries + here * 2 * M + mode, mask=known, other=0.0)
        imaginary = tl.load(carries + here * 2 * M + M + mode, mask=known, other=0.0)
        tl.store(pointer, zero, mask=known)
        tl.store(pointer + P, one, mask=known)
        zero, one = real * zero - imaginary * one + left_zero, real * one + imaginary * zero + left_one


@triton.jit
def chunk_outputs(
    raw, z, states, phases, marks,
    write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
    length, chunks, channels, eps, stride_b, stride_t, stride_k, batch, chunk, channel,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """z [B, T, K, P] of one chunk from the state it is entered with, tile by tile."""
    gamma_M = load_mode_table(gamma, channel, M, MODES)
    clock_bias_M = load_mode_table(clock_bias, channel, M, MODES)
    write_bias_M = load_mode_table(write_bias, channel, M, MODES)
    read_bias_M = load_mode_table(read_bias, channel, M, MODES)
    kc_M, ks_M = load_mode_table(kc, channel, M, MODES), load_mode_table(ks, channel, M, MODES)
    own_M = kc_M * (1.0 - load_mode_table(zero_lag, channel, M, MODES))  # what is left of the response at lag zero
    blend = tl.load(beta + channel)

    pointer_PL, mask_PL = state_block(states, (batch * channels + channel) * chunks + chunk, P, M, WIDTH, MODES)
    state_PL = tl.load(pointer_PL, mask=mask_PL, other=0.0)
    p, tile_row_R = tl.arange(0, WIDTH), tl.arange(0, TILE_ROWS)
    base = chunk_base(raw, batch, chunk, channel, stride_b, stride_t, stride_k, ALIGN)
    z_base = z + ((batch * length + chunk.to(tl.int64) * CHUNK_ROWS) * channels + channel) * P
    for tile in range(tiles_of(length, chunk)):
        local_R = tile * TILE_ROWS + tile_row_R
        rows = length - chunk * CHUNK_ROWS - tile * TILE_ROWS
        count_R, valid_R, cut_R, cuts_R = row_marks(marks, batch, length, chunk, local_R, HAS_MARKS)
        row_R = tl.multiple_of(local_R * stride_t, ALIGN)
        raw_RP, norm_R = load_raw(base, row_R, valid_R, eps, P, WIDTH)
        clock_RM = load_columns(base, row_R, valid_R, P + 2 * M, M, MODES).to(tl.float32) + clock_bias_M
        decay_RM = decays(clock_RM, valid_R, cut_R, gamma_M, M, MODES)
        write_RM = load_gate(base, row_R, valid_R, write_bias_M, P, M, MODES, NEUTRAL, SPLIT)
        read_RM = load_gate(base, row_R, valid_R, read_bias_M, P + M, M, MODES, NEUTRAL, SPLIT)
        cos_RM, sin_RM = load_phases(phases, channel, count_R, MODES)
        cos_RM, sin_RM = laid(cos_RM, SPLIT), laid(sin_RM, SPLIT)
        write_RM *= (1.0 - blend + blend * norm_R)[:, None]
        own_R = tl.sum(read_RM * write_RM * own_M, axis=1)

        falling_RM, rising_RM, before_M, through_M, after_M = spans(decay_RM, EXACT)
        reached_R, leaving_R, whole = tile_parts(marks, batch, length, chunk, tile, cuts_R, HAS_MARKS)
        if HAS_MARKS:
            through_M *= whole
        matrix_RR = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
        readout_RL = pair(kc_M * cos_RM - ks_M * sin_RM, -kc_M * sin_RM - ks_M * cos_RM)
        phase_RL = pair(cos_RM, -sin_RM)
        if EXACT:
            query_RL, key_RL = pair(read_RM, read_RM) * readout_RL, pair(write_RM, write_RM) * phase_RL
            matrix_RR = exact_matrix(query_RL, key_RL, decay_RM, tl.minimum(rows, TILE_ROWS))
        falling_RM, rising_RM = falling_RM * read_RM, rising_RM * write_RM
        query_RL, key_RL = pair(falling_RM, falling_RM) * readout_RL, pair(rising_RM, rising_RM) * phase_RL
        if not EXACT:
            matrix_RR = product(query_RL, tl.trans(key_RL), matrix_RR, SPLIT)
        # Above the diagonal the product may have overflowed.
        matrix_RR = tl.where(tile_row_R[:, None] > tile_row_R[None, :], matrix_RR, 0.0)
        matrix_RR = together(matrix_RR, cuts_R, HAS_MARKS)
        matrix_RR = tl.where(tile_row_R[:, None] == tile_row_R[None, :], own_R[:, None], matrix_RR)
        z_RP = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
        z_RP = product(query_RL, tl.trans(state_PL * lanes(before_M)), z_RP, SPLIT)
        z_RP = kept(z_RP, reached_R, HAS_MARKS)
        z_RP = tl.dot(matrix_RR.to(raw_RP.dtype), raw_RP, acc=z_RP, input_precision="ieee")
        z_RP_at = z_base + local_R[:, None] * (channels * P) + p[None, :]
        tl.store(z_RP_at, z_RP, mask=(tile_row_R < rows)[:, None] & (p < P)[None, :])

        key_RL = kept(key_RL, leaving_R, HAS_MARKS)
        state_PL = product_of_given(tl.trans(raw_RP), key_RL, state_PL * lanes(through_M), SPLIT) * lanes(after_M)


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    raw, z, states, exact, phases, marks,
    write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
    length, chunks, channels, items, eps, stride_b, stride_t, stride_k,
    P: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, MODES: tl.constexpr, ALIGN: tl.constexpr,
    NEUTRAL: tl.constexpr, HAS_MARKS: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`chunk_outputs` of the chunks of one form.

    The tiles' matrices are products in a launch of a program a chunk. Those summed elementwise have a launch of their
    own: in one kernel with the others they would take registers from every chunk. It is of few programs, which look
    for flags: mostly there is none.
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
                        chunk_outputs(
                            raw, z, states, phases, marks,
                            write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
                            length, chunks, channels, eps, stride_b, stride_t, stride_k,
                            batch.to(tl.int64), chunk, channel,
                            P, M, WIDTH, MODES, ALIGN, NEUTRAL, HAS_MARKS, SPLIT, EXACT,
                        )  # fmt: skip
    else:
        channel, chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if tl.load(exact + (batch * channels + channel) * chunks + chunk) == 0:
            chunk_outputs(
                raw, z, states, phases, marks,
                write_bias, read_bias, clock_bias, gamma, kc, ks, zero_lag, beta,
                length, chunks, channels, eps, stride_b, stride_t, stride_k, batch, chunk, channel,
                P, M, WIDTH, MODES, ALIGN, NEUTRAL, HAS_MARKS, SPLIT, EXACT,
            )  # fmt: skip
