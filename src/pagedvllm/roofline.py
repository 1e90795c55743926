"""What a step must read and compute, and how soon a machine can do both: the roofline.

Lower bounds, in whole numbers. Each weight, key and value is read once; norms, activations
and cache writes are small beside them and do not count.
Paper: Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from pagedvllm.batch import FlatBatch
from pagedvllm.model.config import DecoderConfig


@dataclass(frozen=True)
class Machine:
    """What a machine can do at best."""

    bytes_per_second: float  # read from memory
    flops_per_second: float  # a multiplication and an addition are two operations

    @property
    def knee(self) -> float:
        """Operations per byte: below, a step waits for memory; above, for arithmetic."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True)
class StepCost:
    """What one pass over a flat batch must do, at the least."""

    weight_bytes: int  # once, for all rows
    kv_bytes: int  # of each sequence, for its own rows alone
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.num_bytes

    def seconds(self, machine: Machine) -> float:
        """No step is faster, even if reading and computing overlap perfectly."""
        reading = self.num_bytes / machine.bytes_per_second
        computing = self.flops / machine.flops_per_second
        return max(reading, computing)


def matrix_sizes(config: DecoderConfig) -> tuple[int, int]:
    """Numbers in the matrices of all layers, which every row meets; and in the last matrix,
    which only sampled rows meet."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden  # qkv_proj, o_proj
    mlp = 3 * hidden * config.intermediate_size  # gate, up, down
    return config.num_layers * (attention + mlp), config.vocab_size * hidden


def step_cost(config: DecoderConfig, batch: FlatBatch, bytes_per_element: int) -> StepCost:
    """The cost of a batch, every sequence decoding or in its prompt."""
    layers, head = matrix_sizes(config)
    new_tokens = [end - start for start, end in pairwise(batch.query_start_loc)]
    pairs = 0  # of query and key: the last row looks at all, the one before at one less
    for new, length in zip(new_tokens, batch.seq_lens, strict=True):
        pairs += new * length - new * (new - 1) // 2
    products = layers * batch.num_tokens + head * len(batch.sample_rows)
    per_pair = 2 * config.num_layers * config.num_heads * config.head_dim  # q k, weight v
    return StepCost(
        weight_bytes=(layers + head) * bytes_per_element,
        kv_bytes=config.kv_bytes_per_token(bytes_per_element) * sum(batch.seq_lens),
        flops=2 * (products + per_pair * pairs),
    )


def decode_batch(size: int, context: int) -> FlatBatch:
    """The newest token of each of `size` sequences, all `context` tokens long."""
    rows = list(range(size))
    return FlatBatch(
        token_ids=[0] * size,
        positions=[context - 1] * size,
        slot_mapping=[row * context + context - 1 for row in rows],
        query_start_loc=[*rows, size],
        seq_lens=[context] * size,
        sample_rows=rows,
    )


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The two ceilings of a machine.

    One row through a huge matrix is all reading; the product of two square ones is all
    arithmetic.
    """
    rows, columns, size = (
        (8192, 4096, 1024) if device.type == "cpu" else (32768, 32768, 8192)
    )
    huge = torch.ones(rows, columns, dtype=dtype, device=device)
    square = torch.ones(size, size, dtype=dtype, device=device)
    reading = best_time(lambda: F.linear(huge[:1], huge), device)
    multiplying = best_time(lambda: square @ square, device)
    return Machine(huge.nbytes / reading, 2 * size**3 / multiplying)


def best_time(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Seconds of the fastest run: whatever else a machine does only slows a run down."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
