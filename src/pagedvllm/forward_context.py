"""What a forward pass needs besides weights and tokens.

Passed by hand, never a global: two passes may be in flight (draft models, micro-batches).
vLLM: forward_context.py, ForwardContext; there a global that `set_forward_context` sets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagedvllm.attention.base import AttentionBackend, AttentionMetadata
from pagedvllm.ops import Ops


@dataclass(frozen=True)
class ForwardContext:
    """One flat batch of T tokens: the new ones of all sequences, in a row, no padding."""

    positions: Tensor  # [T] int64: the place of each token in its own sequence
    metadata: AttentionMetadata
    attention: AttentionBackend
    ops: Ops
