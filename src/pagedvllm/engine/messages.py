"""What crosses the border between the front end, which has text, and the core, which has ids.

Plain data, so that the core may move into a process of its own (chapter 8).
vLLM: v1/engine/__init__.py, EngineCoreRequest and EngineCoreOutputs; v1/metrics/stats.py,
SchedulerStats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import EngineCoreOutput


@dataclass(frozen=True)
class EngineCoreRequest:
    """One sequence to be continued: checked, tokenized, ready to be queued."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_time: float  # on any clock: only the order counts


@dataclass(frozen=True)
class SchedulerStats:
    """How full the engine was after a step."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float  # 0 to 1: the share of blocks that some request holds


@dataclass(frozen=True)
class EngineCoreOutputs:
    """What one step brought: something for some requests, and a look at the whole."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats = field(default=SchedulerStats(0, 0, 0.0))
