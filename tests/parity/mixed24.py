"""The workload mixed24: 24 prompts of 16 to 128 random ids, each continued by 16 to 96 tokens."""

from __future__ import annotations

import random


def workload() -> tuple[list[list[int]], list[int]]:
    """(prompts as token ids, the number of tokens to generate for each)."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40000) for _ in range(rng.randint(16, 128))] for _ in range(24)]
    return prompts, [rng.randint(16, 96) for _ in range(24)]
