"""When a request is finished. vLLM: v1/core/sched/utils.py, check_stop; the order of the checks is the same."""

from __future__ import annotations

from pagedvllm.outputs import FinishReason
from pagedvllm.sampling_params import SamplingParams


def check_stop(
    token: int, num_output: int, num_tokens: int, params: SamplingParams, eos_token_ids: tuple[int, ...], max_len: int
) -> tuple[FinishReason | None, int | None]:
    """(finish reason, the stop token that was met), after `token` was appended.

    num_output: tokens generated so far; num_tokens: those and the prompt; max_len: the longest sequence allowed.
    """
    if not params.ignore_eos and token in eos_token_ids:
        return "stop", None
    if token in (params.stop_token_ids or ()):
        return "stop", token
    if num_tokens >= max_len or num_output == params.max_tokens:
        return "length", None
    return None, None
