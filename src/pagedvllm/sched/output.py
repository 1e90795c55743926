"""What crosses the border between the scheduler and whoever runs the model.

Plain data, fit for another process. vLLM: SchedulerOutput in v1/core/sched/output.py,
ModelRunnerOutput in v1/outputs.py, EngineCoreOutput in v1/engine/.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedvllm.outputs import FinishReason
from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRequestData:
    """All that a worker must know of a request it holds nothing of."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, request: Request) -> NewRequestData:
        name, tokens = request.request_id, list(request.token_ids)
        num_prompt, eos = request.num_prompt_tokens, request.eos_token_ids
        return cls(name, tokens, num_prompt, request.params, eos)


@dataclass
class SchedulerOutput:
    """One step: which tokens of which requests to compute.

    The dicts are keyed by request id, in scheduling order.
    """

    step: int  # 1, 2, ...
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: dict[str, int] = field(default_factory=dict)  # before this step
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)  # how tables grew
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)  # new, or back
    resumed_req_ids: list[str] = field(default_factory=list)  # those of them that are back
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)  # since the step before

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def add(self, request_id: str, start: int, num_tokens: int, blocks: list[int]) -> None:
        self.num_scheduled_tokens[request_id] = num_tokens
        self.num_computed_tokens[request_id] = start
        self.new_block_ids[request_id] = blocks

    def take_back(self, request_id: str) -> int:
        """Unschedule a request. The tokens it gives back: 0 if it was not scheduled."""
        self.num_computed_tokens.pop(request_id, None)
        self.new_block_ids.pop(request_id, None)
        return self.num_scheduled_tokens.pop(request_id, 0)


@dataclass
class ModelRunnerOutput:
    """What the model made of a step. `sampled[i]` belongs to `req_ids[i]`.

    It holds no token while a prompt is being computed, one otherwise, several when guesses
    came true.
    """

    req_ids: list[str]
    sampled: list[list[int]]


@dataclass(slots=True)
class EngineCoreOutput:
    """What a step brought one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0  # of its prompt, found in the prefix cache at admission
