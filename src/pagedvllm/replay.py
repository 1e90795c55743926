"""Replay a workload through scheduler and KV-cache manager, without a model.

The tokens come from a hash function, so every decision can be repeated, and compared with
vLLM's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pagedvllm.config import CacheConfig
from pagedvllm.kv.protocol import KVCache
from pagedvllm.plugins import resolve
from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedvllm.sched.recorder import RecordingScheduler
from pagedvllm.workload import Workload, WorkloadRequest


def make_scheduler(workload: Workload, kv_manager: str = "auto") -> RecordingScheduler:
    """A scheduler and its memory under the workload's limits."""
    limits = workload.engine
    name = CacheConfig(
        enable_prefix_caching=limits.enable_prefix_caching, kv_manager=kv_manager
    ).manager
    manager = resolve(name, KVCache)  # type: ignore[type-abstract]
    kv = manager(limits.num_blocks, limits.block_size)
    scheduler = RecordingScheduler(limits.scheduler_config(), kv, limits.max_model_len)
    scheduler.like_vllm = True
    return scheduler


def replay(
    workload: Workload, kv_manager: str = "auto", check: bool = False
) -> Iterator[dict[str, Any]]:
    """One dict for each step, then a last one with the key "end".

    kv_manager: as in the config; check: walk all invariants after each step.
    """
    scheduler = make_scheduler(workload, kv_manager)
    arrivals = sorted(enumerate(workload.requests), key=lambda item: item[1].arrival_step)
    arrivals.reverse()  # so that the next one is popped from the end
    aborts: dict[int | None, list[str]] = defaultdict(list)
    for item in workload.requests:
        aborts[item.abort_step].append(item.id)
    step = 0
    while (arrivals or scheduler.has_requests()) and step < workload.engine.max_steps:
        while arrivals and arrivals[-1][1].arrival_step <= step:
            scheduler.add_request(make_request(*arrivals.pop()))
        scheduler.finish_requests(aborts[step])
        if scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update(output, run_model(workload, scheduler, output))
        else:
            scheduler.idle()
        if check:
            scheduler.check_invariants()
        line = scheduler.trace.pop()  # a long trace is not kept in memory
        if not workload.record_free_queue:
            line.pop("free_queue", None)
        yield line
        step += 1
    yield scheduler.end()


def make_request(index: int, item: WorkloadRequest) -> Request:
    params = SamplingParams(
        max_tokens=item.max_tokens,
        stop_token_ids=item.stop_token_ids,
        ignore_eos=True,
        temperature=0.0,
    )
    return Request(
        item.id,
        item.prompt_token_ids,
        params,
        arrival_time=float(index if item.arrival_time is None else item.arrival_time),
        priority=item.priority,
        cache_salt=item.cache_salt,
    )


def run_model(
    workload: Workload, scheduler: RecordingScheduler, output: SchedulerOutput
) -> ModelRunnerOutput:
    """A token for each request whose tokens are all computed."""
    result = ModelRunnerOutput([], [])
    for request_id in output.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        done = request.num_computed_tokens >= request.num_tokens
        result.req_ids.append(request_id)
        result.sampled.append(
            [workload.tokens.next_token(request_id, request.token_ids)] if done else []
        )
    return result
