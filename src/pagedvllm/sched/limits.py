"""The scheduler's limits: what they are where none is set, and which contradict each other.

vLLM 0.30.0: engine/arg_utils.py for defaults by device, SchedulerConfig.verify_max_model_len in
config/scheduler.py for contradictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedvllm.config import SchedulerConfig

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What the defaults depend on."""

    kind: str  # "cpu" or "cuda"
    name: str = ""
    memory: int = 0  # bytes, in all

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(device.type)
        import torch

        properties = torch.cuda.get_device_properties(device)
        return cls("cuda", properties.name, properties.total_memory)


def with_defaults(
    config: SchedulerConfig, device: Device, max_model_len: int
) -> SchedulerConfig:
    """Fill in max_num_seqs and max_num_batched_tokens for offline use."""
    if device.kind == "cpu":
        seqs, tokens = 256, 4096
    elif device.memory >= 160 * GIB or (
        device.memory >= 70 * GIB and "a100" not in device.name.lower()
    ):
        seqs, tokens = 1024, 16384
    else:
        seqs, tokens = 256, 8192
    if config.max_num_batched_tokens is not None:
        tokens, seqs = (
            config.max_num_batched_tokens,
            min(seqs, config.max_num_batched_tokens),
        )
    elif not config.enable_chunked_prefill:
        tokens = max(tokens, max_model_len)  # otherwise a long prompt could never start
    if config.max_num_seqs is not None:
        seqs = config.max_num_seqs
        tokens = tokens if config.max_num_batched_tokens is not None else max(tokens, seqs)
    return replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def check_limits(config: SchedulerConfig, max_model_len: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of a config that no request can be stuck under.

    Raises:
        ValueError: a limit is missing or at odds with another; the message names both.
    """
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None or budget is None:
        raise ValueError(
            "max_num_seqs and max_num_batched_tokens must be set before a scheduler is made"
        )
    if budget < seqs:
        raise ValueError(
            f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs}): one token for each"
        )
    if budget < max_model_len and not config.enable_chunked_prefill:
        raise ValueError(
            f"max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}) when"
            " enable_chunked_prefill is False: a longer prompt could never start"
        )
    if config.long_prefill_token_threshold > max_model_len:
        raise ValueError(
            f"long_prefill_token_threshold ({config.long_prefill_token_threshold}) must be at most max_model_len"
            f" ({max_model_len})"
        )
    return seqs, budget
