"""Drives a scheduler without a model, and measures in steps: what chapter 3 and its lab do again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedvllm.request import Request
    from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput
    from pagedvllm.sched.recorder import RecordingScheduler

    Model = Callable[[RecordingScheduler, SchedulerOutput], ModelRunnerOutput]

Line = dict[str, Any]
MOST_STEPS = 20_000


def make_scheduler(blocks: int, block_size: int = 16, max_model_len: int = 1024, **limits: Any) -> RecordingScheduler:
    """A recording scheduler over a counting KV cache of `blocks` usable blocks; `limits` as in SchedulerConfig."""
    from pagedvllm.config import SchedulerConfig
    from pagedvllm.kv.protocol import CountingKVCache
    from pagedvllm.sched.recorder import RecordingScheduler

    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    kv = CountingKVCache(blocks + 1, block_size)  # block 0 is never handed out
    return RecordingScheduler(SchedulerConfig(**limits), kv, max_model_len)


def make_request(name: str, prompt: int, output: int, at: int = 0, priority: int = 0) -> Request:
    """A request with `prompt` tokens that ends after `output` more; it arrives before step `at`."""
    from pagedvllm.request import Request
    from pagedvllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(name, [1] * prompt, params, arrival_time=float(at), priority=priority)


def fake_model(scheduler: RecordingScheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """Token 7 for each request whose tokens are all computed, none for one in the middle of its prompt."""
    from pagedvllm.sched.output import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    return ModelRunnerOutput(names, [[7] * (r.num_computed_tokens == r.num_tokens) for r in requests])


def play(scheduler: RecordingScheduler, requests: Iterable[Request], model: Model = fake_model) -> list[Line]:
    """Run until all have ended. Returns the trace: one line a step, in the format of `pagedvllm replay`.

    A request arrives before the step that its arrival_time names; those of one step in the given order.

    Raises:
        RuntimeError: after MOST_STEPS steps somebody is still there.
    """
    coming = sorted(requests, key=lambda request: request.arrival_time)[::-1]  # the next one is the last
    while coming or scheduler.has_requests():
        step = len(scheduler.trace)
        if step >= MOST_STEPS:
            raise RuntimeError(f"still {len(scheduler.requests)} requests after {step} steps")
        while coming and coming[-1].arrival_time <= step:
            scheduler.add_request(coming.pop())
        if scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update(output, model(scheduler, output))
        else:
            scheduler.idle()
    return scheduler.trace


def latencies(trace: Iterable[Line]) -> dict[str, tuple[int, float]]:
    """For each request (TTFT, TPOT) in steps, in order of arrival.

    TTFT: steps from its arrival to its first token, both included. TPOT: steps for each token after that.
    """
    arrived: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}  # the steps that brought a token
    for line in trace:
        arrived |= dict.fromkeys(line.get("arrived", ()), line["step"])
        for name in line.get("sampled", ()):
            tokens.setdefault(name, []).append(line["step"])
    return {
        name: (steps[0] - arrived[name] + 1, (steps[-1] - steps[0]) / max(len(steps) - 1, 1))
        for name in arrived
        if (steps := tokens.get(name))
    }


def longest_stall(trace: Iterable[Line]) -> int:
    """The most steps between two tokens of one request: 1 if nobody ever had to wait once it had begun."""
    last: dict[str, int] = {}
    longest = 0
    for line in trace:
        for name in line.get("sampled", ()):
            longest = max(longest, line["step"] - last.get(name, line["step"]))
            last[name] = line["step"]
    return longest


def totals(trace: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Steps, computed tokens, generated tokens and preemptions of a trace."""
    lines = [line for line in trace if "scheduled" in line]
    return {
        "steps": len(lines),
        "computed": sum(line["total"] for line in lines),
        "generated": sum(len(line["sampled"]) for line in lines),
        "preemptions": sum(len(line["preempted"]) for line in lines),
    }
