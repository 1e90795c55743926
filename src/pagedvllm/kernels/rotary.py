"""Rotation by position and the cache write in one kernel: keys never come back to memory in
between.

Paper: Su et al., "RoFormer", 2021.
vLLM: csrc/pos_encoding_kernels.cu; compilation/passes/fusion/rope_kvcache_fusion.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedvllm.kernels.launch import launch, padded, tl, triton


@triton.jit
def rotate_heads(
    out_ptr,
    x_ptr,
    cos,
    sin,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
):
    """Turn the pairs (x[i], x[i + D/2]) of one token's heads [HEADS, D] by their angles.

    cos, sin: [1, PADDED_HALF], the same for all heads.
    """
    HALF: tl.constexpr = D // 2
    head = tl.arange(0, PADDED_HEADS)[:, None]
    i = tl.arange(0, cos.shape[1])[None, :]
    place = head * D + i
    inside = (head < HEADS) & (i < HALF)
    a = tl.load(x_ptr + place, mask=inside).to(tl.float32)
    b = tl.load(x_ptr + place + HALF, mask=inside).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(out_ptr + place + HALF, (b * cos + a * sin).to(kind), mask=inside)


@triton.jit
def rotary_kernel(
    q_out_ptr,  # [T, HEADS, D]
    k_out_ptr,  # [rows, KV_HEADS, D]: the cache's slots, or the T tokens
    v_out_ptr,
    q_ptr,  # [T, HEADS, D], tokens q_stride apart; k, v likewise
    k_ptr,
    v_ptr,
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [positions, D] fp32: D/2 cosines, D/2 sines
    slots_ptr,  # [T] int64
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    WRITE_CACHE: tl.constexpr,  # keys and values go to slots; else keys to their own row
):
    """One program a token: all its heads share the angles."""
    token = tl.program_id(0).to(tl.int64)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * D
    i = tl.arange(0, PADDED_HALF)
    cos = tl.load(angles_ptr + i, mask=i < D // 2)[None, :]
    sin = tl.load(angles_ptr + D // 2 + i, mask=i < D // 2)[None, :]
    q_out_ptr += token * HEADS * D
    rotate_heads(q_out_ptr, q_ptr + token * q_stride, cos, sin, HEADS, D, PADDED_HEADS)
    row = token
    if WRITE_CACHE:
        row = tl.load(slots_ptr + token).to(tl.int64)
    if row >= 0:  # -1: a padded row, written nowhere
        k_out_ptr += row * KV_HEADS * D
        k_ptr += token * k_stride
        rotate_heads(k_out_ptr, k_ptr, cos, sin, KV_HEADS, D, PADDED_KV_HEADS)
        if WRITE_CACHE:
            column = tl.arange(0, PADDED_KV_HEADS * PADDED_HALF * 2)
            inside = column < KV_HEADS * D
            value = tl.load(v_ptr + token * v_stride + column, mask=inside)
            tl.store(v_out_ptr + row * KV_HEADS * D + column, value, mask=inside)


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k: [T, heads, D], rotated by their positions [T]; cos_sin: [positions, D]."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _launch(q_out, k_out, k_out, q, k, k, positions, cos_sin, positions, write_cache=False)
    return q_out, k_out


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated q; rotated k and v go to rows `slots` of the caches [slots, KV heads, D]."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q_out, k_cache, v_cache, q, k, v, positions, cos_sin, slots, write_cache=True)
    return q_out


def _launch(
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    write_cache: bool,
) -> None:
    num_tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q, k, v = q.flatten(1), k.flatten(1), v.flatten(1)  # views, of merged projections too
    launch(
        rotary_kernel, (num_tokens,),
        q_out, k_out, v_out, q, k, v, positions, cos_sin, slots,
        q.stride(0), k.stride(0), v.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, D=dim, PADDED_HEADS=padded(heads),
        PADDED_KV_HEADS=padded(kv_heads), PADDED_HALF=padded(dim // 2),
        WRITE_CACHE=write_cache,
    )  # fmt: skip
