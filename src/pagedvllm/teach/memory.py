"""Where memory goes: workloads, what their traces say of it, and what an attention layer takes (chapter 4)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagedvllm.attention.base import AttentionSpec

Line = Mapping[str, Any]
Lengths = Sequence[tuple[int, int]]  # (prompt, answer) in tokens
CACHE, LONGEST = 8192, 2048  # tokens: of the whole cache, of one request
STATES = ("in use", "for later", "never used", "free, nobody fits")  # of a place in the cache


@dataclass(frozen=True)
class Memory:
    """The cache after one step."""

    tables: Mapping[str, Sequence[int]]  # request -> its blocks, in order
    tokens: Mapping[str, int]  # request -> how many of its tokens are in them
    waiting: int  # requests that hold nothing yet


def memory_of(trace: Iterable[Line]) -> Iterator[Memory]:
    """The cache after each schedule() of a trace (the format of `pagedvllm replay`)."""
    computed: dict[str, int] = {}
    for line in trace:
        if line.get("idle") or line.get("end"):
            continue
        computed |= line["admitted_computed"]
        for name, count in line["scheduled"].items():
            computed[name] += count
        tables = dict(line["blocks"])
        yield Memory(tables, {name: computed[name] for name in tables}, len(line["waiting_queue"]))


def token_states(trace: Iterable[Line], final: Mapping[str, int], num_blocks: int, block_size: int) -> dict[str, float]:
    """The shares of the cache in each of STATES, averaged over the steps in which somebody waits for memory.

    final: request -> the tokens it stores by the time it ends. num_blocks: without block 0.
    """
    sums, steps = dict.fromkeys(STATES, 0), 0
    for memory in memory_of(trace):
        if not memory.waiting:
            continue
        steps += 1
        held = {name: len(table) * block_size for name, table in memory.tables.items()}
        used = sum(memory.tokens.values())
        later = sum(min(room, final[name]) - memory.tokens[name] for name, room in held.items())
        sums["in use"] += used
        sums["for later"] += later
        sums["never used"] += sum(held.values()) - used - later
        sums["free, nobody fits"] += num_blocks * block_size - sum(held.values())
    if not steps:
        raise ValueError("nobody ever waits in this trace: the cache is never full")
    return {state: total / (steps * num_blocks * block_size) for state, total in sums.items()}


# ---------------------------------------------------------------- workloads and measurements


def draw_lengths(count: int, seed: int, prompt: float = 105.0, answer: float = 210.0, spread: float = 0.9) -> Lengths:
    """Requests with log-normal lengths. prompt, answer: medians in tokens; spread: of the logarithm.

    The defaults have about the means that Kwon et al. (SOSP 2023, figure 11) report for ShareGPT: 161 and 338.
    """
    rng = random.Random(seed)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        p, a = (round(median * rng.lognormvariate(0, spread)) for median in (prompt, answer))
        if p > 3 and a > 0 and p + a < LONGEST:
            pairs.append((p, a))
    return pairs


def final_tokens(lengths: Lengths) -> dict[str, int]:
    """Request -> the tokens it stores by the time it ends. Its last one is sampled, never stored."""
    return {f"r{i}": prompt + answer - 1 for i, (prompt, answer) in enumerate(lengths)}


def trace_of(manager: str, lengths: Lengths, block_size: int = 16, **limits: Any) -> list[dict[str, Any]]:
    """Replay requests r0, r1, ... that arrive together, in a cache of CACHE tokens under a KV-cache manager.

    manager: "plain", "counting", or "__main__:Class" for one of the notebook's own. limits: as in a workload's engine.
    """
    from pagedvllm.replay import replay
    from pagedvllm.workload import parse

    engine = {
        "num_blocks": CACHE // block_size + 1,
        "block_size": block_size,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": LONGEST,
        "enable_prefix_caching": False,
    }
    requests = [
        {"id": f"r{i}", "arrival_step": 0, "prompt": [{"seed": i, "len": prompt}], "max_tokens": answer}
        for i, (prompt, answer) in enumerate(lengths)
    ]
    workload = {"engine": {**engine, **limits}, "requests": requests, "record_free_queue": False}
    trace = []
    for line in replay(parse(workload), manager):
        line.pop("ref_cnt", None)  # of every block in every step: large, and not asked for here
        trace.append(line)
    return trace


def layer_times(
    spec: AttentionSpec, block_sizes: Sequence[int], device: torch.device, requests: int = 4, context: int = 1024
) -> dict[str, float]:
    """Milliseconds of one attention layer that decodes `requests` tokens, each the last of `context`.

    Contiguous, and with pages of each size in random order. All take turns, so that whatever else the machine does
    slows all of them; the best of 16 rounds counts.
    """
    import torch

    from pagedvllm.forward_context import ForwardContext
    from pagedvllm.ops import TorchOps

    layers = _layers(spec, block_sizes, device, requests, context)
    for layer, _ in layers.values():
        for cache in layer.caches[0]:
            cache.zero_()
    q = torch.randn(requests, spec.num_heads, spec.head_dim, device=device)
    k = torch.randn(requests, spec.num_kv_heads, spec.head_dim, device=device)
    positions = torch.full((requests,), context - 1, device=device)
    best = dict.fromkeys(layers, float("inf"))
    for _ in range(16):
        for name, (layer, metadata) in layers.items():
            ctx = ForwardContext(positions, metadata, layer, TorchOps())
            start = time.perf_counter()
            layer.forward(spec, q, k, k, ctx).sum().item()  # .item() waits for a GPU
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def _layers(
    spec: AttentionSpec, block_sizes: Sequence[int], device: torch.device, requests: int, context: int
) -> dict[str, tuple[Any, Any]]:
    """name -> (attention backend, metadata of the same decode step)."""
    import torch

    from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
    from pagedvllm.attention.paged import PagedMetadata, pad_tables
    from pagedvllm.attention.torch_paged import TorchPagedAttention

    starts, lens, fp32 = list(range(requests + 1)), [context] * requests, torch.float32
    firsts = [i * context for i in range(requests)]
    last = torch.tensor(firsts, device=device) + context - 1
    contiguous = ContiguousAttention([spec], requests * context, fp32, device)
    layers: dict[str, tuple[Any, Any]] = {"contiguous": (contiguous, ContiguousMetadata(starts, lens, last, firsts))}
    for size in block_sizes:
        count = context // size
        pages = random.Random(0).sample(range(1, requests * count + 1), requests * count)
        tables = [pages[i * count : (i + 1) * count] for i in range(requests)]
        last = torch.tensor([table[-1] * size + size - 1 for table in tables], device=device)
        paged = TorchPagedAttention([spec], requests * count + 1, size, fp32, device)
        layers[f"pages of {size}"] = (paged, PagedMetadata(starts, lens, last, pad_tables(tables, device)))
    return layers
