"""What a step costs: it grows with the requests that are scheduled, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedvllm.cli import main
from pagedvllm.commands import bench_scheduler
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.prefix_cache import PrefixCachingManager
from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.scheduler import Scheduler


def fill(scheduler: Scheduler, count: int) -> None:
    for i in range(count):
        params = SamplingParams(max_tokens=10_000, ignore_eos=True)
        scheduler.add_request(Request(f"r{i}", [i % 100 + 1] * 40, params, arrival_time=float(i)))


def fastest(scheduler: Scheduler, steps: int = 60) -> float:
    """ns of the quickest step: what the machine does besides can only make one slower."""
    for _ in range(10):
        bench_scheduler.step(scheduler)
    return min(sum(bench_scheduler.step(scheduler)) for _ in range(steps))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", [KVCacheManager, PrefixCachingManager])
def test_neither_waiting_requests_nor_the_pool_cost_anything(kind: type[KVCacheManager], policy: str) -> None:
    config = bench_scheduler.SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=4096, policy=policy)
    small = Scheduler(config, kind(16 * 20, 16), 8192)
    large = Scheduler(config, kind(100_000, 16), 8192)
    fill(small, 16)
    fill(large, 20_000)
    assert fastest(large) < 3 * fastest(small)  # growing with either, it would be hundreds of times more
    assert len(large.waiting) == 19_984 and len(large.running) == 16


def test_linear_in_running_requests() -> None:
    few, many = (bench_scheduler.make_scheduler(n, 100, caching=True) for n in (32, 512))
    fill(few, 32)
    fill(many, 512)
    assert fastest(many) < 3 * 16 * fastest(few)  # quadratic would be 256 times more


def test_many_steps_in_little_time() -> None:
    """A third of vLLM's time per request would be 12 us on the machine where vLLM takes 36; benchmarks/ has both."""
    scheduler = bench_scheduler.make_scheduler(256, 100, caching=True)
    fill(scheduler, 256)
    assert fastest(scheduler) / 256 < 12_000


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    small = ["--running", "1", "4", "--waiting", "0", "3", "--steps", "5"]
    assert main(["bench", "scheduler", *small, "--output", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    assert [(run["running"], run["waiting"]) for run in result["runs"]] == [(1, 0), (4, 0), (1, 3), (4, 3)]
    assert all(run["total_us"] > 0 and run["us_per_request"] > 0 for run in result["runs"])
    assert main(["bench", "scheduler", "--running", "0"]) == 2
    assert "--running must be at least 1" in capsys.readouterr().err
    assert main(["bench", "scheduler", *small, "--no-prefix-caching"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_caching"] is False
