"""A worker that finds out by itself how much memory the KV cache may have.

vLLM: v1/worker/gpu_worker.py, Worker (init_device, load_model, determine_available_memory,
initialize_from_config); v1/worker/cpu_worker.py, CPUWorker.
"""

from __future__ import annotations

import logging

import torch

from pagedvllm.attention.paged import PagedAttentionBackend, page_bytes
from pagedvllm.config import ATTENTION_BACKENDS, OPS, RUNNERS, CacheConfig, EngineConfig
from pagedvllm.engine.worker_base import BatchLimits, Runner
from pagedvllm.hub import resolve_model
from pagedvllm.kv.sizing import useful_blocks
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops
from pagedvllm.plugins import load_plugins, resolve_from
from pagedvllm.sched.limits import Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedvllm.worker.memory import (
    MemoryProfile,
    MemorySnapshot,
    cpu_kv_bytes,
    device_memory,
    requested_memory,
    size,
)
from pagedvllm.worker.profile import largest_steps, model_without_weights, weight_bytes

logger = logging.getLogger(__name__)


class Worker:
    """One device: the model, its cache and a runner on it, and the books of its memory."""

    def __init__(self, config: EngineConfig) -> None:
        load_plugins()
        self.config = config
        self.memory_profile: MemoryProfile | None = None  # of a GPU that was measured
        self.init_device()
        self.load_model()

    def init_device(self) -> None:
        """Take the device, and see what is free there before anything of ours is.

        Raises:
            ValueError: there is no such device, less is free than gpu_memory_utilization
                asks for, or that share was set for a CPU.
        """
        device = pick_device(self.config.model.device)
        if device.type == "cuda":
            if (device.index or 0) >= torch.cuda.device_count():
                have = torch.cuda.device_count()
                raise ValueError(
                    f"device {device} was asked for, but there are {have} GPUs"
                )
            torch.cuda.set_device(device.index or 0)
        self.torch_device, self.device = device, Device.of(device)
        self.memory = device_memory(device)
        self.before = self.memory.snapshot()
        cache, default = self.config.cache, CacheConfig.gpu_memory_utilization
        share = cache.gpu_memory_utilization
        self.requested = requested_memory(self.before.total, share)
        by_hand = cache.num_gpu_blocks_override or cache.kv_cache_memory_bytes
        if self.memory.counts_tensors:
            if not by_hand and self.before.free < self.requested:
                raise ValueError(_device_is_taken(self.before, self.requested, share))
        elif share != default:
            raise ValueError(
                "gpu_memory_utilization is for GPUs, whose memory can be measured; on a CPU"
                f" leave it at {default} and set kv_cache_memory_bytes"
            )

    def load_model(self) -> None:
        """Load the weights, once it is known that they fit.

        Raises:
            ModelError: there is no such model.
            ValueError: its weights are larger than what is free.
        """
        settings, device = self.config.model, self.torch_device
        path = resolve_model(settings.model, need_weights=settings.load_format != "dummy")
        needed = weight_bytes(model_without_weights(path, settings, device))
        free, total = self.before.free, self.before.total
        if needed > free:
            raise ValueError(
                f"the weights of {path.name} need {size(needed)}, but of {size(total)}"
                f" {size(free)} are free on {device}: {size(needed - free)} are missing."
                " Choose a smaller model, or a dtype of fewer bytes"
            )
        self.model = load_model(path, settings, device)
        self.max_model_len = self.model.max_model_len
        self.specs, build = self.model.attention_specs(), self.model.build
        self.page_bytes = page_bytes(self.specs, self.config.cache.block_size, build.dtype)
        self.ops = resolve_from(OPS, self.config.ops, Ops)()  # type: ignore[type-abstract]

    def determine_available_memory(self, limits: BatchLimits) -> int:
        """Bytes for the KV cache: as said by hand, else measured; on a CPU a share of RAM.

        Raises:
            ValueError: what was said does not fit, or nothing is left.
        """
        cache, free = self.config.cache, self.memory.snapshot().free
        if (num_blocks := cache.num_gpu_blocks_override) is not None:
            asked = num_blocks * self.page_bytes
            return _as_asked("num_gpu_blocks_override", num_blocks, asked, free)
        if (asked_bytes := cache.kv_cache_memory_bytes) is not None:
            return _as_asked("kv_cache_memory_bytes", asked_bytes, asked_bytes, free)
        if not self.memory.counts_tensors:
            return self.share_of_ram(limits)
        self.memory_profile = profile = self.profile_run(limits)
        logger.info("%s, measured: %s", self.torch_device, profile)
        if (missing := 2 * self.page_bytes - profile.kv) > 0:  # one is the null block
            raise ValueError(
                f"no memory is left for the KV cache, {size(missing)} are missing:"
                f" {profile}."
                f" Raise gpu_memory_utilization ({cache.gpu_memory_utilization}), or lower"
                f" {_what_a_step_depends_on(limits)}"
            )
        return profile.kv

    def share_of_ram(self, limits: BatchLimits) -> int:
        """A stated share of a computer's memory, but never more than requests could use."""
        seqs, longest = limits.max_num_seqs, limits.max_model_len
        useful = useful_blocks(seqs, longest, limits.block_size) * self.page_bytes
        ram = self.memory.snapshot()
        available = min(cpu_kv_bytes(ram), useful)
        logger.info(
            "%s for the KV cache: a share of %s of RAM (%s are available), not a"
            " measurement; kv_cache_memory_bytes sets it by hand",
            *map(size, (available, ram.total, ram.free)),
        )
        return available

    def profile_run(self, limits: BatchLimits) -> MemoryProfile:
        """Run the largest steps over a cache of one block, and see what they took.

        They are the engine's own: its runner and buffers, attention, sampling. vLLM leaves
        attention out here: its fused kernels need next to nothing.

        Raises:
            ValueError: they do not fit.
        """
        loaded = self.memory.snapshot()
        self.memory.reset_peak()
        if not self.runs_largest_steps(limits):
            raise ValueError(
                f"the largest step does not fit into {size(loaded.free)}, which are free"
                " once the weights are loaded."
                f" Lower {_what_a_step_depends_on(limits)}"
            )
        weights = loaded.torch_allocated - self.before.torch_allocated
        after = self.memory.snapshot()
        return MemoryProfile.of(self.requested, weights, self.before, after)

    def runs_largest_steps(self, limits: BatchLimits) -> bool:
        """False if they need more memory than there is.

        Whatever they took is then given back: an error raised in here would keep it.
        """
        try:
            runner = self.make_runner(1, limits)
            for step in largest_steps(limits):
                runner.execute(step)
        except torch.OutOfMemoryError:
            return False
        return True

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        """Make the cache and the runner that works on it.

        Raises:
            ValueError: they do not fit.
        """
        free, needed = self.memory.snapshot().free, num_blocks * self.page_bytes
        fits = needed <= free
        if fits:
            try:
                self.runner = self.make_runner(num_blocks, limits)
            except torch.OutOfMemoryError:
                fits = False
        if not fits:
            raise ValueError(
                f"a KV cache of {num_blocks} blocks needs {size(needed)}, but {size(free)}"
                f" are free on {self.torch_device}. Lower num_gpu_blocks_override,"
                " kv_cache_memory_bytes or gpu_memory_utilization, or end what else uses it"
            )

    def make_runner(self, num_blocks: int, limits: BatchLimits) -> Runner:
        limits.check_buffers()
        config, build = self.config, self.model.build
        name = config.attention.attention_backend
        backend = resolve_from(ATTENTION_BACKENDS, name, PagedAttentionBackend)  # type: ignore[type-abstract]
        runner = resolve_from(RUNNERS, config.parallel.runner_cls, Runner)  # type: ignore[type-abstract]
        cache = (num_blocks, limits.block_size, build.dtype, build.device)
        attention = backend(self.specs, *cache)
        return runner(self.model, attention, self.ops, limits, config.model.seed)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(output)


