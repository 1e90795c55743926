"""What a stage gets, what it gives back, and which stages there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pagedvllm.worker.cuda_graph import CudaGraphRecorder


@dataclass(frozen=True)
class Stage:
    """One module with a function `run(setup) -> Outcome`."""

    name: str
    proves: str
    seconds: float  # after so long it is stopped


STAGES = (
    Stage("kernels", "every kernel against float64, on the card", 110),
    Stage("parity", "the engine's tokens against transformers, on the same random weights", 80),
    Stage("graphs", "the same tokens with CUDA graphs and without; what they save", 80),
    Stage("launches", "our kernels ran, and no others in their place", 40),
    Stage("ceilings", "kernels as a share of what copying and matrix products reach here", 60),
    Stage("throughput", "nano-vllm's workload, Qwen3-0.6B's dimensions", 100),
    Stage("notebooks", "the chapters on the GPU", 60),
)
TOTAL_SECONDS = 470.0


@dataclass(frozen=True)
class Setup:
    """On what, and how long."""

    dry: bool  # toy sizes on the CPU, kernels in Triton's interpreter
    seconds: float  # a stage that measures stops by itself before them
    folder: Path  # for its files; removed afterwards

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def half(self) -> torch.dtype:
        """16 bits, as the card has them. The interpreter cannot multiply bf16."""
        modern = not self.dry and torch.cuda.get_device_capability() >= (8, 0)
        return torch.bfloat16 if modern else torch.float16

    def engine(self, **changes: Any) -> dict[str, Any]:
        """Settings of an engine on our kernels, with graphs; on a CPU the tape plays them."""
        recorder = "tape" if self.dry else "auto"
        return {
            "device": str(self.device),
            "attention_backend": "triton",
            "ops": "triton",
            "cudagraph_recorder": recorder,
            "enable_prefix_caching": False,
        } | changes

    def seconds_of(self, function: Callable[[], object], calls: int = 20, rounds: int = 7) -> float:
        """Of one call: the median round's mean. On a GPU a round is one graph: the host's own time is not in it."""
        if self.dry:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        once = self._elapsed(function)
        calls = max(1, min(calls, int(0.05 / once)))
        marker = torch.empty(1, device=self.device)

        def repeated() -> Tensor:
            for _ in range(calls):
                function()
            return marker

        graph = CudaGraphRecorder(self.device).record(repeated)
        return median(self._elapsed(graph.replay) / calls for _ in range(rounds))

    def _elapsed(self, function: Callable[[], object]) -> float:
        """Of the second call: the first may compile something."""
        function()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


@dataclass
class Outcome:
    """What a stage found. It failed if there are faults."""

    claim: str = ""  # one sentence for the page of measured claims
    result: dict[str, Any] = field(default_factory=dict)  # name with its unit -> number or text
    faults: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""  # why

    def check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


def run_stage(name: str, setup: Setup) -> Outcome:
    """Never raises: whatever goes wrong is a fault."""
    try:
        torch.manual_seed(0)
        outcome: Outcome = import_module(f"benchmarks.gpu_check.{name}").run(setup)
    except Exception as error:  # the next stages are to be run all the same
        import traceback

        traceback.print_exc()
        return Outcome(faults=[f"{type(error).__name__}: {error}"])
    return outcome
