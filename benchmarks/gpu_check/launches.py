"""Our kernels ran, and as often as a forward pass needs them: counted by us, and in replays by the profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.gpu_check.graphs import greedy, load
from benchmarks.gpu_check.models import QWEN3_06B, TINY, runner_of
from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm.kernels.launch import launches

DECODES = 4


def run(setup: Setup) -> Outcome:
    sizes = TINY if setup.dry else QWEN3_06B | {"num_hidden_layers": 4, "vocab_size": 8000}
    layers = sizes["num_hidden_layers"]
    small = {"num_gpu_blocks_override": 40, "block_size": 4, "max_num_seqs": 4, "max_model_len": 32}
    dtype = str(setup.half).removeprefix("torch.")
    llm = load(setup, sizes, dtype=dtype, **(small if setup.dry else small | {"block_size": 16}))
    runner = runner_of(llm)
    graphed, forwards = runner.model, Counter[str]()
    outcome = Outcome("The forward pass runs on our kernels, eagerly and in graphs.")

    def counted(ids: Any, ctx: Any) -> Any:
        forwards["python"] += 1
        return inner(ids, ctx)

    expected = {  # of one forward pass
        "rotary_kernel": layers,
        "paged_attention_kernel": layers,
        "rms_norm_kernel": 4 * layers + 1,  # two of a layer's norms are those of q and k
        "silu_and_mul_kernel": layers,
    }
    inner = graphed.model
    counted.logits = inner.logits  # type: ignore[attr-defined]
    runner.model, before = counted, launches.copy()
    prompts = [[5, 6, 7, 8, 9], [3]]
    llm.generate(prompts, greedy(DECODES), use_tqdm=False)
    ran = launches - before
    for kernel, times in expected.items():
        want = times * forwards["python"]
        outcome.result[f"{kernel}, eager"] = f"{ran[kernel]} launches in {forwards['python']} forward passes"
        outcome.check(ran[kernel] == want > 0, f"{kernel}: {ran[kernel]} launches, {want} expected")
    runner.model, before, replays = graphed, launches.copy(), graphed.replays.total()
    seen = profiled(setup, lambda: llm.generate(prompts, greedy(DECODES), use_tqdm=False))
    replays = graphed.replays.total() - replays
    outcome.check(replays == DECODES - 1, f"{replays} replays, {DECODES - 1} expected")
    if setup.dry:  # the tape starts kernels in Python
        seen = launches - before
    if not seen:
        outcome.result["in graphs"] = "torch's profiler sees no kernel on this machine: not counted"
        return outcome
    for kernel, times in expected.items():
        want = times * DECODES  # a prefill in Python, and the replays
        outcome.result[f"{kernel}, with graphs"] = f"{seen[kernel]} runs in {replays} replays and one eager pass"
        outcome.check(seen[kernel] == want, f"{kernel}: {seen[kernel]} runs with graphs, {want} expected")
    return outcome


def profiled(setup: Setup, function: Any) -> Counter[str]:
    """How often the device ran each kernel of ours."""
    if setup.dry:
        function()
        return Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    ours = {"rotary_kernel", "paged_attention_kernel", "rms_norm_kernel", "silu_and_mul_kernel"}
    return Counter({event.key: event.count for event in profile.key_averages() if event.key in ours})
