"""When a request is finished.

vLLM: v1/core/sched/utils.py, check_stop; the order of the checks is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedvllm.outputs import FinishReason
from pagedvllm.sampling_params import SamplingParams


def check_stop(
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
) -> tuple[FinishReason | None, int | None]:
    """(finish reason, the stop token that was met), after a token was appended."""
    token = output[-1]
    if not params.ignore_eos and token in eos_token_ids:
        return "stop", None
    if token in (params.stop_token_ids or ()):
        return "stop", token
    if len(prompt) + len(output) >= max_model_len or len(output) == params.max_tokens:
        return "length", None
    return None, None
