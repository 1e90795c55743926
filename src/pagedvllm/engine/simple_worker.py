"""A worker whose memory for the KV cache is said by hand. Chapter 6 measures it.

vLLM: v1/worker/gpu_worker.py, Worker.
"""

from __future__ import annotations

from pagedvllm.attention.paged import PagedAttentionBackend, page_bytes
from pagedvllm.config import ATTENTION_BACKENDS, OPS, RUNNERS, EngineConfig
from pagedvllm.engine.worker_base import BatchLimits, Runner
from pagedvllm.hub import resolve_model
from pagedvllm.kv.sizing import bytes_by_hand, useful_blocks
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops
from pagedvllm.plugins import load_plugins, resolve_from
from pagedvllm.sched.limits import Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput


class SimpleWorker:
    """The model, its cache and a runner on one device."""

    def __init__(self, config: EngineConfig) -> None:
        load_plugins()
        self.config = config
        dummy = config.model.load_format == "dummy"
        path = resolve_model(config.model.model, need_weights=not dummy)
        self.model = load_model(path, config.model, pick_device(config.model.device))
        self.max_model_len, build = self.model.max_model_len, self.model.build
        self.device = Device.of(build.device)
        self.specs, block_size = self.model.attention_specs(), config.cache.block_size
        self.page_bytes = page_bytes(self.specs, block_size, build.dtype)

    def determine_available_memory(self, limits: BatchLimits) -> int:
        """kv_cache_memory_bytes, else 1 GiB, but never more than could be used."""
        seqs, longest = limits.max_num_seqs, limits.max_model_len
        useful = useful_blocks(seqs, longest, limits.block_size) * self.page_bytes
        return bytes_by_hand(self.config.cache, useful, "worker_cls 'simple'")

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        limits.check_buffers()
        config, build = self.config, self.model.build
        name = config.attention.attention_backend
        backend = resolve_from(ATTENTION_BACKENDS, name, PagedAttentionBackend)  # type: ignore[type-abstract]
        cache = (num_blocks, limits.block_size, build.dtype, build.device)
        try:
            attention = backend(self.specs, *cache)
        except RuntimeError:  # torch's allocators say so in many ways
            raise ValueError(
                f"a KV cache of {num_blocks} blocks needs {num_blocks * self.page_bytes} bytes,"
                f" which {build.device} does not have: lower num_gpu_blocks_override or"
                " kv_cache_memory_bytes"
            ) from None
        ops = resolve_from(OPS, config.ops, Ops)()  # type: ignore[type-abstract]
        runner = resolve_from(RUNNERS, config.parallel.runner_cls, Runner)  # type: ignore[type-abstract]
        self.runner = runner(self.model, attention, ops, limits, config.model.seed)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(output)
