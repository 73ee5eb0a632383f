# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the sampler's kernels share: the processed scores of a tile, their order, random numbers, the race.

Kernels that compute a score must all be built without contraction (``enable_fp_fusion=False``): then they give it the
same bits, and those of the torch path. Import needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-2147483648)
"""Before the first place in `order`: as a threshold it keeps every token."""


@triton.jit
def either(a, b):
    """Flags of both, for a reduction."""
    return a | b


@triton.jit
def _bit(p_words, row, b_col, b_mask, words):
    """Bit of each token in a packed mask ``[N, words]``."""
    b_word = tl.load(p_words + row * words + b_col // 32, mask=b_mask, other=0)
    return ((b_word >> (b_col % 32)) & 1) != 0


@triton.jit
def processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts, p_prompt, p_bias,
              p_allowed):  # fmt: skip
    """Scores of a tile after penalties, bias and mask, as `torch_path.processed`; -Inf for a NaN and where there is no
    token; and where the bias is NaN."""
    b_z = b_x.to(tl.float32)
    # a NaN, flagged by its bits, takes part in no search: it would make the place of a maximum arbitrary
    b_banned = (b_z != b_z) | (b_mask == 0)
    b_wrong = b_banned & (b_banned == 0)
    words = (vocab + 31) // 32
    if p_counts is not None:
        b_count = tl.load(p_counts + row * vocab + b_col, mask=b_mask, other=0)
    if p_repetition is not None:
        b_seen = b_wrong
        if p_counts is not None:
            b_seen = b_count > 0
        if p_prompt is not None:
            b_seen = b_seen | _bit(p_prompt, row, b_col, b_mask, words)
        penalty = tl.load(p_repetition + row)
        b_z = tl.where(b_seen, tl.where(b_z > 0, tl.math.div_rn(b_z, penalty), b_z * penalty), b_z)
    if p_frequency is not None:
        b_z = b_z - tl.load(p_frequency + row) * b_count.to(tl.float32)
    if p_presence is not None:
        b_z = b_z - tl.where(b_count > 0, tl.load(p_presence + row), 0.0)
    if p_bias is not None:
        b_bias = tl.load(p_bias + row * vocab + b_col, mask=b_mask, other=0.0)
        b_wrong = b_bias != b_bias
        b_banned = b_banned | (b_bias == float("-inf"))
        b_z = b_z + b_bias
    if p_allowed is not None:
        b_banned = b_banned | (_bit(p_allowed, row, b_col, b_mask, words) == 0)
    if p_repetition is not None or p_frequency is not None or p_presence is not None or p_bias is not None:
        b_banned = b_banned | (b_x.to(tl.float32) == float("-inf")) | (b_z != b_z)
        largest: tl.constexpr = 3.4028234663852886e38
        b_z = tl.where(b_z > largest, largest, tl.where(b_z < -largest, -largest, b_z))
    # adding 0 makes 0 of -0: its place in the order would be below that of 0, to which it is equal
    return tl.where(b_banned, float("-inf"), b_z + 0.0), b_wrong


@triton.jit
def random_words(seed, position, i_tile, TILE: tl.constexpr):
    """uint32 words of a tile of tokens, as `philox.random_words`."""
    b_block = i_tile * (TILE // 4) + tl.arange(0, TILE // 4)
    b_zero = b_block * 0
    b_low, b_high = b_zero + position.to(tl.int32), b_zero + (position >> 32).to(tl.int32)
    b_0, b_1, b_2, b_3 = tl.philox(seed, b_block, b_low, b_high, b_zero)
    return tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [TILE])


@triton.jit
def leads(seed, position, i_tile, TILE: tl.constexpr):
    """``-log`` of the exponential variates of a tile, as `philox.exponentials`."""
    b_word = random_words(seed, position, i_tile, TILE)
    b_u = (b_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_rest = ((b_word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_series = b_u * (1.0 + b_u * (0.5 + b_u * (0.3333333333333333 + b_u * 0.25)))
    return -tl.log(tl.where(b_u < 0.03125, b_series, -tl.log(b_rest)))


@triton.jit
def temperature_of(p_temperature, row):
    """1 for a greedy row and for one with an event: what it draws is not used."""
    temperature = tl.load(p_temperature + row)
    is_usable = (temperature >= 1.1754943508222875e-38) & (temperature <= 3.4028234663852886e38)
    return tl.where(is_usable, temperature, 1.0)


@triton.jit
def above_empty(x):
    """0 for the maximum of nothing, so that a difference of two is no NaN."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def scaled(b_gap, temperature):
    """Rounded as PyTorch rounds a division."""
    return tl.math.div_rn(b_gap, temperature)


@triton.jit
def race(b_z, b_keep, top, row, i_tile, p_temperature, p_seeds, p_positions, TILE: tl.constexpr):
    """Best bid of a tile and its place: the exponential race in logarithms, relative to the tile's maximum."""
    b_lead = leads(tl.load(p_seeds + row), tl.load(p_positions + row), i_tile, TILE)
    b_bid = scaled(b_z - above_empty(top), temperature_of(p_temperature, row)) + b_lead
    return tl.max(tl.where(b_keep, b_bid, float("-inf")), axis=0, return_indices=True)


@triton.jit
def order(b_z):
    """int32 that order as the scores do."""
    b_bits = b_z.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_top(p_floats, row, num_tiles, BLOCK_T: tl.constexpr):
    """Maximum of a row, of those of its tiles."""
    b_tile = tl.arange(0, BLOCK_T)
    b_top = tl.load(p_floats + row * 4 * num_tiles + b_tile, mask=b_tile < num_tiles, other=float("-inf"))
    return tl.max(b_top, axis=0)


@triton.jit
def masses(b_z, base, temperature):
    """Fixed-point weights, int64: 2**42 for a score of ``base``, as `torch_path.kept`."""
    return (tl.exp(scaled(b_z - base, temperature)) * 4398046511104.0).to(tl.int64)


@triton.jit
def cuts(row, vocab, p_top_k, p_top_p):
    """Whether top-k and top-p can cut a row, and the former's k."""
    by_count, by_mass, k = row < 0, row < 0, row
    if p_top_k is not None:
        k = tl.load(p_top_k + row).to(tl.int64)
        by_count = (k > 0) & (k < vocab)
    if p_top_p is not None:
        by_mass = tl.load(p_top_p + row) < 1
    return by_count, by_mass, k
