"""Inputs for attention kernels: small paged caches, NaN where nobody's token is, and a model for the interpreter."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedvllm.attention.paged import pad_tables, paged_slots
from pagedvllm.hub import EMBEDDED_MODEL, resolve_model
from pagedvllm.teach.helpers import device

if TYPE_CHECKING:
    from pagedvllm.kernels.attention_plan import AttentionPlan

Sequences = Sequence[tuple[int, int]]  # (tokens computed before, new tokens) of each


@dataclass(frozen=True)
class PagedCase:
    """S sequences in a paged cache, T new tokens in all."""

    q: Tensor  # [T, heads, D]
    k_cache: Tensor  # [blocks, block_size, KV heads, D]; NaN wherever no token is
    v_cache: Tensor
    tables: Tensor  # [S, longest]
    starts: list[int]  # S + 1: query_start_loc
    lengths: list[int]  # S
    expected: Tensor  # [T, heads, D] float64

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def plan(self, rows: int = 16, keys: int = 8, splits: int = 1) -> AttentionPlan:
        """What the engine's kernel is told, with tiles of our choice."""
        from pagedvllm.kernels.attention_plan import AttentionPlan, TileShape

        starts, lengths = (
            torch.tensor(numbers, dtype=torch.int32, device=self.q.device) for numbers in (self.starts, self.lengths)
        )
        return AttentionPlan(starts, lengths, TileShape(rows, keys, 4, 1), splits)

    def error(self, got: Tensor) -> float:
        """The largest distance from the expected numbers; NaN if there is one."""
        return float((got.double() - self.expected).abs().max())


def paged_case(
    sequences: Sequences,
    tables: Sequence[list[int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 4,
) -> PagedCase:
    """Random queries, keys and values; `tables` says in which blocks each sequence lies."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(map(max, tables)) + 1, block_size, kv_heads, dim)
    k_cache, v_cache = (torch.full(shape, float("nan")) for _ in "kv")
    queries, expected, starts = [], [], [0]
    for (computed, new), table in zip(sequences, tables, strict=True):
        length = computed + new
        q = torch.randn(new, heads, dim, generator=generator)
        k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")
        slots = paged_slots(table, block_size, 0, length)
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = k, v
        queries.append(q)
        expected.append(attention64(q, k, v))
        starts.append(starts[-1] + new)
    to, lengths = device().split()[0], [computed + new for computed, new in sequences]
    return PagedCase(
        torch.cat(queries).to(to),
        k_cache.to(to),
        v_cache.to(to),
        pad_tables(tables, torch.device(to)),
        starts,
        lengths,
        torch.cat(expected).to(to),
    )


def attention64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a sequence's last len(q) tokens, one token and one head after the other, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        seen = len(k) - len(q) + t + 1
        for head in range(q.shape[1]):
            keys, values = (x[:seen, head // group].double() for x in (k, v))
            weights = torch.softmax(keys @ q[t, head].double() / q.shape[2] ** 0.5, 0)
            out[t, head] = weights @ values
    return out


def tiny_model() -> str:
    """A directory with a model of two layers for `load_format="dummy"`, and the embedded model's tokenizer.

    The interpreter runs a program at a time; 30 layers would take seconds a step.
    """
    path = Path(tempfile.mkdtemp(prefix="pagedvllm-tiny-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    for file in resolve_model(EMBEDDED_MODEL).glob("*token*"):
        shutil.copy(file, path)
    return str(path)
