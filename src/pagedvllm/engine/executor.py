"""How many workers there are, and where: the engine core does not know.

vLLM: v1/executor/abstract.py, Executor; v1/executor/uniproc_executor.py, UniProcExecutor.
"""

from __future__ import annotations

from typing import Protocol

from pagedvllm.config import WORKERS, EngineConfig
from pagedvllm.engine.worker_base import BatchLimits, Worker
from pagedvllm.plugins import resolve_from
from pagedvllm.sched.limits import Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """A worker's methods, for all workers at once."""

    device: Device
    max_model_len: int
    page_bytes: int

    def __init__(self, config: EngineConfig) -> None: ...

    def determine_available_memory(self, limits: BatchLimits) -> int:
        """Bytes for the KV cache of the worker that has the fewest."""
        ...

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None: ...

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class UniProcExecutor:
    """One worker, in this very process: a debugger can step from the scheduler into it."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        for name in sizes:
            if getattr(parallel, name) != 1:
                raise ValueError(
                    f"{name} must be 1 with distributed_executor_backend"
                    f" {parallel.distributed_executor_backend!r}, got {getattr(parallel, name)}"
                )
        if parallel.enable_expert_parallel:
            raise ValueError("enable_expert_parallel has no effect with one worker")
        worker = resolve_from(WORKERS, parallel.worker_cls, Worker)  # type: ignore[type-abstract]
        self.worker = worker(config)
        self.device, self.page_bytes = self.worker.device, self.worker.page_bytes
        self.max_model_len = self.worker.max_model_len

    def determine_available_memory(self, limits: BatchLimits) -> int:
        return self.worker.determine_available_memory(limits)

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        self.worker.initialize_cache(num_blocks, limits)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute(output)
