"""The two halves of a decoder layer: attention, which mixes tokens, and the MLP.

Papers: Vaswani et al., 2017; Touvron et al., "LLaMA", 2023.
vLLM: model_executor/models/llama.py, LlamaAttention and LlamaMLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.linear import Linear, LinearMethod, UnquantizedMethod
from pagedvllm.parallel_context import ParallelContext


@dataclass(frozen=True)
class Build:
    """Where and how every layer of one model is made."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: ParallelContext = field(default_factory=ParallelContext)
    method: LinearMethod = field(default_factory=UnquantizedMethod)

    def linear(self, in_features: int, sizes: dict[str, int], **kwargs: Any) -> Linear:
        kwargs |= {"parallel": self.parallel, "method": self.method}
        return Linear(in_features, sizes, dtype=self.dtype, device=self.device, **kwargs)

    def empty(self, *shape: int) -> nn.Parameter:
        value = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(value, requires_grad=False)


class RMSNorm(nn.Module):
    """Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight, self.eps = build.empty(size), eps

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.ops.rms_norm(x, self.weight, self.eps)

    def add(
        self, x: Tensor, residual: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum itself."""
        return ctx.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Projections around the attention backend, which owns the cache."""

    def __init__(
        self, config: DecoderConfig, layer_index: int, cos_sin: Tensor, build: Build
    ) -> None:
        super().__init__()
        d, ranks = config.head_dim, build.parallel
        heads, kv_heads = (
            ranks.shard(n, getattr(config, n)) for n in ("num_heads", "num_kv_heads")
        )
        num_heads, num_kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        self.spec = AttentionSpec(layer_index, num_heads, num_kv_heads, d, cos_sin)
        sizes = {
            "q_proj": config.num_heads * d,
            "k_proj": config.num_kv_heads * d,
            "v_proj": config.num_kv_heads * d,
        }
        self.qkv_proj = build.linear(
            config.hidden_size, sizes, bias=config.qkv_bias, shard="column"
        )
        self.o_proj = build.linear(
            sizes["q_proj"], {"o_proj": config.hidden_size}, bias=config.o_bias, shard="row"
        )
        self.q_norm = RMSNorm(d, config.rms_norm_eps, build) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps, build) if config.qk_norm else None

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.sizes, dim=-1)
        per_head = (-1, self.spec.head_dim)
        q, k, v = (part.unflatten(-1, per_head) for part in (q, k, v))  # [T, heads, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, ctx), self.k_norm(k, ctx)
        out = ctx.attention.forward(self.spec, q, k, v, ctx)
        return cast("Tensor", self.o_proj(out.flatten(1)))


class MLP(nn.Module):
    """Paper: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU)."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        sizes = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = build.linear(
            config.hidden_size, sizes, bias=bias, shard="column"
        )
        self.down_proj = build.linear(
            inner, {"down_proj": config.hidden_size}, bias=bias, shard="row"
        )

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        inner = ctx.ops.silu_and_mul(self.gate_up_proj(x))
        return cast("Tensor", self.down_proj(inner))