def _device_is_taken(before: MemorySnapshot, requested: int, share: float) -> str:
    """Who holds what is missing: an earlier engine of this process, or somebody else."""
    ours, free, total = before.torch_allocated, before.free, before.total
    held = f"other processes and the driver hold {size(total - free - ours)}"
    if ours:
        held += f", tensors of this process {size(ours)} (an earlier LLM? delete it)"
    fits = int(free / total * 100) / 100
    return (
        f"gpu_memory_utilization {share} asks for {size(requested)} of {size(total)}, but"
        f" {size(free)} are free, {size(requested - free)} too little: {held}."
        f" Lower gpu_memory_utilization to at most {fits}, or end what holds them"
    )


def _as_asked(setting: str, value: int, num_bytes: int, free: int) -> int:
    if num_bytes > free:
        raise ValueError(
            f"{setting} {value} asks for {size(num_bytes)}, but {size(free)} are free once"
            f" the weights are loaded: {size(num_bytes - free)} are missing"
        )
    return num_bytes


def _what_a_step_depends_on(limits: BatchLimits) -> str:
    return (
        f"max_num_batched_tokens ({limits.max_num_batched_tokens}), max_num_seqs"
        f" ({limits.max_num_seqs}) or max_model_len ({limits.max_model_len}: the torch"
        " attention backend keeps a score for each pair of a new token and one of its"
        " sequence)"
    )
