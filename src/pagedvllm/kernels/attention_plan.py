"""What the attention kernel is told once a step: tile sizes, splits, the sequences' places.

All layers of a step share it.
vLLM: TritonAttentionMetadata in v1/attention/backends/triton_attn.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.kernels.launch import padded

MAX_SPLITS = 32
MIN_SHARE = 256  # keys: below that, merging costs more than a split gains
PROGRAMS_PER_SM = 4  # enough to keep its memory busy


@dataclass(frozen=True)
class Card:
    """What a plan must know of a GPU."""

    capability: int  # 90 is sm_90
    num_sms: int  # streaming multiprocessors

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """For a CPU one processor, and large tiles: the interpreter is slow for each."""
        if device.type != "cuda":
            return cls(90, 1)
        found: Any = torch.cuda.get_device_properties(device)
        return cls(found.major * 10 + found.minor, found.multi_processor_count)


@dataclass(frozen=True)
class TileShape:
    """What a program works on at a time, and how."""

    rows: int  # query rows: new tokens * query heads of a KV head
    keys: int
    num_warps: int
    num_stages: int  # tiles of keys that are on their way from memory at once


# Sizes that neither spill registers nor ask for more shared memory than a card has, as
# `pagedvllm check --kernels` shows. Triton uses tensor cores from sm_80 on, never for fp32;
# without them every thread computes whole sums, and a tile must be small.
WITHOUT_TENSOR_CORES = (TileShape(16, 16, 4, 1), TileShape(32, 16, 8, 1))
SMALL_HEADS = (TileShape(16, 128, 4, 3), TileShape(64, 64, 4, 3), TileShape(128, 64, 8, 3))
SHAPES = (TileShape(16, 64, 4, 3), TileShape(64, 32, 4, 3), TileShape(128, 64, 8, 3))
LARGE_HEADS = (TileShape(16, 32, 4, 3), TileShape(64, 32, 8, 2))


def tile_shape(
    rows: int, group: int, head_dim: int, dtype: torch.dtype, card: Card
) -> TileShape:
    """For sequences of up to `rows` query rows, `group` of them a token."""
    shapes = LARGE_HEADS if head_dim > 128 else SHAPES if head_dim > 64 else SMALL_HEADS
    if dtype == torch.float32 or card.capability < 80:
        shapes = WITHOUT_TENSOR_CORES
    shape = next((shape for shape in shapes if shape.rows >= rows), shapes[-1])
    # A token's heads are never torn apart.
    return replace(shape, rows=max(shape.rows, padded(group)))


@dataclass(frozen=True)
class AttentionPlan:
    """For one step of S sequences."""

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    shape: TileShape
    num_splits: int


def plan_attention(
    query_start_loc: list[int],
    seq_lens: list[int],
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    card: Card,
) -> AttentionPlan:
    """The plan for a batch of S sequences, and its numbers on the device."""
    group = spec.num_heads // spec.num_kv_heads
    longest = max(end - start for start, end in pairwise(query_start_loc))
    shape = tile_shape(longest * group, group, spec.head_dim, dtype, card)
    tiles = query_start_loc[-1] // (shape.rows // group) + len(seq_lens)
    splits = num_splits(tiles * spec.num_kv_heads, max(seq_lens), card)
    numbers = torch.tensor(
        query_start_loc + seq_lens, dtype=torch.int32, pin_memory=device.type == "cuda"
    ).to(device, non_blocking=True)
    starts = numbers[: len(query_start_loc)]
    return AttentionPlan(starts, numbers[len(query_start_loc) :], shape, splits)


def num_splits(programs: int, longest: int, card: Card) -> int:
    """Into how many parts to split the keys, a power of two: 1 if that many programs fill
    the card by themselves, or the sequences are short.
    """
    wanted = card.num_sms * PROGRAMS_PER_SM // programs
    most = min(wanted, longest // MIN_SHARE, MAX_SPLITS)
    return padded(most + 1) // 2 if most > 1 else 1  # the power of two at or below it
