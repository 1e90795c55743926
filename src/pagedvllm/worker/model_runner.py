"""The runner with a persistent batch: SchedulerOutput to tokens, without Python per token.

vLLM: v1/worker/gpu_model_runner.py, GPUModelRunner (_update_states, _prepare_inputs), which
takes a row out of the batch also while a step leaves it out; its successor, V2, is
v1/worker/gpu/model_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedvllm.attention.paged import PagedAttentionBackend, PagedMetadata
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops
from pagedvllm.sample.min_tokens import MinTokens
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sched.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from pagedvllm.worker.input_batch import InputBatch, Ints, RequestState


class StagingBuffer:
    """Up to `size` int64 numbers: the host writes them, the device reads them.

    On a CPU both are the same memory. For a GPU the host's side is pinned: the copy then
    runs by itself, and the host must not write again before it is done.
    vLLM: CpuGpuBuffer in v1/utils.py.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=on_gpu)
        self.on_device = self.host.to(device)  # on a CPU: not a copy
        self.copied = None
        if on_gpu:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, values: Ints) -> Tensor:
        """The same numbers on the device, until the next call."""
        count = len(values)
        if self.copied is not None:
            self.copied.synchronize()
        self.host.numpy()[:count] = values
        if self.copied is not None:
            self.on_device[:count].copy_(self.host[:count], non_blocking=True)
            self.copied.record(torch.cuda.current_stream(self.on_device.device))
        return self.on_device[:count]


@dataclass(frozen=True)
class StepInputs:
    """T new tokens of S requests, R of which get a next token."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    metadata: PagedMetadata
    logits_at: Tensor  # [R]: which of the T
    sampled_rows: Ints  # R: whose they are


class ModelRunner:
    """Keeps a batch from step to step; runs the model on what a step adds to it."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: PagedAttentionBackend,
        ops: Ops,
        limits: BatchLimits,
        seed: int,
    ) -> None:
        self.model, self.attention, self.ops, self.limits = model, attention, ops, limits
        self.device = device = model.build.device
        self.sampler = Sampler([MinTokens()])
        self.generator = torch.Generator(device).manual_seed(seed)
        self.seeded: dict[str, torch.Generator] = {}  # until a request has finished
        self.batch = InputBatch(limits, device)
        num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.token_ids, self.positions, self.slots = (
            StagingBuffer(num_tokens, device) for _ in range(3)
        )
        self.logits_at = StagingBuffer(num_seqs, device)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step's tokens and choose the next ones.

        After a failure the scheduler sends the step's requests again, in whole: their rows
        are given up.
        """
        names = list(output.num_scheduled_tokens)
        try:
            self.update_states(output)
            tokens = self.run(output) if names else {}
        except BaseException:
            for name in (*output.preempted_req_ids, *names):
                self.batch.remove(name)
            raise
        sampled = [[tokens[name]] if name in tokens else [] for name in names]
        return ModelRunnerOutput(names, sampled)

    def update_states(self, output: SchedulerOutput) -> None:
        """Take in what has changed. In this order: a finished id may be in use again."""
        for name in output.finished_req_ids:
            self.seeded.pop(name, None)
            self.batch.remove(name)
        for name in output.preempted_req_ids:
            self.batch.remove(name)
        for new in output.scheduled_new_reqs:
            self.batch.add(self.state_of(new), new.token_ids)
        for name, block_ids in output.new_block_ids.items():
            if block_ids:
                self.batch.tables.append(self.batch.row_of[name], block_ids)

    def state_of(self, new: NewRequestData) -> RequestState:
        """A seed's random stream begins here, or goes on if the request was here before."""
        name, seed, generator = new.request_id, new.params.seed, self.generator
        if seed is not None:
            if name not in self.seeded:
                self.seeded[name] = torch.Generator(self.device).manual_seed(seed)
            generator = self.seeded[name]
        eos = new.eos_token_ids
        return RequestState(name, new.params, new.num_prompt_tokens, eos, generator)

    def run(self, output: SchedulerOutput) -> dict[str, int]:
        """The next token of each request all of whose tokens are computed by now."""
        inputs = self.prepare_inputs(output)
        metadata, rows = inputs.metadata, inputs.sampled_rows
        context = ForwardContext(inputs.positions, metadata, self.attention, self.ops)
        hidden = self.model(inputs.token_ids, context)
        if not len(rows):
            return {}
        logits = self.model.logits(hidden[inputs.logits_at])
        batch = self.batch.sampling_batch(rows)
        with rewound_on_failure(batch):
            tokens = self.sampler(logits, batch)
            names = [self.batch.rows[row].request_id for row in rows.tolist()]
            self.batch.append_tokens(rows, tokens)
        return dict(zip(names, tokens, strict=True))

    def prepare_inputs(self, output: SchedulerOutput) -> StepInputs:
        """Where each of the step's tokens is in the batch, in its request, in the cache.

        S requests, T tokens; a row's tokens are adjacent. All arithmetic on whole arrays.
        """
        batch, block_size = self.batch, self.limits.block_size
        names = sorted(output.num_scheduled_tokens, key=batch.row_of.__getitem__)
        rows = np.array([batch.row_of[name] for name in names])  # S, ascending
        starts = np.array([output.num_computed_tokens[name] for name in names])
        num_new = np.array([output.num_scheduled_tokens[name] for name in names])
        ends = starts + num_new
        stops = num_new.cumsum()  # e.g. 2 and 3 new tokens: 2, 5
        total, limit = int(stops[-1]), self.limits.max_num_batched_tokens
        if total > limit:
            raise ValueError(
                f"{total} tokens are more than max_num_batched_tokens, {limit}"
            )
        row = rows.repeat(num_new)  # T, as all that follows: r0 r0 r1 r1 r1
        positions = np.arange(total) + (ends - stops).repeat(num_new)
        blocks = batch.tables.host[row, positions // block_size]
        slots = blocks * block_size + positions % block_size
        batch.tables.send()
        metadata = PagedMetadata(
            [0, *stops.tolist()],
            ends.tolist(),
            self.slots.send(slots),
            batch.tables.of(rows),
        )
        complete = ends == batch.num_tokens[rows]  # inside a prompt the next token is known
        return StepInputs(
            self.token_ids.send(batch.token_ids[row, positions]),
            self.positions.send(positions),
            metadata,
            self.logits_at.send(stops[complete] - 1),
            rows[complete],
        )


@contextmanager
def rewound_on_failure(batch: SamplingBatch) -> Iterator[None]:
    """What was drawn in a step that fails will be drawn again."""
    rows = zip(batch.params, batch.generators, strict=True)
    random = {generator for params, generator in rows if not params.greedy}
    states = [(generator, generator.get_state()) for generator in random]
    try:
        yield
    except BaseException:
        for generator, state in states:
            generator.set_state(state)
        raise
