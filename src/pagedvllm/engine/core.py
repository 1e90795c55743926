"""The engine core: schedule, execute, update. It knows ids, blocks and steps, and no text.

vLLM: v1/engine/core.py, EngineCore.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagedvllm.config import EXECUTORS, KV_MANAGERS, SCHEDULERS, EngineConfig
from pagedvllm.engine.executor import Executor
from pagedvllm.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.kv.protocol import KVCache
from pagedvllm.kv.sizing import num_kv_blocks
from pagedvllm.plugins import load_plugins, resolve_from
from pagedvllm.request import Request
from pagedvllm.sched.limits import with_defaults
from pagedvllm.sched.scheduler import Scheduler


class EngineCore:
    """Owns the scheduler and, through an executor, the workers."""

    def __init__(self, config: EngineConfig) -> None:
        load_plugins()
        backend = config.parallel.distributed_executor_backend
        self.executor = resolve_from(EXECUTORS, backend, Executor)(config)  # type: ignore[type-abstract]
        self._initialize_kv_cache(config)

    def _initialize_kv_cache(self, config: EngineConfig) -> None:
        """Ask what memory is left, cut it into blocks, and say who decides about them."""
        executor, cache = self.executor, config.cache
        device, longest = executor.device, executor.max_model_len
        scheduler = with_defaults(config.scheduler, device, longest)
        seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        assert seqs is not None and tokens is not None  # by with_defaults
        limits = BatchLimits(seqs, tokens, longest, cache.block_size)
        available = executor.determine_available_memory(limits)
        num_blocks = num_kv_blocks(cache, available, executor.page_bytes)
        asked = config.model.max_model_len is not None
        self.max_model_len = _fit(longest, asked, num_blocks, cache.block_size)
        limits = replace(limits, max_model_len=self.max_model_len)
        executor.initialize_cache(num_blocks, limits)
        name, size = cache.manager, cache.block_size
        manager = resolve_from(KV_MANAGERS, name, KVCache)  # type: ignore[type-abstract]
        kind = resolve_from(SCHEDULERS, scheduler.scheduler_cls, Scheduler)
        self.scheduler = kind(scheduler, manager(num_blocks, size), self.max_model_len)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never fit ends with an error in the next step."""
        self.scheduler.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.params,
                request.arrival_time,
                eos_token_ids=request.eos_token_ids,
            )
        )

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks. An unknown id is fine: it may have finished."""
        self.scheduler.finish_requests(request_ids)

    def step(self) -> EngineCoreOutputs:
        """Decide, compute, take in. If computing fails, all is as if it was not tried."""
        output = self.scheduler.schedule()
        try:
            result = self.executor.execute(output)
        except BaseException:
            self.scheduler.retract(output)
            raise
        outputs = self.scheduler.update(output, result)
        return EngineCoreOutputs(outputs, self.make_stats())

    def make_stats(self) -> SchedulerStats:
        """How full the engine is now."""
        scheduler = self.scheduler
        kv = scheduler.kv
        usage = 1 - kv.num_free_blocks / (kv.num_blocks - 1)
        return SchedulerStats(len(scheduler.running), len(scheduler.waiting), usage)


def _fit(max_model_len: int, asked: bool, num_blocks: int, block_size: int) -> int:
    """max_model_len, as long as one such request fits beside the null block.

    Where nobody asked for a length, what fits will do.

    Raises:
        ValueError: it was asked for, and does not fit.
    """
    fits = (num_blocks - 1) * block_size
    if max_model_len > fits and asked:
        raise ValueError(
            f"max_model_len {max_model_len} does not fit: the KV cache has {num_blocks - 1}"
            f" blocks of {block_size} tokens, {fits} in all. Lower max_model_len to at most"
            f" {fits}, or make the cache larger: num_gpu_blocks_override,"
            " kv_cache_memory_bytes, on a GPU gpu_memory_utilization"
        )
    return min(max_model_len, fits)
