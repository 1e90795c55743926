"""What chapter 7.3 and its lab run: an attention that can be recorded, decode steps, and what a step takes."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedMetadata
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.forward_context import ForwardContext

NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty")  # memory, and nothing in it


class RecordableAttention(TorchPagedAttention):
    """Decode steps with tensors alone, as kernels do them; anything else as in chapter 4.

    Slow (it gathers, and makes copies of keys for each query head), but nothing in a decode step depends on a Python
    number of the step: lengths come from the plan's tensor.
    """

    planned: Any = (None, None)

    def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> Any:
        """`seq_lens` [S] on the device, made once for each metadata object."""
        if self.planned[0] is not meta:
            lengths = torch.tensor(meta.seq_lens, device=q.device)
            self.planned = meta, SimpleNamespace(seq_lens=lengths)
        return self.planned[1]

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        if meta.query_start_loc != list(range(len(meta.seq_lens) + 1)):
            return super().forward(spec, q, k, v, ctx)
        lengths = self.plan(meta, spec, q).seq_lens
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        tables, within = meta.block_tables, torch.arange(self.block_size, device=q.device)
        places = (tables[:, :, None] * self.block_size + within).flatten(1)  # [S, keys]: slots
        seen = torch.arange(places.shape[1], device=q.device) < lengths[:, None]
        keys_values = []
        for cache, new in zip(self.caches[spec.layer_index], (k, v), strict=True):
            rows = cache.flatten(0, 1)
            rows.index_copy_(0, meta.slot_mapping.clamp(min=0), new)  # -1: into the null block
            found = rows[places]  # a gather: on the device alone
            found = torch.where(seen[:, :, None, None], found, 0.0)  # beyond the end may be NaN
            keys_values.append(found.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2))
        scores = torch.einsum("shd,skhd->shk", q, keys_values[0]) * spec.scale
        weights = scores.masked_fill(~seen[:, None, :], float("-inf")).softmax(-1)
        return torch.einsum("shk,skhd->shd", weights, keys_values[1])


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active: how often each operation of torch ran that on a GPU would start a kernel.

    Views are left out (they only make a new header), and so is memory that is not written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returned = [value.alias_info for value in func._schema.returns]
        if name not in NO_KERNEL and not any(alias and not alias.is_write for alias in returned):
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def runner(llm: Any) -> Any:
    """The runner of an engine in this process."""
    return llm.engine.core.executor.worker.runner


def step(llm: Any, new: list[int], length: int = 9) -> tuple[Tensor, ForwardContext]:
    """Ids and context of a step: requests of `length` tokens, each in a block of its own, the last `new` of them new.

    A decode step of three: `step(llm, [1, 1, 1])`.
    """
    of = runner(llm)
    device, size = of.model.build.device, of.limits.block_size
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    positions = [length - count + i for count in new for i in range(count)]
    slots = [(1 + row) * size + length - count + i for row, count in enumerate(new) for i in range(count)]
    ids, places, into = (torch.tensor(v, device=device) for v in (list(range(100, 100 + len(slots))), positions, slots))
    tables = torch.arange(1, len(new) + 1, device=device)[:, None]
    meta = PagedMetadata(starts, [length] * len(new), into, tables)
    return ids, ForwardContext(places, meta, of.attention, of.ops)


def seconds(function: Callable[[], Any], times: int = 9) -> float:
    """Median of some runs, after one that does not count."""
    function()
    took = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def compiled(function: Callable[..., Tensor], *args: Tensor) -> dict[str, float]:
    """Seconds of torch.compile for `function`, of a call before it and of one after it, and how far results differ.

    Empty unless PAGEDVLLM_COMPILE is set: C++ is written and compiled, which can take a minute.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    if not os.environ.get("PAGEDVLLM_COMPILE"):
        return {}
    before = seconds(lambda: function(*args), 99)
    fast, start = torch.compile(function), time.perf_counter()
    difference = (fast(*args) - function(*args)).abs().max().item()
    compiling = time.perf_counter() - start
    after = seconds(lambda: fast(*args), 99)
    return {"compile": compiling, "before": before, "after": after, "difference": difference}
