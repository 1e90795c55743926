"""Random workloads for the comparison with vLLM: every limit drawn at random, requests that share, repeat, stop, abort.

usage: draw.py SEED COUNT DIRECTORY [--small]     writes DIRECTORY/r<seed>_<number>.workload.json
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any


def draw(seed: int, small: bool = False) -> dict[str, Any]:
    """One workload. Every request fits the pool alone: vLLM would wait for ever for one that does not."""
    r = random.Random(seed)
    engine = draw_engine(r)
    room = min((engine["num_blocks"] - 1) * engine["block_size"], engine["max_model_len"])
    requests: list[dict[str, Any]] = []
    step, prompts = 0, []
    for number in range(r.randrange(6, 14) if small else r.randrange(30, 120)):
        step += r.choice([0, 0, 0, 0, 1, 1, 2, 3, 9, 40 if number % 20 == 19 else 1])
        prompt = draw_prompt(r, engine["block_size"], max(room // 3, 1), prompts, seed * 1000 + number)
        prompts.append(prompt)
        length = sum(p["len"] if isinstance(p, dict) else 1 for p in prompt)
        item = {"id": f"q{number}", "arrival_step": step, "prompt": prompt}
        item["max_tokens"] = r.randrange(1, max(min(room - length, 12 if small else room // 2), 2))
        if engine["policy"] == "priority":
            item["priority"] = r.randrange(-1, 3)
            if r.random() < 0.3:
                item["arrival_time"] = r.choice([0, 1.5, number / 2])
        if r.random() < 0.08:
            item["abort_step"] = step + r.randrange(0, 20)
        if r.random() < 0.15 and engine["enable_prefix_caching"]:
            item["cache_salt"] = r.choice(["a", "b"])
        if r.random() < 0.1:
            item["stop_token_ids"] = [r.randrange(60) for _ in range(r.randrange(1, 4))]
        requests.append(item)
    tokens = {"mode": r.choice(["per_request", "content"]), "seed": seed, "vocab": r.choice([8, 60, 50_000])}
    return {"name": f"r{seed}", "doc": "drawn at random", "engine": engine, "tokens": tokens, "requests": requests}


def draw_engine(r: random.Random) -> dict[str, Any]:
    block_size = r.choice([1, 2, 3, 4, 8, 16])
    max_model_len = r.choice([48, 96, 160, 256])
    whole = -(-max_model_len // block_size)
    engine = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": 1 + max(whole // 2, 2) + r.randrange(0, r.choice([3, 12, 60])),
        "max_num_seqs": r.choice([1, 2, 3, 5, 12, 32]),
        "max_num_batched_tokens": r.choice([7, 16, 48, 128, 300]),
        "enable_prefix_caching": r.random() < 0.7,
        "enable_chunked_prefill": r.random() < 0.8,
        "policy": r.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": r.choice([0, 0, 1, 10, 33]),
        "watermark": r.choice([0.0, 0.0, 0.03, 0.2, 0.5]),
        "scheduler_reserve_full_isl": r.random() < 0.6,
    }
    least = engine["max_num_seqs"] if engine["enable_chunked_prefill"] else max(max_model_len, engine["max_num_seqs"])
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], least)
    return engine


def draw_prompt(r: random.Random, block_size: int, longest: int, earlier: list[list[Any]], seed: int) -> list[Any]:
    """Up to `longest` tokens: new ones, after a common beginning, or those of an earlier request."""
    if earlier and r.random() < 0.15:
        return r.choice(earlier)
    prompt: list[Any] = []
    if r.random() < 0.5:
        length = r.choice([block_size, 2 * block_size, 3 * block_size + 1, 19])
        prompt.append({"seed": 9000 + r.randrange(3), "len": min(length, longest)})
    prompt.append({"seed": 20_000 + seed, "len": r.randrange(1, longest + 1)})
    if r.random() < 0.1:
        prompt.append(r.randrange(50))
    return prompt


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for i in range(options.count):
        file = options.directory / f"r{options.seed}_{i:03d}.workload.json"
        file.write_text(json.dumps(draw(options.seed * 10_000 + i, options.small)))
