"""The worker of chapter 6, which now also records decode steps and sets memory aside for them.

vLLM: v1/worker/gpu_worker.py, Worker.compile_or_warm_up_model; GPUModelRunner.capture_model
and profile_cudagraph_memory in v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from pagedvllm.config import GRAPH_RECORDERS
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.plugins import resolve_from
from pagedvllm.worker.cuda_graph import (
    GraphedModel,
    GraphRecorder,
    PlanningAttention,
    capture_sizes,
)
from pagedvllm.worker.memory import MemoryProfile, size
from pagedvllm.worker.worker import Worker

logger = logging.getLogger(__name__)


class GraphWorker(Worker):
    """Puts a `GraphedModel` into its runner, where the device and the attention allow it."""

    def profile_run(self, limits: BatchLimits) -> MemoryProfile:
        """What graphs will take is taken from the cache's share."""
        profile = super().profile_run(limits)
        graphs = self.graph_bytes(limits)
        return replace(profile, graphs=graphs, kv=profile.kv - graphs)

    def graph_bytes(self, limits: BatchLimits) -> int:
        """Record all graphs over a cache of one block, and see what that takes.

        It costs the seconds of recording twice. vLLM records one or two of each kind and
        multiplies.
        """
        runner = self.make_runner(1, limits)
        before = self.memory.snapshot().free
        self.record_graphs(runner, limits)
        return max(before - self.memory.snapshot().free, 0)

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        """Make cache and runner, and record graphs over this cache: they hold its address."""
        super().initialize_cache(num_blocks, limits)
        self.record_graphs(self.runner, limits)

    def record_graphs(self, runner: Any, limits: BatchLimits) -> None:
        """From now on `runner` calls a model that replays graphs; or else it is said why not.

        runner: has `model`, `attention` and `ops`, as both of ours do.

        Raises:
            ValueError: graphs do not fit into memory, or the recorder that was asked for
                cannot record this attention.
        """
        settings, device = self.config.compilation, self.torch_device
        if why := self.why_eager(runner.attention):
            logger.info("no CUDA graphs: %s", why)
            return
        name = settings.cudagraph_recorder
        name = "cuda" if name == "auto" else name
        recorder = resolve_from(GRAPH_RECORDERS, name, GraphRecorder)(device)  # type: ignore[type-abstract]
        sizes, start = capture_sizes(limits, settings.cudagraph_capture_sizes), time.time()
        free = self.memory.snapshot().free
        parts = runner.model, runner.attention, runner.ops
        try:
            runner.model = GraphedModel(*parts, limits, sizes, recorder)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"CUDA graphs of {len(sizes)} batch sizes, up to {sizes[-1]}, do not fit into"
                f" {size(free)}, which are free. Lower gpu_memory_utilization, name fewer"
                " cudagraph_capture_sizes, or set enforce_eager=True"
            ) from None
        seconds = time.time() - start
        logger.info("%s CUDA graphs, up to %s: %.1f s", len(sizes), sizes[-1], seconds)

    def why_eager(self, attention: object) -> str:
        """What stands against graphs; "": nothing."""
        settings = self.config.compilation
        name, backend = settings.cudagraph_recorder, self.config.attention.attention_backend
        if settings.enforce_eager:
            return "enforce_eager is set"
        if name == "auto" and self.torch_device.type != "cuda":
            return f"device {self.torch_device} has none"
        if isinstance(attention, PlanningAttention):
            return ""
        why = f"attention_backend {backend!r} computes with a step's numbers on the host"
        if name != "auto":
            raise ValueError(f"cudagraph_recorder {name!r} cannot record: {why}")
        return why
