"""Attention through block tables: one kernel for prefill, chunks of prompts, decoding and
the verification of drafts, all of them in one batch.

They differ only in how many of a sequence's tokens are new. A program owns one KV head and
a tile of rows: up to QUERIES new tokens times the query heads that share the KV head (GQA),
so that a key once read serves them all.
Papers: Kwon et al., SOSP 2023; Dao, "FlashAttention-2", 2023; Ainslie et al., "GQA", 2023.
vLLM: v1/attention/ops/triton_unified_attention.py, kernel_unified_attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedvllm.kernels.attention_plan import AttentionPlan
from pagedvllm.kernels.attention_tiles import attend_range, find_tile
from pagedvllm.kernels.launch import launch, padded, tl, triton
from pagedvllm.kernels.merge_splits import merge_splits

# What differs from step to step must not make Triton compile the kernel anew.
VARIES = ["seq_lens_ptr", "num_seqs", "num_tokens", "table_stride"]


@triton.jit(do_not_specialize=VARIES)
def paged_attention_kernel(
    out_ptr,  # [T, heads, D]; if the keys are split: [splits, T, heads, D] fp32
    lse_ptr,  # [splits, T, heads] fp32: then also the log2 of the sum of all weights
    q_ptr,  # [T, heads, D], rotated; heads = KV_HEADS * GROUP
    k_cache_ptr,  # [blocks, BLOCK_SIZE, KV_HEADS, D]
    v_cache_ptr,
    table_ptr,  # [S, longest] block ids, rows table_stride apart
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    num_seqs,  # S
    num_tokens,  # T
    table_stride,
    log2_scale,  # softmax scale * log2(e): the hardware has exp2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: tiles of rows, KV heads, splits (one, unless SPLIT)."""
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last has most keys: first
    seq, first = find_tile(query_start_loc_ptr, num_seqs, tile, QUERIES)
    start = tl.load(query_start_loc_ptr + seq)
    num_queries = tl.load(query_start_loc_ptr + seq + 1) - start
    if first >= num_queries:
        return  # the tile too many
    seq_len = tl.load(seq_lens_ptr + seq)
    computed = seq_len - num_queries  # tokens before the first query

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_D)
    query = first + row // GROUP
    ours = (row < QUERIES * GROUP) & (query < num_queries)
    inside = ours[:, None] & (dim < D)[None, :]
    # Of the T * heads lines, the tile's first, and where its rows are from there.
    line = (start + first).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    below = row // GROUP * (KV_HEADS * GROUP) + row % GROUP
    place = below[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + line * D + place, mask=inside, other=0.0)

    # Keys 0 to last_key - 1, of which every query sees those before full_keys.
    full_keys, first_key = computed + first + 1, 0
    last_key = tl.minimum(full_keys + QUERIES - 1, seq_len)
    if SPLIT:  # of them, this program's share, in whole tiles
        share = tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(2)) * KEYS
        first_key = split * share
        last_key = tl.minimum(last_key, first_key + share)
        full_keys = tl.minimum(full_keys, last_key)
    acc, top, total = attend_range(
        q, computed + query, first_key, full_keys, last_key,
        table_ptr + seq.to(tl.int64) * table_stride,
        k_cache_ptr + kv_head * D, v_cache_ptr + kv_head * D,
        log2_scale, KV_HEADS * D, D, BLOCK_SIZE, KEYS,
    )  # fmt: skip
    if SPLIT:
        line += split * num_tokens.to(tl.int64) * (KV_HEADS * GROUP)
        tl.store(lse_ptr + line + below, top + tl.log2(total), mask=ours)  # no key: -inf
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + line * D + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: AttentionPlan,
    scale: float,
) -> Tensor:
    """Each of the T queries attends to its own sequence, up to itself.

    q: [T, heads, D], rotated. Caches: [blocks, block_size, KV heads, D], which hold the
    queries' own keys and values already. block_tables: [S, longest]. Returns [T, heads, D].
    """
    num_tokens, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    shape, splits, group = plan.shape, plan.num_splits, heads // kv_heads
    out = partial = torch.empty_like(q)
    lse = out  # without splits nobody looks at it
    if splits > 1:
        size = (splits, num_tokens, heads, dim)
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
        lse = torch.empty(size[:3], dtype=torch.float32, device=q.device)
    num_seqs = len(plan.seq_lens)
    grid = (num_tokens // (shape.rows // group) + num_seqs, kv_heads, splits)
    launch(
        paged_attention_kernel, grid,
        partial, lse, q, k_cache, v_cache, block_tables,
        plan.query_start_loc, plan.seq_lens, num_seqs, num_tokens, block_tables.stride(0), scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP=group, D=dim,
        PADDED_D=max(padded(dim), 16),  # the least that tensor cores take
        BLOCK_SIZE=block_size, ROWS=shape.rows, KEYS=shape.keys, SPLIT=splits > 1,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits(partial, lse, out)
    return out
