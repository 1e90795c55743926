"""What attention over a paged cache is given, and how pages become places in memory.

Paper: Kwon et al., SOSP 2023, section 4.1. vLLM: BlockTable in v1/worker/block_table.py,
CommonAttentionMetadata in v1/attention/backend.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedvllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec


@dataclass(frozen=True)
class PagedMetadata(AttentionMetadata):
    """Adds where the pages are: token t of i in block block_tables[i, t // block_size]."""

    block_tables: torch.Tensor  # [S, longest table] int64, padded with 0, the null block


class PagedAttentionBackend(AttentionBackend, Protocol):
    """A backend that owns, for every layer, `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        specs: list[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...


def paged_slots(table: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """Slots of tokens start to end - 1: block id * block size + place in the block."""
    return [table[t // block_size] * block_size + t % block_size for t in range(start, end)]


def pad_tables(tables: Sequence[list[int]], device: torch.device) -> torch.Tensor:
    """Block tables of different lengths as one tensor [S, longest]."""
    longest = max(map(len, tables))
    padded = [table + [0] * (longest - len(table)) for table in tables]
    return torch.tensor(padded, device=device)


def page_bytes(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: its keys and values in all layers."""
    numbers = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs)
    return block_size * numbers * dtype.itemsize
