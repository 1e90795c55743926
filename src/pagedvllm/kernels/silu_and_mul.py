"""silu(gate) * up, reading both halves of the merged projection once.

Paper: Shazeer, "GLU Variants Improve Transformer", 2020.
vLLM: csrc/activation_kernels.cu, silu_and_mul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedvllm.kernels.launch import launch, padded, tl, triton


@triton.jit
def silu_and_mul_kernel(
    out_ptr,  # [T, SIZE]
    gate_up_ptr,  # [T, 2 * SIZE], tokens `stride` apart
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and BLOCK of its numbers."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    kind = out_ptr.dtype.element_ty
    gate_up_ptr += token * stride
    gate = tl.load(gate_up_ptr + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + SIZE + column, mask=inside).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, (activated * up).to(kind), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I], gate then up -> silu(gate) * up: [T, I]."""
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(padded(size), 1024)
    launch(
        silu_and_mul_kernel,
        (num_tokens, triton.cdiv(size, block)),
        out,
        gate_up,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
    )
    return out
