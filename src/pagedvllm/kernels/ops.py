"""The `Ops` of chapter 1, each as one kernel: `LLM(model, ops="triton")`."""

from __future__ import annotations

from torch import Tensor

from pagedvllm.kernels.cache_write import write_cache
from pagedvllm.kernels.rms_norm import add_rms_norm, rms_norm
from pagedvllm.kernels.rotary import rotate
from pagedvllm.kernels.silu_and_mul import silu_and_mul


class TritonOps:
    """What each one computes is said in `Ops` (ops.py), and defined by `TorchOps`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return rotate(q, k, positions, cos_sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def write_cache(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        write_cache(k, v, k_cache, v_cache, slots)
