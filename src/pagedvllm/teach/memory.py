"""Where memory goes: workloads, what their traces say of it, the pictures of chapter 4 and its lab."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from pagedvllm.teach.style import BLUE, COLORS, GRID, INK, ORANGE, RED, figure, show

if TYPE_CHECKING:
    import torch

    from pagedvllm.attention.base import AttentionSpec

Line = Mapping[str, Any]
Lengths = Sequence[tuple[int, int]]  # (prompt, answer) in tokens
CACHE, LONGEST = 8192, 2048  # tokens: of the whole cache, of one request
STATES = {"in use": BLUE, "for later": "#9CCBE8", "never used": ORANGE, "free, nobody fits": RED}


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
    return list(replay(parse(workload), manager))


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


# ---------------------------------------------------------------- pictures


def memory_map(panels: Mapping[str, Memory], num_blocks: int, block_size: int, follow: str, columns: int = 64) -> None:
    """The cache at one instant under several managers, a cell for each block, coloured by owner.

    Filled: as much of the block as holds tokens; pale: taken, and empty; white: free. follow: the request that is drawn
    in ink in every panel.
    """
    rows = -(-num_blocks // columns)
    names = sorted({name for memory in panels.values() for name in memory.tables}, key=_order)
    colors = {name: INK if name == follow else _color(i) for i, name in enumerate(names)}
    fig, axes = figure(6.4, len(panels) * (0.42 + 0.105 * rows), rows=len(panels), squeeze=False)
    for axis, (title, memory) in zip(axes[:, 0], panels.items(), strict=True):
        free = set(range(1, num_blocks + 1))
        for name, table in memory.tables.items():
            free -= set(table)
            left, color = memory.tokens[name], colors[name]
            parts = [(block, min(max(left - i * block_size, 0) / block_size, 1.0)) for i, block in enumerate(table)]
            _cells(axis, [(block, 1.0) for block, filled in parts if filled < 1], columns, color, alpha=0.28)
            _cells(axis, [part for part in parts if part[1]], columns, color)
        _cells(axis, [(block, 1.0) for block in free], columns, GRID)
        axis.set(xlim=(-0.2, columns), ylim=(rows, -0.2), xticks=[], yticks=[])
        axis.set_title(title, loc="left")
        for spine in axis.spines.values():
            spine.set_visible(False)
    shares = ", ".join(
        f"{title}: {len(memory.tables)} requests, {sum(memory.tokens.values()) / num_blocks / block_size:.0%} of the"
        " memory holds tokens"
        for title, memory in panels.items()
    )
    show(fig, alt=f"Maps of the same {num_blocks} blocks at the same step, coloured by owner. {shares}.")


def block_picture(rows: Mapping[int, Sequence[str]]) -> None:
    """A few blocks with what is in each place ("a0" is token 0 of request a, "." is empty), coloured by request."""
    wide = max(map(len, rows.values()))
    fig, axis = figure(0.8 + 0.62 * wide, 0.5 + 0.34 * len(rows))
    owners = sorted({place[0] for places in rows.values() for place in places if place != "."})
    for y, places in enumerate(rows.values()):
        for x, place in enumerate(places):
            color = GRID if place == "." else _color(owners.index(place[0]) + 4)
            axis.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=color, edgecolor="none"))
            axis.text(x + 0.5, y + 0.52, place.strip("."), ha="center", va="center", color=INK)
    axis.set(xlim=(0, wide), ylim=(len(rows), 0), xticks=[])
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [f"block {block}" for block in rows])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    said = "; ".join(f"block {block}: {' '.join(places)}" for block, places in rows.items())
    show(fig, alt=f"The blocks and what they hold. {said}.")


def state_bars(states: Mapping[str, Mapping[str, float]]) -> None:
    """One horizontal bar for each manager: the shares of its memory in each of STATES."""
    fig, axis = figure(6.4, 0.9 + 0.42 * len(states))
    names = list(states)
    left = [0.0] * len(names)
    for state, color in STATES.items():
        shares = [100 * states[name][state] for name in names]
        axis.barh(names, shares, left=left, color=color, label=state, height=0.66)
        for y, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 7:
                light = color in (BLUE, RED)
                axis.text(
                    start + share / 2, y, f"{share:.0f}", ha="center", va="center", color="white" if light else INK
                )
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlim=(0, 100), xlabel="% of the KV cache, while somebody waits")
    fig.legend(loc="outside upper center", ncols=len(STATES), handlelength=1, columnspacing=1.2)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{state} {share:.0%}" for state, share in row.items()) for name, row in states.items()
    )
    show(fig, alt=f"Where the memory goes. {said}.")


def _order(name: str) -> tuple[int, str]:
    """r2 before r10."""
    return len(name), name


def _color(number: int) -> tuple[float, ...]:
    """The palette, then the palette again half as dark."""
    base = to_rgb(COLORS[number % len(COLORS)])
    return base if number // len(COLORS) % 2 == 0 else tuple(0.55 * c for c in base)


def _cells(axis: Any, parts: Sequence[tuple[int, float]], columns: int, color: Any, alpha: float = 1.0) -> None:
    """Draw (block, filled share) as one path, neighbours in one piece: a picture of 500 blocks stays small."""
    vertices: list[tuple[float, float]] = []
    codes: list[Any] = []
    for first, last, share in _pieces(sorted(parts), columns):
        y, x = divmod(first - 1, columns)
        right = x + last - first + 0.86 * share
        vertices += [(x, y), (right, y), (right, y + 0.84), (x, y + 0.84), (x, y)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if vertices:
        axis.add_patch(PathPatch(Path(vertices, codes), facecolor=color, edgecolor="none", alpha=alpha))


def _pieces(parts: Iterable[tuple[int, float]], columns: int) -> list[tuple[int, int, float]]:
    """(first block, last block, filled share of the last) of stretches of full blocks in one row."""
    pieces: list[tuple[int, int, float]] = []
    for block, share in parts:
        if pieces and pieces[-1][1:] == (block - 1, 1.0) and (block - 1) % columns:
            pieces[-1] = (pieces[-1][0], block, share)
        else:
            pieces.append((block, block, share))
    return pieces
