"""What comes back from a request. vLLM: outputs.py, RequestOutput and CompletionOutput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass
class CompletionOutput:
    """One generated continuation. `finish_reason` is None while it is still growing."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = (
        None  # the token id or string that stopped it; None: the end-of-sequence token
    )


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, as OpenAI's API counts them."""

    prompt_tokens: int
    completion_tokens: int  # of all its outputs together
    cached_tokens: int  # of the prompt: not computed, because a prefix cache had them

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class RequestOutput:
    """A request and what it has produced so far. `error` says why a request was refused
    (finish reason "error").
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    num_cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        completion = sum(len(output.token_ids) for output in self.outputs)
        return Usage(len(self.prompt_token_ids), completion, self.num_cached_tokens)
