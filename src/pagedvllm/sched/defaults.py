"""Limits where none are set, by device: vLLM 0.30.0's, from its engine/arg_utils.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedvllm.config import SchedulerConfig

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What the defaults depend on."""

    kind: str  # "cpu" or "cuda"
    name: str = ""
    memory: int = 0  # bytes, in all


def with_defaults(config: SchedulerConfig, device: Device, max_model_len: int) -> SchedulerConfig:
    """Fill in max_num_seqs and max_num_batched_tokens for offline use."""
    if device.kind == "cpu":
        seqs, tokens = 256, 4096
    elif device.memory >= 160 * GIB or (device.memory >= 70 * GIB and "a100" not in device.name.lower()):
        seqs, tokens = 1024, 16384
    else:
        seqs, tokens = 256, 8192
    if config.max_num_batched_tokens is not None:
        tokens, seqs = config.max_num_batched_tokens, min(seqs, config.max_num_batched_tokens)
    elif not config.enable_chunked_prefill:
        tokens = max(tokens, max_model_len)  # otherwise a long prompt could never start
    if config.max_num_seqs is not None:
        seqs = config.max_num_seqs
        tokens = tokens if config.max_num_batched_tokens is not None else max(tokens, seqs)
    return replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)
