"""What a step costs besides the model: us of schedule() and update(), N running, W waiting."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import time
from statistics import median
from typing import Any

from pagedvllm import __version__
from pagedvllm.config import CacheConfig, SchedulerConfig
from pagedvllm.kv.protocol import KVCache
from pagedvllm.plugins import resolve
from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import ModelRunnerOutput
from pagedvllm.sched.scheduler import Scheduler

PROMPT, BLOCK_SIZE, WARM_UP = 128, 16, 20  # tokens, tokens, steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[1, 32, 256, 1024],
        help="decodes in each step",
    )
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=[0, 10_000],
        help="requests that cannot start yet",
    )
    parser.add_argument("--steps", type=int, default=200, help="measured steps")
    parser.add_argument("--no-prefix-caching", action="store_true")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    for name, least in (("running", 1), ("waiting", 0), ("steps", 1)):
        values = getattr(args, name)
        if min(values if isinstance(values, list) else [values]) < least:
            raise ValueError(f"--{name} must be at least {least}, got {values}")
    caching = not args.no_prefix_caching
    runs = [
        measure_one(n, w, args.steps, caching) for w in args.waiting for n in args.running
    ]
    return {
        "pagedvllm": __version__,
        "environment": environment(),
        "prefix_caching": caching,
        "runs": runs,
    }


def measure_one(running: int, waiting: int, steps: int, caching: bool) -> dict[str, Any]:
    """Medians over the steps, in microseconds."""
    scheduler = make_scheduler(running, steps, caching)
    for i in range(running + waiting):
        prompt = [(i * 7919 + j) % 50_000 for j in range(PROMPT)]
        params = SamplingParams(
            max_tokens=steps + WARM_UP + 50, ignore_eos=True, temperature=0.0
        )
        scheduler.add_request(Request(f"r{i}", prompt, params, arrival_time=float(i)))
    for _ in range(1 + WARM_UP):  # the first step is one big prefill
        step(scheduler)
    gc.collect()
    gc.freeze()  # as an engine does once it has started
    times = [step(scheduler) for _ in range(steps)]
    gc.unfreeze()
    assert len(scheduler.running) == running and len(scheduler.waiting) == waiting
    schedule, update = (median(column) / 1000 for column in zip(*times, strict=True))
    total = median(sum(pair) for pair in times) / 1000
    return {
        "running": running,
        "waiting": waiting,
        "schedule_us": round(schedule, 1),
        "update_us": round(update, 1),
        "total_us": round(total, 1),
        "us_per_request": round(total / running, 2),
    }


def make_scheduler(running: int, steps: int, caching: bool) -> Scheduler:
    per_request = (PROMPT + steps + WARM_UP + 64) // BLOCK_SIZE + 2
    name = CacheConfig(enable_prefix_caching=caching).manager
    manager = resolve(name, KVCache)  # type: ignore[type-abstract]
    kv = manager(running * per_request + 16, BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=max(running * PROMPT, running)
    )
    return Scheduler(config, kv, max_model_len=32_768)


def step(scheduler: Scheduler) -> tuple[int, int]:
    """(schedule, update) in nanoseconds."""
    start = time.perf_counter_ns()
    output = scheduler.schedule()
    scheduled = time.perf_counter_ns()
    ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(ids, [[11] for _ in ids])
    sampled = time.perf_counter_ns()
    scheduler.update(output, result)
    return scheduled - start, time.perf_counter_ns() - sampled


def environment() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
