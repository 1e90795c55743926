"""The engine's greedy tokens against transformers, on the same random weights.

transformers reads what the engine has written and says at each place how much its own best token is better: nothing,
or as much as rounding explains. So one tie does not hide what comes after it.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.gpu_check.models import QWEN3_06B, TINY, of_transformers, runner_of, trace_of
from benchmarks.gpu_check.stage import Outcome, Setup
from pagedvllm import LLM, SamplingParams

ALLOWED = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.15}  # of logits, whose deviation is about 0.6
SMALL_LLAMA = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 8000}


def run(setup: Setup) -> Outcome:
    half = str(setup.half).removeprefix("torch.")
    outcome = Outcome("The engine, on its Triton kernels and with CUDA graphs, gives transformers' greedy tokens.")
    if setup.dry:
        compare(setup, outcome, "Qwen3", TINY, ["float32"])
    else:
        small = TINY | SMALL_LLAMA | {"num_hidden_layers": 4, "num_attention_heads": 8}
        for family in ("Llama", "Qwen2"):
            compare(setup, outcome, family, small, ["float32"])
        compare(setup, outcome, "Qwen3", QWEN3_06B, ["float32", half])
    return outcome


def compare(setup: Setup, outcome: Outcome, family: str, sizes: dict[str, Any], dtypes: list[str]) -> None:
    folder, rng = setup.folder / family, random.Random(0)
    count, longest, length = (3, 12, 3) if setup.dry else (16, 150, 24)
    reference = of_transformers(folder, sizes, setup.device, family)
    prompts = [[rng.randrange(1, sizes["vocab_size"]) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    # Few blocks and a small budget: prompts come in chunks, requests are preempted.
    few = {"num_gpu_blocks_override": 5, "block_size": 4, "max_num_batched_tokens": 6, "max_num_seqs": 3}
    many = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    settings = setup.engine(scheduler_cls="recording", max_model_len=16 if setup.dry else 256)
    for dtype in dtypes:
        llm = LLM(str(folder), **settings | (few if setup.dry else many) | {"dtype": dtype})
        written = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        name, trace = f"{family} {dtype}", trace_of(llm)
        preempted, replays = sum(len(line["preempted"]) for line in trace), runner_of(llm).model.replays.total()
        del llm
        reference = reference.to(getattr(torch, dtype))
        behind = [shortfalls(reference, p, w, setup.device) for p, w in zip(prompts, written, strict=True)]
        values = torch.cat(behind)
        allowed = ALLOWED[dtype]
        outcome.result[f"{name}: tokens that are transformers' own"] = f"{int((values == 0).sum())} of {len(values)}"
        outcome.result[f"{name}: largest distance to its best logit"] = round(float(values.max()), 5)
        outcome.details[name] = {"preemptions": preempted, "graph replays": replays, "allowed": allowed}
        outcome.check(bool((values <= allowed).all()), f"{name}: a token is {float(values.max()):.3f} behind")
        outcome.check(preempted > 0 and replays > 0, f"{name}: {preempted} preemptions, {replays} replays: not tested")


@torch.inference_mode()
def shortfalls(reference: Any, prompt: list[int], written: list[int], device: torch.device) -> torch.Tensor:
    """For each token that was written: how far its logit is below the largest, in transformers' opinion."""
    ids = torch.tensor([prompt + written], device=device)
    logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    found: torch.Tensor = (logits.amax(-1) - chosen).cpu().nan_to_num(1e9, 1e9, 1e9)
    return found
