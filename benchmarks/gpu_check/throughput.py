"""nano-vllm's benchmark on a model of Qwen3-0.6B's dimensions with random weights: tokens a second, end to end."""

from __future__ import annotations

import random
import time

from benchmarks.gpu_check.graphs import load
from benchmarks.gpu_check.models import QWEN3_06B, TINY, runner_of
from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm import LLM, SamplingParams


def workload(count: int, low: int, high: int, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """256 prompts of 100 to 1024 ids, outputs of 100 to 1024: drawn as nano-vllm's bench.py draws them."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, vocabulary) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return prompts, [rng.randint(low, high) for _ in range(count)]


def run(setup: Setup) -> Outcome:
    begin = time.monotonic()
    sizes = TINY if setup.dry else QWEN3_06B
    prompts, lengths = workload(3, 2, 6, 300) if setup.dry else workload(256, 100, 1024, 10000)
    dtype = str(setup.half).removeprefix("torch.")
    small = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_seqs": 4, "max_model_len": 16}
    llm = load(setup, sizes, dtype=dtype, **(small if setup.dry else {"max_model_len": 4096}))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)  # nano-vllm's warm-up
    left = setup.seconds - (time.monotonic() - begin) - 10
    done, finished, seconds = generate(llm, prompts, lengths, max(left, 5.0))
    asked = sum(lengths)
    whole = finished == len(prompts)
    outcome = Outcome(
        "nano-vllm's workload (256 requests of 100 to 1024 tokens, answers of 100 to 1024, temperature 0.6) on"
        " Qwen3-0.6B's dimensions with random weights, all of it by this engine: output tokens a second."
    )
    outcome.result = {
        "output tokens/s": round(done / seconds, 1),
        "output tokens": done,
        "seconds": round(seconds, 2),
        "extent": "the whole workload"
        if whole
        else f"stopped: {finished} of {len(prompts)} requests, {done} of {asked} tokens",
    }
    outcome.details = {"dtype": dtype, "input tokens": sum(map(len, prompts)), "asked": asked}
    outcome.details["replays"] = runner_of(llm).model.replays.total()
    outcome.check(done > 0 and outcome.details["replays"] > 0, "nothing was generated, or without graphs")
    return outcome


def generate(llm: LLM, prompts: list[list[int]], lengths: list[int], limit: float) -> tuple[int, int, float]:
    """(output tokens, finished requests, seconds): all of it, or what there was when time was up."""
    for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False)
        llm.engine.add_request(f"bench-{i}", None, ids, params)
    counts, finished = dict[str, int](), 0
    start = time.perf_counter()
    while llm.engine.has_unfinished_requests() and time.perf_counter() - start < limit:
        for output in llm.engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
            finished += output.finished
    return sum(counts.values()), finished, time.perf_counter() - start
