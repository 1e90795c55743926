"""A decode step, recorded once and then replayed: hundreds of launches for the price of one.

A CUDA graph is a list of kernels with their grids and their arguments, addresses included.
So there is one for each batch size, smaller batches are padded to the next, and what differs
from step to step must be in memory that stays where it is.
vLLM: v1/worker/gpu/cudagraph_utils.py, CudaGraphManager; v1/cudagraph_dispatcher.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedAttentionBackend, PagedMetadata
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops

LARGEST = 512  # beyond it a step's kernels take longer than their launches


def capture_sizes(limits: BatchLimits, asked: Sequence[int] | None = None) -> list[int]:
    """Batch sizes to record, ascending: 1, 2, 4, then every 8th, from 256 on every 16th; the
    last is the most requests a step can have, or 512.

    asked: these instead. None is above max_num_seqs, max_num_batched_tokens or max_model_len
    (vLLM issue 53658): what is larger becomes the largest that is allowed.
    """
    limit = min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    if asked is not None:
        return sorted({min(size, limit) for size in asked})
    last = min(limit, LARGEST)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, last, 16), last}
    return sorted(size for size in sizes if size <= last)


@dataclass(frozen=True)
class Graph:
    """Something recorded. `replay` does it again, and so writes `output` anew."""

    replay: Callable[[], None]
    output: Tensor


class GraphRecorder(Protocol):
    """Who can record what a function does on a device."""

    def __init__(self, device: torch.device) -> None: ...

    def record(self, function: Callable[[], Tensor]) -> Graph:
        """Call `function`, and keep what it did on the device; what it did on the host, its
        Python included, will not happen again.
        """
        ...


class CudaGraphRecorder:
    """Graphs of a GPU. They share a pool of memory, for only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, function: Callable[[], Tensor]) -> Graph:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()  # Triton compiles, libraries make workspaces: not while recording
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            output = function()
        return Graph(graph.replay, output)


class StepPlan(Protocol):
    """What a backend's kernels are told of a step."""

    @property
    def seq_lens(self) -> Tensor: ...  # [S], on the device


@runtime_checkable
class PlanningAttention(Protocol):
    """A backend that can be recorded: its kernels read tensors, and no Python numbers but
    those of a plan, made once for each metadata object.
    """

    def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> StepPlan: ...


class StaticBatch:
    """The inputs of up to `size` decoding requests, at addresses that never change."""

    def __init__(self, size: int, table_width: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.token_ids, self.positions, self.slots = (zeros(size) for _ in range(3))
        self.tables = zeros(size, table_width)
        self.slots.fill_(-1)

    def fill(self, token_ids: Tensor, ctx: ForwardContext, size: int) -> None:
        """A step's requests, then rows that nobody waits for, `size` in all: token 0 at
        position 0, whose key is written nowhere and whose only block is the null block.
        """
        meta, count = ctx.metadata, len(token_ids)
        assert isinstance(meta, PagedMetadata)
        for buffer, values, padding in (
            (self.token_ids, token_ids, 0),
            (self.positions, ctx.positions, 0),
            (self.slots, meta.slot_mapping, -1),
        ):
            buffer[:count].copy_(values)
            buffer[count:size].fill_(padding)
        # Beyond a row's own blocks its table may hold anything: it is not read there.
        self.tables[:count, : meta.block_tables.shape[1]].copy_(meta.block_tables)
        self.tables[count:size].zero_()


class GraphedModel:
    """Takes a model's place: replays a graph where one fits, else calls the model."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: PagedAttentionBackend,
        ops: Ops,
        limits: BatchLimits,
        sizes: Sequence[int],
        recorder: GraphRecorder,
    ) -> None:
        self.model, self.attention, self.ops, self.limits = model, attention, ops, limits
        self.build, self.logits = model.build, model.logits
        self.sizes, self.recorder = sorted(sizes), recorder
        width = blocks_for(limits.max_model_len, limits.block_size)
        self.batch = StaticBatch(self.sizes[-1], width, model.build.device)
        self.planned: list[
            object
        ] = []  # what graphs read and write: they know only addresses
        # The largest first: smaller ones find in the pool what it has given back.
        self.graphs = {size: self.capture(size) for size in reversed(self.sizes)}
        self.replays: Counter[int] = Counter()  # size -> how often

    def capture(self, size: int) -> Graph:
        """Record a step of `size` requests with one new token each.

        Its grids are those of the longest sequences there may be: a plan is Python, and so
        becomes a part of the graph. How long they are is read from `seq_lens`.
        """
        batch, attention, build = self.batch, self.attention, self.model.build
        assert isinstance(attention, PlanningAttention)
        token_ids, positions = batch.token_ids[:size], batch.positions[:size]
        starts, longest = list(range(size + 1)), [self.limits.max_model_len] * size
        meta = PagedMetadata(starts, longest, batch.slots[:size], batch.tables[:size])
        spec = self.model.attention_specs()[0]
        shape = (size, spec.num_heads, spec.head_dim)
        q = torch.empty(shape, dtype=build.dtype, device=build.device)
        plan = attention.plan(meta, spec, q)  # its tensors are made here, not in the graph
        self.planned.append((meta, plan))
        context = ForwardContext(positions, meta, attention, self.ops)

        @torch.inference_mode()
        def step() -> Tensor:
            plan.seq_lens.copy_(positions + 1)  # the new token is a sequence's last
            return self.model(token_ids, context)  # type: ignore[no-any-return]

        return self.recorder.record(step)

    def eligible(self, ctx: ForwardContext) -> bool:
        """Whether there is a graph for this step: one new token for each request, no more
        requests than were recorded, and the cache that was recorded.
        """
        meta = ctx.metadata
        num_seqs, num_tokens = len(meta.seq_lens), meta.query_start_loc[-1]
        fits = num_tokens == num_seqs <= self.sizes[-1]
        return fits and ctx.attention is self.attention

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """As the model: token_ids [T] -> hidden states [T, hidden], good until the next call."""
        if not self.eligible(ctx):
            return self.model(token_ids, ctx)  # type: ignore[no-any-return]
        count = len(token_ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        self.batch.fill(token_ids, ctx, size)
        graph = self.graphs[size]
        graph.replay()
        self.replays[size] += 1
        return graph.output[:count]
