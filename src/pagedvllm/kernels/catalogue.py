"""Every kernel in every form in which the engine may launch it on a card.

The forms are taken from the launching functions, called on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.kernels.attention_plan import AttentionPlan, Card, plan_attention
from pagedvllm.kernels.cache_write import write_cache
from pagedvllm.kernels.compile import Compiled, compile_launch
from pagedvllm.kernels.launch import Launch, recorded
from pagedvllm.kernels.paged_attention import paged_attention
from pagedvllm.kernels.rms_norm import add_rms_norm, rms_norm
from pagedvllm.kernels.rotary import rotate, rotate_and_write
from pagedvllm.kernels.silu_and_mul import silu_and_mul

HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS, KV_HEADS, TOKENS, BLOCK_SIZE = 8, 2, 512, 16
META = torch.device("meta")


@dataclass(frozen=True)
class Form:
    """A launch, and what is particular about it."""

    label: str
    call: Launch


def forms(target: int) -> Iterator[Form]:
    """For a card of that compute capability."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for dtype in dtypes if target >= 80 else (torch.float16, torch.float32):
        yield from _small_kernels(dtype)
        for dim in HEAD_DIMS:
            yield from _attention(dtype, dim, Card(target, 100))


def _small_kernels(dtype: torch.dtype) -> Iterator[Form]:
    name = str(dtype).removeprefix("torch.")

    def form(label: str, function: Callable[..., object], *arguments: Any) -> Form:
        with recorded() as calls:
            function(*arguments)
        return Form(f"{name} {label}", calls[0])

    for size in (576, 1024, 4096, 8192):
        x, weight = _empty(dtype, TOKENS, size), _empty(dtype, size)
        yield form(f"H={size}", rms_norm, x, weight, 1e-6)
        yield form(f"H={size}, add", add_rms_norm, x, x, weight, 1e-6)
    yield form("I=3072", silu_and_mul, _empty(dtype, TOKENS, 2 * 3072))
    slots = _empty(torch.int64, TOKENS)
    for dim in HEAD_DIMS:
        q, k = _empty(dtype, TOKENS, HEADS, dim), _empty(dtype, TOKENS, KV_HEADS, dim)
        table, at = _empty(torch.float32, 4096, dim), f"D={dim}"
        yield form(f"{at}, to cache", rotate_and_write, q, k, k, slots, table, k, k, slots)
        yield form(at, rotate, q, k, slots, table)
        yield form(at, write_cache, k, k, k, k, slots)


def _attention(dtype: torch.dtype, dim: int, card: Card) -> Iterator[Form]:
    """All tile shapes; the smallest also with the keys split, and the merging of splits."""
    spec = AttentionSpec(0, HEADS, KV_HEADS, dim, _empty(torch.float32, 4096, dim))
    q, cache = (
        _empty(dtype, TOKENS, HEADS, dim),
        _empty(dtype, 64, BLOCK_SIZE, KV_HEADS, dim),
    )
    tables = _empty(torch.int64, 1, TOKENS)
    name = str(dtype).removeprefix("torch.")

    def calls(plan: AttentionPlan) -> list[Form]:
        with recorded() as launches:
            paged_attention(q, cache, cache, tables, plan, spec.scale)
        shape, splits = plan.shape, plan.num_splits
        label = f"{name} D={dim}, {shape.rows} rows x {shape.keys} keys, {splits} splits"
        return [Form(label, call) for call in launches]

    plans = [
        plan_attention([0, queries], [4096], spec, dtype, META, card)
        for queries in (1, 4, 8, 16, 32)
    ]
    for plan in {plan.shape: plan for plan in plans}.values():
        yield from calls(replace(plan, num_splits=1))
    yield from calls(replace(plans[0], num_splits=8))


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def compile_all(targets: tuple[int, ...]) -> Iterator[tuple[str, Compiled]]:
    """(label, what it takes) of every form on every target, in order, on all processors."""
    work = [(target, i) for target in targets for i in range(len(_forms_of(target)))]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile, work)


def _compile(work: tuple[int, int]) -> tuple[str, Compiled]:
    target, index = work
    form = _forms_of(target)[index]
    return form.label, compile_launch(form.call, target)


@cache
def _forms_of(target: int) -> list[Form]:
    return list(forms(target))
