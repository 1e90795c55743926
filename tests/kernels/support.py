"""Random paged caches, and attention in float64 to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedvllm.attention.paged import pad_tables
from pagedvllm.kernels.attention_plan import AttentionPlan, TileShape
from pagedvllm.teach.kernel_cases import attention64

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@dataclass(frozen=True)
class Paged:
    """S sequences in a cache, in which all that is not theirs is NaN."""

    q: Tensor  # [T, heads, D]
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    starts: list[int]
    lengths: list[int]
    expected: Tensor  # [T, heads, D] float64

    def plan(self, rows: int = 64, keys: int = 32, splits: int = 1) -> AttentionPlan:
        numbers = (torch.tensor(x, dtype=torch.int32) for x in (self.starts, self.lengths))
        return AttentionPlan(*numbers, TileShape(rows, keys, 4, 2), splits)


def paged(
    sequences: list[tuple[int, int]],  # (tokens computed before, new tokens) of each
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    generator = torch.Generator().manual_seed(seed)
    lengths = [computed + new for computed, new in sequences]
    counts = [-(-length // block_size) for length in lengths]
    order = random.Random(seed).sample(range(1, sum(counts) + 2), sum(counts))
    tables = [[order.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, block_size, kv_heads, dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in "kv")
    queries, expected, starts = [], [], [0]
    for (_, new), length, table in zip(sequences, lengths, tables, strict=True):
        q, k, v = (
            torch.randn(n, h, dim, generator=generator).to(dtype)
            for n, h in ((new, heads), (length, kv_heads), (length, kv_heads))
        )
        for cache, rows in ((k_cache, k), (v_cache, v)):
            for at, block in enumerate(table):
                part = rows[at * block_size : (at + 1) * block_size]
                cache[block, : len(part)] = part
        queries.append(q)
        expected.append(attention64(q, k, v))
        starts.append(starts[-1] + new)
    return Paged(
        torch.cat(queries), k_cache, v_cache, pad_tables(tables, CPU), starts, lengths, torch.cat(expected)
    )  # fmt: skip


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[got.dtype])
