"""A request inside the engine: one list of tokens, a number that chases its length, and where it stands.

vLLM: v1/request.py, Request and RequestStatus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto

from pagedvllm.outputs import FinishReason
from pagedvllm.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands. Whatever comes after PREEMPTED is finished."""

    WAITING = auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    WAITING_FOR_STREAMING_REQ = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_IGNORED = auto()
    FINISHED_ERROR = auto()
    FINISHED_REPETITION = auto()

    @property
    def finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


_FINISHED = frozenset(status for status in RequestStatus if status.finished)
_WAITS = frozenset(
    {
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
)

TRANSITIONS = {
    RequestStatus.WAITING: _FINISHED | _WAITS | {RequestStatus.RUNNING},
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.WAITING_FOR_REMOTE_KVS: _FINISHED | {RequestStatus.WAITING, RequestStatus.PREEMPTED},
    RequestStatus.WAITING_FOR_STREAMING_REQ: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINISHED
    | {RequestStatus.PREEMPTED, RequestStatus.WAITING, RequestStatus.WAITING_FOR_STREAMING_REQ},
    RequestStatus.PREEMPTED: _FINISHED | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS},
    **dict.fromkeys(_FINISHED, frozenset()),
}

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",  # a prompt longer than the limit: OpenAI's API says "length"
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    There is no prefill and no decode here: `num_computed_tokens` of the `token_ids` are in the KV cache, and every step
    moves that number towards `num_tokens`. When it arrives, the model says what the next token is.
    """

    request_id: str
    token_ids: list[int]  # the prompt to begin with; output is appended to the same list
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = 0.0  # on any clock: only the order counts
    priority: int = 0  # smaller goes first
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None  # requests with different salts never share cached blocks (chapter 9.2)
    lora_id: int | None = None  # the adapter, a new number for each load
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # found in the prefix cache when first admitted
    num_preemptions: int = field(default=0, init=False)
    last_step: int = field(default=0, init=False)  # the newest step that computes some of its tokens
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # of its full blocks, as far as asked for
    stop_reason: int | str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)  # why it was refused (FINISHED_ERROR)
    _status: RequestStatus = field(default=RequestStatus.WAITING, init=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"request {self.request_id!r}: prompt_token_ids is empty: at least one token is needed")
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, new: RequestStatus) -> None:
        """Raises ValueError on a transition that no life of a request contains."""
        if new not in TRANSITIONS[self._status]:
            raise ValueError(f"request {self.request_id!r} cannot go from {self._status.name} to {new.name}")
        self._status = new

    @property
    def finished(self) -> bool:
        return self._status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it is not finished."""
        return FINISH_REASONS.get(self._status)
