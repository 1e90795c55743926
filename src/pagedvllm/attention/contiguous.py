"""The simplest KV cache: one stretch of memory for a sequence's longest possible length.

What chapters 2 and 4 measure and replace; it stays as their oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionMetadata, AttentionSpec
from pagedvllm.forward_context import ForwardContext


@dataclass(frozen=True)
class ContiguousMetadata(AttentionMetadata):
    """Adds where in the cache each sequence begins."""

    first_slots: list[int]  # S


class ContiguousAttention:
    """Caches of shape [num_slots, num_kv_heads, head_dim], a pair for each layer."""

    def __init__(
        self,
        specs: list[AttentionSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.caches: list[tuple[Tensor, Tensor]] = []
        for spec in specs:
            shape = (num_slots, spec.num_kv_heads, spec.head_dim)
            k_cache = torch.empty(shape, dtype=dtype, device=device)
            self.caches.append((k_cache, torch.empty_like(k_cache)))

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> Tensor:
        meta = ctx.metadata
        assert isinstance(meta, ContiguousMetadata)
        k_cache, v_cache = self.caches[spec.layer_index]
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        ctx.ops.write_cache(k, v, k_cache, v_cache, meta.slot_mapping)
        out = torch.empty_like(q)
        for i, first in enumerate(meta.first_slots):
            new = slice(meta.query_start_loc[i], meta.query_start_loc[i + 1])
            all_ = slice(first, first + meta.seq_lens[i])
            out[new] = attend(q[new], k_cache[all_], v_cache[all_], spec.scale)
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence's newest tokens to the whole sequence.

    q: [new tokens, query heads, D]; k, v: [all tokens, KV heads, D]. Query heads share KV
    heads in groups (GQA: Ainslie et al., 2023). Returns [new tokens, query heads, D].
    """
    num_new, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    group_size = num_heads // num_kv_heads
    grouped = q.view(num_new, num_kv_heads, group_size, -1)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k).float() * scale
    query_position = torch.arange(length - num_new, length, device=q.device).unsqueeze(1)
    future = torch.arange(length, device=q.device) > query_position  # [new, all]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
