"""The pieces of paged attention: which queries a program owns, and how it takes in one tile
of keys.

Papers: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
"FlashAttention-2", 2023. vLLM: v1/attention/ops/triton_attention_helpers.py.
"""

from __future__ import annotations

from pagedvllm.kernels.launch import tl, triton


@triton.jit
def find_tile(query_start_loc_ptr, num_seqs, tile, QUERIES: tl.constexpr):
    """(sequence, first of its query rows) of the flat batch's tile number `tile`.

    Sequence i gets query_start_loc[i] // QUERIES + i as its first tile: never fewer tiles
    than it needs, at most one more, and none of it has to be computed on the host.
    """
    low, high = tl.full([], 0, tl.int32), num_seqs
    while high - low > 1:  # for the last sequence whose first tile is not after `tile`
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    first_tile = tl.load(query_start_loc_ptr + low) // QUERIES + low
    return low, (tile - first_tile) * QUERIES


@triton.jit
def attend_tile(
    acc,  # [ROWS, PADDED_D] fp32: sum of weights * values so far
    running_max,  # [ROWS] fp32, of the scores so far
    running_sum,  # [ROWS] fp32, of the weights so far
    q,  # [ROWS, PADDED_D]
    position,  # [ROWS]: of each query in its sequence
    first_key,
    last_key,  # keys from here on do not exist
    table_ptr,  # the sequence's block table
    k_cache_ptr,  # at the program's KV head
    v_cache_ptr,
    log2_scale,
    SLOT: tl.constexpr,  # numbers from one slot to the next: KV heads * D
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,  # some key is hidden from some query, or does not exist
):
    """Online softmax: one more tile of keys and values, whatever came before."""
    key = first_key + tl.arange(0, KEYS)
    dim = tl.arange(0, acc.shape[1])
    exists = key < last_key
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    place = (block * BLOCK_SIZE + key % BLOCK_SIZE) * SLOT  # 64 bits: caches are large
    place = place[:, None] + dim[None, :]
    inside = (dim < D)[None, :]
    if EDGE:  # what is no key of ours may be NaN, and 0 * NaN is not 0
        inside = inside & exists[:, None]
    k = tl.load(k_cache_ptr + place, mask=inside, other=0.0)
    # IEEE: for fp32 the tensor cores would round to 10 bits; other types do not look at it.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
    if EDGE:
        visible = (key[None, :] <= position[:, None]) & exists[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # so far it may have seen none
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(running_max - base)  # what was summed with the old maximum
    running_sum = running_sum * shrink + tl.sum(weights, axis=1)
    v = tl.load(v_cache_ptr + place, mask=inside, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, running_sum


@triton.jit
def attend_range(
    q,
    position,
    first_key,
    full_keys,  # up to here every key is visible to every query
    last_key,
    table_ptr,
    k_cache_ptr,
    v_cache_ptr,
    log2_scale,
    SLOT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(acc, running_max, running_sum) over the keys first_key to last_key - 1."""
    acc = tl.zeros(q.shape, tl.float32)
    running_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    running_sum = tl.zeros([q.shape[0]], tl.float32)
    num_full = tl.maximum(full_keys - first_key, 0) // KEYS
    edge = first_key + num_full * KEYS
    for key in range(first_key, edge, KEYS):
        acc, running_max, running_sum = attend_tile(
            acc, running_max, running_sum, q, position, key, last_key, table_ptr,
            k_cache_ptr, v_cache_ptr, log2_scale, SLOT, D, BLOCK_SIZE, KEYS, False,
        )  # fmt: skip
    for key in range(edge, last_key, KEYS):
        acc, running_max, running_sum = attend_tile(
            acc, running_max, running_sum, q, position, key, last_key, table_ptr,
            k_cache_ptr, v_cache_ptr, log2_scale, SLOT, D, BLOCK_SIZE, KEYS, True,
        )  # fmt: skip
    return acc, running_max, running_sum
