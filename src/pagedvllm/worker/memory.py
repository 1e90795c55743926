"""Where a device's memory goes, and what of it is left for the KV cache.

vLLM: MemorySnapshot and memory_profiling in utils/mem_utils.py, request_memory in
v1/worker/utils.py. All sizes are in bytes.
"""

from __future__ import annotations

import gc
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

CPU_KV_SHARE = 0.1  # of the machine's RAM: the rest belongs to whatever else runs here
CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",  # a container's own limit, version 2 and 1
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True)
class MemorySnapshot:
    """A device at one moment. What others hold is neither free nor in torch's count."""

    total: int
    free: int
    torch_allocated: int = 0  # by tensors of this process
    torch_peak: int = 0  # the most of that since the last `reset_peak`


class DeviceMemory(Protocol):
    """Who knows how full a device is."""

    counts_tensors: bool  # False: torch keeps no count here, snapshots say 0

    def snapshot(self) -> MemorySnapshot: ...

    def reset_peak(self) -> None:
        """Let the peak begin at what is allocated now."""
        ...


class CudaMemory:
    """A GPU: the driver knows what is free, torch's allocator what its tensors take."""

    counts_tensors = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def snapshot(self) -> MemorySnapshot:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # torch keeps freed memory: to the driver it is not free
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        return MemorySnapshot(total, free, allocated, peak)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class HostMemory:
    """A computer's RAM, or what its container may use of it."""

    counts_tensors = False

    def snapshot(self) -> MemorySnapshot:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = _available_ram(total)
        for path in CGROUP_LIMITS:
            limit = Path(path).read_text().strip() if os.path.exists(path) else "max"
            if limit != "max":
                total = min(total, int(limit))
        return MemorySnapshot(total, min(free, total))

    def reset_peak(self) -> None:
        pass


def _available_ram(total: int) -> int:
    """What Linux could hand out without swapping; `total` where nobody says."""
    if not os.path.exists("/proc/meminfo"):
        return total
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = dict(line.split(":") for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024  # it counts KiB


def device_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def cpu_kv_bytes(ram: MemorySnapshot) -> int:
    """A share of the RAM for the KV cache, and at most half of what is available now.

    A choice, not a measurement: RAM is shared with the desktop and its programs, and the
    system may swap, so "all that is left" would be a bad answer.
    """
    return min(int(ram.total * CPU_KV_SHARE), ram.free // 2)


def requested_memory(total: int, utilization: float) -> int:
    """What the engine may use of a GPU of `total` bytes, all in all."""
    return math.ceil(total * utilization)


def available_kv_bytes(
    requested: int, before: MemorySnapshot, after: MemorySnapshot, graphs: int = 0
) -> int:
    """What is left of `requested` once everything else has its memory; it may be negative.

    before: when the engine had nothing yet. after: weights are loaded, and the largest step
    has run since the last `reset_peak`; its tensors are gone, and will come again.
    graphs: what CUDA graphs will take (chapter 7.3).
    """
    stays = before.free - after.free  # weights, libraries' workspaces, the allocator's rest
    comes_and_goes = after.torch_peak - after.torch_allocated  # activations
    return requested - stays - comes_and_goes - graphs


@dataclass(frozen=True)
class MemoryProfile:
    """What a GPU's memory is for. `requested` is the sum of the last five."""

    total: int
    requested: int
    weights: int
    activations: int  # the tensors of the largest step, at their worst moment
    other: int  # what stays, and is no weight: libraries' workspaces, rounding
    graphs: int
    kv: int

    @classmethod
    def of(
        cls,
        requested: int,
        weights: int,
        before: MemorySnapshot,
        after: MemorySnapshot,
        graphs: int = 0,
    ) -> MemoryProfile:
        """weights: bytes of their tensors. The rest as in `available_kv_bytes`.

        Raises:
            RuntimeError: more is free than before: the difference says nothing.
        """
        if after.free > before.free:
            raise RuntimeError(
                f"free memory grew from {size(before.free)} to {size(after.free)} while it"
                " was measured: another process released some. Start again when nothing"
                " else changes"
            )
        activations = after.torch_peak - after.torch_allocated
        other = before.free - after.free - weights
        kv = available_kv_bytes(requested, before, after, graphs)
        return cls(before.total, requested, weights, activations, other, graphs, kv)

    def __str__(self) -> str:
        return (
            f"of {size(self.total)} the engine may use {size(self.requested)}: weights"
            f" {size(self.weights)}, activations {size(self.activations)}, CUDA graphs"
            f" {size(self.graphs)}, other {size(self.other)}, KV cache {size(self.kv)}"
        )


def size(num_bytes: int) -> str:
    """For people: 1.50 GiB, 12.3 MiB."""
    if abs(num_bytes) >= 0.1 * 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
