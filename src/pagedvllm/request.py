"""A request inside the engine: its tokens, a number that chases their count, its state.

vLLM: v1/request.py, Request and RequestStatus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import overload

from pagedvllm.outputs import FinishReason
from pagedvllm.sample.stopping import check_stop
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


_S = RequestStatus
_FINISHED = frozenset(status for status in RequestStatus if status.finished)
_ON_HOLD = frozenset(
    {
        _S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        _S.WAITING_FOR_REMOTE_KVS,
        _S.WAITING_FOR_STREAMING_REQ,
    }
)

TRANSITIONS = {
    _S.WAITING: _FINISHED | _ON_HOLD | {_S.RUNNING},
    _S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINISHED | {_S.WAITING},
    _S.WAITING_FOR_REMOTE_KVS: _FINISHED | {_S.WAITING, _S.PREEMPTED},
    _S.WAITING_FOR_STREAMING_REQ: _FINISHED | {_S.WAITING},
    _S.RUNNING: _FINISHED | {_S.PREEMPTED, _S.WAITING, _S.WAITING_FOR_STREAMING_REQ},
    _S.PREEMPTED: _FINISHED | {_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS},
    **dict.fromkeys(_FINISHED, frozenset()),
}

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",  # too long a prompt: as OpenAI's API says it
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


class TokenView(Sequence[int]):
    """A part of a list that grows, without a copy. vLLM: ConstantList in v1/utils.py."""

    def __init__(self, token_ids: list[int], start: int, stop: int | None = None) -> None:
        self._token_ids, self._start, self._stop = token_ids, start, stop

    def __len__(self) -> int:
        stop = len(self._token_ids) if self._stop is None else self._stop
        return stop - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if index == -1 and self._stop is None and len(self):  # what is asked for most
            return self._token_ids[-1]
        return self._token_ids[self._start : self._stop][index]


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    There is no prefill and no decode here. `num_computed_tokens` of the `token_ids` are in
    the KV cache, and every step moves that number towards `num_tokens`. Once it is there,
    the model says what the next token is.
    """

    request_id: str
    token_ids: list[int]  # the prompt to begin with; output is appended to the same list
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = 0.0  # on any clock: only the order counts
    priority: int = 0  # smaller goes first
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None  # different salts never share cached blocks (chapter 9.2)
    lora_id: int | None = None  # the adapter, a new number for each load
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # prefix hits at first admission
    num_preemptions: int = field(default=0, init=False)
    last_step: int = field(default=0, init=False)  # the newest step that computes of it
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # of full blocks
    stop_reason: int | str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)  # with FINISHED_ERROR: why
    _status: RequestStatus = field(default=RequestStatus.WAITING, init=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"request {self.request_id!r}: prompt_token_ids is empty")
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self._prompt = TokenView(self.token_ids, 0, self.num_prompt_tokens)
        self._output = TokenView(self.token_ids, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token: int, max_model_len: int) -> FinishReason | None:
        """Append a sampled token. The reason, if it ends the request."""
        self.token_ids.append(token)
        reason, self.stop_reason = check_stop(
            self._prompt, self._output, self.params, self.eos_token_ids, max_model_len
        )
        return reason

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, new: RequestStatus) -> None:
        """Raises ValueError on a transition that no life of a request contains."""
        if new not in TRANSITIONS[self._status]:
            names = f"{self._status.name} to {new.name}"
            raise ValueError(f"request {self.request_id!r} cannot go from {names}")
        self._status = new

    @property
    def finished(self) -> bool:
        return self._status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it is not finished."""
        return FINISH_REASONS.get(self._status)
