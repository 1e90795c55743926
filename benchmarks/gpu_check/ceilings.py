"""Each kernel's bytes or operations a second, as a share of what a copy or a matrix product reaches in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.kernels.attention_plan import Card, plan_attention
from pagedvllm.kernels.ops import TritonOps
from pagedvllm.kernels.paged_attention import paged_attention
from pagedvllm.kernels.rotary import rotate_and_write
from pagedvllm.model.rotary import rotary_table

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 8, 128, 16  # Qwen3-0.6B's


def run(setup: Setup) -> Outcome:
    outcome = Outcome("What our kernels reach of this card's memory bandwidth and of its matrix products.")
    copy, matmul = copy_ceiling(setup), matmul_ceiling(setup)
    outcome.result |= {"copy, TB/s": round(copy / 1e12, 3), "matrix product, TFLOP/s": round(matmul / 1e12, 1)}

    def share(name: str, function: Callable[[], object], amount: float, ceiling: float, goal: str = "") -> None:
        """amount: bytes or operations of one call."""
        rate = amount / setup.seconds_of(function)
        percent = round(100 * rate / ceiling, 1)
        of = "copy" if ceiling == copy else "matrix product"
        outcome.result[f"{name}, % of {of}{goal}"] = percent
        outcome.details[name] = f"{rate / 1e12:.3f} T{'B' if ceiling == copy else 'FLOP'}/s"

    decodes = [(2, 20)] if setup.dry else [(64, 4096), (256, 1024), (8, 32768), (1, 32768)]
    for count, length in decodes:
        function, moved = decode(setup, count, length)
        goal = " (goal: 85)" if (count, length) == decodes[0] else ""
        share(f"decode attention, {count} sequences of {length}", function, moved, copy, goal)
    for length in [16] if setup.dry else [4096, 16384]:
        function, operations = prefill(setup, length)
        share(f"prefill attention, {length} tokens", function, operations, matmul, " (goal: 70)")
    for name, call, moved in small_kernels(setup):
        share(name, call, moved, copy)
    return outcome


def copy_ceiling(setup: Setup) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**12 if setup.dry else 2**29, dtype=setup.half, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / setup.seconds_of(lambda: target.copy_(source), calls=5)


def matmul_ceiling(setup: Setup) -> float:
    """Operations a second of a product of two square matrices."""
    side = 32 if setup.dry else 8192
    x, y = (torch.randn(side, side, device=setup.device).to(setup.half) for _ in range(2))
    return 2 * side**3 / setup.seconds_of(lambda: x @ y, calls=5)


def decode(setup: Setup, count: int, length: int) -> tuple[Callable[[], Tensor], float]:
    """One token each for `count` sequences; bytes of keys and values that must be read."""
    return attention(setup, [1] * count, [length] * count), 2.0 * count * length * KV_HEADS * DIM * 2


def prefill(setup: Setup, length: int) -> tuple[Callable[[], Tensor], float]:
    """A whole prompt; operations of the two products over the keys that each query sees."""
    return attention(setup, [length], [length]), 4.0 * HEADS * DIM * length * (length + 1) / 2


def attention(setup: Setup, news: list[int], lengths: list[int]) -> Callable[[], Tensor]:
    device, dtype, width = setup.device, setup.half, -(-max(lengths) // BLOCK_SIZE)
    blocks = len(lengths) * width + 1
    shape = (blocks, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    tables = torch.randperm(blocks - 1, device=device).view(len(lengths), width) + 1  # pages lie anywhere
    q = torch.randn(sum(news), HEADS, DIM, device=device).to(dtype)
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, torch.empty(0))
    starts = [sum(news[:i]) for i in range(len(news) + 1)]
    plan = plan_attention(starts, lengths, spec, dtype, device, Card.of(device))
    return lambda: paged_attention(q, keys, values, tables, plan, spec.scale)


def small_kernels(setup: Setup) -> list[tuple[str, Callable[[], object], float]]:
    """(name, call, bytes read and written)."""
    tokens, hidden, inner = (3, 64, 96) if setup.dry else (32768, 1024, 3072)
    heads, kv_heads, dim = (2, 1, 16) if setup.dry else (HEADS, KV_HEADS, DIM)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=setup.device).to(setup.half)

    ops, x, residual, weight = TritonOps(), randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
    gate_up = randn(tokens, 2 * inner)
    q, k, v = torch.split(randn(tokens, heads + 2 * kv_heads, dim), [heads, kv_heads, kv_heads], dim=1)
    table = rotary_table({"rope_type": "default", "rope_theta": 1e6}, dim, 4096).to(setup.device)
    places = torch.randint(0, 4096, (tokens,), device=setup.device)
    slots = torch.randperm(tokens, device=setup.device)
    keys, values = (randn(tokens, kv_heads, dim) for _ in "kv")
    turned = 2 * (q.numel() + k.numel() + v.numel()) * q.element_size()
    return [
        ("norm and residual", lambda: ops.add_rms_norm(x, residual, weight, 1e-6), 4.0 * x.nbytes),
        ("SiLU and multiply", lambda: ops.silu_and_mul(gate_up), 1.5 * gate_up.nbytes),
        (
            "rotary and cache write",
            lambda: rotate_and_write(q, k, v, places, table, keys, values, slots),
            float(turned),
        ),
    ]
