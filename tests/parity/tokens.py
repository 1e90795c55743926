"""Greedy tokens of vLLM 0.30.0 itself on mixed24, kept in tests/golden/mixed24.tokens.json.

usage: tokens.py MODEL_DIRECTORY OUT.json      (the interpreter is that of an environment with vLLM)

It knows nothing of pagedvllm: what the two have in common is `mixed24.py` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}

import vllm
from mixed24 import workload


def main(model: str, out: str) -> None:
    prompts, lengths = workload()
    llm = vllm.LLM(model, dtype="float32", enforce_eager=True, max_model_len=1024)
    params = [vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(out).write_text(json.dumps({"vllm": vllm.__version__, "tokens": tokens}) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
