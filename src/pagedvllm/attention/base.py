"""The contract between a model and the cache: what attention gets, what it gives back.

vLLM: v1/attention/backend.py, AttentionBackend and AttentionImpl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from pagedvllm.forward_context import ForwardContext


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer looks like: enough to size its cache and to compute it."""

    layer_index: int
    num_heads: int  # query heads
    num_kv_heads: int  # fewer than num_heads: grouped-query attention
    head_dim: int
    cos_sin: Tensor  # [positions, head_dim]: the rotary table, cosines then sines

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class AttentionMetadata:
    """How the T tokens of a flat batch split into S sequences.

    Sequence i owns the tokens query_start_loc[i] to query_start_loc[i + 1] - 1. They are
    its last ones: with them it is seq_lens[i] tokens long. Whatever came before is in the
    cache already.
    """

    query_start_loc: list[int]  # S + 1
    seq_lens: list[int]  # S
    slot_mapping: Tensor  # [T] int64: where in the cache each token's key and value go


class AttentionBackend(Protocol):
    """Keeps keys and values, and attends to them."""

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Rotate q and k, store k and v; each query attends to its sequence up to itself.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]. q and k come not yet
        rotated, so that a backend may fuse the rotation with the cache write. Returns
        [T, num_heads, head_dim].
        """
        ...
