"""RMSNorm, with or without the residual addition, in one reading and one writing of a row.

Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
vLLM: csrc/layernorm_kernels.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedvllm.kernels.launch import launch, padded, tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,  # [N, SIZE]
    sum_ptr,  # [N, SIZE]: x + residual
    x_ptr,  # [N, SIZE], in groups of GROUP adjacent rows, group_stride apart
    residual_ptr,  # [N, SIZE]
    weight_ptr,  # [SIZE]
    num_rows,
    group_stride,
    eps,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program for ROWS whole rows: they stay in registers from first to last."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, PADDED_SIZE)[None, :]
    inside = (row < num_rows) & (column < SIZE)
    source = row // GROUP * group_stride + row % GROUP * SIZE + column
    place = row * SIZE + column
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + place, x.to(kind), mask=inside)
        x = x.to(kind).to(tl.float32)  # rounded, as the next layer reads it
    mean_square = tl.sum(x * x, axis=1)[:, None] / SIZE
    normed = (x * tl.rsqrt(mean_square + eps)).to(kind).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (normed * weight).to(kind), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., H], divided by its root mean square over H, times weight [H]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, out, x, out, weight, eps, add=False)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, both [T, H], and that sum."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(out, total, x, residual.contiguous(), weight, eps, add=True)
    return out, total


def _launch(
    out: Tensor,
    total: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    add: bool,
) -> None:
    size = x.shape[-1]
    # Heads in a merged projection: a token's rows are adjacent, its neighbour's are not.
    groups = x.flatten(1) if x.dim() > 1 else x.unsqueeze(0)
    groups = groups if groups.stride(1) == 1 else groups.contiguous()
    num_rows = x.numel() // size
    rows = max(1, 2048 // padded(size))  # a head is too little work for a program
    launch(
        rms_norm_kernel, (triton.cdiv(num_rows, rows),),
        out, total, groups, residual, weight, num_rows, groups.stride(0), eps,
        GROUP=groups.shape[1] // size, SIZE=size, PADDED_SIZE=padded(size), ROWS=rows,
        ADD=add, num_warps=8 if size > 2048 else 4,
    )  # fmt: skip
