"""The small operations between the matrix products, behind one protocol.

They are the memory-bound part of a layer: torch reads a value several times where a fused
kernel (chapter 7.2) reads it once.
vLLM: model_executor/layers/layernorm.py, activation.py and rotary_embedding/.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    """T tokens of a flat batch; H hidden size; D head size."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., H], divided by its root mean square over H, times weight [H]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum: the residual stream as it goes on."""
        ...

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q, k: [T, heads, D], rotated by their positions [T]; cos_sin: [positions, D]."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I], gate then up -> silu(gate) * up: [T, I]."""
        ...

    def write_cache(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        """Row t of k, v [T, KV heads, D] goes to row slots[t] of the caches; -1: nowhere."""
        ...


class TorchOps:
    """The definition of each operation, for any device: the oracle of every faster one."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()  # in half precision the squares would overflow
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x + residual
        return self.rms_norm(x, weight, eps), x

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = cos_sin[positions].to(q.dtype).unsqueeze(1)  # the same for all heads
        cos, sin = angles.chunk(2, dim=-1)  # [T, 1, D/2] each
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_cache(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        real = slots >= 0
        k_cache[slots[real]] = k[real]
        v_cache[slots[real]] = v[real]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) by its angle, for every i < D/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
