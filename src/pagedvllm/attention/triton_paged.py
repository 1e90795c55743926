"""Attention over a paged cache in Triton kernels: two launches a layer, or three for long
contexts.

vLLM: v1/attention/backends/triton_attn.py, TritonAttentionImpl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedMetadata
from pagedvllm.forward_context import ForwardContext
from pagedvllm.kernels.attention_plan import AttentionPlan, Card, plan_attention
from pagedvllm.kernels.launch import INTERPRETED, check_device
from pagedvllm.kernels.paged_attention import paged_attention
from pagedvllm.kernels.rotary import rotate_and_write


class TritonPagedAttention:
    """A pair of caches a layer: [num_blocks, block_size, num_kv_heads, head_dim].

    Raises:
        ValueError: these kernels do not run on `device`, or not in `dtype`.
    """

    def __init__(
        self,
        specs: list[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_device(device, dtype)
        if INTERPRETED and dtype == torch.bfloat16:
            raise ValueError(
                "dtype bfloat16: the matrix product of Triton's interpreter multiplies its"
                " bits as integers; choose dtype='float32' or 'float16'"
            )
        self.card = Card.of(device)
        self.caches = []
        for spec in specs:
            shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
            self.caches.append([keys, values])
        self._planned: tuple[PagedMetadata, AttentionPlan] | None = None

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        k_cache, v_cache = self.caches[spec.layer_index]
        slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # views
        q = rotate_and_write(
            q, k, v, ctx.positions, spec.cos_sin, *slots, meta.slot_mapping
        )
        plan, tables = self.plan(meta, spec, q), meta.block_tables
        return paged_attention(q, k_cache, v_cache, tables, plan, spec.scale)

    def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> AttentionPlan:
        """Made by a step's first layer, used by all: their specs are alike."""
        if self._planned is None or self._planned[0] is not meta:
            lists = meta.query_start_loc, meta.seq_lens
            plan = plan_attention(*lists, spec, q.dtype, q.device, self.card)
            self._planned = meta, plan
        return self._planned[1]
