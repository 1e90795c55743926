"""The small operations between the matrix products, behind one protocol: torch here, Triton kernels in chapter 7.2.

They are the memory-bound part of a layer: a fused kernel reads each value once where torch reads it several times.
vLLM: the custom ops of model_executor/layers (layernorm.py, activation.py, rotary_embedding/).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Ops(Protocol):
    """T tokens of a flat batch; H hidden size; D head size."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [..., H], divided by its root mean square over the last dimension, times weight [H]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum: the residual stream as it goes on."""
        ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [T, query heads, D], k: [T, KV heads, D], rotated by their positions [T]. cos_sin: [positions, D]."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I], gate then up -> silu(gate) * up: [T, I]."""
        ...

    def write_cache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Row t of k and v [T, KV heads, D] goes to slot slots[t] of the caches [slots, KV heads, D]; -1 is padding."""
        ...


class TorchOps:
    """The definition of each operation, in torch, for any device. The oracle of every faster version."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()  # in half precision the squares would overflow
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + residual
        return self.rms_norm(x, weight, eps), x

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_cache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        real = slots >= 0
        k_cache[slots[real]] = k[real]
        v_cache[slots[real]] = v[real]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pair (x[i], x[i + D/2]) by its angle, for every i < D/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
