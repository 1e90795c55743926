"""What is asked of whoever runs the model: of a worker, which has a device, and of its runner.

Plain data goes in, plain data comes out, so that a worker may live in another process.
vLLM: v1/worker/worker_base.py, WorkerBase; v1/worker/gpu_model_runner.py, GPUModelRunner.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from pagedvllm.attention.paged import PagedAttentionBackend
from pagedvllm.config import EngineConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops
from pagedvllm.sched.limits import Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class BatchLimits:
    """The most that one step, and one request, can hold: buffers are made this large once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def check_buffers(self) -> None:
        """Raise ValueError if a runner's buffers would take more than half of the RAM."""
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        needed = 4 * seqs * self.max_model_len + 32 * tokens
        if needed > ram // 2:
            raise ValueError(
                f"max_num_seqs {seqs} of max_model_len {self.max_model_len}, and"
                f" max_num_batched_tokens {tokens}, need buffers of {needed} bytes; half of this"
                f" machine's RAM is {ram // 2}. Lower one of them"
            )


class Worker(Protocol):
    """One device with its weights, its part of the KV cache, and a runner."""

    device: Device
    max_model_len: int  # as asked for, else what the model was trained for
    page_bytes: int  # of one KV block, all of this worker's layers together

    def __init__(self, config: EngineConfig) -> None:
        """Take the device and load the weights."""
        ...

    def determine_available_memory(self, limits: BatchLimits) -> int:
        """Bytes that are left for the KV cache."""
        ...

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        """Make the cache and the runner. Once; before it, nothing can be executed."""
        ...

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        ...


class Runner(Protocol):
    """Turns a SchedulerOutput into a flat batch, and its logits into tokens."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: PagedAttentionBackend,
        ops: Ops,
        limits: BatchLimits,
        seed: int,
    ) -> None: ...

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. Requests of `scheduled_new_reqs` may be known from before a preemption or
        a failed step: what comes now replaces what was, except that a random stream goes on.
        """
        ...
