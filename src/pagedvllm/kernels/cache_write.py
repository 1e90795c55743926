"""Each token's key and value go to its slot of the paged cache.

Paper: Kwon et al., SOSP 2023, section 5.1 ("fused reshape and block write").
vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py.
"""

from __future__ import annotations

from torch import Tensor

from pagedvllm.kernels.launch import launch, padded, tl, triton


@triton.jit
def cache_write_kernel(
    k_cache_ptr,  # [slots, KV heads * D]
    v_cache_ptr,
    k_ptr,  # [T, KV heads * D], rows k_stride apart
    v_ptr,
    slots_ptr,  # [T] int64
    k_stride,
    v_stride,
    ROW: tl.constexpr,  # numbers of a token: KV heads * D
    BLOCK: tl.constexpr,
):
    """One program a token and BLOCK of its numbers."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:  # -1: a padded row, written nowhere
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < ROW
        # 64 bits: slot * ROW passes 2**31 in a cache of a few GiB.
        target = slot.to(tl.int64) * ROW + column
        key = tl.load(k_ptr + token * k_stride + column, mask=inside)
        tl.store(k_cache_ptr + target, key, mask=inside)
        value = tl.load(v_ptr + token * v_stride + column, mask=inside)
        tl.store(v_cache_ptr + target, value, mask=inside)


def write_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Row t of k, v [T, KV heads, D] goes to row slots[t] of the caches; -1: nowhere."""
    # A view if a token's heads lie in one piece, as in a part of a merged projection.
    k, v = k.flatten(1), v.flatten(1)
    num_tokens, row = k.shape
    block = min(padded(row), 1024)
    launch(
        cache_write_kernel, (num_tokens, triton.cdiv(row, block)),
        k_cache, v_cache, k, v, slots, k.stride(0), v.stride(0), ROW=row, BLOCK=block,
    )  # fmt: skip
