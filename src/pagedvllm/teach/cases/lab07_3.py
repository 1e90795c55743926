"""Lab 7.3: fit a step into a recorded size, fill static buffers, choose capture sizes for a workload."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pagedvllm.teach.labs import Case, Task
from pagedvllm.worker.cuda_graph import Graph
from pagedvllm.worker.graph_tape import TapeRecorder

# ---------------------------------------------------------------- 7.3.1 which size

FIT_CASES = [
    Case(([1, 2, 4, 8], 4), (4, 0), "a size of its own"),
    Case(([1, 2, 4, 8], 5), (8, 3), "padded to the next"),
    Case(([1, 2, 4, 8], 8), (8, 0), "the largest"),
    Case(([1, 2, 4, 8], 9), None, "more than were recorded"),
    Case(([16], 1), (16, 15), "one size for all"),
    Case(([8, 1, 4], 2), (4, 2), "sizes in any order"),
]

# ---------------------------------------------------------------- 7.3.2 static buffers

PADDING = {"token_ids": 0, "positions": 0, "slots": -1, "tables": 0}
Step = dict[str, Tensor]


def new_buffers(size: int, width: int) -> Step:
    """Static buffers as a larger, earlier step has left them."""
    rows = torch.arange(size)
    tables = 50 + torch.arange(size * width).view(size, width)
    return {"token_ids": 900 + rows, "positions": 30 + rows, "slots": 800 + rows, "tables": tables}


def new_step(count: int, width: int, shift: int = 0) -> Step:
    """A step of `count` requests; no two numbers are equal."""
    rows = torch.arange(count) + shift
    tables = 10 + shift + torch.arange(count * width).view(count, width)
    return {"token_ids": 100 + rows, "positions": 7 + rows, "slots": 200 + rows, "tables": tables}


def recording(buffers: Step, size: int) -> Graph:
    """A graph of `size` rows that returns what it reads: [size, 3 + width]."""

    def function() -> Tensor:
        columns = [buffers[name][:size, None] for name in ("token_ids", "positions", "slots")]
        return torch.cat([*columns, buffers["tables"][:size]], dim=1) + 0

    return TapeRecorder(torch.device("cpu")).record(function)


class Recorded(dict[str, Tensor]):
    """Buffers that a graph of `size` rows reads."""

    def __init__(self, rows: int, width: int, size: int) -> None:
        super().__init__(new_buffers(rows, width))
        self.graph, self.before = recording(dict(self), size), dict(self)


def _buffers_case(note: str, count: int, size: int, rows: int, width: int, narrow: int) -> Case:
    def make() -> tuple[Any, ...]:
        return Recorded(rows, width, size), new_step(count, narrow), size

    return Case(make, note=note, check=_read_right)


def _read_right(got: Any, buffers: Recorded, step: Step, size: int) -> str:
    """What a replay reads, name by name."""
    count, width = step["tables"].shape
    buffers.graph.replay()
    read = buffers.graph.output
    seen = {"token_ids": read[:, 0], "positions": read[:, 1], "slots": read[:, 2], "tables": read[:, 3:]}
    for name, values in seen.items():
        mine = values[:count, :width] if name == "tables" else values[:count]
        if not torch.equal(mine, step[name]):
            moved = buffers.get(name) is not buffers.before[name]
            why = ": another tensor took the buffer's place, and nobody reads it" if moved else ""
            return f"the graph read {name} {mine.tolist()}, not {step[name].tolist()}{why}"
        if not bool((values[count:] == PADDING[name]).all()):
            return f"rows {count} to {size - 1} of {name} are {values[count:].tolist()}, not {PADDING[name]}"
    return ""


BUFFER_CASES = [
    _buffers_case("as many requests as rows", 4, 4, 4, 2, 2),
    _buffers_case("five requests in eight rows", 5, 8, 8, 2, 2),
    _buffers_case("a table narrower than the buffer", 3, 4, 8, 4, 1),
    _buffers_case("one request", 1, 1, 8, 3, 2),
]

# ---------------------------------------------------------------- 7.3.3 which sizes to record


def wasted_rows(sizes: Sequence[int], steps: dict[int, int]) -> int:
    """Rows that nobody waits for. steps: requests in a step -> how many such steps.

    Raises:
        ValueError: a step is larger than all sizes.
    """
    total = 0
    for requests, times in steps.items():
        fitting = [size for size in sizes if size >= requests]
        if not fitting:
            raise ValueError(f"no size for {requests} requests")
        total += times * (min(fitting) - requests)
    return total


def least_waste(steps: dict[int, int], graphs: int) -> int:
    """The fewest wasted rows that `graphs` sizes allow: the oracle of the task."""
    counts = sorted(steps)

    @cache
    def rest(first: int, left: int) -> float:
        if first == len(counts):
            return 0
        if not left:
            return float("inf")
        return min(
            sum(steps[n] * (counts[last] - n) for n in counts[first : last + 1]) + rest(last + 1, left - 1)
            for last in range(first, len(counts))
        )

    return int(rest(0, graphs))


def _sizes_right(got: Any, steps: dict[int, int], graphs: int) -> str:
    if not isinstance(got, (list, tuple)) or not all(type(size) is int and size > 0 for size in got):
        return f"expected a list of sizes, got {got!r}"
    if len(got) > graphs:
        return f"{len(got)} sizes, {graphs} graphs are allowed"
    if max(got, default=0) < max(steps):
        return f"no size for a step of {max(steps)} requests"
    waste, least = wasted_rows(got, steps), least_waste(steps, graphs)
    return "" if waste == least else f"{sorted(got)} wastes {waste} rows, {least} are possible"


def _sizes_case(note: str, steps: dict[int, int], graphs: int) -> Case:
    return Case((steps, graphs), note=note, check=_sizes_right)


EVENING = {1: 300, 2: 40, 3: 220, 5: 90, 6: 15, 9: 400, 10: 12, 11: 60, 12: 5}
SIZE_CASES = [
    _sizes_case("one graph", {2: 5, 7: 1}, 1),
    _sizes_case("a graph for each", {1: 3, 4: 2, 6: 9}, 3),
    _sizes_case("the most frequent is not always worth a graph", {1: 10, 8: 9, 9: 11, 16: 1}, 2),
    _sizes_case("more graphs than kinds of steps", {3: 1, 5: 1}, 4),
    _sizes_case("an evening, three graphs", EVENING, 3),
    _sizes_case("an evening, four graphs", EVENING, 4),
]

TASKS = {
    "7.3.1": Task("Fit a step into a size", FIT_CASES),
    "7.3.2": Task("Fill the static buffers", BUFFER_CASES),
    "7.3.3": Task("Choose the sizes", SIZE_CASES),
}
