"""The same tokens with CUDA graphs and without, and how long a decode step takes either way."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.models import QWEN3_06B, TINY, runner_of, without_weights
from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm import LLM, SamplingParams
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.worker.cuda_graph import GraphedModel

TIE = 1e-3  # logits in fp32 that are closer than this may come out in either order


def run(setup: Setup) -> Outcome:
    outcome = Outcome("CUDA graphs do not change the tokens; they take the launches out of a decode step.")
    same_tokens(setup, outcome)
    if not outcome.faults:
        step_times(setup, outcome)
    return outcome


def load(setup: Setup, sizes: dict[str, Any], **changes: Any) -> LLM:
    path = without_weights(setup.folder / f"model-{sizes['num_hidden_layers']}", sizes)
    return LLM(str(path), load_format="dummy", **setup.engine(**changes))


def same_tokens(setup: Setup, outcome: Outcome) -> None:
    sizes = TINY if setup.dry else QWEN3_06B | {"num_hidden_layers": 8, "vocab_size": 20000}
    limits = {"num_gpu_blocks_override": 40, "max_num_seqs": 4, "block_size": 4, "max_model_len": 32}
    large = {"max_num_seqs": 20, "max_model_len": 512, "num_gpu_blocks_override": 1000}
    llm = load(setup, sizes, dtype="float32", **(limits if setup.dry else large))
    runner, rng = runner_of(llm), random.Random(0)
    graphed = runner.model
    if not isinstance(graphed, GraphedModel):
        outcome.faults.append("the engine has no graphs")
        return
    count, longest = (3, 6) if setup.dry else (13, 200)
    prompts = [[rng.randrange(1, sizes["vocab_size"]) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    params = [greedy(rng.randint(2, 5) if setup.dry else rng.randint(8, 60)) for _ in prompts]

    def tokens(model: Any) -> list[list[int]]:
        runner.model = model
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    eager, replayed = tokens(graphed.model), tokens(graphed)
    distances = []
    for prompt, one, two in zip(prompts, eager, replayed, strict=True):
        if one != two:
            at = next(i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
            runner.model = graphed.model
            distances.append(distance(llm, prompt + one[:at], one[at], two[at]))
    compared = sum(map(len, eager))
    outcome.result["requests with the same tokens, fp32"] = f"{count - len(distances)} of {count}"
    outcome.details["tokens compared"] = compared
    outcome.details["replays by batch size"] = {str(size): n for size, n in sorted(graphed.replays.items())}
    outcome.details["distances of the first logits that differ"] = distances
    outcome.check(graphed.replays.total() > 0, "no graph was replayed")
    outcome.check(all(d < TIE for d in distances), f"tokens differ whose logits are {max(distances, default=0)} apart")


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)


class KeepingSampler(Sampler):
    logits: Tensor | None = None

    def __call__(self, logits: Tensor, batch: SamplingBatch, mask: Tensor | None = None) -> list[int]:
        self.logits = logits
        return super().__call__(logits, batch, mask)


def distance(llm: LLM, context: list[int], one: int, two: int) -> float:
    """Between the logits of two tokens after `context`."""
    runner = runner_of(llm)
    before, runner.sampler = runner.sampler, KeepingSampler()
    llm.generate(context, greedy(1), use_tqdm=False)
    logits, runner.sampler = runner.sampler.logits[0], before
    return abs(float(logits[one] - logits[two]))


class Timed:
    """A model that notes how long it took, the device's work included."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device, self.seconds = model, device, list[float]()
        self.logits, self.build = model.logits, model.build

    def __call__(self, *arguments: Any) -> Any:
        _wait(self.device)
        start = time.perf_counter()
        hidden = self.model(*arguments)
        _wait(self.device)
        self.seconds.append(time.perf_counter() - start)
        return hidden


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_times(setup: Setup, outcome: Outcome) -> None:
    """Decode steps of Qwen3-0.6B's dimensions at contexts of about 512 tokens, in turns."""
    sizes, batches, context, steps = (TINY, [2], 4, 1) if setup.dry else (QWEN3_06B, [1, 8, 32, 128, 256], 512, 12)
    cache = {"num_gpu_blocks_override": 40, "block_size": 4} if setup.dry else {}
    most = batches[-1]
    dtype = str(setup.half).removeprefix("torch.")
    llm = load(setup, sizes, dtype=dtype, max_num_seqs=most, max_model_len=32 if setup.dry else 1024, **cache)
    runner, engine = runner_of(llm), llm.engine
    graphed, kv = runner.model, engine.core.scheduler.kv  # type: ignore[attr-defined]
    fits = (kv.num_blocks - 1) * kv.block_size // (context + (10 if setup.dry else 200))
    for batch in (batch for batch in batches if batch <= fits):
        for i in range(batch):
            ids = [(i * 7919 + j) % 200 + 1 for j in range(context)]
            engine.add_request(f"{batch}-{i}", None, ids, greedy(10 if setup.dry else 200))
        runner.model, before = graphed, graphed.replays.total()
        while graphed.replays.total() == before and engine.has_unfinished_requests():  # prompts first
            engine.step()
        found: dict[str, list[tuple[float, float]]] = {"eager": [], "graphs": []}
        for _ in range(1 if setup.dry else 3):
            for name, model in (("eager", graphed.model), ("graphs", graphed)):
                runner.model = timed = Timed(model, setup.device)
                start = time.perf_counter()
                for _ in range(steps):
                    engine.step()
                found[name].append(((time.perf_counter() - start) / steps, median(timed.seconds)))
        runner.model = graphed
        for i in range(batch):
            engine.abort_request(f"{batch}-{i}")
        engine.step()
        for name, rounds in found.items():
            whole, forward = (1000 * median(column) for column in zip(*rounds, strict=True))
            outcome.result[f"{name}, {batch} requests: forward pass, ms"] = round(forward, 3)
            outcome.result[f"{name}, {batch} requests: whole step, ms"] = round(whole, 3)
