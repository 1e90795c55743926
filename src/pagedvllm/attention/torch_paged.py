"""Attention over a paged KV cache, in torch: the reference of every faster backend.

The cache is an array of blocks. A sequence's block table says which are its own, in order; all
else in the cache belongs to somebody else, or to nobody, and may hold anything.
Paper: Kwon et al., SOSP 2023, section 4.1. vLLM: v1/attention/backends/.
"""

from __future__ import annotations

import torch

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.contiguous import attend
from pagedvllm.attention.paged import PagedMetadata
from pagedvllm.forward_context import ForwardContext


class TorchPagedAttention:
    """A pair of caches a layer: [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(
        self,
        specs: list[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.caches = []
        for spec in specs:
            shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
            self.caches.append([keys, values])

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        k_cache, v_cache = self.caches[spec.layer_index]
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        # Write all rows before reading any: one may need what another has just computed.
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # views
        ctx.ops.write_cache(k, v, k_slots, v_slots, meta.slot_mapping)
        out = torch.empty_like(q)
        for i, length in enumerate(meta.seq_lens):
            new = slice(meta.query_start_loc[i], meta.query_start_loc[i + 1])
            pages = meta.block_tables[i, : -(-length // self.block_size)]
            keys = k_cache[pages].flatten(0, 1)[:length]  # gathered, then cut
            values = v_cache[pages].flatten(0, 1)[:length]
            out[new] = attend(q[new], keys, values, spec.scale)
        return out
