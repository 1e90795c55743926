"""A long context is split among several programs; this puts their partial results together.

Paper: Dao et al., "Flash-Decoding for long-context inference", 2023.
vLLM: v1/attention/ops/triton_unified_attention.py, reduce_segments.
"""

from __future__ import annotations

from torch import Tensor

from pagedvllm.kernels.launch import launch, padded, tl, triton


@triton.jit(do_not_specialize=["num_lines"])
def merge_splits_kernel(
    out_ptr,  # [lines, D]: a line for each head of each token
    partial_ptr,  # [SPLITS, lines, D] fp32: softmax over a split's own keys
    lse_ptr,  # [SPLITS, lines] fp32: log2 of the sum of its weights; -inf if it had no key
    num_lines,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program a line: the partial results, each weighted by its share of the sum."""
    line = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED_D)
    lines = split * num_lines.to(tl.int64) + line
    lse = tl.load(lse_ptr + lines)
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    place = lines[:, None] * D + dim[None, :]
    partial = tl.load(partial_ptr + place, mask=(dim < D)[None, :], other=0.0)
    out = tl.sum(partial * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + line * D + dim, out.to(kind), mask=dim < D)


def merge_splits(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """partial: [splits, T, heads, D]; lse: [splits, T, heads]; out: [T, heads, D].

    The number of splits must be a power of two.
    """
    splits, num_tokens, heads, dim = partial.shape
    launch(
        merge_splits_kernel,
        (num_tokens * heads,),
        out,
        partial,
        lse,
        num_tokens * heads,
        D=dim,
        PADDED_D=padded(dim),
        SPLITS=splits,
    )
