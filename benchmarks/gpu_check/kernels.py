"""Every kernel against float64, on the card: all head sizes and dtypes, block edges, ragged batches, unused slots NaN.

Several processes at once, since most of the time goes into compiling.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import pad_tables
from pagedvllm.kernels import paged_attention, rotary
from pagedvllm.kernels.attention_plan import Card, plan_attention
from pagedvllm.kernels.ops import TritonOps
from pagedvllm.model.rotary import rotary_table
from pagedvllm.ops import TorchOps

Errors = dict[str, float]  # case -> its largest error as a share of what is allowed
Sequences = list[tuple[int, int]]  # (tokens computed before, new ones) of each
HEAD_DIMS = (64, 80, 96, 128, 256)
ALLOWED = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of values around 1
BATCHES: dict[str, Sequences] = {
    "decode": [(length, 1) for length in (0, 14, 15, 16, 31, 300, 1023)],
    "long decode": [(5000, 1), (17, 1)],  # its keys are split
    "prefill": [(0, 1), (0, 16), (0, 33), (0, 700)],
    "mixed": [(0, 40), (100, 64), (47, 1), (512, 5), (3, 1)],  # a prompt, a chunk, decodes, guesses
}
TOY: dict[str, Sequences] = {"decode": [(0, 1), (4, 1)], "mixed": [(0, 3), (5, 2), (3, 1)]}


def run(setup: Setup) -> Outcome:
    dtypes = list(dict.fromkeys((torch.float32, torch.float16, setup.half)))
    dims, batches = ((16, 20), TOY) if setup.dry else (HEAD_DIMS, BATCHES)
    work = [partial(attention_cases, setup.device, dtype, dim, batches) for dtype in dtypes for dim in dims]
    work += [partial(small_cases, setup.device, dtype, dims, setup.dry) for dtype in dtypes]
    if not setup.dry:
        work.append(partial(far_cases, setup.device))
    found: Errors = {}
    if setup.dry:
        for cases in work:
            found |= cases()
    else:
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
            for errors in pool.map(_call, work):
                found |= errors
    wrong = {name: error for name, error in found.items() if not error <= 1}
    worst = max(found, key=lambda name: found[name] if found[name] == found[name] else float("inf"))
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return Outcome(
        f"Every kernel gives what float64 gives, within rounding ({names}; head sizes {', '.join(map(str, dims))}).",
        {
            "cases": len(found),
            "wrong": len(wrong),
            "largest error, as a share of what is allowed": round(found[worst], 3),
        },
        [f"{name}: {error:.2f} times the error that is allowed" for name, error in wrong.items()],
        {"worst case": worst, "allowed": {str(dtype): ALLOWED[dtype] for dtype in dtypes}},
    )


def _call(cases: partial[Errors]) -> Errors:
    return cases()


def error(got: Tensor, want: Tensor) -> float:
    """Not a number, or an infinity, is a very large error."""
    difference = (got.double() - want.double()).abs() / want.double().abs().clamp(min=1)
    return float(difference.nan_to_num(1e9, 1e9).max()) / ALLOWED[got.dtype]


def attention_cases(
    device: torch.device, dtype: torch.dtype, dim: int, batches: dict[str, Sequences], num_blocks: int = 0
) -> Errors:
    errors, card = {}, Card.of(device)
    for index, (name, sequences) in enumerate(batches.items()):
        block_size, (heads, kv_heads) = (16, 32, 128, 64)[index % 4], ((8, 2), (4, 4), (6, 2), (8, 1))[index % 4]
        generator = torch.Generator(device).manual_seed(index)

        def randn(*shape: int, source: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=source, device=device).to(dtype)

        lengths = [computed + new for computed, new in sequences]
        counts = [-(-length // block_size) for length in lengths]
        blocks = num_blocks or sum(counts) + 2
        order = random.Random(index).sample(range(blocks - sum(counts), blocks), sum(counts))
        tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (blocks, block_size, kv_heads, dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
        queries, wanted, starts = [], [], [0]
        for (_, new), length, table in zip(sequences, lengths, tables, strict=True):
            q, k, v = (randn(n, h, dim) for n, h in ((new, heads), (length, kv_heads), (length, kv_heads)))
            for cache, rows in ((keys, k), (values, v)):
                padded = torch.full((len(table) * block_size, kv_heads, dim), float("nan"), dtype=dtype, device=device)
                padded[:length] = rows
                cache[table] = padded.view(len(table), *shape[1:])
            queries.append(q)
            wanted.append(attention64(q, k, v))
            starts.append(starts[-1] + new)
        spec = AttentionSpec(0, heads, kv_heads, dim, torch.empty(0))
        plan = plan_attention(starts, lengths, spec, dtype, device, card)
        tables_there = pad_tables(tables, device)
        got = paged_attention.paged_attention(torch.cat(queries), keys, values, tables_there, plan, spec.scale)
        label = f"paged_attention {dtype} D={dim} {name}, block size {block_size}, {heads}/{kv_heads} heads"
        errors[f"{label}, {plan.num_splits} splits"] = error(got, torch.cat(wanted))
    return errors


def attention64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a sequence's last len(q) tokens, by its definition."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / q.shape[2] ** 0.5
    places = torch.arange(len(k), device=q.device)
    hidden = places[None, :] > places[len(k) - len(q) :, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def far_cases(device: torch.device) -> Errors:
    """Slots whose offset is beyond 2**31: a cache of 4.3 GB twice, on a card that has room for it."""
    block, dtype = 16 * 2 * 128, torch.float16
    if torch.cuda.mem_get_info(device)[0] < 12 * 2**30:
        return {}
    num_blocks = 2**31 // block + 1000
    found = attention_cases(device, dtype, 128, {"decode, far away": [(40, 1), (7, 1)]}, num_blocks)
    cache = torch.zeros(num_blocks * 16, 2, 128, dtype=dtype, device=device)
    k, slots = torch.ones(2, 2, 128, dtype=dtype, device=device), torch.tensor([5, len(cache) - 1], device=device)
    TritonOps().write_cache(k, k, cache, torch.empty_like(cache), slots)
    return found | {"write_cache, far away": error(cache[slots], k) + error(cache.sum(dtype=torch.float32), k.sum())}


def small_cases(device: torch.device, dtype: torch.dtype, dims: tuple[int, ...], dry: bool) -> Errors:
    triton, exact, found, size = TritonOps(), TorchOps(), Errors(), 3 if dry else 130
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def both(name: str, got: Tensor, want: Tensor) -> None:
        found[f"{name} {dtype}"] = max(found.get(f"{name} {dtype}", 0.0), error(got, want))

    for hidden in (48,) if dry else (576, 1024, 4096):
        x, residual, weight = randn(size, hidden), randn(size, hidden), randn(hidden)
        both("rms_norm", triton.rms_norm(x, weight, 1e-6), rms64(x, weight))
        normed, total = triton.add_rms_norm(x, residual, weight, 1e-6)
        both("add_rms_norm, sum", total, x.double() + residual.double())
        both("add_rms_norm", normed, rms64(total, weight))
        both("silu_and_mul", triton.silu_and_mul(x), exact.silu_and_mul(x.double()))
    for dim in dims:
        q, k, v = torch.split(randn(size, 8, dim), [4, 2, 2], dim=1)  # parts of one merged projection
        table = rotary_table({"rope_type": "default", "rope_theta": 1e4}, dim, 256).to(device)
        places = torch.randint(0, 256, (size,), generator=generator, device=device)
        turned = exact.rotary(q.double(), k.double(), places, table.double())
        for name, got, want in zip("qk", triton.rotary(q, k, places, table), turned, strict=True):
            both(f"rotary {name}", got, want)
        slots = torch.randperm(2 * size, generator=generator, device=device)[:size]
        slots[1] = -1
        caches = [torch.full((2 * size, 2, dim), 7.0, dtype=dtype, device=device) for _ in range(4)]
        wanted = [cache.double() for cache in caches]
        triton.write_cache(k, v, caches[0], caches[1], slots)
        exact.write_cache(k.double(), v.double(), wanted[0], wanted[1], slots)
        both(
            "rotate_and_write q",
            rotary.rotate_and_write(q, k, v, places, table, caches[2], caches[3], slots),
            turned[0],
        )
        exact.write_cache(turned[1], v.double(), wanted[2], wanted[3], slots)
        names = ("write_cache k", "write_cache v", "rotate_and_write k", "rotate_and_write v")
        for name, got, want in zip(names, caches, wanted, strict=True):
            both(name, got, want)
    return found


def rms64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
